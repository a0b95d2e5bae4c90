"""What one message of the upstream means to the session that received it: pure.

Rule 1: one call is in flight per session, so a request of the server belongs to that call, though nothing in it names
one. Rule 2: a request that belongs to no call of a client never reaches a client (SEP-2260).
"""

from typing import Final

import msgspec
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import input_requests, results
from gateway.protocol import jsonrpc, mcp
from gateway.sessions.call import Call

_CHANGES: Final = frozenset({mcp.TOOLS_CHANGED, mcp.PROMPTS_CHANGED, mcp.RESOURCES_CHANGED, mcp.RESOURCE_UPDATED})
_AMBIGUOUS: Final = "Several calls are in flight, and the request names none of them"
_NO_CALL: Final = "No call is in flight that could ask (SEP-2260)"


Answer = on.Resulted | on.Failed
"""The response to the call in flight."""

ForCall = Answer | on.Nested | on.Progressed | on.Logged | on.Withdrawn
"""A response, request or notification that concerns the call in flight."""


class UnknownId(msgspec.Struct, frozen=True):
    """A response to no request that is in flight."""


class Ping(msgspec.Struct, frozen=True):
    """A ping of the server, to be answered by the gateway."""

    id: Raw


class Unsolicited(msgspec.Struct, frozen=True):
    """A request of the server that no client's call owns, with the error to answer."""

    id: Raw
    method: str
    error: jsonrpc.Error


class Unanswerable(msgspec.Struct, frozen=True):
    """A question whose answer cannot reach the server."""


class Change(msgspec.Struct, frozen=True):
    """A notification that something at the upstream changed."""

    method: str


class Unrelated(msgspec.Struct, frozen=True):
    """A notification that is not about the call in flight."""

    method: str


Meaning = ForCall | UnknownId | Ping | Unsolicited | Unanswerable | Change | Unrelated


def meaning(
    message: jsonrpc.Message, call: Call | None, *, can_ask: bool = True, is_ambiguous: bool = False
) -> Meaning:
    """What a message means while `call` is in flight.

    `can_ask`: an answer to a question can reach the server. `is_ambiguous`: calls of several owners are in flight in
    the session, and the message came on the stream that they share.
    """
    method = message.method
    if method is None:
        return answer(message, call) or UnknownId()
    if not isinstance(message.id, Raw):
        return _notification(method, message.params, call)
    if method == mcp.PING:
        return Ping(message.id)
    if is_ambiguous or call is None or call.is_own:
        why = _AMBIGUOUS if is_ambiguous else _NO_CALL
        return Unsolicited(message.id, method, jsonrpc.Error(mcp.INVALID_PARAMS, why))
    if method in input_requests.KINDS and not can_ask:
        return Unanswerable()
    return on.Nested(message.id, method, message.params)


def answers(message: jsonrpc.Message, call: Call | None) -> bool:
    """Whether a message carries the id of the call in flight as a response."""
    return call is not None and message.method is None and message.id == Raw(call.id)


def answer(message: jsonrpc.Message, call: Call | None) -> Answer | None:
    """The response to the call in flight, if the message is one."""
    if answers(message, call):
        if isinstance(message.result, Raw):
            return on.Resulted(message.result)
        if isinstance(message.error, Raw):
            return on.Failed(jsonrpc.error(message.error))
    return None


def plain_answer(data: bytes, call: Call | None) -> Answer | None:
    """The response to the call in flight if it has the usual form, and a result of a tool that is plain.

    Such a result is read once, and not copied. For all other messages, None says nothing. Raises UnicodeDecodeError.
    """
    if call is not None and (result := jsonrpc.unchecked_result(data, call.id)) is not None:
        is_tool_error = results.plain(result)
        if is_tool_error is not None:
            if not data.isascii():
                _ = data.decode()
            return on.Resulted(result, is_tool_error=is_tool_error)
    return None


def _notification(method: str, params: Raw | msgspec.UnsetType, call: Call | None) -> Meaning:
    if method in _CHANGES:
        return Change(method)
    return (_event(method, params, call) if call is not None else None) or Unrelated(method)


def _event(
    method: str, params: Raw | msgspec.UnsetType, call: Call
) -> on.Progressed | on.Logged | on.Withdrawn | None:
    try:
        opened = jsonrpc.fields(params) if isinstance(params, Raw) else {}
    except ValueError:
        return None
    if method == mcp.PROGRESS:
        token = opened.get("progressToken")
        is_ours = token is not None and call.progress_token is not None and bytes(token) == call.progress_token
        return on.Progressed(opened) if is_ours else None
    if method == mcp.LOG and isinstance(params, Raw):
        return on.Logged(jsonrpc.text(opened.get("level")) or "", params)
    if method == mcp.CANCELLED and "requestId" in opened:
        return on.Withdrawn(opened["requestId"])
    return None
