"""Tool arguments that clients repeat in headers."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.protocol import param_headers
from gateway.protocol.errors import HeaderMismatch, InvalidParams
from gateway.protocol.param_headers import Mirrored, Tool
from tests.protocol.test_request import values
from tests.support.playbook import raw


def mirrored(properties: Mapping[str, Any]) -> tuple[Mirrored, ...]:
    schema = {"type": "object", "properties": properties}
    return param_headers.of_tools(bytes(raw({"tools": [{"name": "t", "inputSchema": schema}]})))["t"].mirrored


def annotated(type_: Any = "string", header: Any = "Region") -> dict[str, Any]:
    return {"type": type_, "x-mcp-header": header}


def test_annotated_parameters_are_found_where_the_specification_allows_them() -> None:
    found = mirrored(
        {
            "region": annotated(),
            "where": {"type": "object", "properties": {"zone": annotated("integer", "Zone"), "x": True}},
            "plain": {"type": "string"},
            "list": {"type": "array", "items": {"type": "object", "properties": {"a": annotated()}}},
            "either": {"anyOf": [annotated()]},
        }
    )
    assert found == (Mirrored(("region",), "Mcp-Param-Region"), Mirrored(("where", "zone"), "Mcp-Param-Zone"))


@pytest.mark.parametrize(
    "property_",
    [
        annotated("number"),
        annotated("array"),
        annotated(["string", "null"]),
        annotated({}),
        annotated(None),
        annotated(header=""),
        annotated(header="a b"),
        annotated(header="a\r\nb"),
        annotated(header="\xe9"),
        annotated(header=7),
        {"x-mcp-header": "A"},
        "x-mcp-header",
    ],
    ids=range(12),
)
def test_an_annotation_against_the_rules_is_not_used(property_: Any) -> None:
    assert mirrored({"a": property_}) == ()


def test_tools_without_annotations_or_schemas_have_none() -> None:
    tools = [{"name": "a"}, {"name": "b", "inputSchema": {"type": "object", "properties": {"a": {}}}}]
    tools += [{"name": "c", "inputSchema": {"x-mcp-header": "A"}}, {"name": "d", "inputSchema": ["x-mcp-header"]}]
    assert param_headers.of_tools(bytes(raw({"tools": tools}))) == dict.fromkeys("abcd", Tool())


@pytest.mark.parametrize(
    ("annotations", "ephemeral"),
    [
        ({"readOnlyHint": True}, True),
        ({"idempotentHint": True}, True),
        ({"readOnlyHint": False, "idempotentHint": True}, True),
        ({"readOnlyHint": True, "idempotentHint": False, "title": "x", "com.example/a": 1}, True),
        ({"readOnlyHint": False, "idempotentHint": False}, False),
        ({"destructiveHint": False}, False),
        ({"readOnlyHint": "true"}, False),
        ({"readOnlyHint": 1}, False),
        ({"readOnlyHint": None}, False),
        ({"readonlyhint": True}, False),
        ({}, False),
        (None, False),
        ([], False),
        ("readOnlyHint", False),
    ],
    ids=range(14),
)
def test_a_tool_may_run_twice_where_it_says_so(annotations: Any, *, ephemeral: bool) -> None:
    tools = [{"name": "t", "annotations": annotations}, {"name": "plain"}]
    assert param_headers.of_tools(bytes(raw({"tools": tools}))) == {"t": Tool((), ephemeral), "plain": Tool()}


def test_a_tool_has_both_its_parameters_and_its_hints() -> None:
    schema = {"type": "object", "properties": {"region": annotated()}}
    tool = {"name": "t", "inputSchema": schema, "annotations": {"readOnlyHint": True}}
    found = param_headers.of_tools(bytes(raw({"tools": [tool]})))["t"]
    assert found == Tool((Mirrored(("region",), "Mcp-Param-Region"),), ephemeral=True)


@pytest.mark.parametrize("result", [b"{}", b'{"tools":[{}]}', b"[]"])
def test_what_is_no_list_of_tools_is_a_value_error(result: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        param_headers.of_tools(result)


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


A = annotated(header="A")
FLAWS: dict[str, tuple[dict[str, Any], str | None]] = {
    "none": ({"a": A, "b": annotated("boolean", "B")}, None),
    "a property with the name of the keyword": ({"x-mcp-header": {"type": "string"}}, None),
    "in a property of a property": ({"o": {"properties": {"a": A}}}, None),
    "in a list": ({"o": {"items": A}}, "inputSchema.o.items has x-mcp-header, but the root does not reach it"),
    "in one of several schemas": (
        {"o": {"oneOf": [A]}},
        "inputSchema.o.oneOf has x-mcp-header, but the root does not reach it",
    ),
    "in a definition": (
        {"o": {"$defs": {"a": A}}},
        "inputSchema.o.a has x-mcp-header, but the root does not reach it",
    ),
    "no header name": ({"a": annotated(header="a b")}, "inputSchema.a has an x-mcp-header that is not a header name"),
    "a number for a name": ({"a": annotated(header=5)}, "inputSchema.a has an x-mcp-header that is not a header name"),
    "type number": ({"a": annotated("number", "A")}, "inputSchema.a has x-mcp-header, but its type is not"),
    "two types": ({"a": annotated(["string"], "A")}, "inputSchema.a has x-mcp-header, but its type is not"),
    "twice": ({"a": A, "b": annotated(header="a")}, "inputSchema.b repeats the x-mcp-header of another property"),
}


@pytest.mark.parametrize(("properties", "flaw"), FLAWS.values(), ids=FLAWS)
def test_the_flaw_of_an_annotation_is_named_with_its_place(properties: dict[str, Any], flaw: str | None) -> None:
    found = param_headers.flaw({"type": "object", "properties": properties})
    assert found is None if flaw is None else found is not None and found.startswith(flaw)


def test_a_schema_is_too_deep_to_be_searched_or_it_is_searched() -> None:
    """JSON that can just be read may still be too deep for what comes after that."""
    for depth in range(200, 520):
        schema = b'{"x-mcp-header":"A","properties":{"a":' * depth + b"{}" + b"}}" * depth
        with suppress(ValueError):
            assert param_headers.of_tools(b'{"tools":[{"name":"t","inputSchema":%b}]}' % schema).keys() == {"t"}


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


@pytest.mark.parametrize(
    ("execution", "support"),
    [({"taskSupport": "optional"}, "optional"), ({"taskSupport": 5}, ""), ({}, ""), (None, ""), ([], "")],
)
def test_the_task_support_of_a_tool_is_a_string(execution: Any, support: str) -> None:
    tools = raw({"tools": [{"name": "t", "execution": execution}]})
    assert param_headers.of_tools(bytes(tools))["t"].task_support == support
