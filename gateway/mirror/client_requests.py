"""Reads what a legacy client says: how it introduces itself, then its requests; pure.

A modern server learns from each request what a legacy server learns once. So the gateway repeats the client's profile
in every request that it sends upstream.
"""

from typing import Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams, MethodNotFound
from gateway.protocol.request_meta import Capabilities, capabilities_of
from gateway.seal import sep_1655_items

_MAX_INFO_BYTES: Final = 1_024
_MAX_CAPABILITIES_BYTES: Final = 2_048
"""Larger declarations lose what only describes, because the session id, a header, carries them."""
_ASKABLE: Final = ("elicitation", "sampling", "roots")
_MODES: Final = frozenset({"form", "url", "tools", "context"})
_OTHER: Final = ("experimental", "extensions")
_NAME_CHARACTERS: Final = 200

DEFAULT_LEVEL: Final = "info"
"""The log level of a client that has set none: a modern server logs nothing unless it is told a level."""

_UNSERVED: Final = frozenset({mcp.DISCOVER, mcp.LISTEN})
"""Modern methods: a legacy client that sends one would get what it cannot read."""


class Profile(msgspec.Struct, frozen=True, array_like=True):
    """The negotiated version, `clientInfo` as JSON, and the capabilities as a modern client declares them."""

    version: str
    info: bytes
    capabilities: bytes
    echoes_state: bool = False
    """Whether the client echoes the state of nested requests (SEP-1685)."""
    keeps_state: bool = False
    """Whether the client keeps state for its server, and the route knows of it (SEP-1655)."""

    @property
    def declared(self) -> Capabilities:
        """The kinds of questions that the client can answer."""
        return capabilities_of(self.capabilities)

    @property
    def with_tasks(self) -> "Profile":
        """The same client, for whom the gateway follows the tasks of a server."""
        opened = jsonrpc.fields(self.capabilities)
        extensions = jsonrpc.fields(opened.get("extensions", jsonrpc.EMPTY)) | {mcp.TASKS: jsonrpc.EMPTY}
        declared = {**opened, "extensions": Raw(jsonrpc.merge(extensions))}
        return replace(self, capabilities=jsonrpc.merge(declared))

    @property
    def resumes(self) -> bool:
        """Whether the client comes back for a stream that broke, with the id of its last event."""
        return self.version == mcp.LEGACY


class LegacyRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of a legacy client; `id` and `params` are JSON."""

    id: bytes
    method: str
    params: bytes

    @property
    def target(self) -> str:
        """The tool, prompt or URI; empty for other methods."""
        field = mcp.TARGET_FIELD.get(self.method)
        return (jsonrpc.text(jsonrpc.fields(self.params).get(field)) or "") if field is not None else ""


def of_initialize(params: jsonrpc.Fields, *, keeps_state: bool = False) -> Profile:
    """The profile of an `initialize` request; raises InvalidParams.

    `keeps_state`: if the client keeps state for its server (SEP-1655), the server is told so.
    """
    requested = jsonrpc.text(params.get("protocolVersion"))
    if requested is None:
        raise InvalidParams('initialize needs "params.protocolVersion", a string')
    version = requested if requested in mcp.LEGACY_VERSIONS else mcp.LEGACY
    declared = params.get("capabilities", jsonrpc.EMPTY)
    keeps_state = keeps_state and sep_1655_items.declares(declared)
    capabilities = _capabilities(declared, (*_OTHER, "state") if keeps_state else _OTHER)
    echoes_state = sep_1655_items.declares(declared, "request")
    raw = params.get("clientInfo", jsonrpc.EMPTY)
    try:
        opened = jsonrpc.fields(raw)
    except ValueError as exc:
        raise InvalidParams(f'"params.clientInfo" must be an object: {exc}') from exc
    info = bytes(raw)
    if not {"name", "version"} <= opened.keys() or len(info) > _MAX_INFO_BYTES:
        name, release = jsonrpc.text(opened.get("name")) or "unknown", jsonrpc.text(opened.get("version")) or "0"
        info = jsonrpc.encode({"name": name[:_NAME_CHARACTERS], "version": release[:_NAME_CHARACTERS]})
    return Profile(version, info, capabilities, echoes_state, keeps_state)


def _capabilities(declared: Raw, others: tuple[str, ...]) -> bytes:
    try:
        opened = jsonrpc.fields(declared)
        kept = {key: opened[key] for key in (*_ASKABLE, *others) if bytes(opened.get(key, b"")).startswith(b"{")}
        if "roots" in kept:
            kept["roots"] = jsonrpc.EMPTY  # `listChanged` has no meaning for a server that keeps nothing
        if "extensions" in kept:
            # The gateway declares the tasks itself, for the calls that need them (`with_tasks`).
            kept["extensions"] = jsonrpc.without(kept["extensions"], mcp.TASKS)
        modern = jsonrpc.merge(kept)
        if len(modern) > _MAX_CAPABILITIES_BYTES:
            asked = [(key, jsonrpc.fields(kept[key])) for key in _ASKABLE if key in kept]
            modern = jsonrpc.encode({key: {mode: {} for mode in modes if mode in _MODES} for key, modes in asked})
        _ = capabilities_of(modern)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.capabilities" is not ClientCapabilities: {exc}') from exc
    return modern


# -- requests ------------------------------------------------------------------------------------------------------


def params_of(message: jsonrpc.Message) -> jsonrpc.Fields:
    """The params of a message; raises InvalidParams."""
    try:
        return jsonrpc.fields(message.params) if isinstance(message.params, Raw) else {}
    except ValueError as exc:
        raise InvalidParams(f'"params" must be an object: {exc}') from exc


def answer_of(message: jsonrpc.Message) -> Raw | jsonrpc.Error:
    """What the response to a nested request says; `null` if it says nothing."""
    if (error := message.failure) is not None:
        return error
    return message.result if isinstance(message.result, Raw) else Raw(b"null")


def request_of(id_: bytes, message: jsonrpc.Message) -> LegacyRequest:
    """A request that goes upstream; raises MethodNotFound or InvalidParams."""
    method = message.method or ""
    if method in _UNSERVED or method.startswith("tasks/"):
        raise MethodNotFound(f"Method not found: {method[:80]}")
    params = params_of(message)
    field = mcp.TARGET_FIELD.get(method)
    if field is not None and jsonrpc.text(params.get(field)) is None:
        raise InvalidParams(f'{method} needs "params.{field}", a string')
    return LegacyRequest(id_, method, jsonrpc.merge(params))  # a copy, so that the body can go


def level_of(message: jsonrpc.Message) -> str:
    """The level of logging/setLevel; raises InvalidParams."""
    level = jsonrpc.text(params_of(message).get("level"))
    if level not in mcp.LOG_LEVELS:
        raise InvalidParams(f'logging/setLevel needs "params.level", one of {", ".join(mcp.LOG_LEVELS)}')
    return level


def uri_of(message: jsonrpc.Message) -> str:
    """The resource of a subscription; raises InvalidParams."""
    uri = jsonrpc.text(params_of(message).get("uri"))
    if uri is None:
        raise InvalidParams('resources/subscribe needs "params.uri", a string')
    return uri
