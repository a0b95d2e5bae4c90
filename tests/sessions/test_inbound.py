"""What one message of the upstream means while a call is, or is not, in flight."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc, mcp
from gateway.sessions import inbound
from gateway.sessions.call import Call, OwnListener

CALL = Call(b'"gw-1"', b"", OwnListener(), b"7")
OWN = Call(b'"gw-1"', b"", OwnListener(), b"7", is_own=True)
NOT_CALLED = "No call is in flight that could ask (SEP-2260)"
NAMELESS = "Several calls are in flight, and the request names none of them"


def message(**members: Any) -> jsonrpc.Message:
    return jsonrpc.message(msgspec.json.encode({"jsonrpc": "2.0", **members}))


def shown(found: inbound.Meaning) -> tuple[str, Any]:
    """The name of a meaning, with its fields in plain values."""
    fields = {name: getattr(found, name) for name in type(found).__struct_fields__}
    fields = {name: field for name, field in fields.items() if field is not msgspec.UNSET}
    return type(found).__name__, msgspec.json.decode(msgspec.json.encode(fields))


def unsolicited(method: str, why: str) -> tuple[str, Any]:
    error = {"code": mcp.INVALID_PARAMS, "message": why}
    return "Unsolicited", {"id": 3, "method": method, "error": error}


ELICIT = {"id": 3, "method": mcp.ELICIT, "params": {"message": "Name?"}}
NESTED = ("Nested", {"id": 3, "method": mcp.ELICIT, "params": {"message": "Name?"}})


@pytest.mark.parametrize(
    ("members", "call", "expected"),
    [
        (
            {"id": "gw-1", "result": {"a": 1}},
            CALL,
            ("Resulted", {"result": {"a": 1}, "is_tool_error": None}),
        ),
        (
            {"id": "gw-1", "error": {"code": -1, "message": "no"}},
            CALL,
            ("Failed", {"error": {"code": -1, "message": "no"}}),
        ),
        (
            {"id": "gw-1", "result": {}},
            OWN,
            ("Resulted", {"result": {}, "is_tool_error": None}),
        ),
        ({"id": "gw-1", "result": {}}, None, ("UnknownId", {})),
        ({"id": "gw-2", "result": {}}, CALL, ("UnknownId", {})),
        ({"id": 1, "result": {}}, CALL, ("UnknownId", {})),
        ({"id": "gw-1"}, CALL, ("UnknownId", {})),
        ({"result": {}}, CALL, ("UnknownId", {})),
        ({"id": 3, "method": mcp.PING}, CALL, ("Ping", {"id": 3})),
        ({"id": 3, "method": mcp.PING}, None, ("Ping", {"id": 3})),
        (ELICIT, CALL, NESTED),
        (ELICIT, None, unsolicited(mcp.ELICIT, NOT_CALLED)),
        (ELICIT, OWN, unsolicited(mcp.ELICIT, NOT_CALLED)),
        ({"id": 3, "method": "x/y"}, CALL, ("Nested", {"id": 3, "method": "x/y"})),
        ({"method": mcp.TOOLS_CHANGED}, CALL, ("Change", {"method": mcp.TOOLS_CHANGED})),
        ({"method": mcp.PROMPTS_CHANGED}, None, ("Change", {"method": mcp.PROMPTS_CHANGED})),
        ({"method": mcp.RESOURCES_CHANGED}, None, ("Change", {"method": mcp.RESOURCES_CHANGED})),
        ({"method": mcp.RESOURCE_UPDATED}, None, ("Change", {"method": mcp.RESOURCE_UPDATED})),
        (
            {"method": mcp.PROGRESS, "params": {"progressToken": 7, "progress": 1}},
            CALL,
            ("Progressed", {"params": {"progressToken": 7, "progress": 1}}),
        ),
        ({"method": mcp.PROGRESS, "params": {"progressToken": "7"}}, CALL, ("Unrelated", {"method": mcp.PROGRESS})),
        ({"method": mcp.PROGRESS, "params": {}}, CALL, ("Unrelated", {"method": mcp.PROGRESS})),
        (
            {"method": mcp.PROGRESS, "params": {"progressToken": 7}},
            Call(b'"gw-1"', b"", OwnListener()),
            ("Unrelated", {"method": mcp.PROGRESS}),
        ),
        ({"method": mcp.PROGRESS, "params": {"progressToken": 7}}, None, ("Unrelated", {"method": mcp.PROGRESS})),
        (
            {"method": mcp.LOG, "params": {"level": "info", "data": 1}},
            CALL,
            ("Logged", {"level": "info", "params": {"level": "info", "data": 1}}),
        ),
        ({"method": mcp.LOG, "params": {}}, CALL, ("Logged", {"level": "", "params": {}})),
        ({"method": mcp.LOG}, CALL, ("Unrelated", {"method": mcp.LOG})),
        ({"method": mcp.LOG, "params": [1]}, CALL, ("Unrelated", {"method": mcp.LOG})),
        (
            {"method": mcp.CANCELLED, "params": {"requestId": 3}},
            CALL,
            ("Withdrawn", {"id": 3, "replayable": False}),
        ),
        ({"method": mcp.CANCELLED, "params": {}}, CALL, ("Unrelated", {"method": mcp.CANCELLED})),
        ({"method": "notifications/other"}, CALL, ("Unrelated", {"method": "notifications/other"})),
    ],
)
def test_a_message_means(members: dict[str, Any], call: Call | None, expected: tuple[str, Any]) -> None:
    assert shown(inbound.meaning(message(**members), call)) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (ELICIT, ("Unanswerable", {})),
        ({"id": 3, "method": "x/y"}, ("Nested", {"id": 3, "method": "x/y"})),
        ({"id": 3, "method": mcp.PING}, ("Ping", {"id": 3})),
    ],
)
def test_a_question_cannot_be_put_where_no_answer_reaches_the_server(
    members: dict[str, Any], expected: tuple[str, Any]
) -> None:
    assert shown(inbound.meaning(message(**members), CALL, can_ask=False)) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (ELICIT, unsolicited(mcp.ELICIT, NAMELESS)),
        ({"id": 3, "method": mcp.PING}, ("Ping", {"id": 3})),
        ({"id": "gw-1", "result": {}}, ("Resulted", {"result": {}, "is_tool_error": None})),
        ({"method": mcp.LOG, "params": {}}, ("Logged", {"level": "", "params": {}})),
    ],
)
def test_a_request_that_any_of_several_calls_may_own_belongs_to_none(
    members: dict[str, Any], expected: tuple[str, Any]
) -> None:
    assert shown(inbound.meaning(message(**members), CALL, is_ambiguous=True)) == expected


def test_only_a_response_with_the_id_of_the_call_answers_it() -> None:
    assert inbound.answers(message(id="gw-1", result={}), CALL)
    assert not inbound.answers(message(id="gw-1", result={}), None)
    assert not inbound.answers(message(id="gw-2", result={}), CALL)
    assert not inbound.answers(message(id="gw-1", method=mcp.PING), CALL)


def test_an_answer_keeps_the_bytes_of_the_result() -> None:
    found = inbound.meaning(jsonrpc.message(b'{"id":"gw-1","result":{ "a" : 1.0 }}'), CALL)
    assert isinstance(found, on.Resulted)
    assert found.result == Raw(b'{ "a" : 1.0 }')


PLAIN = b'{"content":[{"type":"text","text":"a"}]}'
FAILED = b'{"content":[],"isError":true}'


@pytest.mark.parametrize(
    ("data", "result", "is_tool_error"),
    [
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b}' % PLAIN, PLAIN, False),
        (b'{"result":%b,"jsonrpc":"2.0","id":"gw-1"}' % FAILED, FAILED, True),
        (b'{"jsonrpc":"2.0","id":"gw-1","result": %b}' % PLAIN, PLAIN, None),
        (b'{"result":\n%b,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":{"content":[null]}}', b'{"content":[null]}', None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":{"tools":[]}}', b'{"tools":[]}', None),
        (b'{"id":"gw-1","jsonrpc":"2.0","result":%b}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b,"x":1}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b,"result":%b}' % (FAILED, PLAIN), PLAIN, None),
        (b'{"result":%b,"id":1,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-2","result":%b}' % PLAIN, None, None),
        (b'{"result":%b,"jsonrpc":"2.0","id":"gw-2"}' % PLAIN, None, None),
    ],
)
def test_the_answer_to_the_call_is_read_at_once_if_it_has_the_usual_form(
    data: bytes, result: bytes | None, *, is_tool_error: bool | None
) -> None:
    plain = inbound.plain_answer(data, CALL)
    assert (plain is not None) is (is_tool_error is not None)
    answer = plain or inbound.answer(jsonrpc.message(data), CALL)
    if result is None:
        assert answer is None
        return
    assert isinstance(answer, on.Resulted)
    assert (bytes(answer.result), answer.is_tool_error) == (result, is_tool_error)


@pytest.mark.parametrize(
    "data",
    [
        b'{"jsonrpc":"2.0","id":"gw-1","result":%b' % PLAIN,
        b'{"jsonrpc":"2.0","id":"gw-1","result":%b}}' % PLAIN,
        b'{"jsonrpc":"2.0","id":"gw-1","result":}',
        b'{"jsonrpc":"2.0","id":"gw-1","result":{}',
        b'{"jsonrpc":"2.0","id":"gw-1","result":{"content":[{"type":"text","text":"\xff"}]}}',
        b'{"result":,"jsonrpc":"2.0","id":"gw-1"}',
        b'{"result":%b,"x":,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN,
    ],
)
def test_an_answer_of_the_usual_form_that_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        _ = inbound.plain_answer(data, CALL) or jsonrpc.message(data)
