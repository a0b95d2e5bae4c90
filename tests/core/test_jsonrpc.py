import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from gateway.core import jsonrpc
from tests.schema import assert_legacy_message, assert_modern_message

DEEP = b"[" * 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


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


def test_deep_nesting_is_a_value_error_and_not_a_crash() -> None:
    with pytest.raises(ValueError, match="too deeply"):
        jsonrpc.message(b'{"params":' + DEEP)
    with pytest.raises(ValueError, match="too deeply"):
        jsonrpc.fields(b'{"a":' + DEEP)


ERRORS = [
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
    [(b'"a"', "a"), (b'"\\u00e9"', "é"), (b"1", None), (b"null", None), (b'"\xff"', None), (None, None)],
)
def test_text_is_a_string_or_none(raw: bytes | None, text: str | None) -> None:
    assert jsonrpc.text(None if raw is None else Raw(raw)) == text


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
    (b'"\\ud800"', False),
    (DEEP, False),
]


@pytest.mark.parametrize(("raw", "valid"), IDS, ids=range(len(IDS)))
def test_an_id_is_a_string_or_an_integer(raw: bytes, *, valid: bool) -> None:
    assert jsonrpc.is_id(Raw(raw)) is valid


def test_an_absent_id_is_none() -> None:
    assert not jsonrpc.is_id(UNSET)


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


BOUNDS = [
    (b'{"a":[[1]]}', 3, None),
    (b'{"a":[[[1]]]}', 3, "deeper than 3"),
    (b"[[],[],[],[],[]]", 2, None),
    (b"[[],[],[],[],[]]", 5, None),
    (b"[[],[[]],[],[],[]]", 2, "deeper than 2"),
    (b'{"a":"[[[[[["}', 1, None),
    (b'{"a":"\\"[[[[[["}', 1, None),
    (b'{"a":"\\\\","b":[[1]]}', 2, "deeper than 2"),
    (b'{"a":"\xff"}', 3, "not UTF-8 at byte 6"),
    ('{"é":1}'.encode(), 3, None),
    ('{"é":"\ud800"}'.encode("utf-8", "surrogatepass"), 3, "not UTF-8"),
]


@pytest.mark.parametrize(("data", "depth", "refused"), BOUNDS, ids=range(len(BOUNDS)))
def test_bounds(data: bytes, depth: int, refused: str | None) -> None:
    if refused is None:
        jsonrpc.check_bounds(data, depth)
        return
    with pytest.raises(ValueError, match=refused):
        jsonrpc.check_bounds(data, depth)


def test_measuring_the_depth_takes_linear_time() -> None:
    # An unterminated string of escaped quotes: a pattern that starts anew at each takes minutes for this body.
    body = b"[" * 70 + b'"' + b'\\"' * 500_000
    began = time.perf_counter()
    with pytest.raises(ValueError, match="nested deeper"):
        jsonrpc.check_bounds(body, 64)
    assert time.perf_counter() - began < 5


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
]


@pytest.mark.parametrize(("data", "repeated"), DUPLICATES, ids=range(len(DUPLICATES)))
def test_duplicate_keys_are_seen(data: bytes, *, repeated: bool) -> None:
    assert jsonrpc.has_duplicate_keys(data, jsonrpc.fields(data)) is repeated


@given(
    members=st.lists(st.tuples(st.text(max_size=2), VALUES), max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_duplicate_keys_are_seen_however_the_object_is_written(
    members: list[tuple[str, Any]], indent: int | None, *, ascii_only: bool
) -> None:
    space = "" if indent is None else " "
    pairs = (
        f"{json.dumps(key, ensure_ascii=ascii_only)}:{space}{json.dumps(value, ensure_ascii=ascii_only)}"
        for key, value in members
    )
    data = ("{" + ",".join(pairs) + "}").encode()
    assert jsonrpc.has_duplicate_keys(data, jsonrpc.fields(data)) is (len(dict(members)) < len(members))


@given(VALUES)
def test_canonical_json_is_equal_for_equal_values(value: Any) -> None:
    written = jsonrpc.canonical(value)
    assert json.loads(written) == value
    assert jsonrpc.canonical(json.loads(json.dumps(value, indent=2))) == written


def test_canonical_json_sorts_keys() -> None:
    assert jsonrpc.canonical({"b": 1, "a": {"d": 1, "c": "é"}}) == b'{"a":{"c":"\\u00e9","d":1},"b":1}'


def test_merging_splices_values_as_they_are() -> None:
    assert jsonrpc.merge([("a", b"[1, 2]"), ('"é', Raw(b"1e1"))]) == '{"a":[1, 2],"\\"é":1e1}'.encode()
    assert jsonrpc.merge([]) == b"{}"
    assert msgspec.json.decode(jsonrpc.merge({"x": jsonrpc.EMPTY}.items())) == {"x": {}}
