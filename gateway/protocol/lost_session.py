"""Recognises how legacy servers refuse a message of a session that they do not know.

An error with the id of the request that was sent is normally the answer to it, even if it mentions a session, because
a tool may do so. But a server that parses the body before it looks for the session repeats the id in its refusal too.
Only the exact message of a known server tells such a refusal from an answer.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc, reply_messages
from gateway.protocol.jsonrpc import Error, Message

_MESSAGES: Final[Mapping[int, frozenset[str]]] = {
    # TypeScript SDK 1.x and its examples, C# SDK
    -32001: frozenset({"Session not found"}),
    # Examples of the TypeScript SDK, server-everything, and the many servers that began as one of them
    -32000: frozenset(
        {
            "Bad Request: No valid session ID provided",
            "Bad Request: No valid session ID",
            "Session not found",
        }
    ),
    # Python SDK
    -32600: frozenset(
        {
            "Bad Request: No valid session ID provided",
            "Not Found: Invalid or expired session ID",
            "Not Found: Session has been terminated",
            "Session not found",
        }
    ),
}


def is_template(error: Error) -> bool:
    """Whether a known server refuses an unknown session with exactly this error."""
    return error.message in _MESSAGES.get(error.code, frozenset())


def is_own(message: Message, sent: bytes | None) -> bool:
    """Whether a response has the id of the request that was sent, and so answers it."""
    asked = opened(sent) if sent is not None else Message()
    if asked.method is None or not isinstance(asked.id, Raw) or not isinstance(message.id, Raw):
        return False
    return message.method is None and jsonrpc.is_same_id(message.id, asked.id)


def is_foreign(message: Message, sent: bytes | None) -> bool:
    """Whether a response answers another request than the one that was sent."""
    asked = opened(sent) if sent is not None else Message()
    return isinstance(asked.id, Raw) and reply_messages.is_foreign(message, asked.id)


def is_answered(body: bytes, sent: bytes) -> bool:
    """Whether the body of a refusal answers the request that was sent, instead of reporting a lost session."""
    message = opened(body)
    if not is_own(message, sent):
        return False
    return not (isinstance(message.error, Raw) and is_template(jsonrpc.error(message.error)))


def opened(body: bytes) -> Message:
    """The message in a body; an empty one if the body is not a message."""
    try:
        return jsonrpc.message(body)
    except ValueError:
        return Message()
