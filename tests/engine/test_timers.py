"""The times of one exchange: the quiet window, the limit of a leg, grace, expiry, linger."""

import asyncio
import json

import pytest

from gateway import world
from gateway.exchange.commands import Timer
from gateway.protocol import mcp
from gateway.runtime.coarse_timer import TICK_SECONDS
from tests.support.fake_upstream import SAMPLE, FakeUpstream, Turn, ask, gives_up, text, waits
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Client, Stand, eventually, later, leave


async def test_each_question_starts_the_quiet_window_anew(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"quiet_seconds": 5})
    more, ends = asyncio.Event(), list[float]()

    async def tool(turn: Turn) -> None:
        first = asyncio.ensure_future(turn.elicit())
        await more.wait()
        await turn.ask(mcp.ROOTS)
        await first

    upstream.tool(tool)
    waiting = later(stand.client().call())
    for count in (1, 2):
        await eventually(
            lambda count=count: (
                [len(each.glance(0.0).asked) for each in stand.gateway.downstream.legs.running] == [count]
            )
        )  # type: ignore[misc]
        (driver,) = stand.gateway.downstream.legs.running
        ends.append(driver.live.deadlines.shared[Timer.QUIET].deadline(driver) or 0.0)
        more.set()
    assert 0 < ends[0] < ends[1]
    await leave(waiting)


async def test_a_long_leg_ends_with_a_state_only_round_at_most_so_many_times(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(legs={"limit_seconds": 0.03, "rounds": 2})
    client, go = stand.client(), asyncio.Event()
    upstream.tool(waits(go, "slow"))
    reply = await client.call()
    assert reply.questions == {}
    reply = await client.call(state=reply.state)
    assert reply.questions == {}
    waiting = later(client.call(state=reply.state))
    await eventually(lambda: stand.held == 0)
    _ = await asyncio.wait((waiting,), timeout=0.1)
    assert not waiting.done(), "the third leg is kept open"
    go.set()
    assert (await waiting).text == "slow"
    assert len(upstream.of("tools/call")) == 1


async def test_a_retry_that_is_not_repeated_is_cancelled_after_grace(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    gate = Gate(upstream)
    asked = await client.call()
    first = later(client.answer(asked))
    await gate.answered.wait()
    await leave(first)
    await upstream.saw(mcp.CANCELLED)
    gate.go.set()
    await eventually(lambda: not stand.busy_tasks())
    reply = await client.answer(asked)
    assert reply.outcome == (400, -32602, "invalid_request_state")
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_result_is_kept_for_the_linger_time_only(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"linger_seconds": 0.05})
    client = stand.client()
    upstream.tool(ask)
    asked = await client.call()
    await client.answer(asked)
    await eventually(lambda: not list(stand.gateway.lot))
    assert (await client.answer(asked)).outcome == (400, -32602, "invalid_request_state")
    assert stand.metric("mcp_gateway_state_rejected_total", reason="ended") == 1


@pytest.mark.parametrize(
    ("jump", "reason", "outcome"),
    [(600, "expired", (400, -32602, "invalid_request_state")), (-600, "future", (503, -32603, "owner_stalled"))],
)
async def test_a_clock_that_jumps_ends_no_held_call(
    upstream: FakeUpstream,
    begin: Start,
    monkeypatch: pytest.MonkeyPatch,
    jump: float,
    reason: str,
    outcome: tuple[int, int, str],
) -> None:
    """Deadlines use the monotonic clock. A state looks too old or too new until the clock is right again."""
    stand = await begin(hold={"ttl_seconds": 300})
    client = stand.client()
    upstream.tool(ask)
    asked = await client.call()
    now = world.wall
    with monkeypatch.context() as clock:
        clock.setattr(world, "wall", lambda: now() + jump)
        assert (await client.answer(asked)).outcome == outcome
        assert stand.metric("mcp_gateway_state_rejected_total", reason=reason) == 1
        await asyncio.sleep(2 * TICK_SECONDS)  # the timers of this event loop that are due before it have rung
    assert stand.held == 1
    assert json.loads((await client.answer(asked)).text) == ACCEPT


@pytest.mark.parametrize("section", ["hold", "state"])
async def test_an_abandoned_call_is_settled_cancelled_and_freed(
    upstream: FakeUpstream, begin: Start, section: str
) -> None:
    stand = await begin(**{section: {"ttl_seconds": 0.2}})
    client = stand.client()
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await asyncio.gather(turn.elicit("q"), turn.ask(mcp.SAMPLE, SAMPLE), turn.ask(mcp.ROOTS))
        await ended.wait()
        await turn.result(text("nobody hears this"))

    upstream.tool(tool)
    asked = await client.call()
    assert stand.held == 1
    answers = {seen.body["id"]: seen.body for seen in await upstream.saw("answer", 3)}
    by_method = {q["method"]: answers[number] for number, q in enumerate(asked.questions.values())}
    assert by_method[mcp.ELICIT]["result"] == {"action": "cancel"}
    assert by_method[mcp.SAMPLE]["error"]["code"] == -32603
    assert by_method[mcp.ROOTS]["error"]["code"] == -32603
    assert len(await upstream.saw(mcp.CANCELLED)) == 1
    assert (stand.held, len(stand.gateway.lot)) == (0, 0)
    assert stand.sessions("quarantined") == 1
    ended.set()
    await upstream.saw("DELETE")
    reply = await client.answer(asked, ACCEPT)
    assert reply.outcome == (400, -32602, "invalid_request_state")
    assert stand.nested(mcp.ELICIT, "expired") == 1


async def test_a_finished_call_whose_client_does_not_return_is_forgotten(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"ttl_seconds": 0.2})
    go = asyncio.Event()
    upstream.tool(gives_up(go, lambda turn: turn.result(text("done"))))
    await stand.client().call()
    go.set()
    await eventually(lambda: not list(stand.gateway.lot))
    assert mcp.CANCELLED not in upstream.words


async def test_a_held_call_expires_no_more_once_it_is_answered(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    gate = Gate(upstream)
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()

    def running() -> list[Timer]:
        return [timer for timer, shared in driver.live.deadlines.shared.items() if shared.deadline(driver) is not None]

    assert running() == [Timer.TTL]
    retry = later(client.answer(asked))
    await gate.answered.wait()
    assert running() == [Timer.LEG]
    gate.go.set()
    assert (await retry).text == "done"
    assert running() == [Timer.LINGER]
