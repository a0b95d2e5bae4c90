"""What a modern request must be, and which refusal it gets first."""

import copy
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from multidict import CIMultiDict

from gateway.protocol import header_mismatch, jsonrpc, mcp, request
from gateway.protocol.errors import (
    DownstreamError,
    HeaderMismatch,
    InvalidParams,
    InvalidRequest,
    InvalidState,
    MethodNotFound,
    Notification,
    ParseError,
    UnsupportedVersion,
)
from gateway.protocol.json_text.json_bounds import MAX_DEPTH, MAX_MEMBERS
from gateway.protocol.request_meta import UNKNOWN_INFO
from tests.support.schema import assert_modern_message

DEPTH = MAX_DEPTH
META: dict[str, Any] = {
    mcp.META_VERSION: mcp.MODERN,
    mcp.META_CLIENT_INFO: {"name": "c", "version": "1"},
    mcp.META_CAPABILITIES: {},
}
CALL: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "greet", "arguments": {"a": 1}, "_meta": META},
}
HEADERS = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: "tools/call", mcp.NAME_HEADER: "greet"}

Headers = Mapping[str, str | list[str]]


def values(headers: Headers) -> header_mismatch.HeaderValues:
    """Headers, of which a list is one that came several times."""
    each = ((name, [value] if isinstance(value, str) else value) for name, value in headers.items())
    return CIMultiDict([(name, value) for name, all_values in each for value in all_values])


def body(**changes: Any) -> bytes:
    """The call with members of the request replaced; None removes one."""
    return json.dumps({key: value for key, value in {**CALL, **changes}.items() if value is not None}).encode()


def with_params(**changes: Any) -> bytes:
    params = {**CALL["params"], **changes}
    return body(params={key: value for key, value in params.items() if value is not None})


def with_meta(meta: Mapping[str, Any] | None = None, **changes: Any) -> bytes:
    merged = {**META, **{mcp.RESERVED + key: value for key, value in changes.items()}, **(meta or {})}
    return with_params(_meta={key: value for key, value in merged.items() if value is not None})


def read(data: bytes, headers: Headers | None = None) -> request.Request:
    return request.check(request.read(data), values(HEADERS if headers is None else headers))


def headers(**changes: str | list[str] | None) -> dict[str, str | list[str]]:
    names = {"version": mcp.PROTOCOL_VERSION, "method": mcp.METHOD_HEADER, "name": mcp.NAME_HEADER}
    merged: dict[str, Any] = {**HEADERS, **{names[key]: value for key, value in changes.items()}}
    return {key: value for key, value in merged.items() if value is not None}


# -- a good request ---------------------------------------------------------------------------------------------------


def test_a_good_request_is_taken_apart() -> None:
    responses = {"a": {"action": "accept"}}
    found = read(with_params(inputResponses=responses, requestState="sealed", task={"ttl": 1}))
    assert (bytes(found.id), found.method, found.said.version, found.target) == (
        b"1",
        "tools/call",
        "2026-07-28",
        "greet",
    )
    assert list(found.params) == ["name", "arguments"]
    assert found.input_responses is not None
    assert {key: json.loads(bytes(value)) for key, value in found.input_responses.items()} == responses
    assert found.request_state == "sealed"


def test_a_held_request_keeps_what_runs_the_call_and_no_part_of_its_body() -> None:
    data = json.dumps(json.loads(with_meta({"progressToken": 7, "own": "x"})), separators=(",", ":")).encode()
    references = sys.getrefcount(data)
    whole = read(data)
    assert sys.getrefcount(data) > references
    held = whole.held()
    assert (held.method, held.target) == (whole.method, whole.target)
    for name in ("version", "user_meta", "declared", "log_level", "progress_token"):
        assert getattr(held.said, name) == getattr(whole.said, name)
    assert list(held.params.items()) == list(whole.params.items())
    assert [held.params.get(key) for key in ("name", "x")] == [whole.params.get("name"), None]
    assert held.params_size >= whole.params_size
    assert held.held() == held, "it is held again in each round"
    assert (held.said.capabilities, held.said.client_info) == (jsonrpc.EMPTY, UNKNOWN_INFO)
    del whole
    assert sys.getrefcount(data) == references


