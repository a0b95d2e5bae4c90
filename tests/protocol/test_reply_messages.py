"""The JSON-RPC messages in the body of a reply, whole or cut off."""

import json
from typing import Any

import pytest

from gateway.protocol import jsonrpc, reply_messages

PROGRESS = b'{"jsonrpc":"2.0","method":"notifications/progress"}'
RESULT = b'{"jsonrpc":"2.0","id":1,"result":{}}'
ERROR = b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}'
STREAM = b"id: 7\ndata: %b\n\n: ping\n\ndata: what is this\n\nid: 8\ndata: %b\n\n" % (PROGRESS, RESULT)


@pytest.mark.parametrize(
    ("content_type", "body", "responses"),
    [
        ("application/json", RESULT, [True]),
        ("application/json", ERROR, [True]),
        ("application/json", PROGRESS, [False]),
        ("application/json", RESULT[:-1], []),
        ("text/html", b"<p>no</p>", []),
        ("text/event-stream", STREAM, [False, True]),
        ("text/event-stream", STREAM[:-1], [False]),
        ("text/event-stream", b"", []),
    ],
)
def test_the_messages_are_read_and_anything_else_is_skipped(
    content_type: str, body: bytes, responses: list[bool]
) -> None:
    assert [
        reply_messages.is_response(message) for message in reply_messages.messages(content_type, body)
    ] == responses


def test_the_events_keep_their_ids() -> None:
    assert [event.id for event in reply_messages.events(STREAM) if event.id] == ["7", "8"]


@pytest.mark.parametrize(
    ("id_", "asked", "answers"),
    [
        (b"1", b"1", True),
        (b'"a"', b'"a"', True),
        (b'"\\u0061"', b'"a"', True),
        (b"1", b'"1"', False),
        (b'"1"', b"1", False),
        (b"2", b"1", False),
        (b"null", b"1", False),
        (b'"server-error"', b"1", False),
    ],
)
def test_a_response_belongs_to_the_request_whose_id_it_carries(id_: bytes, asked: bytes, *, answers: bool) -> None:
    message = jsonrpc.message(b'{"jsonrpc":"2.0","id":%b,"result":{}}' % id_)
    assert reply_messages.is_answer(message, asked) is answers
    assert reply_messages.is_foreign(message, asked) is not answers


@pytest.mark.parametrize("id_", [b'"id":null,', b'"id":"server-error",', b'"id":"",', b""])
def test_an_error_without_an_id_belongs_to_any_request(id_: bytes) -> None:
    message = jsonrpc.message(b'{"jsonrpc":"2.0",%b"error":{"code":-1,"message":"no"}}' % id_)
    assert reply_messages.is_answer(message, b"1")


@pytest.mark.parametrize("data", [PROGRESS, b'{"jsonrpc":"2.0","id":1,"method":"ping"}', b'{"jsonrpc":"2.0","id":1}'])
def test_what_is_no_response_is_neither_an_answer_nor_foreign(data: bytes) -> None:
    message = jsonrpc.message(data)
    assert not reply_messages.is_answer(message, b"1")
    assert not reply_messages.is_foreign(message, b"2")


@pytest.mark.parametrize(
    ("code", "message", "known"),
    [
        (-32001, "Session not found", True),
        (-32600, "Session not found", True),
        (-32000, "Bad Request: No valid session ID provided", True),
        (-32000, "bad request: no valid session id provided", False),
        (-32001, "Session not found in the database", False),
        (-32603, "Session not found", False),
    ],
)
def test_only_the_whole_words_of_a_known_server_tell_of_a_lost_session(
    code: int, message: str, *, known: bool
) -> None:
    assert reply_messages.is_of_lost_session(jsonrpc.Error(code, message)) is known


SENT = b'{"jsonrpc":"2.0","id":"gw-1","method":"tools/call","params":{}}'
NOT_FOUND = {"code": -32001, "message": "Session not found"}


def body(id_: Any, **members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id_, **members}).encode()


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (body("gw-1", error={"code": -32603, "message": "The database session timed out"}), True),
        (body("gw-1", error=NOT_FOUND), False),
        (body("gw-1", result={}), True),
        (body(None, error={"code": -32603, "message": "The database session timed out"}), False),
        (body("server-error", error=NOT_FOUND), False),
        (body("gw-1", method="ping"), False),
        (b"Session not found", False),
        (b"[]", False),
        (b"\xff", False),
    ],
)
def test_what_carries_the_requests_id_answers_it_unless_its_session_is_lost(said: bytes, *, answered: bool) -> None:
    assert reply_messages.is_answered(said, SENT) is answered


@pytest.mark.parametrize(
    "sent",
    [
        b'{"jsonrpc":"2.0","id":"gw-1","result":{}}',
        b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}',
    ],
)
def test_nothing_answers_what_is_no_request_or_has_another_id(sent: bytes) -> None:
    assert not reply_messages.is_answered(body("gw-1", result={}), sent)
