"""Unpacks JSON-RPC batches.

Only version 2025-03-26 allows them, in replies and on streams.
"""

from collections.abc import Sequence

from gateway.protocol import jsonrpc
from gateway.upstream.channel import Receive


def unpacked(data: bytes) -> Sequence[bytes]:
    """Return the messages of a batch, or else `data` itself, even if it is not a message."""
    if data[:1] == b"{" or data.lstrip()[:1] != b"[":
        return (data,)
    try:
        return [bytes(item) for item in jsonrpc.items(data)]
    except (ValueError, RecursionError):
        return (data,)


def hand_over(data: bytes, receive: Receive) -> bool:
    """Hand over every message in `data`; return whether one of them was the answer."""
    answered = False
    for message in unpacked(data):
        answered = receive(message) or answered
    return answered