def test_a_held_request_knows_that_it_brought_answers_but_keeps_neither_them_nor_its_task() -> None:
    data = with_params(inputResponses={"a": {}}, task={"ttl": 1})
    references = sys.getrefcount(data)
    held = read(data).held()
    assert (held.input_responses, held.task) == ({}, None)
    assert sys.getrefcount(data) == references


@pytest.mark.parametrize("said", [rb'{"\ud800":"\ud800"},"\ud800\"":1.50', '{"ü":"😀"},"ü":[ ]'.encode(), b"{ }"])
def test_the_params_of_a_held_request_are_those_of_the_body_whatever_they_say(said: bytes) -> None:
    data = with_params(arguments=0).replace(b'"arguments": 0', b'"arguments": ' + said)
    assert said in data
    whole = read(data)
    assert list(whole.held().params.items()) == list(whole.params.items())


@pytest.mark.parametrize("method", sorted(mcp.METHODS - mcp.ASKING - {mcp.TASKS_UPDATE}))
def test_only_methods_that_may_ask_take_answers_and_need_a_name(method: str) -> None:
    found = read(
        body(method=method, params={"_meta": META, "inputResponses": 1, "requestState": 2}),
        headers(method=method, name=None),
    )
    assert (found.target, found.params, found.input_responses, found.request_state) == ("", {}, None, None)


def test_a_resource_is_named_by_its_uri() -> None:
    found = read(
        body(method="resources/read", params={"uri": "file:///a", "_meta": META}),
        headers(method="resources/read", name="file:///a"),
    )
    assert found.target == "file:///a"


def test_a_task_is_named_in_a_header_but_no_target() -> None:
    named = body(method=mcp.TASKS_GET, params={"taskId": "t1", "_meta": META})
    assert request.read(named).target == "t1"
    assert read(named, headers(method=mcp.TASKS_GET, name="t1")).target == ""
    with pytest.raises(HeaderMismatch):
        read(named, headers(method=mcp.TASKS_GET, name="t2"))


def test_a_notification_is_read_without_an_id_and_makes_no_request() -> None:
    parsed = request.read(b'{"jsonrpc":"2.0","method":"notifications/x"}')
    assert parsed.id is None
    with pytest.raises(Notification, match="notifications/x"):
        request.check(parsed, values({}))


# -- refusals, in their order -----------------------------------------------------------------------------------------

