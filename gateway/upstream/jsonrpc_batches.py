"""Unpacks JSON-RPC batches.

Only version 2025-03-26 allows them, in replies and on streams. A batch is handed over in one turn of the event loop.
So one of too many messages is not unpacked, and counts as malformed.
"""

from collections.abc import Sequence
from typing import Final

from gateway.protocol import jsonrpc
from gateway.upstream.channel import Receive

MAX_MESSAGES: Final = 100


def unpacked(data: bytes) -> Sequence[bytes]:
    """Return the messages of a batch of at most MAX_MESSAGES, or else `data` itself, even if it is not a message."""
    if data[:1] == b"{" or data.lstrip()[:1] != b"[":
        return (data,)
    try:
        items = jsonrpc.items(data)
    except (ValueError, RecursionError):
        return (data,)
    return [bytes(item) for item in items] if len(items) <= MAX_MESSAGES else (data,)


def hand_over(data: bytes, receive: Receive) -> bool:
    """Hand over every message in `data`; return whether one of them was the answer."""
    answered = False
    for message in unpacked(data):
        answered = receive(message) or answered
    return answered
