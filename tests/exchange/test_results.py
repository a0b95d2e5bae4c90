"""Old results and errors as a modern client sees them."""

import json
from typing import Any

import pytest
from msgspec import UNSET, Raw

from gateway.exchange import results
from gateway.protocol import jsonrpc, mcp
from tests.support.playbook import raw
from tests.support.schema import assert_modern_message, assert_modern_result

INFO = {"name": "s", "version": "2"}
SERVER = json.dumps(INFO).encode()
TOOL = {"name": "t", "inputSchema": {"type": "object", "properties": {"a": {"default": None}}}}


def modern(method: str, result: Any, *, retried: bool = False) -> dict[str, Any]:
    data = result if isinstance(result, Raw) else raw(result)
    found = assert_modern_result(method, results.modern(method, data, SERVER, (5000, "public"), retried=retried).body)
    assert found.pop("resultType") == "complete"
    assert found.pop("_meta") == {mcp.META_SERVER_INFO: INFO}
    return found


TEXT = {"type": "text", "text": "Hi"}
CACHED = {"ttlMs": 5000, "cacheScope": "public"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tools/call": (mcp.TOOLS_CALL, {"content": [TEXT]}, {"content": [TEXT]}),
    "an error of a tool": (mcp.TOOLS_CALL, {"content": [], "isError": True}, {"content": [], "isError": True}),
    "structured only": (
        mcp.TOOLS_CALL,
        {"structuredContent": {"a": None}},
        {"structuredContent": {"a": None}, "content": []},
    ),
    "nulls": (
        mcp.TOOLS_CALL,
        {"content": [{**TEXT, "annotations": {"audience": None}, "_meta": None}], "structuredContent": None},
        {"content": [{**TEXT, "annotations": {}}]},
    ),
    "null content": (mcp.TOOLS_CALL, {"content": None}, {"content": []}),
    "prompts/get": (
        mcp.PROMPTS_GET,
        {"description": None, "messages": [{"role": "user", "content": {**TEXT, "annotations": None}}]},
        {"messages": [{"role": "user", "content": TEXT}]},
    ),
    "completion/complete": (
        mcp.COMPLETE,
        {"completion": {"values": ["a"], "total": 1, "hasMore": False}},
        {"completion": {"values": ["a"], "total": 1, "hasMore": False}},
    ),
    "tools/list": (
        mcp.TOOLS_LIST,
        {"tools": [{**TOOL, "title": None, "annotations": {"title": None}}], "nextCursor": None},
        {"tools": [{**TOOL, "annotations": {}}], **CACHED},
    ),
    "prompts/list": (
        mcp.PROMPTS_LIST,
        {"prompts": [{"name": "p", "title": None}]},
        {"prompts": [{"name": "p"}], **CACHED},
    ),
    "resources/list": (
        mcp.RESOURCES_LIST,
        {"resources": [{"uri": "file:///a", "name": "a", "size": None}], "nextCursor": "n"},
        {"resources": [{"uri": "file:///a", "name": "a"}], "nextCursor": "n", **CACHED},
    ),
    "resources/templates/list": (mcp.TEMPLATES_LIST, {"resourceTemplates": []}, {"resourceTemplates": [], **CACHED}),
    "resources/read": (
        mcp.RESOURCES_READ,
        {"contents": [{"uri": "file:///a", "text": "null", "mimeType": None}]},
        {"contents": [{"uri": "file:///a", "text": "null"}], **CACHED},
    ),
}


