"""Links are long and lossy, processes stand still, and clocks differ by 10 minutes.

Programs, promises and the ledger are those of `test_partitions.py`.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.chaos.hosts import (
    MARKS,
    REPLICAS,
    STALLED_SECONDS,
    TIMEOUTS,
    UNREACHABLE_SECONDS,
    Stage,
    insist,
    open_gate,
    spawn,
    staged,
    within,
)
from tests.chaos.stage import Call, Gate
from tests.e2e.wire import Wire
from tests.parts.clients.drive import available, elicit, modern_client

FAKETIME: Final = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)

pytestmark = MARKS


# --- delay and loss ---


async def test_far_and_lossy_links_cost_time_and_nothing_else() -> None:
    """300 ms for a round trip and 5 % loss, with default timeouts, between all hosts but balancer and replicas."""
    far = [("client", "balancer"), *((name, "server") for name in REPLICAS)]
    far += [("gw-1", "gw-2"), ("gw-2", "gw-3"), ("gw-1", "gw-3")]
    async with staged({}) as stage:
        calls = [
            Call(server, tool, f"far {server.name} {tool} {number}")
            for server in (stage.plain, stage.stored)
            for tool in ("ask_slow", "ask_read")
            for number in range(4)
        ]

        async def attend(call: Call) -> str:
            client = stage.through_balancer(call.server)
            answer = await insist(call, client, await call.begin(client), 30)
            return call.outcome(answer)

        with stage.net.slow(far, delay_seconds=0.15, loss=0.05):
            assert await asyncio.gather(*map(attend, calls)) == ["result"] * len(calls)
            assert sum(stage.net.lost.values()) > 0
        assert [(call.runs, call.answers) for call in calls if call.tool == "ask_slow"] == [(1, 1)] * 8
        assert all(call.answers <= call.runs for call in calls)


@pytest.mark.skipif(not available("py"), reason="scripts/parts has not been run")
async def test_a_published_client_is_served_over_far_and_lossy_links(stage: Stage) -> None:
    far = [("client", "balancer"), *((name, "server") for name in REPLICAS)]
    async with modern_client("py", stage.net["client"].prefix) as client:
        with stage.net.slow(far, delay_seconds=0.15, loss=0.05):
            await client.connect(stage.c.url)
            name = "published client"
            answers = [elicit({"action": "accept", "content": {"name": name}})]
            reply = await client.call_tool("ask_slow", {"question": name}, answers=answers)
        call = Call(stage.plain, "ask_slow", name)
        assert reply.text == call.result
        assert (call.runs, call.answers) == (1, 1)


# --- processes that stand still ---


async def test_a_stopped_owner_behind_the_balancer_costs_its_clients_time_only(stage: Stage) -> None:
    calls = [Call(stage.plain, "ask_slow", f"owner stopped {number}") for number in range(3)]
    owner = stage.c.replica("gw-1")
    states = [await call.begin(stage.at("gw-1", stage.plain)) for call in calls]
    owner.stop()
    for name in ("gw-2", "gw-3"):
        told = await within(STALLED_SECONDS, calls[0].retry(stage.at(name, stage.plain), states[0]))
        assert (told.status, calls[0].outcome(told)) == (503, "owner_stalled")
    retried = [spawn(insist(call, stage.client, state)) for call, state in zip(calls, states, strict=True)]
    owner.cont()
    told_all = await asyncio.gather(*retried)
    assert [call.outcome(told) for call, told in zip(calls, told_all, strict=True)] == ["result"] * 3
    assert [(call.runs, call.answers) for call in calls] == [(1, 1)] * 3


async def test_a_stopped_server_behind_all_of_it_is_named_in_time(stage: Stage) -> None:
    call = Call(stage.plain, "ask_slow", "server stopped")
    state = await call.begin(stage.client)
    stage.plain.send(signal.SIGSTOP)
    try:
        unheard = spawn(within(UNREACHABLE_SECONDS, fresh(stage).call("echo", {"text": "x"})))
        lost = await within(TIMEOUTS["answer_seconds"] + 4, insist(call, stage.client, state))
        assert call.outcome(lost) == "call_lost"
        assert (await unheard).error["data"]["reason"] == "upstream_unreachable"
    finally:
        stage.plain.send(signal.SIGCONT)
    assert (await stage.client.call("echo", {"text": "on"})).text == "on"
    assert call.runs == 1
    assert call.answers <= 1


def fresh(stage: Stage) -> Wire:
    """A caller that has no session yet."""
    return stage.client.on(Authorization="Bearer nobody-was-here-before")


async def test_a_stopped_balancer_has_lost_nothing_when_it_goes_on(stage: Stage, tmp_path: Path) -> None:
    working, parked = (
        Call(stage.plain, "ask_slow", f"balancer stopped, {kind}", after=Gate(tmp_path / kind))
        for kind in ("working", "parked")
    )
    states = [await call.begin(stage.client) for call in (working, parked)]
    waiting = spawn(working.retry(stage.client, states[0]))
    await working.answered()
    stage.c.balancer.send(signal.SIGSTOP)
    try:
        for call in (working, parked):
            open_gate(call)
        await working.ended("finished")
        with suppress(TimeoutError):  # nobody can answer: the client gives up, and comes back later
            async with asyncio.timeout(0.3):
                await parked.retry(stage.client, states[1])
    finally:
        stage.c.balancer.send(signal.SIGCONT)
    assert working.outcome(await within(5, waiting)) == "result"
    assert parked.outcome(await insist(parked, stage.client, states[1])) == "result"
    assert [(call.runs, call.answers) for call in (working, parked)] == [(1, 1)] * 2


# --- clocks ---


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart() -> AsyncIterator[Stage]:
    """The clock of gw-3 is 10 minutes ahead, and states live longer than that."""
    assert FAKETIME is not None
    ahead = ("env", f"LD_PRELOAD={FAKETIME}", "FAKETIME=+600", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    long = {"hold": {"ttl_seconds": 3000}, "state": {"ttl_seconds": 3000}, "timeouts": TIMEOUTS}
    async with staged(long, {"gw-3": ahead}) as found:
        yield found


@pytest.mark.skipif(FAKETIME is None, reason="apt install libfaketime")
@pytest.mark.parametrize(
    ("server", "tool"), [("py130", "ask_slow"), ("py130", "ask_read"), ("py130-store", "ask_slow")]
)
async def test_a_replica_whose_clock_is_ahead_leaves_the_calls_of_others_alone(
    apart: Stage, server: str, tool: str
) -> None:
    """The owner refuses its requests, which proves that the owner lives: the call is neither resumed nor replayed."""
    call = Call(apart.of(server), tool, f"ahead {server} {tool}")
    state = await call.begin(apart.at("gw-1", call.server))
    told = await within(STALLED_SECONDS, call.retry(apart.at("gw-3", call.server), state))
    assert (told.status, call.outcome(told)) == (503, "owner_stalled")
    assert "do clocks and state.keys of both agree?" in told.error["message"]
    assert call.outcome(await call.retry(apart.at("gw-2", call.server), state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


@pytest.mark.skipif(FAKETIME is None, reason="apt install libfaketime")
async def test_a_refused_state_from_the_future_harms_no_call(apart: Stage) -> None:
    call = Call(apart.plain, "ask_slow", "from the future")
    state = await call.begin(apart.at("gw-3", apart.plain))
    told = await within(STALLED_SECONDS, call.retry(apart.at("gw-1", apart.plain), state))
    assert "error" in told.final
    assert (call.runs, call.answers) == (1, 0)
    assert call.outcome(await call.retry(apart.at("gw-3", apart.plain), state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


@pytest.mark.skipif(FAKETIME is None, reason="apt install libfaketime")
@pytest.mark.xfail(
    strict=True,
    reason="decision 7 promises 503 owner_stalled, but a state that is more than 60 s from the future gets 400 "
    "invalid_request_state, which no client retries: the user's answer is lost although the call still waits",
)
async def test_a_state_from_the_future_asks_its_client_to_come_again(apart: Stage) -> None:
    call = Call(apart.plain, "ask_slow", "come again")
    state = await call.begin(apart.at("gw-3", apart.plain))
    told = await within(STALLED_SECONDS, call.retry(apart.at("gw-1", apart.plain), state))
    assert (told.status, call.outcome(told)) == (503, "owner_stalled")


@pytest.mark.skipif(FAKETIME is None, reason="apt install libfaketime")
@pytest.mark.xfail(
    strict=True,
    reason="a state from the future proves that two clocks differ, but only a metric counts it: no log line names it",
)
async def test_a_state_from_the_future_is_logged_with_its_cause(apart: Stage) -> None:
    refuser = apart.c.replica("gw-2")
    call = Call(apart.plain, "ask_slow", "logged")
    state = await call.begin(apart.at("gw-3", apart.plain))
    _ = await call.retry(apart.at("gw-2", apart.plain), state)
    assert await refuser.metric("mcp_gateway_state_rejected_total", reason="future") == 1
    assert any("clock" in str(line.get("fix")) for line in refuser.log())
