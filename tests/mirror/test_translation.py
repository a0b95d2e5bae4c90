"""Legacy requests to modern ones, and modern results or errors back."""

import json
from typing import Any

import pytest
from msgspec import UNSET, Raw

from gateway.exchange import events as on
from gateway.mirror import translation
from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ModernRequest
from gateway.protocol import jsonrpc, mcp

PROFILE = Profile("2025-11-25", b'{"name":"c","version":"1"}', b'{"roots":{}}')
META = {
    mcp.META_VERSION: mcp.MODERN,
    mcp.META_CLIENT_INFO: {"name": "c", "version": "1"},
    mcp.META_CAPABILITIES: {"roots": {}},
}


def raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def test_a_request_tells_who_asks_each_time() -> None:
    params = {"name": raw("t"), "_meta": raw({"progressToken": 1, "x/y": 2, mcp.META_VERSION: "9"})}
    sent = ModernRequest.new("tools/call", params, PROFILE, {}, log_level="info")
    assert json.loads(sent.body) == {
        "jsonrpc": "2.0",
        "id": json.loads(sent.id),
        "method": "tools/call",
        "params": {"name": "t", "_meta": {"progressToken": 1, "x/y": 2, **META, mcp.META_LOG_LEVEL: "info"}},
    }


def test_initialize_says_what_discover_says() -> None:
    capabilities = {
        "tools": {"listChanged": True},
        "extensions": {"io.modelcontextprotocol/tasks": {}, "com.example/x": {}},
        "tasks": {},
        "logging": None,
    }
    discovered = {
        "resultType": "complete",
        "capabilities": capabilities,
        "instructions": "Do.",
        "_meta": {mcp.META_SERVER_INFO: {"name": "s", "version": "2"}},
    }
    assert json.loads(translation.initialize_result(raw(discovered), PROFILE)) == {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {"listChanged": True}, "extensions": {"com.example/x": {}}},
        "serverInfo": {"name": "s", "version": "2"},
        "instructions": "Do.",
    }


def test_a_server_without_a_name_is_unknown() -> None:
    result = json.loads(translation.initialize_result(raw({}), PROFILE))
    assert result["serverInfo"] == {"name": "unknown", "version": "0"}


@pytest.mark.parametrize(
    ("method", "result", "legacy"),
    [
        ("tools/call", {"resultType": "c", "content": [1], "_meta": {mcp.META_SERVER_INFO: {}}}, {"content": [1]}),
        ("tools/call", {"content": [], "structuredContent": {"a": 1}}, {"content": [], "structuredContent": {"a": 1}}),
        ("tools/call", {"content": [], "structuredContent": [1]}, {"content": []}),
        ("resources/list", {"resources": [], "ttlMs": 5, "cacheScope": "public", "_meta": {"a/b": 1}},
         {"resources": [], "_meta": {"a/b": 1}}),
        ("prompts/get", {"messages": [], "structuredContent": [1]}, {"messages": [], "structuredContent": [1]}),
    ],
)  # fmt: skip
def test_a_result_loses_what_came_with_2026(method: str, result: Any, legacy: Any) -> None:
    assert json.loads(translation.legacy_result(method, raw(result))) == legacy


def test_a_tool_loses_an_output_schema_that_describes_no_object() -> None:
    tools = [
        {"name": "a", "outputSchema": {"type": "object"}},
        {"name": "b", "outputSchema": {"type": "array"}},
        {"name": "c", "outputSchema": True},
        {"name": "d"},
    ]
    listed = json.loads(translation.legacy_result("tools/list", raw({"tools": tools})))["tools"]
    assert listed == [tools[0], {"name": "b"}, {"name": "c"}, {"name": "d"}]


@pytest.mark.parametrize(
    ("method", "error", "answer"),
    [
        ("resources/read", (-32602, {"uri": "a:b"}), {"code": -32002, "message": "m", "data": {"uri": "a:b"}}),
        ("resources/read", (-32602, {"a": 1}), {"code": -32602, "message": "m", "data": {"a": 1}}),
        ("tools/call", (-32602, {"uri": "a:b"}), {"code": -32602, "message": "m", "data": {"uri": "a:b"}}),
        ("prompts/get", (-32021, None), {"code": -32603, "message": "m", "data": {"upstreamCode": -32021}}),
        ("tools/call", (-32020, None), {"code": -32603, "message": "m", "data": {"upstreamCode": -32020}}),
        ("tools/call", (-32050, [1]), {"code": -32050, "message": "m", "data": [1]}),
    ],
)
def test_an_error_is_one_that_legacy_clients_know(method: str, error: Any, answer: Any) -> None:
    code, data = error
    given = jsonrpc.Error(code, "m", UNSET if data is None else raw(data))
    ended = translation.legacy_error(method, given)
    assert isinstance(ended, on.Failed)
    assert json.loads(jsonrpc.encode(ended.error)) == answer


def test_a_missing_capability_is_a_tool_error() -> None:
    ended = translation.legacy_error("tools/call", jsonrpc.Error(-32021, "needs it"))
    assert isinstance(ended, on.Resulted)
    assert json.loads(ended.result) == {"content": [{"type": "text", "text": "needs it"}], "isError": True}


def test_a_notification_loses_its_subscription() -> None:
    def told(message: Any) -> Any:
        data = json.dumps(message).encode()
        found = translation.legacy_notification(jsonrpc.message(data), data)
        return None if found is None else json.loads(found)

    note = {"jsonrpc": "2.0", "method": mcp.RESOURCE_UPDATED, "params": {"uri": "a:b"}}
    meta = {mcp.META_SUBSCRIPTION: 1}
    assert told({**note, "params": {"uri": "a:b", "_meta": meta}}) == note
    assert told({**note, "id": 1}) is None, "a modern server sends no requests"
    kept = {**note, "params": {"uri": "a:b", "_meta": {**meta, "x/y": 1}}}
    assert told(kept)["params"]["_meta"] == {"x/y": 1}
    assert told({"jsonrpc": "2.0", "method": mcp.ACKNOWLEDGED, "params": {"_meta": meta}}) is None
    assert told(note) == note
