"""The handshake of the old protocol, from and to the per-request metadata of the new one."""

import json
from typing import Any

import pytest
from msgspec import Raw

from gateway.exchange import handshake
from gateway.protocol import jsonrpc, mcp
from tests.support.playbook import raw
from tests.support.schema import assert_legacy_message, assert_modern_result

INFO = {"name": "c", "version": "1"}
TASKS = "io.modelcontextprotocol/tasks"

CAPABILITIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {"elicitation": {}, "sampling": {"tools": {}}, "roots": {}},
        {"elicitation": {}, "sampling": {"tools": {}}, "roots": {}},
    ),
    ({"elicitation": {"form": {}, "url": {}}}, {"elicitation": {"form": {}, "url": {}}}),
    ({"roots": None, "experimental": {"x": {}}, "unknown": {}}, {"experimental": {"x": {}}}),
    ({"extensions": {TASKS: {}}}, {}),
    ({"extensions": {TASKS: {}, "com.example/a": {"b": 1}}}, {"extensions": {"com.example/a": {"b": 1}}}),
]


@pytest.mark.parametrize(("declared", "old"), CAPABILITIES, ids=range(len(CAPABILITIES)))
def test_initialize_declares_the_capabilities_of_this_request(declared: dict[str, Any], old: dict[str, Any]) -> None:
    params = handshake.initialize_params(raw(INFO), raw(declared))
    message = assert_legacy_message(jsonrpc.request(b'"a"', mcp.INITIALIZE, params))
    assert message["params"] == {"protocolVersion": "2025-11-25", "capabilities": old, "clientInfo": INFO}


@pytest.mark.parametrize("declared", [{"state": {}}, {"state": {"scopes": ["session"]}}, {"state": None}, {}])
def test_a_server_learns_of_state_only_in_a_session_of_a_client_that_keeps_it(declared: dict[str, Any]) -> None:
    told = {key: value for key, value in declared.items() if value is not None}
    for keeps_state, expected in ((True, told), (False, {})):
        params = handshake.initialize_params(raw(INFO), raw({"roots": {}, **declared}), keeps_state=keeps_state)
        message = assert_legacy_message(jsonrpc.request(b'"a"', mcp.INITIALIZE, params))
        assert message["params"]["capabilities"] == {"roots": {}, **expected}


def shaken(**changes: Any) -> handshake.Handshake:
    result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "2"}}
    return handshake.handshake(bytes(raw({**result, **changes})))


def test_a_handshake_is_read() -> None:
    found = shaken(capabilities={"tools": {"listChanged": True}}, instructions="Be kind", extra=1)
    assert found.version == "2025-06-18"
    assert json.loads(found.server_info) == {"name": "s", "version": "2"}
    assert found.instructions is not None
    assert bytes(found.instructions) == b'"Be kind"'
    assert shaken(instructions=None).instructions is None
    assert shaken().instructions is None


@pytest.mark.parametrize("named", [{}, {"serverInfo": None}], ids=["absent", "null"])
def test_a_server_without_a_name_gets_one(named: dict[str, Any]) -> None:
    found = handshake.handshake(bytes(raw({"protocolVersion": "2024-11-05", **named})))
    assert json.loads(found.server_info) == {"name": "unknown", "version": "0"}
    assert found.capabilities == {}


def test_of_a_large_server_info_only_name_and_version_are_kept() -> None:
    icons = [{"src": "data:image/png;base64," + "A" * handshake.MAX_INFO_BYTES}]
    found = shaken(serverInfo={"name": "s", "version": "2", "icons": icons})
    assert json.loads(found.server_info) == {"name": "s", "version": "2"}


def test_a_server_with_a_large_name_gets_another_one() -> None:
    found = shaken(serverInfo={"name": "s" * handshake.MAX_INFO_BYTES, "version": "2"})
    assert json.loads(found.server_info) == {"name": "unknown", "version": "0"}