@pytest.mark.parametrize(("method", "old", "new"), CASES.values(), ids=CASES)
def test_an_old_result_becomes_a_complete_one(method: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert modern(method, old) == new


@pytest.mark.parametrize("own", [{}, {"ttlMs": 60_000, "cacheScope": "public"}], ids=["ours", "the server's"])
def test_a_result_that_depends_on_answers_is_not_cached(own: dict[str, Any]) -> None:
    found = modern(mcp.RESOURCES_READ, {"contents": [], **own}, retried=True)
    assert (found["ttlMs"], found["cacheScope"]) == (0, "private")


def test_caching_hints_of_the_server_are_kept() -> None:
    found = modern(mcp.TOOLS_LIST, {"tools": [], "ttlMs": 1, "cacheScope": "private"})
    assert (found["ttlMs"], found["cacheScope"]) == (1, "private")


@pytest.mark.parametrize("ttl", [-1, 1.5, "5", True, None, 10**15])
def test_what_no_client_takes_for_freshness_is_replaced(ttl: Any) -> None:
    found = modern(mcp.TOOLS_LIST, {"tools": [], "ttlMs": ttl, "cacheScope": "shared"})
    assert (found["ttlMs"], found["cacheScope"]) == (5000, "public")


def test_a_result_cannot_call_itself_anything_but_complete() -> None:
    modern(mcp.TOOLS_CALL, {"resultType": "input_required", "content": []})


def test_meta_is_kept_and_the_server_named() -> None:
    old = raw({"content": [], "_meta": {"a": 1}})
    found = assert_modern_result(
        mcp.TOOLS_CALL, results.modern(mcp.TOOLS_CALL, old, SERVER, (0, "public"), retried=False).body
    )
    assert found["_meta"] == {"a": 1, mcp.META_SERVER_INFO: INFO}
    modern(mcp.TOOLS_CALL, {"content": [], "_meta": None})


def test_content_is_spliced_and_not_rebuilt() -> None:
    content = b'[ {"type":"text","text":"\\u00e9","n":1e1} ]'
    old = Raw(b'{"content":%b}' % content)
    written = results.modern(mcp.TOOLS_CALL, old, SERVER, (0, "public"), retried=False).body
    assert content in written


@pytest.mark.parametrize(
    "content", [Raw(b'{"content":"null"}'), Raw(b'{"content":["null", null]}')], ids=["a string", "no objects"]
)
def test_content_of_a_wrong_shape_is_left_to_the_client(content: Raw) -> None:
    written = results.modern(mcp.TOOLS_CALL, content, SERVER, (0, "public"), retried=False).body
    assert json.loads(written)["content"] == json.loads(bytes(content))["content"]


@pytest.mark.parametrize(
    ("method", "result", "failed"),
    [
        (mcp.TOOLS_CALL, b'{"content":[],"isError": true }', True),
        (mcp.TOOLS_CALL, b'{"isError":true,"_meta":{"a":1}}', True),
        (mcp.TOOLS_CALL, b'{"content":[],"isError":true,"structuredContent":null}', True),
        (mcp.TOOLS_CALL, b'{"content":[],"isError":false}', False),
        (mcp.TOOLS_CALL, b'{"content":[],"isError":"true"}', False),
        (mcp.TOOLS_CALL, b'{"content":[],"isError":null}', False),
        (mcp.TOOLS_CALL, b'{"content":[{"isError":true}]}', False),
        (mcp.PROMPTS_GET, b'{"messages":[],"isError":true}', False),
    ],
)
def test_a_tool_that_failed_is_told_from_one_that_did_not(method: str, result: bytes, *, failed: bool) -> None:
    assert results.modern(method, Raw(result), SERVER, (0, "public"), retried=False).is_tool_error is failed


@pytest.mark.parametrize("result", [b"[]", b"null", b'"x"', b'{"_meta":[]}'])
def test_a_result_that_is_not_an_object_is_a_value_error(result: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        results.modern(mcp.TOOLS_CALL, Raw(result), SERVER, (0, "public"), retried=False)


ERRORS: list[tuple[str, jsonrpc.Error, int, Any]] = [
    (mcp.TOOLS_CALL, jsonrpc.Error(-32602, "Unknown tool"), -32602, UNSET),
    (mcp.TOOLS_CALL, jsonrpc.Error(5, "x", raw({"a": 1})), 5, {"a": 1}),
    (mcp.TOOLS_CALL, jsonrpc.Error(5, "x", raw(None)), 5, UNSET),
    (mcp.TOOLS_CALL, jsonrpc.Error(0, "Tool not found"), 0, UNSET),
    (mcp.RESOURCES_READ, jsonrpc.Error(-32002, "gone"), -32602, {"uri": "file:///a"}),
    (mcp.RESOURCES_READ, jsonrpc.Error(-32002, "gone", raw({"uri": "file:///a"})), -32602, {"uri": "file:///a"}),
    (mcp.RESOURCES_READ, jsonrpc.Error(-32002, "gone", raw({"a": [1]})), -32602, {"a": [1], "uri": "file:///a"}),
    (
        mcp.RESOURCES_READ,
        jsonrpc.Error(-32002, "gone", raw({"uri": "x", "a": 1})),
        -32602,
        {"uri": "file:///a", "a": 1, "upstreamData": {"uri": "x", "a": 1}},
    ),
    (
        mcp.RESOURCES_READ,
        jsonrpc.Error(-32002, "gone", raw(["x"])),
        -32602,
        {"uri": "file:///a", "upstreamData": ["x"]},
    ),
    (mcp.RESOURCES_READ, jsonrpc.Error(-32002, "gone", raw(None)), -32602, {"uri": "file:///a"}),
    (mcp.RESOURCES_READ, jsonrpc.Error(0, "Unknown resource: file:///a"), -32602, {"uri": "file:///a"}),
    (mcp.RESOURCES_READ, jsonrpc.Error(0, "boom"), 0, UNSET),
    (mcp.PROMPTS_GET, jsonrpc.Error(-32002, "gone", raw({"a": 1})), -32602, {"a": 1}),
    (mcp.PROMPTS_GET, jsonrpc.Error(-32002, "gone", raw(None)), -32602, UNSET),
    (mcp.PROMPTS_GET, jsonrpc.Error(0, "gone", raw("x")), -32602, "x"),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32050, "x", raw({"a": [1]})), -32603, {"upstreamCode": -32050, "a": [1]}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32050, "x", raw("why")), -32603, {"upstreamCode": -32050, "upstreamData": "why"}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32050, "x", raw(0)), -32603, {"upstreamCode": -32050, "upstreamData": 0}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32050, "x", raw(None)), -32603, {"upstreamCode": -32050}),
    (
        mcp.TOOLS_CALL,
        jsonrpc.Error(-32050, "x", raw({"upstreamCode": 7, "a": 1})),
        -32603,
        {"upstreamCode": -32050, "a": 1, "upstreamData": {"upstreamCode": 7, "a": 1}},
    ),
    (
        mcp.TOOLS_CALL,
        jsonrpc.Error(-32050, "x", raw({"upstreamData": 7})),
        -32603,
        {"upstreamCode": -32050, "upstreamData": 7},
    ),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32042, "url"), -32603, {"upstreamCode": -32042}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32020, "x"), -32603, {"upstreamCode": -32020}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32099, "x"), -32603, {"upstreamCode": -32099}),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32019, "x"), -32019, UNSET),
    (mcp.TOOLS_CALL, jsonrpc.Error(-32100, "x"), -32100, UNSET),
]


