"""A legacy client as it introduced itself in `initialize`; pure.

A modern server learns from each request what a legacy server learns once. So the gateway repeats the profile in every
request that it sends upstream.
"""

from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities, capabilities_of
from gateway.seal import sep_1655_items

_MAX_INFO_BYTES: Final = 1_024
_MAX_CAPABILITIES_BYTES: Final = 2_048
"""Larger declarations lose what only describes, because the session id, a header, carries them."""
_ASKABLE: Final = ("elicitation", "sampling", "roots")
_OTHER: Final = ("experimental", "extensions")
_NAME_CHARACTERS: Final = 200


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
        declared = {**opened, "extensions": msgspec.Raw(jsonrpc.merge(extensions.items()))}
        return replace(self, capabilities=jsonrpc.merge(declared.items()))

    @property
    def resumes(self) -> bool:
        """Whether the client comes back for a stream that broke, with the id of its last event."""
        return self.version == mcp.LEGACY


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
    return Profile(version, _info(params), capabilities, echoes_state, keeps_state)


def _info(params: jsonrpc.Fields) -> bytes:
    raw = params.get("clientInfo", jsonrpc.EMPTY)
    try:
        opened = jsonrpc.fields(raw)
    except ValueError as exc:
        raise InvalidParams(f'"params.clientInfo" must be an object: {exc}') from exc
    name, version = jsonrpc.text(opened.get("name")) or "unknown", jsonrpc.text(opened.get("version")) or "0"
    if "name" in opened and "version" in opened and len(bytes(raw)) <= _MAX_INFO_BYTES:
        return bytes(raw)
    return jsonrpc.encode({"name": name[:_NAME_CHARACTERS], "version": version[:_NAME_CHARACTERS]})


def _capabilities(declared: msgspec.Raw, others: tuple[str, ...]) -> bytes:
    try:
        opened = jsonrpc.fields(declared)
        kept = {key: bytes(opened[key]) for key in (*_ASKABLE, *others) if _is_object(opened.get(key))}
        if "roots" in kept:
            kept["roots"] = b"{}"  # `listChanged` has no meaning for a server that keeps nothing
        if "extensions" in kept:
            extensions = jsonrpc.fields(kept["extensions"])
            kept["extensions"] = jsonrpc.merge((key, raw) for key, raw in extensions.items() if key != mcp.TASKS)
        modern = jsonrpc.merge(kept.items())
        if len(modern) > _MAX_CAPABILITIES_BYTES:
            modern = jsonrpc.merge((key, _brief(kept[key])) for key in _ASKABLE if key in kept)
        _ = capabilities_of(modern)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.capabilities" is not ClientCapabilities: {exc}') from exc
    return modern


def _is_object(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).startswith(b"{")


def _brief(raw: bytes) -> bytes:
    """A capability with its modes alone."""
    return jsonrpc.merge((mode, b"{}") for mode in jsonrpc.fields(raw) if mode in ("form", "url", "tools", "context"))
