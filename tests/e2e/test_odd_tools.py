"""Real clients and a list with malformed tools, for which a client without the gateway would refuse all tools.

The server is fake: no real one lists such tools on command.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.parts.clients.drive import Kind
from tests.protocol.test_tool_list import KEPT, LEFT_OUT
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway_process import Gateway, gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gw() -> AsyncIterator[Gateway]:
    """A gateway before a server with a malformed tool after each good one."""
    upstream = FakeUpstream()
    good = [{**tool, "name": f"kept {number}"} for number, tool in enumerate(KEPT.values())]
    tools = [tool for number, (bad, _) in enumerate(LEFT_OUT.values()) for tool in (good[number % len(good)], bad)]

    upstream.on("tools/list", lambda turn: turn.result({"tools": tools}))
    async with upstream, gateway(upstream.url) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
async def test_the_good_tools_arrive_and_can_be_called(gw: Gateway, drivers: Drivers, kind: Kind) -> None:
    client = await drivers.connect(kind, gw.url)
    listed = (await client.list_all("tools")).value["tools"]
    assert {tool["name"] for tool in listed} == {f"kept {number}" for number in range(len(KEPT))}
    reply = await client.call_tool("kept 0")
    assert reply.ok, reply
    assert await gw.metric("mcp_gateway_tools_left_out_total") >= len(LEFT_OUT)
    warned = gw.log("tool.left_out")
    assert len({(line["tool"], line["reason"]) for line in warned}) == len(warned), "each once"
