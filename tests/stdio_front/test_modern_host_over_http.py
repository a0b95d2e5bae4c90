"""A modern host before a modern server over HTTP, which is a fake."""

import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.config import InForce
from gateway.protocol import mcp
from gateway.runtime.budget import Budget
from gateway.stdio_front.modern_host import ModernHost
from tests.mirror.conftest import Begin, begin, server
from tests.support import workbench
from tests.support.fake_modern import Call, FakeModern, Json
from tests.support.fake_upstream import FakeUpstream, text
from tests.support.host import call, modern
from tests.support.stand import at_rest, leaving_nothing
from tests.support.workbench import Stand, eventually
from tests.tasks.test_live_task import TaskServer

__all__ = ["begin", "server"]

ARGUMENT = {"type": "string", "x-mcp-header": "City"}
TOOL = {"name": "t", "inputSchema": {"type": "object", "properties": {"city": ARGUMENT}}}


class Lines:
    """The host's end: what it was sent."""

    def __init__(self, stand: Stand) -> None:
        self.got: list[Json] = []
        self.stand = stand
        budget = Budget("limits.sending_bytes", InForce(1 << 20))
        host = Mock(write=self._write, share_unread=lambda: budget.share(Mock()))
        self.modern = ModernHost(host, stand.gateway.downstream, stand.gateway.routes.live["/mcp"])

    async def _write(self, line: bytes) -> None:
        self.got.append(json.loads(line))

    def says(self, message: Json) -> None:
        self.modern.receive(json.dumps(message).encode())

    async def asks(self, message: Json) -> Json:
        self.says(message)
        await eventually(lambda: any(each.get("id") == message["id"] for each in self.got))
        return next(each for each in self.got if each.get("id") == message["id"])


@pytest.fixture
async def lines(begin: Begin) -> AsyncIterator[Lines]:
    found = Lines(await begin(route={"era": "auto"}))
    yield found
    found.modern.close()


def called(server: FakeModern) -> list[Any]:
    """The header of each call that repeats the argument."""
    found = zip(server.requests, server.headers, strict=True)
    return [headers.get("Mcp-Param-City") for body, headers in found if body["method"] == mcp.TOOLS_CALL]


async def test_what_a_server_wants_repeated_in_headers_is_repeated_for_a_host(
    lines: Lines, server: FakeModern
) -> None:
    server.listed, server.tools["t"] = [TOOL], lambda call: call.text("done")
    assert "done" in str(await lines.asks(call("t", 1, city="Bern")))
    assert "done" in str(await lines.asks(call("t", 2, city="Rome")))
    assert (called(server), len(server.of(mcp.TOOLS_LIST))) == (["Bern", "Rome"], 1)


async def test_a_tool_that_has_changed_is_listed_again_for_the_next_call(lines: Lines, server: FakeModern) -> None:
    def tool(call: Call) -> Json:
        is_good = not server.listed or "Mcp-Param-City" in call.headers
        return call.text("done") if is_good else call.error(mcp.HEADER_MISMATCH, "a header is missing")

    server.tools["t"] = tool
    assert "done" in str(await lines.asks(call("t", 1, city="Bern")))
    server.listed = [TOOL]
    assert (await lines.asks(call("t", 2, city="Bern")))["error"]["code"] == mcp.HEADER_MISMATCH
    assert "done" in str(await lines.asks(call("t", 3, city="Bern")))
    assert called(server) == [None, None, "Bern"]


async def test_a_server_that_wants_the_id_of_a_request_gets_it_for_a_host(begin: Begin, server: FakeModern) -> None:
    server.tools["t"] = lambda call: call.text("done")
    host = Lines(await begin(route={"era": "auto", "upstream": {"url": server.url, "request_id_header": "X-Id"}}))
    for number in (1, 2):
        assert "done" in str(await host.asks(call("t", number)))
    host.modern.close()
    ids = [headers.get("X-Id") for headers in server.headers]
    assert None not in ids
    assert len(set(ids)) == 2


async def test_a_subscription_of_a_host_stays_open(lines: Lines, server: FakeModern) -> None:
    listen = modern(mcp.LISTEN, 1, notifications={"toolsListChanged": True, "resourceSubscriptions": []})
    lines.says(listen)
    await eventually(lambda: server.listeners)
    await server.listeners[0]({"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED})
    await eventually(lambda: len(lines.got) == 2)
    assert [each["method"] for each in lines.got] == [mcp.ACKNOWLEDGED, mcp.TOOLS_CHANGED]
    assert not lines.modern.is_busy


async def test_a_server_that_cannot_be_reached_is_an_error_of_the_request(lines: Lines, server: FakeModern) -> None:
    server.tools["t"] = lambda call: call.text("done")
    assert "done" in str(await lines.asks(call("t", 1)))
    await server.close()
    assert (await lines.asks(call("t", 2)))["error"]["data"]["reason"] == "upstream_unreachable"
    failures = "mcp_gateway_upstream_errors_total"
    assert lines.stand.metric(failures, kind="upstream_unreachable") == 1


async def test_a_tool_that_must_run_as_a_task_does_so_before_its_host_has_listed_the_tools() -> None:
    upstream = FakeUpstream()
    server = TaskServer(upstream)
    server.done.set()
    await upstream.start()
    async with leaving_nothing(at_rest, upstream) as (http, stands):
        stands.append(await workbench.start(upstream.url, http))
        host = Lines(stands[0])
        assert (await host.asks(call("tool", 1)))["result"]["content"] == text("done")["content"]
        host.modern.close()
    (made,) = upstream.of(mcp.TOOLS_CALL)
    assert "task" in made.body["params"]


async def test_a_legacy_server_of_unknown_era_is_asked_until_it_has_served_a_session() -> None:
    upstream = FakeUpstream()
    upstream.on(mcp.DISCOVER, lambda turn: turn.reply(500))
    upstream.tool(lambda turn: turn.result(text("done")))
    await upstream.start()
    async with leaving_nothing(at_rest, upstream) as (http, stands):
        stands.append(await workbench.start(upstream.url, http, route={"era": "auto"}))
        host = Lines(stands[0])
        for number in range(3):
            assert "done" in str(await host.asks(call("t", number)))
        host.modern.close()
        assert len(upstream.probes) == 1
