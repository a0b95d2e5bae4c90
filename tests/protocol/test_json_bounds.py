"""The bounds for JSON texts: depth, encoding, the number of values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import jsonrpc
from gateway.protocol.json_text.json_bounds import (
    MAX_MEMBERS,
    TooMany,
    check_bounds,
    check_items,
    check_members,
    check_values,
)

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
        check_bounds(data, depth)
        return
    with pytest.raises(ValueError, match=refused):
        check_bounds(data, depth)


@given(data=st.text('[]{}"\\a', max_size=40), strings=st.lists(st.text('[]{}"\\a', max_size=5), max_size=4))
def test_the_depth_is_that_of_the_brackets_outside_of_strings(data: str, strings: list[str]) -> None:
    nested: Any = strings
    for number, letter in enumerate(data):
        nested = [nested, letter] if number % 2 else {letter: nested}
    body = json.dumps(nested).encode()
    check_bounds(body, len(data) + 1)
    with pytest.raises(ValueError, match=f"deeper than {len(data)} levels"):
        check_bounds(body, len(data))


@pytest.mark.parametrize("brackets", [1, 7, 8, 9, 16, 65])
def test_the_depth_is_exact_wherever_it_is_reached(brackets: int) -> None:
    for before in range(9):
        body = b"[" + b"[]," * before + b"[" * brackets + b"]" * brackets + b"]"
        check_bounds(body, brackets + 1)
        with pytest.raises(ValueError, match="nested deeper"):
            check_bounds(body, brackets)


MANY = MAX_MEMBERS
NUMBERS = b"[%b]" % b",".join([b"1"] * (MANY + 1))
MEMBERS = b"{%b}" % b",".join(b'"%d":1' % number for number in range(MANY + 1))


@pytest.mark.parametrize("data", [MEMBERS, b'{"unknown":%b}' % NUMBERS, b'{"a":[}' + b"," * MANY])
def test_an_object_with_more_members_than_the_gateway_takes_out_of_one_is_refused(data: bytes) -> None:
    with pytest.raises(TooMany, match=str(MANY)):
        check_members(data)


def test_values_that_are_spliced_may_have_any_size() -> None:
    check_members(b'{"structuredContent":%b,"content":[]}' % NUMBERS)
    check_members(json.dumps({"text": "," * 2 * MANY}).encode())
    check_values([json.dumps("," * 2 * MANY).encode()])


@pytest.mark.parametrize(
    "data", [NUMBERS, b"[%b]" % b",".join([b"{}"] * (MANY + 1)), b"[{%b}]" % (b"[],[]," * 10 * MANY)]
)
def test_an_array_with_more_items_than_the_gateway_takes_out_of_one_is_refused(data: bytes) -> None:
    with pytest.raises(TooMany):
        check_items(data)


def test_an_array_of_few_objects_may_have_any_number_of_values_in_them() -> None:
    check_items(b"[%b,{}]" % MEMBERS)
    check_items(b"[]")


@pytest.mark.parametrize("data", [NUMBERS, MEMBERS, b"[%b]" % b",".join([b"[]"] * MANY)])
def test_a_value_with_more_values_than_the_gateway_takes_out_of_one_is_refused(data: bytes) -> None:
    with pytest.raises(TooMany):
        check_values([data])


def test_what_opens_a_message_checks_its_values_first() -> None:
    for read, data in ((jsonrpc.fields, MEMBERS), (jsonrpc.items, NUMBERS), (jsonrpc.value, NUMBERS)):
        with pytest.raises(TooMany):
            read(data)
