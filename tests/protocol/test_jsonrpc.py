import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidParams, InvalidRequest
from gateway.protocol.json_text.json_bounds import MAX_MEMBERS
from tests.protocol.test_canonical_json import VALUES
from tests.support.schema import assert_legacy_message, assert_modern_message

DEEP = b"[" * 100_000


def whole(value: Any) -> Any:
    """The value with U+FFFD for unpaired surrogates, the way that Python's codecs take."""
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def test_a_message_is_opened_one_level_and_no_deeper() -> None:
    message = jsonrpc.message(b'{"jsonrpc":"2.0","id":"1","method":"m","params": {"a" : 1e1} }')
    assert bytes(message.id) == b'"1"'
    assert message.method == "m"
    assert bytes(message.params) == b'{"a" : 1e1}'
    assert message.result is UNSET
    assert message.error is UNSET


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'{"method":1}', b"{", b'{"a":' + DEEP], ids=range(6))
def test_what_is_no_message_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        jsonrpc.message(data)


def test_members_are_empty_for_what_is_no_object() -> None:
    assert jsonrpc.members(Raw(b'{"a":1}')) == {"a": Raw(b"1")}
    for other in (None, UNSET, Raw(b"[]"), Raw(b'{"a"'), b"1", 7):
        assert jsonrpc.members(other) == {}


def test_an_object_gets_another_meta_or_none() -> None:
    opened = jsonrpc.fields(b'{"a":1,"_meta":{"b":2}}')
    assert bytes(jsonrpc.with_meta(opened, {"c": Raw(b"3")})) == b'{"a":1,"_meta":{"c":3}}'
    assert bytes(jsonrpc.with_meta(opened, {})) == b'{"a":1}'


ERRORS = [
    (b'{"code":-1,"message":7}', -32603, "the upstream answered with a malformed JSON-RPC error"),
    (b'{"code":1,"message":"no","data":[1]}', 1, "no"),
    (b'{"code":0}', 0, ""),
    (b'{"code":"x","message":"no"}', -32603, "the upstream answered with a malformed JSON-RPC error"),
    (b'"no"', -32603, "the upstream answered with a malformed JSON-RPC error"),
    (DEEP, -32603, "the upstream answered with a malformed JSON-RPC error"),
]


@pytest.mark.parametrize(("raw", "code", "message"), ERRORS, ids=range(len(ERRORS)))
def test_an_error_is_read_whatever_it_is(raw: bytes, code: int, message: str) -> None:
    error = jsonrpc.error(Raw(raw))
    assert (error.code, error.message) == (code, message)


def test_the_data_of_a_malformed_error_is_kept() -> None:
    error = jsonrpc.error(Raw(b'{"code":"x","data":{"why":[1]}}'))
    assert isinstance(error.data, Raw)
    assert bytes(error.data) == b'{"why":[1]}'


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'"a"', "a"),
        (b'"\\u00e9"', "é"),
        (b'"\\ud83d"', "\ufffd"),
        (b'"\\ud83d\xff"', None),
        (b'"\\ud83d', None),
        (b'"\\ud83d" 1', None),
        (b"1", None),
        (b"null", None),
        (b'"\xff"', None),
        (None, None),
    ],
)
def test_text_is_a_string_or_none(raw: bytes | None, text: str | None) -> None:
    assert jsonrpc.text(None if raw is None else Raw(raw)) == text


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (b"1", 1),
        (b"-0.5", -0.5),
        (b"1e2", 100),
        (b"1e400", None),
        (b"1" + b"0" * 400, None),
        (b"true", None),
        (b"null", None),
        (b'"1"', None),
        (None, None),
    ],
)
def test_a_number_is_one_that_a_float_can_hold(raw: bytes | None, number: float | None) -> None:
    assert jsonrpc.number(None if raw is None else Raw(raw)) == number


IDS = [
    (b'"a"', True),
    (b'""', True),
    (b"0", True),
    (b"-7", True),
    (b"123456789012345678901234567890", True),
    (b"1.0", False),
    (b"1e3", False),
    (b"null", False),
    (b"true", False),
    (b"[]", False),
    (b"{}", False),
    (b"9" * 5000, False),
    (b'"\\ud800"', True),
    (DEEP, False),
]


@pytest.mark.parametrize(("raw", "valid"), IDS, ids=range(len(IDS)))
def test_an_id_is_a_string_or_an_integer(raw: bytes, *, valid: bool) -> None:
    assert jsonrpc.is_id(Raw(raw)) is valid


def test_an_absent_id_is_none() -> None:
    assert not jsonrpc.is_id(UNSET)
    assert jsonrpc.id_of({}) is None


def test_a_message_has_an_id_if_it_is_one_that_mcp_allows() -> None:
    assert jsonrpc.id_of({"id": Raw(b'"a"')}) == b'"a"'
    assert jsonrpc.id_of({"id": Raw(b"1.5")}) is None


