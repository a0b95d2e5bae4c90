"""Translates modern results, errors and notifications to legacy ones; pure.

Sources: specification 2026-07-28 basic/index, basic/versioning, server/discover; 2025-11-25 basic/lifecycle,
server/resources (Error Handling), server/tools (Output Schema).
"""

from typing import Final

from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange.results import internal_error
from gateway.mirror.client_requests import Profile
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.request_meta import UNKNOWN_INFO

_NOT_LEGACY: Final = frozenset({"resultType", "ttlMs", "cacheScope"})
_SERVER_KEYS: Final = ("completions", "experimental", "extensions", "logging", "prompts", "resources", "tools")
_NOT_LEGACY_CODES: Final = (mcp.MISSING_CAPABILITY, mcp.HEADER_MISMATCH, mcp.UNSUPPORTED_VERSION)
"""The errors on which a legacy client cannot act: two are about what the gateway added to the request."""


def initialize_result(discovered: Raw, profile: Profile) -> bytes:
    """The InitializeResult that a DiscoverResult amounts to; raises ValueError."""
    opened = jsonrpc.fields(discovered)
    declared = jsonrpc.fields(opened.get("capabilities", jsonrpc.EMPTY))
    kept = {key: declared[key] for key in _SERVER_KEYS if bytes(declared.get(key, b"")).startswith(b"{")}
    if "extensions" in kept:
        kept["extensions"] = jsonrpc.without(kept["extensions"], mcp.TASKS)
    meta = jsonrpc.fields(opened["_meta"]) if "_meta" in opened else {}
    result = {
        "protocolVersion": jsonrpc.encode(profile.version),
        "capabilities": jsonrpc.merge(kept),
        "serverInfo": meta.get(mcp.META_SERVER_INFO, UNKNOWN_INFO),  # 2025-11-25 requires it
    }
    if jsonrpc.text(opened.get("instructions")) is not None:
        result["instructions"] = opened["instructions"]
    return jsonrpc.merge(result)


def legacy_result(method: str, result: Raw) -> bytes:
    """A complete modern result as a legacy client reads it; raises ValueError if it is not an object."""
    legacy: dict[str, bytes | Raw] = {}
    for key, raw in _with_legacy_meta(jsonrpc.fields(result)).items():
        if key == "structuredContent" and method == mcp.TOOLS_CALL:
            if bytes(raw).startswith(b"{"):  # other values came with 2026-07-28; the text content repeats them
                legacy[key] = raw
        elif key == "tools" and method == mcp.TOOLS_LIST:
            legacy[key] = _legacy_tools(bytes(raw))
        elif key not in _NOT_LEGACY:
            legacy[key] = raw
    return jsonrpc.merge(legacy)


def _with_legacy_meta(members: jsonrpc.Fields) -> jsonrpc.Fields:
    """The members of an object, with what a legacy client can read of its `_meta`, if that is anything."""
    if "_meta" in members:
        members["_meta"] = jsonrpc.without(members["_meta"], mcp.META_SERVER_INFO, mcp.META_SUBSCRIPTION)
        if members["_meta"] == jsonrpc.EMPTY:
            del members["_meta"]
    return members


def _legacy_tools(raw: bytes) -> bytes:
    """The tools without output schemas of other values than objects, for which legacy clients refuse a whole list."""
    if b'"outputSchema"' not in raw:
        return raw
    tools = []
    for tool in jsonrpc.items(raw):
        opened = jsonrpc.fields(tool)
        schema = opened.get("outputSchema")
        is_legacy = schema is None or jsonrpc.text(jsonrpc.members(schema).get("type")) == "object"
        tools.append(tool if is_legacy else jsonrpc.without(tool, "outputSchema"))
    return b"[%b]" % b",".join(tools)


def legacy_error(method: str, error: jsonrpc.Error) -> on.Resulted | on.Failed:
    """How a call ends for a legacy client with a modern error."""
    if error.code == mcp.MISSING_CAPABILITY and method == mcp.TOOLS_CALL:
        return failed(method, error.message)  # the client has no code for a tool that cannot ask
    # 2026-07-28 has no code for an unknown resource; the URI in the data tells.
    if error.code == mcp.INVALID_PARAMS and method == mcp.RESOURCES_READ and "uri" in jsonrpc.members(error.data):
        return on.Failed(jsonrpc.Error(mcp.LEGACY_RESOURCE_NOT_FOUND, error.message, error.data))
    return on.Failed(internal_error(error.message, error) if error.code in _NOT_LEGACY_CODES else error)


def failed(method: str, words: str) -> on.Resulted | on.Failed:
    """How a call ends that fails at the gateway: as a legacy tool ends that raised."""
    if method == mcp.TOOLS_CALL:
        return on.Resulted(jsonrpc.encode({"content": [{"type": "text", "text": words}], "isError": True}))
    return on.Failed(jsonrpc.Error(mcp.INTERNAL_ERROR, words))


def legacy_notification(message: jsonrpc.Message, data: bytes) -> bytes | None:
    """A notification of the upstream as it goes to the client; None if it means nothing to a legacy client.

    A modern server sends no requests: one would reach the client as a question of no call.
    """
    if isinstance(message.id, Raw) or message.method in (None, mcp.ACKNOWLEDGED, mcp.CANCELLED):
        return None
    if mcp.META_SUBSCRIPTION.encode() not in data:
        return data
    params = jsonrpc.fields(message.params) if isinstance(message.params, Raw) else {}
    return jsonrpc.notification(message.method, Raw(jsonrpc.merge(_with_legacy_meta(params))))
