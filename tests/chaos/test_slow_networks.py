"""Links are long and lossy, or clocks differ by 10 minutes.

Programs, promises and the ledger are those of `test_partitions.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.chaos.hosts import (
    MARKS,
    REPLICAS,
    STALLED_SECONDS,
    TIMEOUTS,
    Stage,
    insist,
    staged,
    within,
)
from tests.chaos.stage import Call
from tests.parts.clients.drive import available, elicit, modern_client

FAKETIME: Final = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)

pytestmark = MARKS


# --- delay and loss ---

FAR: Final = (
    *(("client", "balancer"), ("gw-1", "gw-2"), ("gw-2", "gw-3"), ("gw-1", "gw-3")),
    *((name, "server") for name in REPLICAS),
)
"""All links but those of the balancer to the replicas, which its health checks of a second would take for dead."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far() -> AsyncIterator[Stage]:
    """With default timeouts."""
    async with staged({}) as found:
        yield found


async def test_far_and_lossy_links_cost_time_and_nothing_else(far: Stage) -> None:
    calls = [
        Call(server, tool, f"far {server.name} {tool} {number}")
        for server in (far.plain, far.stored)
        for tool in ("ask_slow", "ask_read")
        for number in range(3)
    ]

    async def attend(call: Call) -> str:
        client = far.through_balancer(call.server)
        answer = await insist(call, client, await call.begin(client), 30)
        return call.outcome(answer)

    with far.net.slow(FAR, delay_seconds=0.15, loss=0.05):
        assert await asyncio.gather(*map(attend, calls)) == ["result"] * len(calls)
    assert sum(far.net.lost.values()) > 0
    assert [(call.runs, call.answers) for call in calls if call.tool == "ask_slow"] == [(1, 1)] * 6
    assert all(call.answers <= call.runs for call in calls)


@pytest.mark.skipif(not available("py"), reason="scripts/parts has not been run")
async def test_a_published_client_is_served_over_far_links(far: Stage) -> None:
    """Without loss: this client does not come again after a 503, which the loss of two packets can cost."""
    name = "published client"
    far_links = far.net.slow(FAR, delay_seconds=0.15, loss=0)
    async with modern_client("py", far.net["client"].prefix) as client:
        with far_links:
            await client.connect(far.c.url)
            answers = [elicit({"action": "accept", "content": {"name": name}})]
            reply = await client.call_tool("ask_slow", {"question": name}, answers=answers)
    call = Call(far.plain, "ask_slow", name)
    assert reply.text == call.result
    assert (call.runs, call.answers) == (1, 1)


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
    assert "compare the clocks and state.keys of both" in told.error["message"]
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
async def test_a_state_from_the_future_asks_its_client_to_come_again(apart: Stage) -> None:
    call = Call(apart.plain, "ask_slow", "come again")
    state = await call.begin(apart.at("gw-3", apart.plain))
    told = await within(STALLED_SECONDS, call.retry(apart.at("gw-1", apart.plain), state))
    assert (told.status, call.outcome(told)) == (503, "owner_stalled")


@pytest.mark.skipif(FAKETIME is None, reason="apt install libfaketime")
async def test_a_state_from_the_future_is_logged_with_its_cause(apart: Stage) -> None:
    refuser = apart.c.replica("gw-2")
    call = Call(apart.plain, "ask_slow", "logged")
    state = await call.begin(apart.at("gw-3", apart.plain))
    _ = await call.retry(apart.at("gw-2", apart.plain), state)
    assert await refuser.metric("mcp_gateway_state_rejected_total", reason="future") == 1
    assert any("clock" in str(line.get("fix")) for line in refuser.log())
