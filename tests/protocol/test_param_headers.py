"""Tool arguments that clients repeat in headers."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.protocol import param_headers
from gateway.protocol.errors import HeaderMismatch, InvalidParams
from gateway.protocol.param_headers import Mirrored
from tests.protocol.test_request import values
from tests.support.playbook import raw


def mirrored(properties: Mapping[str, Any]) -> tuple[Mirrored, ...]:
    return param_headers.mirrored({"type": "object", "properties": properties})


def annotated(type_: Any = "string", header: Any = "Region") -> dict[str, Any]:
    return {"type": type_, "x-mcp-header": header}


def test_annotated_parameters_are_found_where_the_specification_allows_them() -> None:
    found = mirrored(
        {
            "region": annotated(),
            "where": {"type": "object", "properties": {"zone": annotated("integer", "Zone"), "x": True}},
            "plain": {"type": "string"},
        }
    )
    assert found == (Mirrored(("region",), "Mcp-Param-Region"), Mirrored(("where", "zone"), "Mcp-Param-Zone"))


def check(value: Any, header: str | list[str] | None) -> None:
    headers = {} if header is None else {"mcp-param-region": header}
    param_headers.check((Mirrored(("a", "b"), "Mcp-Param-Region"),), raw({"a": {"b": value}}), values(headers))


EQUAL: list[tuple[Any, str]] = [
    ("us-west1", "us-west1"),
    ("us-west1", " us-west1\t"),
    ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
    ("", ""),
    ("42", "42"),
    (42, "42"),
    (-7, "-7"),
    (42, "42.0"),
    (42.0, "42"),
    (0.1, "0.1"),
    (1000, "1e3"),
    (True, "true"),
    (False, "false"),
    (9007199254740993, "9007199254740993"),
]
DIFFERENT: list[tuple[Any, str]] = [
    ("us-west1", "us-west2"),
    ("us-west1", "US-WEST1"),
    ("42", "42.0"),
    (42, "43"),
    (42, ""),
    (42, "0x2a"),
    (42, "4_2"),
    (42, "٤٢"),
    (42, "nan"),
    (10**400, "inf"),
    (9007199254740993, "9007199254740992"),
    (True, "True"),
    (True, "1"),
    (1, "true"),
    (False, "true"),
    ([], "[]"),
    ({}, "{}"),
    ("é", "é"),
    ("x", "=?base64?*?="),
]


@pytest.mark.parametrize(("value", "header"), EQUAL)
def test_a_header_that_repeats_its_argument_is_accepted(value: Any, header: str) -> None:
    check(value, header)


@pytest.mark.parametrize(("value", "header"), DIFFERENT)
def test_a_header_that_differs_from_its_argument_is_refused(value: Any, header: str) -> None:
    with pytest.raises(HeaderMismatch, match="Mcp-Param-Region"):
        check(value, header)


def test_a_header_must_be_there_when_its_argument_is_and_only_then() -> None:
    with pytest.raises(HeaderMismatch, match="missing"):
        check("x", None)
    with pytest.raises(HeaderMismatch, match="absent or null"):
        check(None, "x")
    with pytest.raises(HeaderMismatch, match="2 times"):
        check("x", ["x", "x"])
    check(None, None)


@pytest.mark.parametrize("arguments", [None, raw(None), raw([]), raw({"a": 1}), raw({})], ids=range(5))
def test_arguments_without_the_parameter_need_no_header(arguments: Raw | None) -> None:
    param_headers.check((Mirrored(("a", "b"), "Mcp-Param-Region"),), arguments, values({}))


def test_a_tool_without_annotations_is_not_checked() -> None:
    param_headers.check((), Raw(b"not even JSON"), values({"Mcp-Param-Region": "x"}))


@pytest.mark.parametrize("arguments", [b'{"a":{"b":' + b"9" * 5000 + b"}}", b'{"a":' + b"[" * 100_000])
def test_arguments_that_cannot_be_read_are_invalid_params(arguments: bytes) -> None:
    with pytest.raises(InvalidParams, match="arguments"):
        param_headers.check((Mirrored(("a", "b"), "Mcp-Param-Region"),), Raw(arguments), values({}))


@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20))
def test_integers_are_equal_exactly_when_they_are(body: int, header: int) -> None:
    if body == header:
        check(body, str(header))
        return
    with pytest.raises(HeaderMismatch):
        check(body, str(header))


@pytest.mark.parametrize(
    "arguments",
    [
        b'{"a":"eu","a":"us"}',
        b'{ "a" : "eu", "\\u0061" : "us" }',
        b'{"x":1,"x":1,"a":"us"}',
        b'{"n":{"b":"eu","b":"us"},"a":"us"}',
        b'{"n":{"b":1},"n":{"b":"us"},"a":"us"}',
    ],
    ids=range(5),
)
def test_a_repeated_key_on_the_way_to_a_mirrored_argument_is_refused(arguments: bytes) -> None:
    # The upstream may read the other one, and a proxy that routes by the header would have let it through.
    mirrored = (Mirrored(("a",), "Mcp-Param-A"), Mirrored(("n", "b"), "Mcp-Param-B"))
    with pytest.raises(InvalidParams, match="repeats a key"):
        param_headers.check(mirrored, Raw(arguments), values({"Mcp-Param-A": "us", "Mcp-Param-B": "us"}))


def test_a_key_that_is_repeated_elsewhere_is_the_upstreams_business() -> None:
    arguments = Raw(b'{"a":"us","n":{"c":{"d":1,"d":2}}}')
    param_headers.check((Mirrored(("a",), "Mcp-Param-A"),), arguments, values({"Mcp-Param-A": "us"}))


def test_annotated_arguments_are_written_as_headers() -> None:
    found = mirrored(
        {
            "text": annotated(header="Text"),
            "flag": annotated("boolean", "Flag"),
            "off": annotated("boolean", "Off"),
            "count": annotated("integer", "Count"),
            "none": annotated(header="None"),
            "where": {"type": "object", "properties": {"zone": annotated(header="Zone")}},
        }
    )
    arguments = raw({"text": "é", "flag": True, "off": False, "count": 7, "where": {"zone": "a"}})
    assert param_headers.headers_for(found, arguments) == {
        "Mcp-Param-Text": "=?base64?w6k=?=",
        "Mcp-Param-Flag": "true",
        "Mcp-Param-Off": "false",
        "Mcp-Param-Count": "7",
        "Mcp-Param-Zone": "a",
    }
    assert param_headers.headers_for(found, None) == {}
    with pytest.raises(InvalidParams, match="repeats a key"):
        param_headers.headers_for(found, Raw(b'{"text":"a","text":"b"}'))
