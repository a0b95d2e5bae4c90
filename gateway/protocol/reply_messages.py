"""Reads the JSON-RPC messages in the body of an HTTP reply, and tells which of them answer a request.

An error with the id of the request that was sent is normally the answer to it, even if it mentions a session, because
a tool may do so. But a server that parses the body before it looks for the session repeats the id in its refusal too.
Only the exact message of a known server tells such a refusal from an answer.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc, sse
from gateway.protocol.jsonrpc import Error, Message

EVENT_STREAM: Final = "text/event-stream"
_NO_ID: Final = (b"null", b'""', b'"server-error"')
"""What servers write in place of an id that they could not read; the Python SDK 1.x writes the last one."""
_OF_LOST_SESSIONS: Final = frozenset(
    {
        # TypeScript SDK 1.x and its examples, C# SDK
        (-32001, "Session not found"),
        # Examples of the TypeScript SDK, server-everything, and the many servers that began as one of them
        (-32000, "Bad Request: No valid session ID provided"),
        (-32000, "Bad Request: No valid session ID"),
        (-32000, "Session not found"),
        # Python SDK
        (-32600, "Bad Request: No valid session ID provided"),
        (-32600, "Not Found: Invalid or expired session ID"),
        (-32600, "Not Found: Session has been terminated"),
        (-32600, "Session not found"),
    }
)


def messages(content_type: str, body: bytes) -> Iterator[Message]:
    """Yield the messages of a body, or of the beginning of one; anything else is skipped."""
    parts = [event.data for event in events(body) if event.data] if content_type == EVENT_STREAM else [body]
    for part in parts:
        try:
            yield jsonrpc.message(part)
        except ValueError:
            continue


def events(body: bytes) -> list[sse.Event]:
    """Return the events of an event stream that are complete."""
    return sse.Parser(len(body) + 1).feed(body)  # the body is bounded already


def opened(body: bytes) -> Message:
    """The message in a body; an empty one if the body is not a message."""
    try:
        return jsonrpc.message(body)
    except ValueError:
        return Message()


def asked(sent: bytes | None) -> Raw | None:
    """The id of a request that was sent; None if it was none."""
    message = opened(sent or b"")
    return message.id if message.method is not None and isinstance(message.id, Raw) else None


def is_response(message: Message) -> bool:
    """Return whether a message is a response, not a request or a notification."""
    return isinstance(message.result, Raw) or isinstance(message.error, Raw)


def is_own(message: Message, asked: bytes | Raw | None) -> bool:
    """Whether a message has the id of the request that was sent, and so answers it."""
    if asked is None or message.method is not None:
        return False
    id_ = message.id
    return isinstance(id_, Raw) and (
        bytes(id_) == bytes(asked) or jsonrpc.request_id(id_) == jsonrpc.request_id(Raw(asked))
    )


def is_answer(message: Message, asked: bytes | Raw) -> bool:
    """Whether a message on the reply to a request is its response; `asked` is the JSON of the request's id.

    A server, or a proxy before it, that writes a response twice on a kept connection answers the next request with it.
    An error without an id belongs to the request on whose reply it comes.
    """
    has_id = isinstance(message.id, Raw) and bytes(message.id) not in _NO_ID
    is_nameless = message.method is None and isinstance(message.error, Raw) and not has_id
    return is_response(message) and (is_nameless or is_own(message, asked))


def is_foreign(message: Message, asked: bytes | Raw | None) -> bool:
    """Whether a message is the response to another request."""
    is_other = asked is not None and message.method is None and not is_answer(message, asked)
    return is_other and is_response(message)


def is_of_lost_session(error: Error) -> bool:
    """Whether a known server refuses an unknown session with exactly this error."""
    return (error.code, error.message) in _OF_LOST_SESSIONS


def is_answered(body: bytes, sent: bytes) -> bool:
    """Whether the body of a refusal answers the request that was sent, instead of reporting a lost session."""
    message = opened(body)
    is_lost = (error := message.failure) is not None and is_of_lost_session(error)
    return is_own(message, asked(sent)) and not is_lost
