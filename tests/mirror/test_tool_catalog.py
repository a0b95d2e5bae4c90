"""What the mirror knows of the tools of a server (which is a fake)."""

import asyncio
import json

import pytest

from gateway.mirror import tool_catalog as module
from gateway.mirror.client_profile import Profile
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from tests.support.fake_server import FakeServer
from tests.support.workbench import eventually

PROFILE = Profile(mcp.LEGACY, b"{}", b"{}")
ADA, EVE = ("/mcp", b"ada"), ("/mcp", b"eve")


class Bench:
    """A catalog before a server."""

    def __init__(self) -> None:
        self.server, self.catalog = FakeServer(), ToolCatalog()

    def read(self) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self.catalog.read(ADA, self.server, PROFILE, {}))


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def page(*names: str) -> bytes:
    return json.dumps({"tools": [{"name": name, "inputSchema": {}} for name in names]}).encode()


async def test_a_tool_that_the_whole_list_does_not_name_is_not_looked_for_again(bench: Bench) -> None:
    reading = bench.read()
    for count, cursor in ((1, {"nextCursor": "2"}), (2, {})):
        await eventually(lambda number=count: len(bench.server.of(mcp.TOOLS_LIST)) == number)
        assert not bench.catalog.knows(ADA, "unheard")
        bench.server.sent[-1].completes(tools=[{"name": f"t{count}", "inputSchema": {}}], **cursor)
    await reading
    assert bench.catalog.knows(ADA, "unheard")
    assert not bench.catalog.knows(EVE, "t1")
    bench.catalog.forget(ADA)
    assert not bench.catalog.knows(ADA, "t1")


async def test_calls_at_the_same_time_share_one_list(bench: Bench) -> None:
    reading = [bench.read() for _ in range(3)]
    await eventually(lambda: bench.server.sent)
    bench.server.sent[0].completes(tools=[])
    _ = await asyncio.gather(*reading)
    assert len(bench.server.sent) == 1


async def test_a_list_that_failed_is_asked_for_again(bench: Bench) -> None:
    reading = bench.read()
    await eventually(lambda: bench.server.sent)
    bench.server.sent[0].fails(CallLost("gone"))
    await reading
    assert not bench.catalog.knows(ADA, "t")
    again = bench.read()
    await eventually(lambda: len(bench.server.sent) == 2)
    bench.server.sent[1].says(error={"code": -32601, "message": "no tools"})
    await again
    assert bench.catalog.knows(ADA, "t")


async def test_a_list_that_cannot_be_asked_for_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ValueError("a header has a control character in its value")

    monkeypatch.setattr(bench.server, "send", refuse)
    await bench.read()
    assert not bench.catalog.knows(ADA, "t")


def test_the_tools_of_all_callers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TOOLS", 3)
    catalog = ToolCatalog()
    catalog.learn(ADA, page("a", "b"))
    catalog.learn(ADA, page("b"))
    catalog.learn(EVE, page("c", "d" * 300))
    assert (catalog.knows(ADA, "a"), catalog.knows(EVE, "c"), catalog.knows(EVE, "d" * 300)) == (True, True, False)
    catalog.learn(EVE, page("e"))
    assert (catalog.knows(ADA, "a"), catalog.knows(EVE, "e")) == (False, True)
    catalog.learn(EVE, page("f", "g"))
    assert not catalog.knows(EVE, "f"), "one caller with more than the limit has nothing"
