"""Tells whether a request or an upstream is legacy (2025-11-25 or earlier) or modern (2026-07-28).

Source: specification 2026-07-28 basic/versioning and basic/transports/streamable-http (Backward Compatibility): a
DiscoverResult or a recognised modern JSON-RPC error comes from a modern server, any other answer of an MCP server
from a legacy one. An answer that may come from a proxy (an error page, a refused credential) tells nothing.
"""

import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp, reply_messages
from gateway.protocol.errors import DownstreamError
from gateway.protocol.request import ParsedBody

_VERSION: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MODERN_ERRORS: Final = frozenset({mcp.HEADER_MISMATCH, mcp.MISSING_CAPABILITY})
_ORDINARY: Final = frozenset({mcp.PARSE_ERROR, mcp.INVALID_PARAMS})
"""Errors that a modern server answers with HTTP 400 to a malformed request."""
_META_VERSION: Final = mcp.META_VERSION.encode()
_MARKUP: Final = re.compile(rb"\s*<")
REFUTING: Final = frozenset({400, 404, 405, 406})
"""HTTP statuses with which legacy servers refuse a modern request."""


_decode_versions = msgspec.json.Decoder(list[str]).decode


def is_modern(http_method: str, version_header: str | None, body: bytes, parse_body: Callable[[], ParsedBody]) -> bool:
    """Whether a request is modern: its header names a modern version, or its `_meta` any version.

    No legacy client sends that key; for an unknown version, the client gets the error that lists the supported ones.
    `parse_body` is called if neither the header nor a look at the body tells; it may raise a DownstreamError. A body
    that is not a single JSON-RPC request (a batch, a response, not JSON) is not modern.
    """
    if version_header in mcp.SUPPORTED_VERSIONS or names_modern(version_header):
        return True
    if http_method != "POST" or (_META_VERSION not in body and b"\\" not in body):
        return False  # without an escape, the key in `_meta` can only be written as it is
    try:
        return mcp.META_VERSION in (parse_body().meta or {})
    except DownstreamError:
        return False


def names_modern(version: str | None) -> bool:
    """Whether this is the name of a modern version, even of one that the gateway does not support."""
    version = (version or "").strip()
    return _VERSION.fullmatch(version) is not None and version >= mcp.MODERN  # dates in this form compare as texts


def discover(id_: bytes) -> bytes:
    """The request that probes an upstream's era; `id_` is JSON."""
    meta = {
        mcp.META_VERSION: mcp.MODERN,
        mcp.META_CLIENT_INFO: {"name": "mrtr-gateway", "version": "1"},
        mcp.META_CAPABILITIES: {},
    }
    return jsonrpc.request(id_, mcp.DISCOVER, {"_meta": meta})


def verdict(status: int, content_type: str, body: bytes, asked: bytes) -> bool | None:
    """Whether the answer to `discover` shows a modern upstream; None if it tells nothing.

    `asked` is the id of that request: the response to another one tells nothing.
    """
    if status not in REFUTING and not 200 <= status < 300:
        return None  # credentials, limits, proxies: another request may get another answer
    if not body.strip() or "html" in content_type or _MARKUP.match(body):
        return None
    responses = list(filter(reply_messages.is_response, reply_messages.messages(content_type, body)))
    opened = next((each for each in responses if reply_messages.is_answer(each, asked)), None)
    if opened is None and responses:
        return None
    if opened is None:
        # Some legacy servers refuse in plain text; only JSON-RPC can be a success.
        return None if status < 300 else False
    if isinstance(opened.result, Raw):
        return any(map(names_modern, versions(opened.result, "supportedVersions")))
    return _is_modern_error(opened.failure)


def refutes(status: int, body: bytes) -> bool:
    """Whether an answer to a modern request suggests that the upstream is not modern any more."""
    if status not in REFUTING:
        return False
    error = reply_messages.opened(body).failure
    return error is None or not (
        _is_modern_error(error)
        or (status == 400 and error.code in _ORDINARY)
        or (status == 404 and error.code == mcp.METHOD_NOT_FOUND)
    )


def refuses_legacy(content_type: str, body: bytes) -> bool:
    """Whether the refusal of a legacy request comes from a server that serves modern clients only."""
    responses = filter(reply_messages.is_response, reply_messages.messages(content_type, body))
    return _is_modern_error(next(responses, jsonrpc.Message()).failure, is_only_modern=True)


def _is_modern_error(error: jsonrpc.Error | None, *, is_only_modern: bool = False) -> bool:
    """Whether an error comes from a modern server; `is_only_modern`: from one that supports no legacy version."""
    if error is None:
        return False
    if error.code != mcp.UNSUPPORTED_VERSION:
        return error.code in _MODERN_ERRORS
    supported = versions(error.data, "supported")
    return bool(supported) and (all if is_only_modern else any)(map(names_modern, supported))


def versions(raw: object, name: str) -> list[str]:
    """The versions that a member of an object lists; none if it is malformed."""
    try:
        return jsonrpc.inspect(_decode_versions, jsonrpc.members(raw)[name])
    except (KeyError, ValueError):
        return []
