"""Translates the legacy `initialize` handshake into modern `_meta` or `server/discover`, or back.

Sources: specification 2026-07-28 server/discover and basic/versioning; 2025-11-25 basic/lifecycle.
"""

from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.request_meta import UNKNOWN_INFO

MAX_RESULT_BYTES: Final = 262_144
"""The bound for an InitializeResult, which is kept with its sessions."""
MAX_INFO_BYTES: Final = 16_384
"""The bound for `serverInfo`, which goes into each reply and each `requestState`."""
_NAMED: Final = ("name", "version")
_CLIENT_KEYS: Final = ("elicitation", "sampling", "roots", "experimental")
# Without `tasks`: a server of 2026-07-28 must not declare that, only the extension (ext-tasks).
_SERVER_KEYS: Final = ("completions", "experimental", "logging", "prompts", "resources", "tools", "extensions")


class Handshake(msgspec.Struct, frozen=True):
    """What the upstream declared in `initialize`; all but the version are JSON."""

    version: str
    capabilities: jsonrpc.Fields
    server_info: bytes
    instructions: Raw | None

    def offers(self, capability: str, flag: str | None = None) -> bool:
        """Whether the upstream declared a capability, or a flag of it."""
        raw = self.capabilities.get(capability)
        if raw is None or jsonrpc.is_null(raw):
            return False
        if flag is None:
            return True
        value = jsonrpc.fields(raw).get(flag)
        return value is not None and bytes(value) == b"true"

    @property
    def offers_tasks(self) -> bool:
        """Whether tools may be called as tasks. Older servers of the Python SDK declare no `call` below `tools`."""
        return "tools" in jsonrpc.members(jsonrpc.members(self.capabilities.get("tasks")).get("requests"))


def initialize_params(client_info: Raw, capabilities: Raw, *, keeps_state: bool = False) -> dict[str, object]:
    """The parameters of `initialize` for a client that declared `capabilities` (2026-07-28) in this request.

    `keeps_state`: the server is told that the client keeps state for it (SEP-1655).
    """
    declared = {key: raw for key, raw in jsonrpc.fields(capabilities).items() if not jsonrpc.is_null(raw)}
    keys = (*_CLIENT_KEYS, "state") if keeps_state else _CLIENT_KEYS
    legacy: dict[str, object] = {key: declared[key] for key in keys if key in declared}
    if "extensions" in declared:
        # Tasks differ between the revisions; all other extensions concern only client and server.
        kept = {key: raw for key, raw in jsonrpc.fields(declared["extensions"]).items() if key != mcp.TASKS}
        if kept:
            legacy["extensions"] = kept
    return {"protocolVersion": mcp.LEGACY, "capabilities": legacy, "clientInfo": client_info}


@lru_cache(maxsize=64)
def handshake(result: bytes) -> Handshake:
    """Read an InitializeResult; raises ValueError if it is malformed or too large, or its version is unknown.

    A server says the same in all of its sessions, which share one object.
    """
    if (size := len(result)) > MAX_RESULT_BYTES:
        raise ValueError(f"its InitializeResult has {size:,} bytes, more than {MAX_RESULT_BYTES:,}")
    opened = jsonrpc.fields(result)
    version = jsonrpc.text(opened.get("protocolVersion"))
    if version is None:
        raise ValueError("`protocolVersion` must be a string")
    if version not in mcp.LEGACY_VERSIONS:
        raise ValueError(f"the server wants protocol version {version[:40]!r}")
    # Clients validate these values, so malformed ones are replaced or dropped. Of a large `serverInfo` the name and
    # the version are passed on.
    instructions = opened.get("instructions")
    capabilities = jsonrpc.fields(opened.get("capabilities", jsonrpc.EMPTY))
    info, server_info = opened.get("serverInfo"), bytes(UNKNOWN_INFO)
    if info is not None and _is_object(info):
        members = jsonrpc.fields(info)
        named = {key: members[key] for key in _NAMED if jsonrpc.text(members.get(key)) is not None}
        passed = bytes(info) if len(info) <= MAX_INFO_BYTES else jsonrpc.merge(named)
        if len(named) == len(_NAMED) and len(passed) <= MAX_INFO_BYTES:
            server_info = passed
    return Handshake(
        version,
        {
            key: raw if _is_object(raw) else jsonrpc.EMPTY
            for key, raw in capabilities.items()
            if not jsonrpc.is_null(raw) and bytes(raw) != b"false"
        },
        server_info,
        instructions if jsonrpc.text(instructions) is not None else None,
    )


def _is_object(raw: Raw) -> bool:
    return bytes(raw).startswith(b"{")


def discover_result(shaken: Handshake, ttl_ms: int, scope: str) -> bytes:
    """The DiscoverResult for a client of this upstream."""
    capabilities = {
        key: {name: member for name, member in jsonrpc.fields(raw).items() if not jsonrpc.is_null(member)}
        for key, raw in shaken.capabilities.items()
        if key in _SERVER_KEYS
    }
    _ = capabilities.get("extensions", {}).pop(mcp.TASKS, None)  # a legacy session has the tasks of 2025-11-25 at most
    if shaken.offers_tasks:
        # With an empty object: some clients ignore the extension if it has members.
        capabilities["extensions"] = {**capabilities.pop("extensions", {}), mcp.TASKS: jsonrpc.EMPTY}
    result: dict[str, bytes | Raw] = {
        "resultType": b'"complete"',
        "supportedVersions": jsonrpc.encode(mcp.SUPPORTED_VERSIONS),
        "capabilities": jsonrpc.encode(capabilities),
        "ttlMs": b"%d" % ttl_ms,
        "cacheScope": jsonrpc.encode(scope),
        "_meta": jsonrpc.merge({mcp.META_SERVER_INFO: shaken.server_info}),
    }
    if shaken.instructions is not None:
        result["instructions"] = shaken.instructions
    return jsonrpc.merge(result)
