"""Tools that modern clients cannot take: the rows of both tables were measured with all three SDKs."""

import json
from typing import Any

import pytest
from msgspec import Raw

from gateway.protocol import tool_list
from gateway.protocol.json_text.json_bounds import MAX_MEMBERS, TooMany
from gateway.protocol.param_headers import Mirrored
from gateway.protocol.tool_list import Tool
from tests.support.playbook import raw

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def odd(**fields: Any) -> dict[str, Any]:
    return {"name": "odd", "inputSchema": OBJECT, **fields}


def having(**properties: Any) -> dict[str, Any]:
    return odd(inputSchema={"type": "object", "properties": properties})


def schema(**keywords: Any) -> dict[str, Any]:
    return odd(inputSchema={"type": "object", **keywords})


A: dict[str, Any] = {"type": "string", "x-mcp-header": "A"}

KEPT: dict[str, Any] = {
    "plain": odd(),
    "an empty name": odd(name=""),
    "a name with a space": odd(name="a b"),
    "a long name": odd(name="a" * 200),
    "a member unknown": odd(foo=1),
    "properties that are a list": schema(properties=[]),
    "a property that is a number": having(a=5),
    "required that is a string": schema(required="a"),
    "a dialect unknown": schema(**{"$schema": "urn:x"}),
    "a reference to nothing": having(a={"$ref": "#/$defs/none"}),
    "a type unknown": having(a={"type": "nonsense"}),
    "any output": odd(outputSchema={}),
    "output that is a string": odd(outputSchema={"type": "string"}),
    "nulls that are taken off": odd(
        title=None,
        description=None,
        outputSchema=None,
        icons=None,
        annotations={"readOnlyHint": None},
        _meta=None,
        execution={"taskSupport": None},
    ),
    "everything": odd(
        title="t",
        description="d",
        annotations={"title": "t", "readOnlyHint": True, "x": 1},
        icons=[{"src": "b.png", "mimeType": "image/png", "sizes": ["48x48"], "theme": "dark"}],
        execution={"taskSupport": "optional"},
        _meta={"a/b": 1},
    ),
    "an annotation": having(a=A),
    "an annotation below": having(o={"type": "object", "properties": {"a": A}}),
    "a property called so": having(**{"x-mcp-header": {"type": "string"}}),
    "an annotation in a default": schema(default={"x-mcp-header": "A"}),
    "an annotation in an unknown keyword": schema(**{"x-foo": A}),
    "an annotation in the output": odd(outputSchema={"type": "array", "items": A}),
}
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "a number": (5, "got `int`"),
    "null": (None, "got `null`"),
    "a list": ([], "got `array`"),
    "no name": ({"inputSchema": OBJECT}, "`name`"),
    "a name that is a number": (odd(name=5), "$.name"),
    "no schema": ({"name": "odd"}, "`inputSchema`"),
    "schema null": (odd(inputSchema=None), "$.inputSchema"),
    "schema true": (odd(inputSchema=True), "$.inputSchema"),
    "schema list": (odd(inputSchema=[]), "$.inputSchema"),
    "schema without type": (odd(inputSchema={}), "`type`"),
    "schema of a string": (odd(inputSchema={"type": "string"}), "'string'"),
    "schema of types": (odd(inputSchema={"type": ["object", "null"]}), "$.inputSchema.type"),
    "schema of a choice": (odd(inputSchema={"anyOf": [OBJECT]}), "`type`"),
    "a dialect that is a number": (schema(**{"$schema": 5}), "$.inputSchema.$schema"),
    "description": (odd(description=5), "$.description"),
    "title": (odd(title=5), "$.title"),
    "output list": (odd(outputSchema=[]), "$.outputSchema"),
    "output true": (odd(outputSchema=True), "$.outputSchema"),
    "annotations": (odd(annotations=[]), "$.annotations"),
    "hint": (odd(annotations={"readOnlyHint": "yes"}), "$.annotations.readOnlyHint"),
    "hint's title": (odd(annotations={"title": 5}), "$.annotations.title"),
    "icons": (odd(icons={}), "$.icons"),
    "icon without src": (odd(icons=[{}]), "`src`"),
    "icon's sizes": (odd(icons=[{"src": "a", "sizes": "48x48"}]), "sizes"),
    "icon's theme": (odd(icons=[{"src": "a", "theme": "x"}]), "'x'"),
    "meta": (odd(_meta=5), "$._meta"),
    "execution": (odd(execution=5), "$.execution"),
    "task support": (odd(execution={"taskSupport": "nope"}), "'nope'"),
    "header empty": (having(a=A | {"x-mcp-header": ""}), "not a header name"),
    "header with a space": (having(a=A | {"x-mcp-header": "a b"}), "not a header name"),
    "header with a line": (having(a=A | {"x-mcp-header": "a\r\nb"}), "not a header name"),
    "header number": (having(a=A | {"x-mcp-header": 5}), "not a header name"),
    "header null": (having(a=A | {"x-mcp-header": None}), "not a header name"),
    "header of a number": (having(a=A | {"type": "number"}), "inputSchema.a has x-mcp-header, but its type"),
    "header of no type": (having(a={"x-mcp-header": "A"}), "its type is not"),
    "header of types": (having(a=A | {"type": ["string", "null"]}), "its type is not"),
    "header of an object": (having(a=A | {"type": "object"}), "its type is not"),
    "header twice": (having(a=A, b=A | {"x-mcp-header": "a"}), "inputSchema.b repeats"),
    "header in items": (having(o={"type": "array", "items": A}), "inputSchema.o.items has"),
    "header in a choice": (schema(anyOf=[{"properties": {"a": A}}]), "the root does not reach it"),
    "header in a definition": (schema(**{"$defs": {"a": A}}), "the root does not reach it"),
    "header at the root": (schema(**{"x-mcp-header": "A"}), "the root does not reach it"),
    "header of any property": (schema(additionalProperties=A), "the root does not reach it"),
}


