"""The state of nested requests as SEP-1685 has it; pure.

The client echoes the state in the `_meta` of its result. An error has no `_meta`, so the id of the nested request goes
on carrying what it does without the dialect; the state has room for larger calls.
"""

from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange.input_requests import Question
from gateway.mirror.streamable.tokens import STATE, CallPlace, Tokens
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidState

DIALECT: Final = "sep-1685"
KEY: Final = "modelcontextprotocol.io/state/request/"
CODE: Final = -32010


class InvalidRequestState(InvalidState):
    """The echoed state is not the one of an open question; the call stays as it was."""

    code = CODE

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.message = (
            "Invalid or tampered state: repeat the state of the open request exactly, in the _meta of the result"
        )
        self.data = {"reason": "invalid_request_state"}


def with_state(question: Question, state: str) -> Question:
    """The question with its state."""
    params = jsonrpc.fields(question.params or jsonrpc.EMPTY)
    meta = jsonrpc.members(params.get("_meta")) | {KEY: Raw(jsonrpc.encode(state))}
    return replace(question, params=jsonrpc.with_meta(params, meta))


def is_echo(place: CallPlace, message: jsonrpc.Message) -> bool:
    """Whether a response must bring a state."""
    return place.has_state and not isinstance(message.error, Raw)


def taken(place: CallPlace, message: jsonrpc.Message, tokens: Tokens) -> tuple[CallPlace, jsonrpc.Message]:
    """What the state of a response says, and the response without it; raises InvalidRequestState."""
    result = jsonrpc.members(message.result)
    meta = jsonrpc.members(result.get("_meta"))
    raw, is_due = meta.pop(KEY, None), is_echo(place, message)
    if raw is None and not is_due:
        return place, message
    state = jsonrpc.text(raw)
    if state is None or not is_due:
        raise InvalidRequestState("malformed")
    try:
        found = tokens.place(STATE, state, place.session)
    except InvalidState as exc:
        raise InvalidRequestState(exc.reason) from exc
    if found.brief != place.brief:  # the id may have had no room for what continues the call
        raise InvalidRequestState("other_target")
    return found, replace(message, result=jsonrpc.with_meta(result, meta))
