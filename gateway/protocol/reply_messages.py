"""Reads the JSON-RPC messages in the body of an HTTP reply, which is JSON or an event stream."""

from collections.abc import Iterator
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc, sse

EVENT_STREAM: Final = "text/event-stream"
_NO_ID: Final = (b"null", b'""', b'"server-error"')
"""What servers write in place of an id that they could not read; the Python SDK 1.x writes the last one."""


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


def is_answer(message: jsonrpc.Message, asked: bytes | Raw) -> bool:
    """Whether a message on the reply to a request is its response; `asked` is the JSON of the request's id.

    A server, or a proxy before it, that writes a response twice on a kept connection answers the next request with it.
    An error without an id belongs to the request on whose reply it comes.
    """
    if message.method is not None or not is_response(message):
        return False
    return _is_nameless(message) or (isinstance(message.id, Raw) and jsonrpc.is_same_id(message.id, asked))


def is_foreign(message: jsonrpc.Message, asked: bytes | Raw) -> bool:
    """Whether a message is the response to another request."""
    return message.method is None and is_response(message) and not is_answer(message, asked)


def _is_nameless(message: jsonrpc.Message) -> bool:
    """Whether a message is the error of a request whose id the server could not read."""
    has_id = isinstance(message.id, Raw) and bytes(message.id) not in _NO_ID
    return isinstance(message.error, Raw) and not has_id