def test_null_is_null() -> None:
    assert jsonrpc.is_null(Raw(b"null"))
    assert not jsonrpc.is_null(Raw(b'"null"'))


def test_what_goes_upstream_is_valid() -> None:
    assert_legacy_message(jsonrpc.request(b'"a"', "tools/call", {"name": "x", "arguments": Raw(b'{"a":1}')}))
    assert_legacy_message(jsonrpc.notification("notifications/initialized"))
    assert_legacy_message(jsonrpc.notification("notifications/cancelled", {"requestId": Raw(b'"a"')}))
    assert_legacy_message(jsonrpc.result(b"0", Raw(b'{"action":"cancel"}')), "elicitation/create")
    assert_legacy_message(jsonrpc.failure(Raw(b"0"), jsonrpc.Error(-32603, "no")))


def test_what_goes_downstream_is_valid() -> None:
    assert_modern_message(jsonrpc.result(b"1", b'{"resultType":"complete","content":[]}'), "tools/call")
    message = assert_modern_message(jsonrpc.failure(None, jsonrpc.Error(-32700, "no", Raw(b'{"a":1}'))))
    assert "id" not in message
    assert assert_modern_message(jsonrpc.failure(b'"x"', jsonrpc.Error(1, "no")))["id"] == "x"


def test_an_error_with_an_empty_message_has_a_message() -> None:
    # basic/index, Error Responses: code and message are required; an old server may leave the message empty
    assert json.loads(jsonrpc.failure(b"1", jsonrpc.error(Raw(b'{"code":0,"message":""}'))))["error"] == {
        "code": 0,
        "message": "",
    }


DUPLICATES = [
    (b"{}", False),
    (b"{ }", False),
    (b'{"a":1}', False),
    (b'{"a": 1, "b":{"c":1,"c":2}}', False),
    (b'{"a":1,"a":1}', True),
    (b'{"a":1,"\\u0061":2}', True),
    (b'{"a": 1, "b": 2, "a": 3}', True),
    ('{"é":1,"é":2}'.encode(), True),
    ('{"é":1}'.encode(), False),
    (b'{"a": ' + b"9" * 5000 + b"}", False),
    (b'{"a": 1e999}', False),
    (b'{"a":1,"a": {"b":[1, 2]} }', True),
    (b'{ "a\\\\u0062" : 1, "a\\u0062" : 2 }', False),
    (b'{ "a\\\\u0062" : 1, "a\\\\\\u0075\\u0030062" : 2 }', True),
    (b'{"\\"":1,"\\u0022":2}', True),
    (b'{"\\"":"\\\\","\\\\":"\\n\\u0041"}', False),
    (b'{"\\ud83d\\ude00":1}', False),
    ('{"\\ud83d\\ude00":1,"😀":2}'.encode(), True),
    (b'{"\\ud83d":1,"\\ude00":2}', True),
    (b'{"\\ud83d": 1, "\\uD83D": 2}', True),
    (b'{"\\ud83d": "\\\\", "\\\\ud83d": "\\ud83d"}', False),
]


@pytest.mark.parametrize(("data", "repeated"), DUPLICATES, ids=range(len(DUPLICATES)))
def test_duplicate_keys_are_seen(data: bytes, *, repeated: bool) -> None:
    if repeated:
        with pytest.raises(jsonrpc.RepeatedKey):
            jsonrpc.distinct(data)
    else:
        assert {
            key: json.loads(bytes(raw).decode(), parse_int=str) for key, raw in jsonrpc.distinct(data).items()
        } == whole(json.loads(data, parse_int=str))


TEXT = st.text(st.sampled_from('a\\"\n/é😀\ud83d\ude00\uffff\x7f'), max_size=3)


