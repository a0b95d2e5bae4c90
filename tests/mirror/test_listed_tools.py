"""What is known of the tools of a modern server over HTTP (which is a fake)."""

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ModernRequest, RouteServer, _ServerResponse
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, InvalidParams
from gateway.protocol.tool_list import Tool
from gateway.routes.tool_catalog import ToolCatalog
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from gateway.upstream.channel import Hearer
from tests.support.fake_server import FakeServer, fake_live
from tests.support.workbench import eventually, later

PROFILE = Profile(mcp.LEGACY, b"{}", b"{}")
ADA, EVE = b"ada", b"eve"


class Bench:
    """A catalog before a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.live = FakeServer(), fake_live(Tasks(Metrics("0")))
        self.live.upstream.tools = ToolCatalog()
        monkeypatch.setattr(RouteServer, "send", lambda _, *sent: self.server.send(*sent))

    def find(self, name: str = "t", caller: bytes = ADA) -> "asyncio.Task[Tool]":
        call = ModernRequest.new(mcp.TOOLS_CALL, {}, PROFILE, {}, target=name)
        return later(RouteServer(self.live, caller).tool(call))

    def hears(self, method: str, params: jsonrpc.Fields, answer: str) -> None:
        """A request of ada is answered by this response."""
        request = ModernRequest.new(method, params, PROFILE, {})
        response = _ServerResponse(RouteServer(self.live, ADA), request, Hearer())
        assert response.hear(f'{{"jsonrpc":"2.0","id":{request.id.decode()},{answer}}}'.encode())

    async def listed(self, count: int, *names: str, **more: Any) -> None:
        """The server is asked for a list the so-manieth time, and names these tools."""
        await eventually(lambda: len(self.server.of(mcp.TOOLS_LIST)) == count)
        tools = [
            {"name": name, "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}} for name in names
        ]
        self.server.sent[-1].completes(tools=tools, **more)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_a_tool_that_the_whole_list_does_not_name_is_not_looked_for_again(bench: Bench) -> None:
    finding = bench.find("t2")
    await bench.listed(1, "t1", nextCursor="2")
    await bench.listed(2, "t2")
    assert (await finding).ephemeral
    assert ((await bench.find("t1")).ephemeral, await bench.find("unheard")) == (True, Tool())
    of_eve = bench.find("t1", EVE)
    await bench.listed(3)
    assert await of_eve == Tool()
    bench.hears(mcp.TOOLS_CALL, {}, f'"error":{{"code":{mcp.HEADER_MISMATCH},"message":"another header"}}')
    again = bench.find("t1")
    await bench.listed(4)
    assert await again == Tool()


async def test_calls_at_the_same_time_share_one_list(bench: Bench) -> None:
    finding = [bench.find() for _ in range(3)]
    await bench.listed(1, "t")
    assert [each.ephemeral for each in await asyncio.gather(*finding)] == [True] * 3
    assert len(bench.server.sent) == 1


async def test_a_list_ends_with_the_last_call_that_waits_for_it(bench: Bench) -> None:
    finding = [bench.find() for _ in range(2)]
    await eventually(lambda: bench.server.sent)
    for each, is_last in zip(finding, (False, True), strict=True):
        _ = each.cancel()
        assert [type(found) for found in await asyncio.gather(each, return_exceptions=True)] == [
            asyncio.CancelledError
        ]
        await eventually(lambda: bench.server.sent[0].is_aborted) if is_last else await asyncio.sleep(0.01)
        assert bench.server.sent[0].is_aborted is is_last
    tasks = bench.live.process.tasks
    assert (len(tasks), tasks._shared, tasks._waiting) == (0, {}, {}), "nothing is left of a stranger"
    again = bench.find()
    await bench.listed(2, "t")
    assert (await again).ephemeral


async def test_a_list_that_failed_is_asked_for_again(bench: Bench) -> None:
    finding = bench.find()
    await eventually(lambda: bench.server.sent)
    bench.server.sent[0].fails(CallLost("gone"))
    assert await finding == Tool()
    again = bench.find()
    await eventually(lambda: len(bench.server.sent) == 2)
    bench.server.sent[1].says(error={"code": -32601, "message": "no tools"})
    assert await again == await bench.find() == Tool()
    assert len(bench.server.sent) == 2


async def test_a_list_that_cannot_be_asked_for_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise InvalidParams("A header of the request cannot be sent to the server")

    monkeypatch.setattr(RouteServer, "send", refuse)
    assert await bench.find() == Tool()


@pytest.mark.parametrize("part", [({"cursor": Raw(b'"2"')}, ""), ({}, ',"nextCursor":"2"')])
async def test_a_part_of_a_list_that_a_client_has_asked_for_tells_nothing(
    bench: Bench, part: tuple[jsonrpc.Fields, str]
) -> None:
    tool = '{"name":"t","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}}'
    params, more = part
    bench.hears(mcp.TOOLS_LIST, params, f'"result":{{"tools":[{tool}]{more}}}')
    finding = bench.find()
    await bench.listed(1)
    assert await finding == Tool()
    bench.hears(mcp.TOOLS_LIST, {}, f'"result":{{"tools":[{tool}]}}')
    assert (await bench.find()).ephemeral


async def test_a_child_process_reads_no_headers_and_so_is_not_asked_for_its_tools() -> None:
    live, asked = fake_live(Tasks(Metrics("0"))), list[bytes]()

    async def take(body: bytes, _: Hearer) -> None:
        asked.append(body)

    live.upstream.stdio.modern.request = take
    call = ModernRequest.new(mcp.TOOLS_CALL, {}, PROFILE, {}, target="t")
    await RouteServer(live, ADA).send(call, Hearer())
    assert asked == [call.body]
