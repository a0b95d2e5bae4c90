"""The messages that the upstream gets beside a call: cancellations, and answers without the client."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec import Raw

from gateway.bridge import outgoing_messages
from gateway.bridge.outgoing_messages import Outgoing
from gateway.protocol import mcp
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import later
from tests.support.workbench import Client, Stand, eventually, leave


async def test_leaving_in_the_first_round_cancels_at_once_and_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await ended.wait()
        await turn.error(0, "cancelled") if turn.response is None else await turn.result(text("too late"))

    upstream.tool(tool)
    call = later(client.call())
    await upstream.saw("tools/call")
    await leave(call)
    cancelled = (await upstream.saw(mcp.CANCELLED))[0]
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert cancelled.session == upstream.of("tools/call")[0].session
    assert stand.sessions("quarantined") == 1
    assert "DELETE" not in upstream.words, "never under a pending call"
    ended.set()
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("quarantined") == 0)
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_cancellation_that_is_refused_is_sent_again_though_nothing_reads_the_call_any_more(
    upstream: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_messages, "CANCEL_AGAIN_SECONDS", (0.0,))

    async def breaks_off(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await turn.reset()

    upstream.tool(breaks_off)
    upstream.once(mcp.CANCELLED, lambda turn: turn.reply(503))
    assert (await client.call()).error["data"]["reason"] == "call_lost"
    one, other = await upstream.saw(mcp.CANCELLED, 2)
    assert one.body["params"] == other.body["params"]


async def test_a_request_that_no_client_knows_is_method_not_found(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        answer = await turn.ask("tasks/list")
        await turn.result(text(str(answer["error"]["code"])))

    upstream.tool(tool)
    assert (await client.call()).text == "-32601"


async def test_a_message_waits_until_those_before_it_are_sent() -> None:
    tasks, go, sent = Tasks(Metrics("0")), asyncio.Event(), list[str]()
    context: Any = SimpleNamespace(live=SimpleNamespace(process=SimpleNamespace(tasks=tasks)), headers={})
    outgoing = Outgoing(context)

    async def answer() -> None:
        _ = await go.wait()
        sent.append("answer")

    async def other() -> None:
        sent.append("other")

    outgoing.put(answer)
    outgoing.put(other)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (sent, outgoing.is_sending) == ([], True)
    go.set()
    await tasks.settle(60)
    assert (sent, outgoing.is_sending) == (["answer", "other"], False)


async def test_a_flood_of_questions_is_not_answered_without_end() -> None:
    tasks, go = Tasks(Metrics("0")), asyncio.Event()
    context: Any = SimpleNamespace(live=SimpleNamespace(process=SimpleNamespace(tasks=tasks)), headers={})
    outgoing, session = Outgoing(context), AsyncMock()

    async def answer(*_: object) -> None:
        await go.wait()

    session.answer.side_effect = answer
    for _ in range(1_000):
        outgoing.respond(session, Raw(b"1"), Raw(b"{}"))
    go.set()
    await tasks.settle(60)
    assert session.answer.await_count == 256


async def test_a_held_call_that_is_left_frees_its_session_at_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    closed = asyncio.Event()

    async def tool(turn: Turn) -> None:
        try:
            _ = await turn.elicit("name")
        finally:
            closed.set()

    upstream.tool(tool)
    _ = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    (session,) = stand.group().sessions
    assert session.in_flight is not None
    session.leave(session.in_flight)
    assert not session.pending, "no task would notice later"
    await closed.wait()
    driver.expire()
