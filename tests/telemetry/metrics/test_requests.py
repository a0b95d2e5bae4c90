"""The metrics of requests: what they count of real ones."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream, Turn, ask, asks, text
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Client, Stand, eventually, later

DURATION = "mcp_client_operation_duration_seconds"
COUNT = "mcp_server_operation_duration_seconds_count"
OLD = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
FAILED: dict[str, Any] = {**text("no such city"), "isError": True}


def operations(stand: Stand) -> dict[tuple[str, str, str], int]:
    """By method, outcome and error type: rounds that were counted."""
    found = {
        (each.labels["method"], each.labels["outcome"], each.labels["error_type"]): int(each.value)
        for family in stand.gateway.metrics.series.registry.collect()
        for each in family.samples
        if each.name == COUNT
    }
    return {labels: count for labels, count in found.items() if count}


async def fail(turn: Turn) -> None:
    await turn.result(FAILED)


@pytest.mark.parametrize(
    ("code", "error_type"),
    [(-32602, "-32602"), (0, "0"), (-32000, "-32000"), (17, "_OTHER"), (-32050, "-32603")],
)
async def test_an_error_is_counted_by_its_code_or_as_other(
    upstream: FakeUpstream, stand: Stand, client: Client, code: int, error_type: str
) -> None:
    upstream.tool(lambda turn: turn.error(code, "no"))
    assert "error" in (await client.call()).final
    assert operations(stand) == {("tools/call", "error", error_type): 1}


async def test_a_tool_that_says_that_it_failed_is_complete_and_a_tool_error(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    said = iter([text("fine"), FAILED, {**text('"isError": true'), "isError": False}])

    upstream.tool(lambda turn: turn.result(next(said)))
    for _ in range(3):
        _ = await client.call()
    assert operations(stand) == {("tools/call", "complete", ""): 2, ("tools/call", "complete", "tool_error"): 1}


async def test_a_tool_error_of_the_last_round_is_that_rounds(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.result(FAILED)

    upstream.tool(tool)
    asked = await client.call()
    _ = await client.answer(asked)
    assert operations(stand) == {("tools/call", "input_required", ""): 1, ("tools/call", "complete", "tool_error"): 1}


async def test_the_tool_error_of_a_run_that_is_run_again_is_not_that_of_the_last_round(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand, has_asked = await begin(route={"ephemeral": ["tool"]}), asyncio.Event()
    client = stand.client()

    async def impatient(turn: Turn) -> None:
        asking = later(turn.elicit("q", id_=9))
        await has_asked.wait()
        _ = asking.cancel()
        await turn.notify(mcp.CANCELLED, {"requestId": 9})
        await turn.result(FAILED)

    upstream.each("tools/call", impatient, asks("fine", "q"))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    has_asked.set()
    await eventually(lambda: driver.is_finished, "the tool has given up")
    assert (await client.answer(asked)).text == "fine"
    assert operations(stand) == {("tools/call", "input_required", ""): 1, ("tools/call", "complete", ""): 1}


async def test_a_round_is_counted_with_its_error_type_by_the_replica_that_its_client_spoke_to(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.result(FAILED)

    upstream.tool(tool)
    peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2")}
    owner, other = [await begin(replica={"id": name, "listen": peers[name], "peers": peers}) for name in peers]
    asked = await owner.client().call()
    _ = await other.client().answer(asked)
    assert operations(owner) == {("tools/call", "input_required", ""): 1}
    assert operations(other) == {("tools/call", "complete", "tool_error"): 1}


async def test_what_the_gateway_refuses_and_what_the_upstream_breaks_are_told_apart(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    assert (await client.call(state="mrtr1.no")).status == 400
    await upstream.close()
    assert (await client.call()).error["code"] == mcp.INTERNAL_ERROR
    assert operations(stand) == {("tools/call", "rejected", "-32602"): 1, ("tools/call", "error", "-32603"): 1}


async def test_a_subscription_is_counted_when_it_is_open_and_not_when_it_ends(stand: Stand, client: Client) -> None:
    async with client.open(mcp.LISTEN, {"notifications": {}}) as response:
        assert b"acknowledged" in await response.content.readany()
        assert operations(stand) == {("subscriptions/listen", "complete", ""): 1}
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    assert operations(stand) == {("subscriptions/listen", "complete", ""): 1}


async def test_what_is_passed_through_is_timed_but_for_streams_that_are_no_reply(stand: Stand) -> None:
    shake = {"protocolVersion": mcp.LEGACY, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": shake})
    async with stand.http.post(stand.url, data=body, headers=OLD) as response:
        session = response.headers[mcp.SESSION_ID]
        _ = await response.read()
    async with stand.http.get(stand.url, headers={**OLD, mcp.SESSION_ID: session}) as response:
        assert response.status == 200
    passed = "mcp_gateway_passed_through_total"
    await eventually(lambda: stand.metric(passed, era="legacy", outcome="left") == 1)
    assert stand.metric(passed, era="legacy", outcome="answered") == 1
    assert stand.metric("mcp_gateway_passed_through_duration_seconds_count", era="legacy") == 1
    assert operations(stand) == {}


async def test_the_time_that_people_think_is_not_the_upstreams(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.tool(ask)
    client = stand.client()
    asked = await client.call()
    later_on = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0)
    monkeypatch.setattr("gateway.bridge.call_context.world", later_on)
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    labels = {"method": mcp.TOOLS_CALL, "error_type": ""}
    assert stand.metric(f"{DURATION}_count", **labels) == 1
    seconds = stand.metric(f"{DURATION}_sum", **labels)
    assert 0 <= seconds < 100


async def test_a_plain_call_is_counted_with_the_time_of_its_upstream(upstream: FakeUpstream, stand: Stand) -> None:
    client = stand.client()
    for _ in range(3):  # from the second one on, an idle session takes the call at once
        _ = await client.call()
    labels = {"method": mcp.TOOLS_CALL, "error_type": ""}
    assert stand.metric(f"{DURATION}_count", **labels) == 3
