"""What the mirror knows of the tools of a server (which is a fake)."""

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from gateway.mirror import tool_catalog as module
from gateway.mirror.client_requests import Profile
from gateway.mirror.tool_catalog import CallerKey, ToolCatalog
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, InvalidParams
from gateway.protocol.tool_list import Tool
from tests.support.fake_server import FakeServer
from tests.support.workbench import eventually

PROFILE = Profile(mcp.LEGACY, b"{}", b"{}")
ADA, EVE = ("/mcp", b"ada"), ("/mcp", b"eve")


class Bench:
    """A catalog before a server."""

    def __init__(self) -> None:
        self.server, self.catalog = FakeServer(), ToolCatalog()

    def find(self, name: str = "t", caller: CallerKey = ADA) -> "asyncio.Task[Tool]":
        return asyncio.get_running_loop().create_task(self.catalog.tool(caller, self.server, PROFILE, {}, name))

    async def listed(self, count: int, *names: str, **more: Any) -> None:
        """The server is asked for a list the so-manieth time, and names these tools."""
        await eventually(lambda: len(self.server.of(mcp.TOOLS_LIST)) == count)
        tools = [
            {"name": name, "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}} for name in names
        ]
        self.server.sent[-1].completes(tools=tools, **more)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_tool_that_the_whole_list_does_not_name_is_not_looked_for_again(bench: Bench) -> None:
    finding = bench.find("t2")
    await bench.listed(1, "t1", nextCursor="2")
    await bench.listed(2, "t2")
    assert (await finding).ephemeral
    assert ((await bench.find("t1")).ephemeral, await bench.find("unheard")) == (True, Tool())
    of_eve = bench.find("t1", EVE)
    await bench.listed(3)
    assert await of_eve == Tool()
    bench.catalog.forget(ADA)
    again = bench.find("t1")
    await bench.listed(4)
    assert await again == Tool()


async def test_calls_at_the_same_time_share_one_list(bench: Bench) -> None:
    finding = [bench.find() for _ in range(3)]
    await bench.listed(1, "t")
    assert [each.ephemeral for each in await asyncio.gather(*finding)] == [True] * 3
    assert len(bench.server.sent) == 1


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

    monkeypatch.setattr(bench.server, "send", refuse)
    assert await bench.find() == Tool()


@pytest.mark.parametrize("part", [({"cursor": Raw(b'"2"')}, ""), ({}, ',"nextCursor":"2"')])
async def test_a_part_of_a_list_that_a_client_has_asked_for_tells_nothing(
    bench: Bench, part: tuple[jsonrpc.Fields, str]
) -> None:
    tool = '{"name":"t","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}}'
    params, more = part
    bench.catalog.learn(ADA, params, Raw(f'{{"tools":[{tool}]{more}}}'.encode()))
    finding = bench.find()
    await bench.listed(1)
    assert await finding == Tool()
    bench.catalog.learn(ADA, {}, Raw(f'{{"tools":[{tool}]}}'.encode()))
    assert (await bench.find()).ephemeral


async def test_the_tools_of_all_callers_have_a_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TOOLS", 3)
    for count, (caller, names) in enumerate(((ADA, "ab"), (EVE, "c")), 1):
        finding = bench.find(caller=caller)
        await bench.listed(count, *names, "d" * 300)
        assert await finding == Tool()
    assert [(await bench.find(*each)).ephemeral for each in (("a", ADA), ("d" * 300, ADA), ("c", EVE))] == [
        *(True, False, True)
    ]
    third = bench.find(caller=("/mcp", b"bob"))
    await bench.listed(3, "e")
    _ = await third
    assert (await bench.find("c", EVE)).ephemeral
    evicted = bench.find("a", ADA)
    await bench.listed(4, *"abcd")
    assert await evicted == Tool(), "one caller with more than the limit has nothing"