CASES: dict[type[DownstreamError], dict[str, Any]] = {
    ParseError: {
        "empty": (b"", "not valid JSON"),
        "cut": (body()[:-1], "not valid JSON"),
        "NaN": (body().replace(b'"a": 1', b'"a": NaN'), "not valid JSON"),
        "bad UTF-8": (body().replace(b"greet", b"gr\xff"), "not UTF-8"),
        "a byte order mark": (b"\xef\xbb\xbf" + body(), "not valid JSON"),
        "UTF-16": (body().decode().encode("utf-16"), "UTF-8"),
        "two documents": (body() + body(), "not valid JSON"),
        "too deep": (with_params(arguments=json.loads("[" * 70 + "]" * 70)), "deeper than 64"),
        "far too deep": (b"[" * 100_000, "deeper than 64"),
    },
    HeaderMismatch: {
        "half a surrogate pair in a name": (body().replace(b"greet", b"\\ud800"), "Mcp-Name"),
        "no method header": (body(), "Mcp-Method is missing", headers(method=None)),
        "Base64 of another name": (body(), "does not match", headers(name="=?base64?cm0=?=")),
    },
    InvalidRequest: {
        "a batch": (b"[%b]" % body(), "batches"),
        "an empty batch": (b"[]", "batches"),
        "a string": (b'"x"', "object"),
        "no version of JSON-RPC": (body(jsonrpc=None), "jsonrpc"),
        "JSON-RPC 1.0": (body(jsonrpc="1.0"), "jsonrpc"),
        "a result": (b'{"jsonrpc":"2.0","id":1,"result":{}}', "responses"),
        "an error": (b'{"jsonrpc":"2.0","id":1,"error":{"code":1}}', "responses"),
        "no method": (body(method=None), "method"),
        "a number as method": (body(method=7), "method"),
        "a null id": (body().replace(b'"id": 1', b'"id": null'), "id"),
        "a fractional id": (body(id=1.5), "id"),
        "a boolean id": (body(id=True), "id"),
        "an id of 5000 digits": (body().replace(b'"id": 1', b'"id": ' + b"9" * 5000), "id"),
        "params in a list": (body(params=[1]), "params"),
        "null params": (body().replace(b'"params": {', b'"params": null, "x": {'), "params"),
        "a duplicate key": (body().replace(b'"id": 1', b'"id": 1, "id": 2'), "repeats"),
        "an escaped duplicate key": (body().replace(b'"id": 1', b'"id":1,"\\u0069d":2'), "repeats"),
        "a duplicate in params": (
            body().replace(b'"name": "greet"', b'"name":"greet","name":"rm"'),
            "params.*repeats",
        ),
        "a duplicate in _meta": (
            body().replace(b'"_meta": {', b'"_meta": {"%b":"2025-11-25",' % mcp.META_VERSION.encode()),
            "_meta.*repeats",
        ),
    },
    InvalidParams: {
        "no params": (body(params=None), "protocolVersion"),
        "no _meta": (with_params(_meta=None), "protocolVersion"),
        "no name": (with_params(name=None), "params.name"),
        "a number as name": (with_params(name=7), "params.name"),
        "answers in a list": (with_params(inputResponses=[]), "inputResponses"),
        "an answer that is no object": (with_params(inputResponses={"a": 1}), "inputResponses"),
        "a duplicate answer": (
            with_params(inputResponses={"a": {}}).replace(b'"a": {}', b'"a": {}, "a": {}'),
            "inputResponses.*repeats",
        ),
    },
    UnsupportedVersion: {
        "another version": (with_meta(protocolVersion="2027-01-01"), "2027", headers(version="2027-01-01")),
        "an old version": (with_meta(protocolVersion="2025-11-25"), "2025", headers(version="2025-11-25")),
    },
    MethodNotFound: {
        "an unknown method": (body(method="tools/run"), "tools/run", headers(method="tools/run")),
    },
    InvalidState: {
        "a number as state": (with_params(requestState=7), "Invalid or expired"),
    },
}
"""By the error: a body, words of the message, and headers that are not those of the usual call."""
STATUS = {
    ParseError: -32700,
    InvalidRequest: -32600,
    InvalidParams: -32602,
    HeaderMismatch: -32020,
    InvalidState: -32602,
}
STATUS |= {UnsupportedVersion: -32022, MethodNotFound: -32601}


@pytest.mark.parametrize(("error", "case"), [(error, case) for error, cases in CASES.items() for case in cases])
def test_a_fault_is_refused(error: type[DownstreamError], case: str) -> None:
    data, says, *sent = CASES[error][case]
    with pytest.raises(error, match=says) as caught:
        read(data, *sent)
    found = caught.value
    assert type(found) is error
    assert found.code == STATUS[error]
    assert found.status == (404 if error is MethodNotFound else 400)
    details = jsonrpc.Error(found.code, found.message)
    if found.data is not None:
        details.data = jsonrpc.Raw(jsonrpc.encode(found.data))
    assert_modern_message(jsonrpc.failure(b"1", details))


