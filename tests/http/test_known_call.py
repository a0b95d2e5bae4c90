"""Bodies of a form that came before come to the same as those that are read as a whole."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.http.known_call import KnownCall, known_call
from gateway.protocol import jsonrpc, request
from gateway.protocol.errors import DownstreamError
from gateway.protocol.header_mismatch import KnownValues
from tests.protocol.test_request import CALL, DEPTH, HEADERS, META, values

KNOWN = KnownValues(values(HEADERS))
PARAMS = CALL["params"]
FORMS: dict[str, dict[str, Any]] = {
    "id first": CALL,
    "id last": {"method": "tools/call", "params": PARAMS, "jsonrpc": "2.0", "id": 1},
    "meta first": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"_meta": META, "name": "greet", "arguments": {"a": 1}},
    },
    "arguments first": {
        "params": {"arguments": {"a": 1}, "name": "greet", "_meta": META},
        "id": 1,
        "method": "tools/call",
        "jsonrpc": "2.0",
    },
}
SPACES = {"compact": (",", ":"), "usual spaces": None}


def text_of(form: str, spaces: str, id_: object = 1, arguments: object = None) -> bytes:
    changed = {**FORMS[form], "id": id_}
    changed["params"] = {**changed["params"], "arguments": arguments if arguments is not None else {"a": 1}}
    return json.dumps(changed, separators=SPACES[spaces]).encode()


def checked(body: bytes) -> request.Request:
    return request.check(request.read(body), values(HEADERS), KNOWN.repeated)


def learned(body: bytes) -> KnownCall | None:
    return known_call(body, checked(body))


def meaning(found: request.Request) -> object:
    members = {name: jsonrpc.value(value) for name, value in found.params.items()}
    return found.id, found.method, members, found.target, found.said, found.request_state, found.input_responses


def as_a_whole(body: bytes) -> object:
    try:
        return meaning(checked(body))
    except (DownstreamError, ValueError):
        return None


@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("id_", [0, 12345, 10**18, "c-1", "0b9c8f4e-3d55-4a8e-9d0e-1f0a7c4b2e11"])
@pytest.mark.parametrize("arguments", [{}, {"id": 5, "arguments": {"id": 6}}, {"ä": ["}", '"']}, [1], "x", 5])
def test_another_id_and_other_arguments_are_read_as_in_any_body(
    form: str, spaces: str, id_: object, arguments: object
) -> None:
    known = learned(text_of(form, spaces))
    assert known is not None
    body = text_of(form, spaces, id_, arguments)
    found = known.read(body)
    assert found is not None
    assert meaning(found) == as_a_whole(body)
    assert found.said is checked(body).said, "what is remembered by it is found again"


def test_nothing_of_the_body_stays_in_memory() -> None:
    known = learned(text_of("id first", "compact"))
    assert known is not None
    found = known.read(text_of("id first", "compact", 5, {"b": 2}))
    assert found is not None
    assert isinstance(found.params, request.TextParams)
    assert found.params.text == b'{"name":"greet","arguments":{"b":2}}'


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "a b"},
        {"id": "x" * 65},
        {"id": -1},
        {"params": {**PARAMS, "requestState": "x"}},
        {"params": {**PARAMS, "more": 1}},
        {"params": {**PARAMS, "task": {}}},
        {"params": {"name": "greet", "_meta": META}},
        {"params": {**PARAMS, "_meta": {**META, "progressToken": 1}}},
        {"params": {**PARAMS, "arguments": {"a": "x" * 40_000}}},
        {"x": 98765432198765432},
    ],
)
def test_other_bodies_teach_no_form(changes: dict[str, Any]) -> None:
    body = json.dumps({**CALL, **changes}).encode()
    assert as_a_whole(body) is not None
    assert learned(body) is None


@pytest.mark.parametrize("spelling", ['"na\\u006de"', '"i\\u0064"', '"argument\\u0073"'])
def test_members_that_are_spelt_in_another_way_teach_a_right_form_or_none(spelling: str) -> None:
    body = text_of("id first", "compact").replace(json.dumps(json.loads(spelling)).encode(), spelling.encode())
    known = learned(body)
    found = known and known.read(body)
    assert found is None or meaning(found) == as_a_whole(body)


BODIES = [text_of(form, spaces, 17, {"b": [2, "c"]}) for form in FORMS for spaces in SPACES]


@pytest.mark.parametrize(
    ("id_", "arguments"),
    [
        (b"01", b"{}"),
        (b"", b"{}"),
        (b"1.5", b"{}"),
        (b"-1", b"{}"),
        (b'"a"', b"{}"),
        (b"1" * 40, b"{}"),
        (b"1", b""),
        (b"1", b"{},{}"),
        (b"1", b'{},"name":"other"'),
        (b"1", b'{"a":1e}'),
        (b"1", b'{"a":"\xc3"}'),
        (b"1", b'{"a":"\xc3\xa4"}'),
        (b"1", b"[" * DEPTH + b"]" * DEPTH),
        (b"1", b"[" * (DEPTH - 2) + b"]" * (DEPTH - 2)),
        (b"1", b'"' + b"[" * DEPTH + b'"'),
        (b"1", b'{"a":"' + b"x" * 40_000 + b'"}'),
        (b'1,"x":1', b"{}"),
        (b'1,"id":1', b"{}"),
        (b"\xd9\xa1", b"{}"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_is_never_read_in_another_way(form: str, id_: bytes, arguments: bytes) -> None:
    known = learned(text_of(form, "compact"))
    assert known is not None
    pieces = (known.begin, id_, known.middle, arguments, known.end)
    if not known.is_id_first:
        pieces = (known.begin, arguments, known.middle, id_, known.end)
    body = b"".join(pieces)
    found = known.read(body)
    assert found is None or meaning(found) == as_a_whole(body)


@given(
    st.sampled_from(BODIES),
    st.sampled_from(list(FORMS)),
    st.sampled_from(list(SPACES)),
    st.integers(0, 400),
    st.integers(0, 40),
    st.binary(max_size=20),
)
def test_it_comes_to_the_same_for_any_damage(
    body: bytes, form: str, spaces: str, start: int, taken: int, put: bytes
) -> None:
    known = learned(text_of(form, spaces))
    assert known is not None
    damaged = body[:start] + put + body[start + taken :]
    found = known.read(damaged)
    assert found is None or meaning(found) == as_a_whole(damaged)


@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize("form", FORMS)
def test_a_piece_that_is_missing_or_differs_by_a_byte_is_another_form(form: str, spaces: str) -> None:
    body = text_of(form, spaces, 17, "x")
    known = learned(text_of(form, spaces))
    assert known is not None
    for piece in (known.begin, known.middle, known.end):
        assert known.read(body.replace(piece, b"", 1)) is None
        for at in range(len(piece)):
            damaged = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            assert known.read(body.replace(piece, damaged, 1)) is None


def test_an_id_is_a_copy() -> None:
    known = learned(text_of("id last", "compact"))
    assert known is not None
    found = known.read(text_of("id last", "compact", 1234))
    assert found is not None
    assert found.id == Raw(b"1234")
