"""A call that is a task, before a FAKE server that asks in the moment in which the task is made."""

import asyncio
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, TaskCancelled
from gateway.sessions.pool import task_making
from gateway.tasks.legacy_tasks import Ended
from gateway.tasks.task_call import TaskCall
from tests.e2e.wire import ACCEPT, wire
from tests.parts.launch import REPOSITORY
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, text
from tests.support.gateway_process import gateway
from tests.support.stand import Start
from tests.support.task_client import TaskClient
from tests.support.workbench import eventually, later, leave
from tests.tasks.test_live_task import TaskServer, make

FAKE: dict[str, Any] = {
    "command": [sys.executable, "-I", "-S", str(REPOSITORY / "tests" / "support" / "fake_task_stdio.py")],
    "warm": 0,
}


@pytest.mark.processes
@pytest.mark.parametrize("given", [{}, {"impatient": True}, {"first": True}, {"forgets": True}], ids=str)
async def test_a_driven_task_may_ask_as_soon_as_it_is_made(given: dict[str, bool]) -> None:
    async with gateway(FAKE) as gw, wire(gw.url) as client:
        asked = await client.call("hasty", given)
        assert (await client.answer(asked, ACCEPT)).text == "Ann"
        await gw.settled()


@pytest.mark.processes
@pytest.mark.parametrize("given", [{}, {"impatient": True}, {"first": True}, {"forgets": True}], ids=str)
async def test_a_task_of_a_client_may_ask_as_soon_as_it_is_made(given: dict[str, bool]) -> None:
    async with gateway(FAKE) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task("hasty", given)
        asked = await task.until("input_required")
        _ = await task.answer(asked, ACCEPT)
        assert await task.text() == "Ann"


