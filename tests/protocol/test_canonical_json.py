"""Canonical JSON: values that are equal have the same bytes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.protocol.canonical_json import canonical, canonical_members
from gateway.protocol.json_text.json_bounds import MAX_MEMBERS

NUMBERS = b"[%b]" % b",".join([b"1"] * (MAX_MEMBERS + 1))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_canonical_json_is_equal_for_equal_values(value: Any) -> None:
    written = canonical(value)
    assert json.loads(written) == value
    assert canonical(json.loads(json.dumps(value, indent=2))) == written


PLAIN = ["0", "-0", "-0.0", "1", "1.0", "1.10", "1e5", "1E+5", "1e-7", "1e15", "1e16", "1e21", "1e22", "5e-324"]
LARGE = ["9007199254740993", "9007199254740993.0", "-9223372036854775808", "-9223372036854775809"]
LARGEST = ["18446744073709551615", "18446744073709551616", "1.7976931348623157e308", "1e400", "-1e400"]
SPELLED_NUMBERS = st.sampled_from(PLAIN + LARGE + LARGEST) | st.integers().map(str)
SPELLED_TEXT = st.text(max_size=4).map(lambda text: json.dumps(text, ensure_ascii=False)) | st.sampled_from(
    [
        '"\\u0041"',
        '"\\ud83d\\ude00"',
        '"\\/"',
        '"\x7f"',
        '"0e"',
        '"\\\\ud83d"',
        '"\uffff"',
    ]
)


def _spelled_object(members: list[tuple[str, str]]) -> str:
    """An object, perhaps with keys that come twice."""
    return "{" + " ,".join(f"{key}: {value}" for key, value in members) + "}"


SPELLED = st.recursive(
    SPELLED_NUMBERS | SPELLED_TEXT | st.sampled_from(["true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(SPELLED_TEXT, inner), max_size=3).map(_spelled_object)
    ),
    max_leaves=8,
)


def _of_python(text: str) -> bytes | None:
    """What Python's own decoder and encoder make of a text; None for a number that it cannot hold."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return None


@given(SPELLED)
def test_a_value_has_one_canonical_json_however_it_is_spelled(text: str) -> None:
    spelled = _of_python(text)
    if spelled is not None:
        written = canonical_members({"a": Raw(text.encode())})
        assert written == canonical_members({"a": Raw(spelled)})
        assert json.loads(written) == {"a": json.loads(text)}


def test_canonical_json_sorts_keys() -> None:
    assert canonical({"b": 2**70, "a": {"d": 1, "c": "é"}}) == f'{{"a":{{"c":"é","d":1}},"b":{2**70}}}'.encode()


def test_members_are_canonical_unless_they_have_too_many_values() -> None:
    spaced = NUMBERS.replace(b",", b" , ")
    assert canonical_members({"b": Raw(b'{"d":1, "c":"\\u0061"}'), "a": Raw(b"1.0")}) == (
        b'{"a":1.0,"b":{"c":"a","d":1}}'
    )
    assert canonical_members({"a": Raw(spaced)}) == b'{"a":%b}' % NUMBERS
    with pytest.raises(ValueError, match="malformed"):
        canonical_members({"a": Raw(NUMBERS[:-1] + b"}")})


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "1" * 5000])
def test_a_number_that_python_cannot_hold_is_compared_as_text(number: str) -> None:
    written, spaced, other = (
        text % number.encode() for text in (b'{"a":[%b,1]}', b' {"a" : [%b, 1]}', b'{"a":[%b,2]}')
    )
    assert canonical_members({"m": Raw(spaced)}) == canonical_members({"m": Raw(written)}) == b'{"m":%b}' % written
    assert canonical_members({"m": Raw(other)}) != canonical_members({"m": Raw(written)})