ORDER: list[tuple[type[DownstreamError], Callable[[dict[str, Any], dict[str, Any]], object]]] = [
    (InvalidRequest, lambda sent, _: sent.update(jsonrpc="1.0")),
    (InvalidParams, lambda sent, _: sent["params"]["_meta"].pop(mcp.META_CAPABILITIES)),
    (HeaderMismatch, lambda _, sent: sent.update({mcp.NAME_HEADER: "rm"})),
    (
        UnsupportedVersion,
        lambda sent, head: (
            sent["params"]["_meta"].update({mcp.META_VERSION: "2027-01-01"}),
            head.update({mcp.PROTOCOL_VERSION: "2027-01-01"}),
        ),
    ),
    (MethodNotFound, lambda sent, head: (sent.update(method="x"), head.update({mcp.METHOD_HEADER: "x"}))),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
@pytest.mark.parametrize("second", range(len(ORDER)))
def test_of_two_faults_the_first_in_order_answers(first: int, second: int) -> None:
    sent, head = copy.deepcopy(CALL), dict(HEADERS)
    for index in {first, second}:
        ORDER[index][1](sent, head)
    if {first, second} == {2, 4}:
        head[mcp.METHOD_HEADER] = "y"  # an unknown method has no target that a header could miss
    with pytest.raises(ORDER[min(first, second)][0]):
        read(json.dumps(sent).encode(), head)


def test_an_invalid_request_knows_the_id_it_answers_where_one_can_be_read() -> None:
    repeated = body(id="x").replace(b"{", b'{"method":"a",', 1)
    for data, id_ in (
        (body(jsonrpc="1.0", id="x"), b'"x"'),
        (body(jsonrpc="1.0", id=1.5), None),
        (repeated, b'"x"'),
        (repeated.replace(b'"x"', b"1.5"), None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            request.read(data)
        assert caught.value.request_id == id_


# -- whatever comes ---------------------------------------------------------------------------------------------------


def survives(data: bytes) -> None:
    try:
        parsed = request.read(data)
        if parsed.id is not None:
            request.check(parsed, values(HEADERS))
    except DownstreamError:
        pass


INSERTS = [byte.encode("latin-1") for byte in '"\\{}[],:-\xff\0 '] + [b"\\ud800", b"null", b"1e999"]
INSERTS += [b"9" * 5000, b"[" * 40, b'"id":1,', b'"_meta":{},', b'"requestState":', b'"inputResponses":{"a":']


@given(st.data())
def test_mutated_bodies_only_ever_raise_downstream_errors(data: st.DataObject) -> None:
    mutated = data.draw(st.sampled_from([body(), with_params(inputResponses={"a": {}}), with_meta(logLevel="info")]))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutated)))
        end = data.draw(st.integers(start, min(start + 12, len(mutated))))
        mutated = mutated[:start] + data.draw(st.sampled_from(INSERTS) | st.binary(max_size=2)) + mutated[end:]
    survives(mutated)


@pytest.mark.parametrize(
    "number", [b"9" * 5000, b"1e400", b"-1E+0400", b"9" * 299 + b"e10", b"1e-400", b'"1e400"'], ids=range(6)
)
@pytest.mark.parametrize("member", ["arguments", "inputResponses"])
def test_a_number_that_python_cannot_hold_goes_on_as_it_is_written(member: str, number: bytes) -> None:
    data = with_params(**{member: {"a": {"b": 1}}}).replace(b'"b": 1', b'"b": ' + number)
    found = read(data)
    sent = found.params["arguments"] if member == "arguments" else (found.input_responses or {})["a"]
    assert number in bytes(sent)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from(["jsonrpc", "id", "method"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from(["name", "inputResponses", "requestState", "_meta"]), JSON, max_size=2),
    st.dictionaries(st.sampled_from([*META, mcp.META_LOG_LEVEL, "progressToken"]), JSON, max_size=3),
)
def test_members_of_any_type_only_ever_raise_downstream_errors(
    top: dict[str, Any], params: dict[str, Any], meta: dict[str, Any]
) -> None:
    sent = {**CALL, "params": {**CALL["params"], "_meta": {**META, **meta}, **params}, **top}
    survives(json.dumps(sent).encode())