def listed(*tools: Any) -> Raw:
    return raw({"tools": list(tools), "nextCursor": "n"})


@pytest.mark.parametrize("case", KEPT)
def test_what_clients_take_is_not_touched(case: str) -> None:
    result = listed(odd(name="good"), KEPT[case])
    found = tool_list.read(result)
    assert (found.result, found.left_out, found.is_last) == (result, (), False)
    assert found.tools is not None
    assert found.tools.keys() == {"good", KEPT[case]["name"]}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_would_cost_the_list_is_left_out_and_said(case: str) -> None:
    tool, reason = LEFT_OUT[case]
    found = tool_list.read(listed(odd(name="good"), tool, odd(name="last")))
    assert json.loads(bytes(found.result)) == {"tools": [odd(name="good"), odd(name="last")], "nextCursor": "n"}
    assert found.tools == {"good": Tool(), "last": Tool()}
    ((name, why),) = found.left_out
    assert reason in why
    assert name in {"odd", ""}


def test_the_bytes_of_the_others_stay_as_they_are() -> None:
    good = b'{ "name":"\\u0061", "inputSchema":{"type" : "object","x":1.50e3}, "name2": 1 }'
    found = tool_list.read(Raw(b'{"tools":[%b, 5 ,%b]}' % (good, good)))
    assert bytes(found.result) == b'{"tools":[%b,%b]}' % (good, good)
    assert len(found.left_out) == 1


@pytest.mark.parametrize("depth", [50, 200, 300, 400, 450, 480, 490, 5000])
def test_a_tool_that_is_nested_too_deeply_is_left_out_or_refused_with_the_result(depth: int) -> None:
    deep = b'{"properties":{"a":' * depth + b'{"x-mcp-header":"A"}' + b"}}" * depth
    bad = b'{"name":"deep","inputSchema":{"type":"object","not":%b}}' % deep
    try:
        found = tool_list.read(Raw(b'{"tools":[%b]}' % bad))
    except ValueError:
        assert depth >= 300, "what the decoder refuses is no result"
    else:
        assert bytes(found.result) == b'{"tools":[]}'
        assert len(found.left_out) == 1


@pytest.mark.parametrize("tools", [b"5", b"{}", b"null"])
def test_a_result_without_a_list_of_tools_is_returned_unchanged(tools: bytes) -> None:
    for result in (Raw(b'{"tools":%b}' % tools), Raw(b"{}")):
        assert tool_list.read(result) == (result, None, (), True)
    with pytest.raises(ValueError, match="object"):
        tool_list.read(Raw(tools if tools != b"{}" else b"[]"))


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (odd(annotations={"readOnlyHint": True}), Tool(ephemeral=True)),
        (odd(annotations={"readOnlyHint": False, "idempotentHint": True}), Tool(ephemeral=True)),
        (odd(annotations={"readOnlyHint": False, "idempotentHint": False}), Tool()),
        (odd(annotations={"destructiveHint": False}), Tool()),
        (odd(execution={"taskSupport": "optional"}), Tool(task_support="optional")),
        ({**having(a=A), "annotations": {"readOnlyHint": True}}, Tool((Mirrored(("a",), "Mcp-Param-A"),), True)),
    ],
    ids=range(6),
)
def test_a_tool_says_what_it_mirrors_and_how_it_may_run(tool: Any, expected: Tool) -> None:
    assert tool_list.read(listed(tool)).tools == {"odd": expected}


def test_a_list_with_too_many_tools_is_refused() -> None:
    many = raw({"tools": [{"name": "t", "inputSchema": OBJECT}] * (MAX_MEMBERS + 1)})
    with pytest.raises(TooMany):
        tool_list.read(many)


def test_a_list_with_too_many_values_in_annotated_tools_is_refused() -> None:
    values = {"enum": [""] * (MAX_MEMBERS // 2)}
    assert not tool_list.read(raw({"tools": [having(a={**A, **values}), having(b=values)]})).left_out
    with pytest.raises(TooMany):
        tool_list.read(raw({"tools": [having(a={**A, **values}), having(a={**A, **values})]}))


def test_what_a_tool_says_about_its_execution_is_taken_off() -> None:
    tool = {"name": "a", "execution": {"taskSupport": "optional"}, "inputSchema": OBJECT}
    found = json.loads(bytes(tool_list.without_execution(listed(tool, odd()))))
    assert found == {"tools": [{"name": "a", "inputSchema": OBJECT}, odd()], "nextCursor": "n"}


@pytest.mark.parametrize(
    "result", [b'{"tools":[]}', b'{"execution":1}', b'{"tools":{"execution":1}}', b'{"tools":["execution"]}']
)
def test_a_list_without_an_execution_that_can_be_read_stays_as_it_is(result: bytes) -> None:
    assert tool_list.without_execution(Raw(result)) == Raw(result)