@given(
    members=st.lists(st.tuples(TEXT, VALUES | TEXT), max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_duplicate_keys_are_seen_however_the_object_is_written(
    members: list[tuple[str, Any]], indent: int | None, *, ascii_only: bool
) -> None:
    space = "" if indent is None else " "

    def written(value: Any) -> str:
        found = json.dumps(value, ensure_ascii=False)
        return found if not ascii_only and found.isprintable() else json.dumps(value)

    data = ("{" + ",".join(f"{written(key)}:{space}{written(value)}" for key, value in members) + "}").encode()
    # In Python, two halves of a pair that stand apart are not the pair that they are when they are written together.
    keys = [whole(json.loads(json.dumps(key))) for key, _ in members]
    try:
        found = jsonrpc.distinct(data)
    except jsonrpc.RepeatedKey:
        assert len(set(keys)) < len(keys)
    else:
        assert list(found) == keys


def test_opening_an_object_takes_no_time_per_member_of_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The check for repeated keys once built every value of a body in which there was a space.
    monkeypatch.delattr(json, "loads")
    assert list(jsonrpc.distinct(b'{"a": [%b], "b": {}}' % b", ".join([b'{"c": 1}'] * 1000))) == ["a", "b"]


HALF = rb"\ud83d"


@pytest.mark.parametrize("half", [HALF, rb"\uDE00", rb"\ud83dx", rb"\ude00\ud83d", rb"\\\ud83d\\", rb"\ud83d\n"])
def test_half_an_emoji_is_read_as_a_replacement_character(half: bytes) -> None:
    raw = b'{"a":"%b","%b": ["%b",{"%b":1}]}' % (half, half, half, half)
    expected = whole(json.loads(raw))
    for read in (jsonrpc.fields, jsonrpc.distinct):
        assert msgspec.json.decode(jsonrpc.merge(read(raw))) == expected
    assert jsonrpc.value(raw) == expected
    assert msgspec.json.decode(jsonrpc.items(b'["%b",1]' % half)[0]) == expected["a"]
    message = jsonrpc.message(b'{"jsonrpc":"2.0","method":"%b","result":%b}' % (half, raw))
    assert (message.method, msgspec.json.decode(message.result)) == (expected["a"], expected)
    error = jsonrpc.error(Raw(b'{"code":-1,"message":"%b","data":%b}' % (half, raw)))
    assert (error.message, msgspec.json.decode(error.data)) == (expected["a"], expected)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":"\\ud83d",}',
        b'{"a":"\\ud83d\xff"}',
        b'["\\ud83d"]',
        b'{"a":"\\ud83d","b":' + DEEP,
    ],
    ids=range(4),
)
def test_what_is_wrong_stays_wrong_with_half_an_emoji_in_it(raw: bytes) -> None:
    for read in (jsonrpc.fields, jsonrpc.distinct, jsonrpc.message):
        with pytest.raises(ValueError, match=r"."):
            read(raw)


@pytest.mark.parametrize(
    "raw", [b"1e400", b"-1e400", b"9" * 5000, b'["\\ud83d",1e400]', b'["\\ud83d",%b]' % (b"9" * 5000)]
)
def test_a_number_that_python_cannot_hold_has_no_value(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"range|limit"):
        jsonrpc.value(raw)


def test_merging_splices_values_as_they_are() -> None:
    assert jsonrpc.merge({"a": b"[1, 2]", '"é': Raw(b"1e1")}) == '{"a":[1, 2],"\\"é":1e1}'.encode()
    assert jsonrpc.merge({}) == b"{}"
    assert msgspec.json.decode(jsonrpc.merge({"x": jsonrpc.EMPTY})) == {"x": {}}


def test_line_ends_between_tokens_become_spaces_and_nothing_else_changes() -> None:
    assert jsonrpc.without_line_ends(b'{"a":\r\n"\\n",\n1}') == b'{"a":  "\\n", 1}'
    one = b'{"a":"\\r\\n"}'
    assert jsonrpc.without_line_ends(one) is one


def test_a_value_may_be_long_as_long_as_it_has_few_values() -> None:
    assert jsonrpc.value(b'["%b"]' % (b"x" * 60_000)) == ["x" * 60_000]


def test_what_is_only_looked_at_may_be_too_deep() -> None:
    for deep in (DEEP, b'["\\ud83d",' + DEEP):
        with pytest.raises(ValueError, match="nested too deeply"):
            jsonrpc.inspect(msgspec.json.Decoder().decode, deep)


RESULT = b'{"a":1}'
SPELLED_RESPONSES = [
    (b'{"jsonrpc":"2.0","id":1,"result":%b}' % RESULT, RESULT),
    (b'{"result":%b,"jsonrpc":"2.0","id":1}' % RESULT, RESULT),
    (b'{"jsonrpc":"2.0","id":1,"result":%b' % RESULT[:-1], None),
    (b'{"jsonrpc":"2.0","id":2,"result":%b}' % RESULT, None),
    (b'{"result":%b,"jsonrpc":"2.0","id":2}' % RESULT, None),
]


@pytest.mark.parametrize(("response", "result"), SPELLED_RESPONSES, ids=range(len(SPELLED_RESPONSES)))
def test_a_result_is_found_in_the_forms_of_the_sdks(response: bytes, result: bytes | None) -> None:
    found = jsonrpc.unchecked_result(response, b"1")
    assert (found and bytes(found)) == result


def test_an_answer_is_a_result_or_a_failure() -> None:
    assert jsonrpc.answer(b"1", Raw(RESULT)) == b'{"jsonrpc":"2.0","id":1,"result":{"a":1}}'
    assert json.loads(jsonrpc.answer(b"1", jsonrpc.Error(-1, "no")))["error"] == {"code": -1, "message": "no"}


def test_an_object_is_one_without_repeated_keys() -> None:
    for data, error, says in (
        (b"[]", InvalidParams, "it must be an object"),
        (b'{"a":1,"a":2}', InvalidRequest, "it repeats a key"),
        (b"{%b}" % b",".join(b'"%d":1' % number for number in range(MAX_MEMBERS + 1)), InvalidParams, "send fewer"),
    ):
        with pytest.raises(error, match=says):
            jsonrpc.object_of(Raw(data), "it", InvalidParams)
