"""Translates legacy results (or errors) to 2026-07-28 by splicing bytes instead of rebuilding them.

Sources: specification 2026-07-28 basic/index (ResultType, Error Codes), server/utilities/caching, server/resources.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.protocol import jsonrpc, mcp

_OURS: Final = ("resultType", "_meta")
"""Members of a result that the gateway sets, whatever the server sent."""
_LISTED: Final = ("content", "contents", "messages", "tools", "prompts", "resources", "resourceTemplates")
_NESTED: Final = ("annotations", "content", "resource", "execution")
_LEVELS: Final = 4
"""A message of a prompt has content with a resource with annotations; each level costs a parse of its own."""
_TTL: Final = re.compile(rb"[0-9]{1,15}")
_SCOPES: Final = (b'"private"', b'"public"')
_NOT_FOUND: Final = ("unknown resource", "not found")
_RESERVED_CODES: Final = range(-32099, -32019)
"""Codes reserved for the specification (basic/index); a legacy server's own use of one would mislead."""


_UPSTREAM_DATA: Final = "upstreamData"
_NULL: Final = Raw(b"null")


class Modern(msgspec.Struct, frozen=True, gc=False):
    """A complete result of 2026-07-28."""

    begin: bytes
    """The beginning of its JSON."""
    rest: bytes | memoryview
    """The rest, which is copied only into the reply."""
    is_tool_error: bool
    """Whether it is a tool result with `isError`."""

    @property
    def body(self) -> bytes:
        """Its JSON."""
        return b"".join((self.begin, self.rest))


def modern(
    method: str,
    result: bytes | Raw,
    server_info: bytes,
    cache: tuple[int, str],
    *,
    retried: bool,
) -> Modern:
    """A complete result of 2026-07-28; raises ValueError when `result` is not an object.

    `cache` has the `ttlMs` and `cacheScope` of a result that states none. `retried`: the result depends on the
    client's answers, so it must not be cached (server/utilities/caching, Cache Key).
    """
    if method == mcp.TOOLS_CALL and (is_tool_error := plain(result)) is not None:
        rest = result[1:] if type(result) is bytes else memoryview(result)[1:]
        return Modern(_plain_prefix(server_info), rest, is_tool_error)
    opened = jsonrpc.fields(Raw(result))
    parts: dict[str, bytes | Raw] = {"resultType": b'"complete"'}
    nulls = b"null" in bytes(result)
    for key, value in opened.items():
        if key in _OURS or (nulls and jsonrpc.is_null(value)):
            continue
        parts[key] = value
        if nulls and key in _LISTED and bytes(value).startswith(b"["):
            # Without null members where the schema allows none; free-form values stay as they are.
            parts[key] = b"[%b]" % b",".join([_item(item, _LEVELS) for item in jsonrpc.items(value)])
    if method == mcp.TOOLS_CALL and "content" not in parts:
        parts["content"] = b"[]"  # the modern SDKs reject a tool result without it
    if method in mcp.CACHEABLE:
        if _TTL.fullmatch(bytes(opened.get("ttlMs", b""))) is None:
            parts.pop("ttlMs", None)  # keep the server's own value only if it is valid
        if bytes(opened.get("cacheScope", b"")) not in _SCOPES:
            parts.pop("cacheScope", None)
        if retried:
            parts |= {"ttlMs": b"0", "cacheScope": b'"private"'}
        ttl_ms, scope = cache
        parts.setdefault("ttlMs", b"%d" % ttl_ms)
        parts.setdefault("cacheScope", jsonrpc.encode(scope))
    parts["_meta"] = _meta(opened.get("_meta"), server_info)
    is_error = method == mcp.TOOLS_CALL and bytes(opened.get("isError", b"")) == b"true"
    return Modern(jsonrpc.merge(parts), b"", is_error)


class _Object(msgspec.Struct):
    """Any object."""


class _Annotations(msgspec.Struct, forbid_unknown_fields=True):
    audience: list[str] | UnsetType = UNSET
    priority: float | UnsetType = UNSET
    lastModified: str | UnsetType = UNSET  # noqa: N815  (the wire's spelling)


class _Resource(msgspec.Struct, forbid_unknown_fields=True):
    uri: str | UnsetType = UNSET
    mimeType: str | UnsetType = UNSET  # noqa: N815
    text: Raw | UnsetType = UNSET
    blob: Raw | UnsetType = UNSET
    annotations: _Annotations | UnsetType = UNSET
    meta: _Object | UnsetType = msgspec.field(name="_meta", default=UNSET)


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    """The members that content has; none may be null. The large ones are not copied.

    `icons` is missing: icons may have nulls of their own, which the general path removes.
    """

    type: str | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    data: Raw | UnsetType = UNSET
    mimeType: str | UnsetType = UNSET  # noqa: N815
    uri: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    size: float | UnsetType = UNSET
    annotations: _Annotations | UnsetType = UNSET
    resource: _Resource | UnsetType = UNSET
    meta: _Object | UnsetType = msgspec.field(name="_meta", default=UNSET)


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """A tool result that needs no change apart from two new members in front."""

    content: list[_Block]
    structuredContent: _Object | UnsetType = UNSET  # noqa: N815
    isError: bool | UnsetType = UNSET  # noqa: N815
    resultType: Raw | UnsetType = UNSET  # noqa: N815
    meta: Raw | UnsetType = msgspec.field(name="_meta", default=UNSET)


