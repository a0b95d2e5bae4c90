"""Takes a JSON-RPC batch of 2025-03-26 apart."""

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidRequest, ParseError
from gateway.protocol.json_text.json_bounds import check_bounds

VERSION: Final = "2025-03-26"
"""The only version that has batches."""
MAX_MESSAGES: Final = 100


def is_batch(body: bytes) -> bool:
    """Whether a body is an array."""
    return body[:1] != b"{" and body.lstrip()[:1] == b"["


def members(body: bytes, json_depth: int, version: str | None) -> Sequence[ClientMessage]:
    """Return the messages of a batch in a session of this version; raises ParseError or InvalidRequest."""
    try:
        check_bounds(body, json_depth)
        items = jsonrpc.items(body)
    except ValueError as exc:
        raise ParseError(f"The body is not valid JSON: {exc}") from exc
    if version != VERSION:
        raise InvalidRequest(
            f"This session speaks version {version}, and only {VERSION} has JSON-RPC batches; send each message alone"
        )
    if not 0 < len(items) <= MAX_MESSAGES:
        raise InvalidRequest(f"A batch has 1 to {MAX_MESSAGES} messages, and this one has {len(items)}")
    try:
        found = [ClientMessage(bytes(item), jsonrpc.message(bytes(item))) for item in items]
    except (ValueError, msgspec.MsgspecError) as exc:
        raise InvalidRequest("Each member of a batch must be one JSON-RPC object") from exc
    _check(found)
    return found


def _check(found: Sequence[ClientMessage]) -> None:
    if any(member.opened.method == mcp.INITIALIZE for member in found):
        raise InvalidRequest("`initialize` must not be part of a batch; send it alone, without Mcp-Session-Id")
    ids = [member.request_id for member in found if member.request_id is not None]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("Two requests of the batch have the same id; every request needs its own")
