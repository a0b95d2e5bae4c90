"""What tells the refusal of an unknown session from the answer to a request."""

import json
from typing import Any

import pytest

from gateway.protocol import lost_session
from gateway.protocol.jsonrpc import Error

SENT = b'{"jsonrpc":"2.0","id":"gw-1","method":"tools/call","params":{}}'
NOT_FOUND = {"code": -32001, "message": "Session not found"}


def body(id_: Any, **members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id_, **members}).encode()


@pytest.mark.parametrize(
    ("code", "message", "known"),
    [
        (-32001, "Session not found", True),
        (-32600, "Session not found", True),
        (-32600, "Not Found: Session has been terminated", True),
        (-32000, "Bad Request: No valid session ID provided", True),
        (-32000, "Bad Request: No valid session ID", True),
        (-32000, "bad request: no valid session id provided", False),
        (-32001, "Session not found in the database", False),
        (-32603, "Session not found", False),
        (-32000, "", False),
        (1, "Session not found", False),
    ],
)
def test_only_the_whole_words_of_a_known_server_are_a_template(code: int, message: str, *, known: bool) -> None:
    assert lost_session.is_template(Error(code, message)) is known


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (body("gw-1", error={"code": -32603, "message": "The database session timed out"}), True),
        (body("gw-1", error=NOT_FOUND), False),
        (body("gw-1", result={}), True),
        (body(None, error={"code": -32603, "message": "The database session timed out"}), False),
        (body("server-error", error=NOT_FOUND), False),
        (body("gw-1", method="ping"), False),
        (b'{"jsonrpc":"2.0","error":{"code":1,"message":"no id"}}', False),
        (b"Session not found", False),
        (b"", False),
        (b"[]", False),
        (b'"gw-1"', False),
        (b"\xff", False),
    ],
)
def test_what_carries_the_requests_id_answers_it_unless_it_is_a_template(said: bytes, *, answered: bool) -> None:
    assert lost_session.is_answered(said, SENT) is answered


@pytest.mark.parametrize(
    "sent",
    [
        b'{"jsonrpc":"2.0","id":"gw-1","result":{}}',
        b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}',
    ],
)
def test_nothing_answers_what_is_no_request_or_has_another_id(sent: bytes) -> None:
    assert not lost_session.is_answered(body("gw-1", result={}), sent)