_decode_plain = msgspec.json.Decoder(_Plain).decode


def plain(result: bytes | Raw) -> bool | None:
    """Whether a tool result is an error; None if it is not JSON, or cannot be copied as it is.

    To search it for `null` would cost more than this.
    """
    try:
        found = _decode_plain(result)
    except (ValueError, RecursionError):
        return None  # the general path removes nulls, or raises the error
    if found.resultType is not UNSET or found.meta is not UNSET:
        return None
    for block in found.content:
        resource = block.resource
        # These are `Raw`, whose decoder takes a null, too.
        if _NULL in (block.text, block.data) or (resource is not UNSET and _NULL in (resource.text, resource.blob)):
            return None
    return found.isError is True


def plain_response(id_: Raw, result: bytes | Raw, server_info: bytes) -> bytes:
    """The modern response with a result that is `plain`."""
    rest = result[1:] if type(result) is bytes else memoryview(result)[1:]
    return jsonrpc.result(id_, _plain_prefix(server_info), rest)


@lru_cache(maxsize=256)
def _plain_prefix(server_info: bytes) -> bytes:
    return b'{"resultType":"complete","_meta":%b,' % _meta(None, server_info)


def _meta(raw: Raw | None, server_info: bytes) -> bytes:
    meta: dict[str, bytes | Raw] = {}
    if raw is not None and not jsonrpc.is_null(raw):
        meta.update(jsonrpc.fields(raw))
    meta.setdefault(mcp.META_SERVER_INFO, server_info)
    return jsonrpc.merge(meta)


def _item(raw: Raw, levels: int) -> bytes:
    if not levels or not bytes(raw).startswith(b"{"):
        return bytes(raw)
    return jsonrpc.merge(
        {
            key: _item(value, levels - 1) if key in _NESTED else value
            for key, value in jsonrpc.fields(raw).items()
            if not jsonrpc.is_null(value)
        }
    )


def modern_error(method: str, target: str, error: jsonrpc.Error) -> jsonrpc.Error:
    """An upstream error, translated for a 2026-07-28 client."""
    # `mcp` 1.x answers an unknown resource, and every fault in a prompt's name or arguments, with code 0; for a
    # resource, only the message tells the cause.
    is_unknown = method == mcp.PROMPTS_GET or (
        method == mcp.RESOURCES_READ and any(words in error.message.lower() for words in _NOT_FOUND)
    )
    if error.code == mcp.LEGACY_RESOURCE_NOT_FOUND or (error.code == 0 and is_unknown):
        ours = {"uri": target} if method == mcp.RESOURCES_READ else {}
        return jsonrpc.Error(mcp.INVALID_PARAMS, error.message, error_data(error.data, ours))
    if error.code in _RESERVED_CODES:
        return internal_error(error.message, error)
    if error.data is not UNSET and jsonrpc.is_null(error.data):
        return jsonrpc.Error(error.code, error.message)
    return error


def internal_error(message: str, error: jsonrpc.Error) -> jsonrpc.Error:
    """The error -32603 for an upstream error whose code has no meaning, or a different one, in 2026-07-28."""
    return jsonrpc.Error(mcp.INTERNAL_ERROR, message, error_data(error.data, {"upstreamCode": error.code}))


def error_data(data: Raw | UnsetType, ours: Mapping[str, object]) -> Raw | UnsetType:
    """The upstream's `data` with the gateway's members added: an object keeps its own members.

    If `data` is not an object, or has another value under one of the gateway's names, `upstreamData` holds it whole.
    """
    if data is UNSET or jsonrpc.is_null(data):
        return Raw(jsonrpc.encode(ours)) if ours else UNSET
    if not ours:
        return data
    added: dict[str, bytes | Raw] = {name: jsonrpc.encode(value) for name, value in ours.items()}
    try:
        members = jsonrpc.fields(data)
    except ValueError:
        return Raw(jsonrpc.merge(added | {_UPSTREAM_DATA: data}))
    if any(name in members and bytes(members[name]) != value for name, value in added.items()):
        added[_UPSTREAM_DATA] = data
    return Raw(jsonrpc.merge(members | added))