def test_a_large_handshake_is_a_value_error() -> None:
    assert shaken(instructions="i" * (handshake.MAX_RESULT_BYTES - 200)).instructions is not None
    with pytest.raises(ValueError, match=r"InitializeResult has 262,\d\d\d bytes, more than 262,144"):
        shaken(instructions="i" * handshake.MAX_RESULT_BYTES)


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"protocolVersion": "2026-07-28"},
        {"protocolVersion": 1},
        {"protocolVersion": "2025-06-18", "capabilities": 1},
        [],
    ],
    ids=range(5),
)
def test_a_malformed_handshake_is_a_value_error(result: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        handshake.handshake(bytes(raw(result)))


@pytest.mark.parametrize(
    ("capability", "flag", "offered"),
    [
        ("tools", None, True),
        ("tools", "listChanged", True),
        ("resources", None, True),
        ("resources", "subscribe", False),
        ("resources", "listChanged", False),
        ("prompts", None, False),
        ("prompts", "listChanged", False),
        ("logging", None, False),
        ("logging", "x", False),
    ],
)
def test_the_server_offers_exactly_the_capabilities_that_it_declared(
    capability: str, flag: str | None, *, offered: bool
) -> None:
    capabilities = {"tools": {"listChanged": True}, "resources": {"subscribe": False}, "logging": None}
    assert shaken(capabilities=capabilities).offers(capability, flag) is offered


def test_a_discover_result_repeats_the_handshake() -> None:
    capabilities = {
        "tools": {"listChanged": True, "x": None},
        "resources": {"subscribe": True},
        "prompts": None,
        "logging": {},
        "completions": {},
        "experimental": {"a": {"b": 1}},
        "extensions": {TASKS: {}, "com.example/a": {}},
        "tasks": {"list": {}},
    }
    found = shaken(capabilities=capabilities, instructions="Be kind")
    result = assert_modern_result(mcp.DISCOVER, handshake.discover_result(found, 5000, "public"))
    assert result["supportedVersions"] == ["2026-07-28"]
    assert result["capabilities"] == {
        "tools": {"listChanged": True},
        "resources": {"subscribe": True},
        "logging": {},
        "completions": {},
        "experimental": {"a": {"b": 1}},
        "extensions": {"com.example/a": {}},
    }
    assert (result["ttlMs"], result["cacheScope"], result["instructions"]) == (5000, "public", "Be kind")
    assert result["_meta"] == {mcp.META_SERVER_INFO: {"name": "s", "version": "2"}}


def test_a_server_with_tasks_offers_their_extension_beside_its_own() -> None:
    tasks = {"requests": {"tools": {}}}
    found = shaken(capabilities={"tasks": tasks, "extensions": {"a/b": {"c": 1}, mcp.TASKS: {"x": 1}}})
    result = json.loads(handshake.discover_result(found, 0, "private"))
    assert result["capabilities"] == {"extensions": {"a/b": {"c": 1}, mcp.TASKS: {}}}
    bare = json.loads(handshake.discover_result(shaken(capabilities={"tasks": tasks}), 0, "private"))
    assert bare["capabilities"] == {"extensions": {mcp.TASKS: {}}}


def test_a_discover_result_without_instructions_has_none() -> None:
    result = assert_modern_result(mcp.DISCOVER, handshake.discover_result(shaken(), 0, "private"))
    assert "instructions" not in result


def test_sessions_of_a_server_that_says_the_same_share_what_it_said() -> None:
    said = bytes(raw({"protocolVersion": "2025-11-25", "capabilities": {}, "instructions": "Be kind"}))
    assert handshake.handshake(said) is handshake.handshake(bytes(bytearray(said)))


def test_capabilities_are_raw_json_and_stay_so() -> None:
    params = handshake.initialize_params(Raw(b'{"name" : "c", "version":"1"}'), Raw(b'{"roots" : { } }'))
    assert b'"clientInfo":{"name" : "c", "version":"1"}' in jsonrpc.encode(params)
