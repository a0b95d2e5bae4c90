"""The words of SEP-1442: what a request declares in its `_meta`, what errors or results say; pure."""

from typing import Final

import msgspec
from msgspec import Raw

from gateway.mirror.client_requests import Profile, of_initialize
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import DownstreamError, InvalidParams, InvalidRequest
from gateway.protocol.header_mismatch import HeaderValues

DIALECT: Final = "sep-1442"
PREFIX: Final = "modelcontextprotocol.io/"
VERSION: Final = PREFIX + "mcpProtocolVersion"
CAPABILITIES: Final = PREFIX + "clientCapabilities"
_SESSION: Final = PREFIX + "sessionId"
_ROOTS: Final = (PREFIX + "roots", "roots")
_LOG_LEVEL: Final = (PREFIX + "logLevel", "logLevel")
"""The paper writes these two with the prefix in its text, without it in its schema."""
_OWN: Final = frozenset({VERSION, CAPABILITIES, _SESSION, *_ROOTS, *_LOG_LEVEL})
LISTEN: Final = "messages/listen"
LISTENING: Final = "notifications/messages/listen"
SUPPORTED: Final = tuple(sorted(mcp.LEGACY_VERSIONS, reverse=True))
"""The draft gives its own version no name, so a client names the version whose messages it reads."""


class UnknownVersion(DownstreamError):
    """The request names no version, or one that the dialect does not have."""

    rejection = "unsupported_version"
    code = -32000

    def __init__(self) -> None:
        super().__init__("Unsupported protocol version", data={"supportedVersions": list(SUPPORTED)})


class InvalidSession(DownstreamError):
    """The session id does not open, or belongs to another caller."""

    rejection = "no_session"
    code = -32001

    def __init__(self) -> None:
        super().__init__("Invalid Session ID")


class Declared(msgspec.Struct, frozen=True):
    """The declarations of one request about itself and its client."""

    profile: Profile
    streams: bool
    """Whether the reply may be a stream."""
    roots: Raw | None
    """The client's roots, if the request brought them."""
    log_level: str | None


def is_declared(message: jsonrpc.Message) -> bool:
    """Whether a request has the key of the dialect."""
    try:
        return isinstance(message.params, Raw) and VERSION in _meta(jsonrpc.fields(message.params))
    except (ValueError, InvalidParams):
        return False


def declared(params: jsonrpc.Fields, headers: HeaderValues) -> tuple[Raw, Declared]:
    """Read a request; returns its params without the words of the dialect, too.

    Raises UnknownVersion, InvalidRequest where header and `_meta` differ, or InvalidParams.
    """
    meta = _meta(params)
    versions = headers.getall(mcp.PROTOCOL_VERSION, ())
    if len(versions) != 1 or versions[0] not in SUPPORTED:
        raise UnknownVersion
    if jsonrpc.text(meta.get(VERSION)) != versions[0]:
        raise InvalidRequest(f"{VERSION!r} in _meta must repeat the header {mcp.PROTOCOL_VERSION}")
    roots = next((meta[key] for key in _ROOTS if key in meta), None)
    if roots is not None and not bytes(roots).startswith(b"["):
        raise InvalidParams(f"{_ROOTS[0]!r} must be a list of roots")
    capabilities = meta.get(CAPABILITIES, jsonrpc.EMPTY)
    if roots is not None:  # a client that brings its roots can tell them
        try:
            capabilities = Raw(jsonrpc.merge(jsonrpc.fields(capabilities) | {"roots": jsonrpc.EMPTY}))
        except ValueError as exc:
            raise InvalidParams(f"{CAPABILITIES!r} must be an object: {exc}") from exc
    profile = of_initialize({"protocolVersion": Raw(jsonrpc.encode(versions[0])), "capabilities": capabilities})
    level = next((jsonrpc.text(meta[key]) or "" for key in _LOG_LEVEL if key in meta), None)
    if level is not None and level not in mcp.LOG_LEVELS:
        raise InvalidParams(f"{_LOG_LEVEL[0]!r} must be one of {', '.join(mcp.LOG_LEVELS)}")
    kept = jsonrpc.with_meta(params, {key: raw for key, raw in meta.items() if key not in _OWN})
    # The paper lets a server stream only to a client that declares capabilities.
    return kept, Declared(profile, CAPABILITIES in meta, roots, level)


def _meta(params: jsonrpc.Fields) -> jsonrpc.Fields:
    try:
        return jsonrpc.distinct(params["_meta"]) if "_meta" in params else {}
    except ValueError as exc:
        raise InvalidParams(f'"params._meta" must be an object: {exc}') from exc


def initialize_result(result: bytes, session: str) -> bytes:
    """The result of `initialize` with the id of the new session."""
    return jsonrpc.merge({"sessionId": Raw(jsonrpc.encode(session)), **_served(result)})


def discover_result(result: bytes) -> bytes:
    """The DiscoveryResult with the content of a result of `initialize`."""
    found = _served(result)
    del found["protocolVersion"]
    return jsonrpc.merge({"supportedVersions": Raw(jsonrpc.encode(SUPPORTED)), **found})


def _served(result: bytes) -> jsonrpc.Fields:
    """A result of `initialize` without subscriptions to resources, which would need a session that remembers them."""
    found = jsonrpc.fields(result)
    capabilities = jsonrpc.fields(found["capabilities"])
    if "resources" in capabilities:
        resources = jsonrpc.fields(capabilities["resources"])
        _ = resources.pop("subscribe", None)
        capabilities["resources"] = Raw(jsonrpc.merge(resources))
        found["capabilities"] = Raw(jsonrpc.merge(capabilities))
    return found