async def test_a_client_that_leaves_while_its_task_is_made_is_no_failure_of_the_server(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def never(turn: Turn) -> None:
        await turn.raw(b"")
        await turn.for_ever()

    stand = await begin(sessions={"quarantine_seconds": 0.05})
    _ = TaskServer(upstream)
    upstream.tool(never)
    client = stand.client()
    _ = await client.post(mcp.TOOLS_LIST)
    calling = later(client.call())
    (making,) = await upstream.saw(mcp.TOOLS_CALL)
    await leave(calling)
    await eventually(making.cut.is_set, "the gateway has given the request up")
    await eventually(lambda: "call" not in stand.tasks(), "its task has ended")
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 0


@pytest.mark.parametrize(("losses", "reason"), [(1, None), (2, "session_lost")])
async def test_a_session_that_is_lost_before_the_task_is_made_is_replaced_once(
    upstream: FakeUpstream, begin: Start, losses: int, reason: str | None
) -> None:
    async def level(turn: Turn) -> None:
        if len(upstream.of(mcp.SET_LEVEL)) <= losses:
            turn.reply(404)
        else:
            await turn.result({})

    TaskServer(upstream).done.set()
    upstream.capabilities["logging"] = {}
    upstream.on(mcp.SET_LEVEL, level)
    upstream.on(mcp.PING, lambda turn: turn.reply(404))
    stand = await begin()
    reply = await stand.client().call(meta={mcp.META_LOG_LEVEL: "info"})
    (message,) = reply.messages
    assert message.get("error", {}).get("data", {}).get("reason") == reason
    assert len(upstream.of(mcp.TOOLS_CALL)) == (reason is None)
    await eventually(lambda: sum(map(stand.sessions, ("idle", "busy", "quarantined"))) == 0, "no session is left")


async def test_no_session_ends_while_a_task_is_made(upstream: FakeUpstream, begin: Start) -> None:
    """`mcp` 1.30 makes no task between the end of any session and the next handshake."""
    go, early = asyncio.Event(), []

    async def slow(turn: Turn) -> None:
        await turn.raw(b"")
        await go.wait()
        await server.make(turn)

    async def end(turn: Turn) -> None:
        early.append(not go.is_set())
        turn.reply()

    stand = await begin()
    server = TaskServer(upstream)
    upstream.on("DELETE", end)
    client = stand.client()
    calls = [later(client.call())]
    await upstream.saw(mcp.TASKS_RESULT)
    upstream.tool(slow)
    calls.append(later(client.call()))
    await upstream.saw(mcp.TOOLS_CALL, 2)
    server.done.set()
    assert (await calls[0]).text == "done"
    for _ in range(3):
        _ = await client.post(mcp.TOOLS_LIST)
    go.set()
    assert (await calls[1]).text == "done"
    await upstream.saw("DELETE", 2)
    assert early == [False, False]


async def test_a_task_that_is_made_keeps_no_session_from_its_end(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_making, "_APART_SECONDS", 2 * DEADLINE)
    stand = await begin()
    server = TaskServer(upstream)
    client = stand.client()
    working = later(client.call())
    await upstream.saw(mcp.TASKS_RESULT)
    upstream.on(mcp.TASKS_RESULT, lambda turn: turn.result(text("done")))
    assert (await client.call()).text == "done"
    await upstream.saw("DELETE")
    server.done.set()
    assert (await working).text == "done"


async def test_a_pool_that_is_closed_ends_its_sessions_though_a_task_is_made(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_making, "_APART_SECONDS", 2 * DEADLINE)
    stand = await begin()
    server = TaskServer(upstream)
    server.done.set()
    go = upstream.holding(mcp.TOOLS_CALL)
    calling = later(stand.client().call())
    await upstream.saw(mcp.TOOLS_CALL)
    for live in stand.gateway.routes.live.values():
        live.upstream.retire()
    (ended,) = await upstream.saw("DELETE")
    assert ended.session != upstream.of(mcp.TOOLS_CALL)[0].session
    go.set()
    assert (await calling).text == "done"


@pytest.mark.parametrize("seconds", [DEADLINE, 0.01])
async def test_a_task_is_made_after_the_ends_of_sessions_that_are_not_slow(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    go, made = asyncio.Event(), []

    async def make(turn: Turn) -> None:
        made.append(go.is_set())
        await server.make(turn)

    async def end(turn: Turn) -> None:
        await go.wait()
        turn.reply()

    monkeypatch.setattr(task_making, "_APART_SECONDS", seconds)
    stand = await begin()
    server = TaskServer(upstream)
    server.done.set()
    upstream.tool(make)
    upstream.on("DELETE", end)
    client = stand.client()
    assert (await client.call()).text == "done"
    await upstream.saw("DELETE")
    calling = later(client.call())
    if seconds < DEADLINE:
        _ = await calling
    for _ in range(3):
        _ = await client.post(mcp.TOOLS_LIST)
    go.set()
    assert (await calling).text == "done"
    assert made == [False, seconds == DEADLINE]


async def open_for_long(turn: Turn) -> None:
    """The server leaves the stream open on which it told the id of the task."""
    await turn.say({"id": turn.id, "result": {"task": {"taskId": "t", "status": "working"}}})
    await turn.for_ever()


async def test_a_client_gets_the_handle_of_its_task_as_soon_as_that_is_made(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin()
    _ = TaskServer(upstream)
    upstream.tool(open_for_long)
    task = await make(stand)
    (making,) = upstream.of(mcp.TOOLS_CALL)
    assert not making.cut.is_set()
    assert (await task.get())["status"] == "working"


async def test_a_client_that_leaves_as_soon_as_its_driven_task_is_made_has_the_task_cancelled(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def in_order(turn: Turn) -> None:
        assert "DELETE" not in upstream.words
        await server.tell(turn)
        server.done.set()

    stand = await begin()
    server = TaskServer(upstream)
    upstream.tool(open_for_long)
    upstream.on(mcp.TASKS_CANCEL, in_order)
    client = stand.client()
    _ = await client.post(mcp.TOOLS_LIST)
    calling = later(client.call())
    (making,) = await upstream.saw(mcp.TOOLS_CALL)
    await upstream.saw(mcp.TASKS_RESULT)
    await leave(calling)
    (cancelled,) = await upstream.saw(mcp.TASKS_CANCEL)
    assert cancelled.session == making.session
    await upstream.saw("DELETE")
    await eventually(lambda: "call" not in stand.tasks(), "the stream is left")
    assert mcp.CANCELLED not in upstream.words


@pytest.mark.parametrize(
    "end",
    [
        on.Resulted(Raw(b"{}")),
        on.Failed(jsonrpc.Error(1)),
        on.Broke(TaskCancelled()),
        CallLost("lost"),
        TimeoutError(),
    ],
    ids=("completed", "failed", "cancelled", "lost", "timeout"),
)
async def test_the_end_of_an_earlier_task_does_not_end_another_run(end: Ended | Exception) -> None:
    class Earlier:
        session = Mock()

        async def run(self, _: object) -> Ended:
            if isinstance(end, Exception):
                raise end
            return end

    class Listener:
        about: Mapping[str, str | None] = MappingProxyType({})

        def hear(self, event: on.Event) -> None:
            pytest.fail(f"heard {event}")

    live = SimpleNamespace(config=SimpleNamespace(tasks=SimpleNamespace(ttl_seconds=1)))
    context: Any = SimpleNamespace(live=live, is_task=False)
    earlier: Any = Earlier()
    await TaskCall(context, Listener())._drive(earlier)
