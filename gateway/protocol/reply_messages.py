"""Reads the JSON-RPC messages in the body of an HTTP reply, which is JSON or an event stream."""

from collections.abc import Iterator
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc, sse

EVENT_STREAM: Final = "text/event-stream"


def messages(content_type: str, body: bytes) -> Iterator[jsonrpc.Message]:
    """Yield the messages of a body, or of the beginning of one; anything else is skipped."""
    parts = [event.data for event in events(body) if event.data] if content_type == EVENT_STREAM else [body]
    for part in parts:
        try:
            yield jsonrpc.message(part)
        except ValueError:
            continue


def events(body: bytes) -> list[sse.Event]:
    """Return the events of an event stream that are complete."""
    return sse.Parser(len(body) + 1).feed(body)


def is_response(message: jsonrpc.Message) -> bool:
    """Return whether a message is a response, not a request or a notification."""
    return isinstance(message.result, Raw) or isinstance(message.error, Raw)
