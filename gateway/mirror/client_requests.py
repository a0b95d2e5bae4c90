"""Reads the requests of a legacy client; `initialize` is answered from `server/discover`."""

from typing import Final

from msgspec import Raw

from gateway.mirror.call_rounds import Request
from gateway.mirror.client_profile import Profile
from gateway.mirror.server_client import ModernRequest, ServerClient, ask
from gateway.mirror.translation import UNSERVED, initialize_result, modern_request
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, InvalidParams, MethodNotFound, NoHandshake
from gateway.runtime.own_ids import new_id
from gateway.upstream.channel import Headers

DEFAULT_LEVEL: Final = "info"
"""The log level of a client that has set none: a modern server logs nothing unless it is told a level."""


async def initialize(server: ServerClient, profile: Profile, headers: Headers) -> bytes:
    """The InitializeResult of a modern server; raises GatewayError."""
    id_ = new_id()
    body = modern_request(id_, mcp.DISCOVER, {}, profile)
    found = await ask(server, ModernRequest(id_, body, mcp.DISCOVER, "", headers))
    if isinstance(found, jsonrpc.Error):
        raise NoHandshake(f"The server refused server/discover, so it is not a modern one: {found.message}")
    try:
        return initialize_result(found, profile)
    except ValueError as exc:
        raise CallLost(f"The server answered server/discover with a malformed result: {exc}") from exc


def params_of(message: jsonrpc.Message) -> jsonrpc.Fields:
    """The params of a message; raises InvalidParams."""
    try:
        return jsonrpc.fields(message.params) if isinstance(message.params, Raw) else {}
    except ValueError as exc:
        raise InvalidParams(f'"params" must be an object: {exc}') from exc


def answer_of(message: jsonrpc.Message) -> Raw | jsonrpc.Error:
    """What the response to a nested request says; `null` if it says nothing."""
    if isinstance(message.error, Raw):
        return jsonrpc.error(message.error)
    return message.result if isinstance(message.result, Raw) else Raw(b"null")


def request_of(id_: bytes, message: jsonrpc.Message) -> Request:
    """A request that goes upstream; raises MethodNotFound or InvalidParams."""
    method = message.method or ""
    if method in UNSERVED or method.startswith("tasks/"):
        raise MethodNotFound(f"Method not found: {method[:80]}")
    params = params_of(message)
    field = mcp.TARGET_FIELD.get(method)
    if field is not None and jsonrpc.text(params.get(field)) is None:
        raise InvalidParams(f'{method} needs "params.{field}", a string')
    return Request(id_, method, jsonrpc.merge(params.items()))


def level_of(params: jsonrpc.Fields) -> str:
    """The level of logging/setLevel; raises InvalidParams."""
    level = jsonrpc.text(params.get("level"))
    if level not in mcp.LOG_LEVELS:
        raise InvalidParams(f'logging/setLevel needs "params.level", one of {", ".join(mcp.LOG_LEVELS)}')
    return level


def uri_of(params: jsonrpc.Fields) -> str:
    """The resource of a subscription; raises InvalidParams."""
    uri = jsonrpc.text(params.get("uri"))
    if uri is None:
        raise InvalidParams('resources/subscribe needs "params.uri", a string')
    return uri