MANY = b",".join(b'"%d":{}' % number for number in range(MAX_MEMBERS + 1))


def test_a_request_with_too_many_members_is_refused_as_such() -> None:
    with pytest.raises(InvalidRequest, match=r"The body has more than 50000 values .* send fewer"):
        request.read(b'{"jsonrpc":"2.0","id":1,"method":"ping",%b}' % MANY)


# -- the usual call, which is opened in one pass ----------------------------------------------------------------------


def opened(data: bytes) -> object:
    """What reading and checking a body comes to."""
    try:
        parsed = request.read(data)
        checked = parsed.id and request.check(parsed, values(HEADERS), KNOWN.repeated)
    except DownstreamError as exc:
        return type(exc), exc.request_id
    params = {name: value for name, value in parsed.params.items() if name != "_meta"}  # `meta` has it
    return parsed.id, parsed.method, params, parsed.meta, checked


KNOWN = header_mismatch.KnownValues(values(HEADERS))
COMPACT = json.dumps(CALL, separators=(",", ":")).encode()
ARGUMENTS = b'"arguments":{"a":1},'


def test_the_usual_call_is_opened_in_one_pass() -> None:
    assert [request.read(each).tool for each in (COMPACT, b"{ " + COMPACT[1:])] == [b'"greet"', None]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"", b""),
        *((member, member * 2) for member in (b'"id":1,', b'"jsonrpc":"2.0",', b'"name":"greet",', ARGUMENTS)),
        (b'"id":1,', b'"id":1,"id":2,'),
        (b'"id":1,', b'"id":2,"id":1,"x":3,'),
        (ARGUMENTS, b'"arguments":{"a":1,"a":22},'),
        (ARGUMENTS, b'"arguments":{"a":1e999},'),
        (ARGUMENTS, b'"arguments":null,'),
        (ARGUMENTS, b""),
        (ARGUMENTS, b'"arguments":{},"requestState":"x",'),
        (b'"id":1', b'"id":"a b"'),
        (b'"id":1', b'"id":true'),
        (b'"id":1', b'"id":null'),
        (b'"id":1', b'"id":1.5'),
        (b'"id":1', b'"id":01'),
        (b'"id":1', b'"id":' + b"1" * 400),
        (b'"id":1', b'"id":"\xc3\xa4"'),
        (ARGUMENTS, b'"arguments":' + b"[" * (DEPTH - 2) + b"]" * (DEPTH - 2) + b","),
        (ARGUMENTS, b'"arguments":' + b"[" * (DEPTH - 1) + b"]" * (DEPTH - 1) + b","),
        (ARGUMENTS, b'"arguments":"' + b"[" * DEPTH + b'",'),
        (b'"greet"', b"[" * (DEPTH - 1) + b"]" * (DEPTH - 1)),
        (b'"_meta":{', b'"_meta":{"x":' + b"[" * (DEPTH - 2) + b"]" * (DEPTH - 2) + b","),
        (b'"_meta":{', b'"_meta":{"x":' + b"[" * 7 + b"]" * 7 + b","),
        (b"greet", b"gr\xc3\xa4"),
        (b"greet", b"gr\xc3"),
        (b"greet", b"other"),
        (mcp.MODERN.encode(), b"2026-07-29"),
        (b"greet", b"=?base64?Z3JlZXQ=?="),
        (b'"2.0"', b'"2.1"'),
        (b'"2.0"', b'"2\\u002e0"'),
        (b"tools/call", b"tools\\/call"),
        (b"tools/call", b"tools/list"),
        (b'"name"', b'"na\\u006de"'),
        (b'"greet"', b'"gr\\ud83d"'),
        (b'"greet"', b"5"),
        (b'"_meta":{', b'"_meta":{"progressToken":7,'),
        (b'"_meta":{', b'"_meta":{"x":1,"x":1,'),
        (b'"_meta":{', b'"_meta":{"x":"' + b"y" * 2000 + b'",'),
        (mcp.META_VERSION.encode(), b"other"),
        (b"}}", b"}}}"),
        (b"}}", b"}"),
    ],
)
def test_it_comes_to_the_same_as_if_it_was_opened_member_by_member(old: bytes, new: bytes) -> None:
    data = COMPACT.replace(old, new, 1)
    assert opened(data) == opened(b"{ " + data[1:])


