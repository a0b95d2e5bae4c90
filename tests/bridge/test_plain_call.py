"""A call from which nothing but its result comes, and what becomes of it when anything else happens."""

import asyncio
from typing import Any

import pytest

from gateway.bridge import plain_call
from gateway.exchange import results
from gateway.exchange.commands import Timer
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_upstream import FakeUpstream, Turn, event, text
from tests.support.noted_timers import Timers
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually, later, leave


async def warm(client: Client) -> None:
    """Open the session, so that the next call finds it idle."""
    assert (await client.call()).text == "done"


def plain(stand: Stand) -> dict[Any, float]:
    return stand.gateway.downstream.legs.plain


async def test_a_plain_call_has_no_task_and_no_exchange(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    await warm(client)
    go = upstream.waiting_tool()
    call = later(client.call())
    _ = await upstream.saw("tools/call", 2)
    assert stand.busy_tasks() == []
    ((waiting,),) = (plain(stand),)
    assert waiting.driver is None
    go.set()
    assert (await call).text == "done"
    assert waiting.driver is None
    assert stand.sessions("idle") == 1


@pytest.mark.parametrize("side", [False, True], ids=["asked on its stream", "asked on the side stream"])
@pytest.mark.parametrize("is_new", [False, True], ids=["after a plain one", "the first of its session"])
async def test_a_question_makes_it_an_exchange_which_has_no_task_while_it_is_held(
    upstream: FakeUpstream, stand: Stand, client: Client, *, is_new: bool, side: bool
) -> None:
    if not is_new:
        await warm(client)

    async def ask(turn: Turn) -> None:
        answers = [await turn.elicit(name, side=side) for name in ("first", "second")]
        await turn.result(text(",".join(answer["action"] for answer in answers)))

    upstream.tool(ask)
    asked = await client.call()
    for _ in range(2):
        await eventually(lambda: stand.busy_tasks() == [])
        assert stand.held == 1
        asked = await client.answer(asked)
    assert asked.text == "accept,accept"
    assert len(upstream.of("answer")) == 2, "each answer was sent once"
    assert len(upstream.of("tools/call")) == (1 if is_new else 2), "the call was sent once"


async def test_its_result_may_come_on_the_side_stream(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    await warm(client)

    async def aside(turn: Turn) -> None:
        await turn.result(text("aside"), side=True)
        await turn.for_ever()

    upstream.tool(aside)
    assert (await client.call()).text == "aside"
    _ = await asyncio.wait_for(upstream.of("tools/call")[-1].cut.wait(), 5)
    upstream.tool(lambda turn: turn.result(text("next")))
    assert (await client.call()).text == "next"


async def test_a_question_and_the_result_on_the_side_stream_at_once_end_it_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await warm(client)

    async def both(turn: Turn) -> None:
        messages: list[dict[str, Any]] = [{"id": "q", "method": mcp.ROOTS}, {"id": turn.id, "result": text("anyway")}]
        events = [event({"jsonrpc": "2.0", **message}) for message in messages]
        turn.upstream.side(turn.session).put_nowait(b"".join(events))
        await turn.for_ever()

    upstream.tool(both)
    assert (await client.call()).text == "anyway"
    _ = await asyncio.wait_for(upstream.of("tools/call")[-1].cut.wait(), 5)
    await eventually(lambda: stand.busy_tasks() == [])


async def test_a_client_that_leaves_has_it_cancelled_upstream(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await warm(client)
    _ = upstream.waiting_tool()
    call = later(client.call())
    sent = (await upstream.saw("tools/call", 2))[-1]
    await leave(call)
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == sent.body["id"]
    assert not plain(stand)


async def test_an_error_of_the_upstream_is_logged_and_counted_as_of_any_exchange(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await warm(client)
    upstream.tool(lambda turn: turn.error(-32050, "odd"))
    assert (await client.call()).error["code"] == -32603
    assert stand.metric("mcp_gateway_rounds_per_exchange_count") == 1
    assert stand.sessions("idle") == 1


async def test_a_drain_hands_it_over(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 0.05})
    client = stand.client()
    await warm(client)
    go = upstream.waiting_tool()
    call = later(client.call())
    _ = await upstream.saw("tools/call", 2)
    await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), 5)
    assert "shut down" in (await call).error["message"]
    go.set()


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_bug_in_the_translation_ends_it_with_an_error(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch, *, is_plain: bool
) -> None:
    await warm(client)
    if not is_plain:
        upstream.tool(lambda turn: turn.result({"content": [], "_meta": {"a": 1}}))

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(results, "plain_response", broken if is_plain else None)
    monkeypatch.setattr(plain_call, "modern_result", None if is_plain else broken)
    async with asyncio.timeout(5):
        reply = await client.call()
    assert reply.error["code"] == -32603
    assert "ZeroDivision" not in reply.data.decode()
    stand.planted_bugs = 1


async def test_a_call_whose_message_cannot_be_made_gives_its_session_back(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(client)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(plain_call, "legacy_call", broken)
        assert (await client.call()).error["code"] == -32603
    stand.planted_bugs = 1
    assert stand.sessions("idle") == 1


async def test_the_limit_of_its_leg_counts_from_the_beginning_of_the_call(
    upstream: FakeUpstream, begin: Start, timers: Timers
) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.2})
    client = stand.client()
    await warm(client)
    go = upstream.waiting_tool()
    async with client.open("tools/call", {"name": "tool", "arguments": {}}) as response:
        assert await response.content.readuntil(b":\n\n"), "the time of the keep-alive has come"
        (driver,) = stand.gateway.downstream.legs.running
        assert driver.live.deadlines.shared[Timer.LEG].deadline(driver) is None
        (timer,) = [each for each in timers.all if 45 < each[0] < 50]
        assert not timer[1].cancelled(), "a timer of its own, for the rest of the limit"
        go.set()
        assert b"done" in await response.read()
