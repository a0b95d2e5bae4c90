"""JSON-RPC batches, which 2025-03-26 allowed in replies and on streams, and no other version."""

from collections.abc import Sequence

from gateway.protocol import jsonrpc
from gateway.upstream.channel import Receive


def unpacked(data: bytes) -> Sequence[bytes]:
    """The messages in `data`: itself, unless it is a batch. What is neither stays as it is: others judge messages."""
    if data[:1] == b"{" or data.lstrip()[:1] != b"[":
        return (data,)
    try:
        return [bytes(item) for item in jsonrpc.items(data)]
    except (ValueError, RecursionError):
        return (data,)


def hand_over(data: bytes, receive: Receive) -> bool:
    """Hand over every message in `data`; whether one of them was the answer."""
    answered = False
    for message in unpacked(data):
        answered = receive(message) or answered
    return answered