RETRY = COMPACT.replace(
    ARGUMENTS, ARGUMENTS + b'"inputResponses":{"q":{"action":"accept"}},"requestState":"mrtr1.x",', 1
)
ANSWERS = b'"inputResponses":{"q":{"action":"accept"}},'
STATE = b'"requestState":"mrtr1.x",'


def test_the_usual_retry_is_opened_in_one_pass() -> None:
    parsed = request.read(RETRY)
    assert [each.tool for each in (parsed, request.read(b"{ " + RETRY[1:]))] == [b'"greet"', None]
    checked = request.check(parsed, values(HEADERS), KNOWN.repeated)
    assert checked.request_state == "mrtr1.x"
    assert checked.input_responses == {"q": Raw(b'{"action":"accept"}')}
    assert list(checked.params) == ["name", "arguments"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"", b""),
        *((member, member * 2) for member in (ANSWERS, STATE, ARGUMENTS)),
        *((member, b"") for member in (ANSWERS, STATE, ARGUMENTS)),
        (STATE, STATE + b'"x":1,'),
        (ANSWERS, b'"as_long_its":111,'),
        (STATE, b'"as_long_":1111,'),
        (STATE, STATE + b'"task":{},'),
        (STATE, b'"requestState":5,'),
        (STATE, b'"requestState":1e999,'),
        (STATE, b'"requestState":null,'),
        (STATE, b'"requestState":"",'),
        (STATE, b'"requestState":"\\u0041",'),
        (STATE, b'"requestState":"\\ud83d",'),
        (STATE, b'"requestState":"\xc3\xa4",'),
        (STATE, b'"requestStat\\u0065":"x",'),
        (STATE, b'"requestState":"a","requestState":"",'),
        (ANSWERS, b'"inputResponses":{"q":{},"q":{}},'),
        (ANSWERS, b'"inputResponses":{"q":{"a":1e999}},'),
        (ANSWERS, b'"inputResponses":{"q":5},'),
        (ANSWERS, b'"inputResponses":{},'),
        (ANSWERS, b'"inputResponses":[],'),
        (ANSWERS, b'"inputResponses":null,'),
        (ANSWERS, b'"inputResponses":{"q":' + b'{"a":' * (DEPTH - 4) + b"{}" + b"}" * (DEPTH - 4) + b"},"),
        (ANSWERS, b'"inputResponses":{"q":' + b'{"a":' * (DEPTH - 3) + b"{}" + b"}" * (DEPTH - 3) + b"},"),
        (b"greet", b"other"),
        (mcp.MODERN.encode(), b"2026-07-29"),
        (b"tools/call", b"prompts/get"),
        (b"}}", b"}}}"),
    ],
)
def test_a_retry_comes_to_the_same_as_if_it_was_opened_member_by_member(old: bytes, new: bytes) -> None:
    data = RETRY.replace(old, new, 1)
    assert opened(data) == opened(b"{ " + data[1:])


@given(st.sampled_from([COMPACT, RETRY]), st.integers(0, len(RETRY)), st.integers(0, 40), st.integers(0, 40))
def test_it_comes_to_the_same_for_any_damage(whole: bytes, start: int, taken: int, repeated: int) -> None:
    data = b"{" + (whole[:start] + whole[max(0, start - repeated) : start] + whole[start + taken :])[1:]
    assert opened(data) == opened(b"{ " + data[1:])