@pytest.mark.parametrize(("method", "old", "code", "data"), ERRORS, ids=range(len(ERRORS)))
def test_an_old_error_keeps_to_the_new_codes(method: str, old: jsonrpc.Error, code: int, data: Any) -> None:
    found = results.modern_error(method, "file:///a", old)
    assert found.code == code
    assert found.message == old.message
    assert (found.data if found.data is UNSET else json.loads(bytes(found.data))) == data
    assert_modern_message(jsonrpc.failure(b"1", found))


def test_a_long_error_text_is_searched_once() -> None:
    """A quadratic search would take minutes, so that the run would be stopped."""
    error = jsonrpc.Error(0, "resource not foun " * 1_000_000)
    assert results.modern_error(mcp.RESOURCES_READ, "file:///x", error) is error


def test_nulls_are_removed_as_deep_as_the_schema_nests_objects() -> None:
    deep: Any = None
    for _ in range(50):
        deep = {"content": deep, "_meta": None}
    written = results.modern(mcp.TOOLS_CALL, raw({"content": [deep]}), SERVER, (0, "private"), retried=False).body
    assert written.count(b"null") == 1 + 50 - 4


BLOCK = ("text", "data", "mimeType", "uri", "name", "title", "description", "size", "icons", "annotations", "resource")
RESOURCE = ("uri", "mimeType", "text", "blob", "annotations", "_meta")


@pytest.mark.parametrize("space", ["", " ", "\n  "])
@pytest.mark.parametrize(
    "path",
    [
        *[(name,) for name in ("type", "_meta", *BLOCK)],
        *[("resource", name) for name in RESOURCE],
        *[("annotations", name) for name in ("audience", "priority", "lastModified")],
        ("resource", "annotations", "priority"),
    ],
)
def test_a_null_in_any_member_of_content_that_the_schema_knows_is_removed(path: tuple[str, ...], space: str) -> None:
    block: Any = None
    for name in reversed(path):
        block = {name: block}
    old = json.dumps({"content": [TEXT, block]}, separators=(",", f":{space}")).encode()
    written = results.modern(mcp.TOOLS_CALL, Raw(old), SERVER, (0, "private"), retried=False).body
    assert b"null" not in written
    assert json.loads(written)["content"][0] == TEXT


@pytest.mark.parametrize("name", ["structuredContent", "isError", "_meta"])
def test_a_null_in_any_member_of_a_tool_result_is_removed(name: str) -> None:
    old = raw({"content": [TEXT], name: None})
    assert b"null" not in results.modern(mcp.TOOLS_CALL, old, SERVER, (0, "private"), retried=False).body


@pytest.mark.parametrize("old", [{"content": [{**TEXT, "x-own": None}]}, {"content": [TEXT], "x-own": None}])
def test_a_null_in_a_member_that_the_schema_does_not_have_is_removed(old: dict[str, Any]) -> None:
    assert modern(mcp.TOOLS_CALL, old) == {"content": [TEXT]}


def test_members_that_the_schema_does_not_have_stay() -> None:
    old = {"content": [{**TEXT, "x-own": {"a": None}}], "x-own": [None]}
    assert modern(mcp.TOOLS_CALL, old) == old
