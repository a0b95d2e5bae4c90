"""A tools/call whose arguments are repeated in headers: what the gateway learns before it makes the call."""

import asyncio

import pytest

from gateway.protocol import tool_list
from tests.support.fake_upstream import FakeUpstream, Turn
from tests.support.noted_timers import Timers
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually

TOOL = {
    "name": "tool",
    "inputSchema": {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}},
}


@pytest.mark.parametrize(
    ("arguments", "header", "status"),
    [
        ({"region": "eu"}, "eu", 200),
        ({"region": "eü"}, "=?base64?ZcO8?=", 200),
        ({}, None, 200),
        ({"region": "eu"}, "us", 400),
        ({"region": "eu"}, None, 400),
        ({}, "eu", 400),
    ],
)
async def test_mirrored_parameters_are_checked_with_the_tools_listed_once(
    upstream: FakeUpstream, client: Client, arguments: dict[str, str], header: str | None, status: int
) -> None:
    upstream.tools = [TOOL]
    for _ in range(2):
        reply = await client.call("tool", arguments, headers={} if header is None else {"Mcp-Param-Region": header})
        assert reply.status == status
        if status != 200:
            assert reply.error["code"] == -32020
    assert len(upstream.of("tools/list")) == 1
    assert len(upstream.of("tools/call")) == (2 if status == 200 else 0)


async def test_a_list_that_the_client_fetched_is_used_and_a_change_forgets_it(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.tools = [TOOL]
    await client.post("tools/list")
    assert (await client.call("tool", {"region": "eu"})).status == 400
    assert len(upstream.of("tools/list")) == 1
    upstream.tools = []
    upstream.side("s1").put_nowait(b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')
    upstream.side("s1").put_nowait(b'data: {"jsonrpc":"2.0","id":"p","method":"ping"}\n\n')
    await upstream.saw("answer")
    assert (await client.call("tool", {"region": "eu"})).status == 200
    assert len(upstream.of("tools/list")) == 2


async def test_the_same_page_means_the_same_for_every_client(upstream: FakeUpstream, stand: Stand) -> None:
    unusable = {"name": "bad", "inputSchema": {"type": "object", "properties": {"a": {"x-mcp-header": "A"}}}}
    upstream.tools = [TOOL, unusable]
    for number in range(3):
        client = stand.client(info={"name": f"client-{number}", "version": "1"})
        assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020
    assert len(upstream.of("tools/list")) == 3
    assert stand.metric("mcp_gateway_tools_left_out_total") == 3


@pytest.mark.parametrize(("description_bytes", "times"), [(1_000, 1), (300_000, 2)])
async def test_only_a_page_of_usual_size_is_kept_for_other_clients(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch, description_bytes: int, times: int
) -> None:
    pages, read = [], tool_list.read
    monkeypatch.setattr(tool_list, "read", lambda page: pages.append(page) or read(page))
    upstream.tools = [{**TOOL, "description": "x" * description_bytes}]
    for number in range(2):
        client = stand.client(info={"name": f"client-{number}", "version": "1"})
        assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020
    assert len(pages) == times


async def test_all_pages_of_the_tools_are_read(upstream: FakeUpstream, client: Client) -> None:
    async def pages(turn: Turn) -> None:
        if turn.body["params"].get("cursor") is None:
            await turn.result({"tools": [], "nextCursor": "2"})
        else:
            await turn.result({"tools": [TOOL]})

    upstream.on("tools/list", pages)
    assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020
    await client.post("tools/list")
    assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020, "one page teaches nothing new"
    assert len(upstream.of("tools/list")) == 3


@pytest.mark.parametrize("how", ["error", "malformed", "endless", "no tools"])
async def test_tools_that_cannot_be_listed_repeat_nothing(upstream: FakeUpstream, client: Client, how: str) -> None:
    async def script(turn: Turn) -> None:
        if how == "error":
            await turn.error(-32601, "no")
        elif how == "malformed":
            await turn.result({"tools": 5})
        else:
            await turn.result({"tools": [], "nextCursor": "again"})

    upstream.on("tools/list", script)
    if how == "no tools":
        upstream.capabilities = {}
    assert (await client.call("tool", {"region": "eu"})).text == "done"
    assert len(upstream.of("tools/list")) == {"no tools": 0, "endless": 50}.get(how, 1)


async def test_a_list_that_hangs_ends_the_call_before_it_was_sent(
    upstream: FakeUpstream, begin: Start, timers: Timers
) -> None:
    stand = await begin(timeouts={"handshake_seconds": 500.0})
    upstream.once("tools/list", lambda turn: turn.for_ever())
    async with asyncio.TaskGroup() as group:
        calling = group.create_task(stand.client().call())
        await eventually(lambda: "tools/list" in upstream.words)
        timers.ring(500.0)
    assert calling.result().outcome == (200, -32603, "call_lost")
    assert "tools/call" not in upstream.words
    assert "DELETE" not in upstream.words
    assert (await stand.client().call()).text == "done"
