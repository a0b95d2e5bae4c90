"""The network between replicas, legacy server, balancer and client loses packets, or one of them stands still.

Each program has a network namespace of its own (`tests/support/network.py`). Whatever is cut, each request of a client
ends within its documented bound, with its result or with an error, and the ledger says that nothing ran twice but what
may, that no run was answered twice, and that no call got another call's answer.
"""

import asyncio
import json
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import pytest

from gateway.protocol import sse
from tests.chaos.hosts import (
    BUSY_SECONDS,
    MARKS,
    REPLICAS,
    SERVERS,
    SILENT_SECONDS,
    STALLED_SECONDS,
    TIMEOUTS,
    UNREACHABLE_SECONDS,
    Stage,
    insist,
    open_gate,
    spawn,
    within,
)
from tests.chaos.stage import Call, Gate, accept
from tests.e2e.wire import Wire
from tests.support.network import Network, Way

BROKEN: Final = (aiohttp.ClientError, json.JSONDecodeError)
"""What a client sees of a connection that breaks; the balancer says it with a page of HTML."""
CALL_SECONDS: Final = 30.0
ENDS: Final = {
    *("result", "call_lost", "session_lost", "upstream_unreachable"),
    *(exception.__name__ for exception in (aiohttp.ServerDisconnectedError, json.JSONDecodeError)),
}
"""How a call may end whose network fails, if no process died."""
LINKS: Final = (
    *(("gw-1", "gw-2"), ("gw-1", "gw-3"), ("gw-2", "gw-3")),
    *((name, other) for name in REPLICAS for other in ("server", "balancer")),
)


pytestmark = MARKS


# --- between replicas ---


async def test_a_cut_between_two_replicas_is_the_trouble_of_one_retry_only(stage: Stage) -> None:
    """The third replica reaches the owner, so the call is not taken over, and every other way serves the retry."""
    call = Call(stage.stored, "ask_slow", "cut between two")
    state = await call.begin(stage.at("gw-1", stage.stored))
    with stage.net.cut("gw-1", "gw-2"):
        told = await within(STALLED_SECONDS, call.retry(stage.at("gw-2", stage.stored), state))
        assert (told.status, call.outcome(told)) == (503, "owner_stalled")
        assert call.answers == 0
        assert call.outcome(await insist(call, stage.at("gw-3", stage.stored), state)) == "result"
    assert call.outcome(await insist(call, stage.at("gw-2", stage.stored), state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


async def test_an_isolated_owner_still_serves_its_own_clients(stage: Stage) -> None:
    """It cannot be told from a dead one, but its call has no event ids, so the other replicas leave it alone."""
    call = Call(stage.plain, "ask_slow", "isolated owner")
    state = await call.begin(stage.at("gw-2", stage.plain))
    with stage.net.cut("gw-2", "gw-1", "gw-3"):
        for name in ("gw-1", "gw-3"):
            told = await within(STALLED_SECONDS, call.retry(stage.at(name, stage.plain), state))
            assert (told.status, call.outcome(told)) == (503, "owner_stalled")
        assert call.outcome(await call.retry(stage.at("gw-2", stage.plain), state)) == "result"
    assert call.outcome(await insist(call, stage.at("gw-1", stage.plain), state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


async def test_both_sides_of_a_partition_answer_a_call_once(stage: Stage) -> None:
    """The owner and a replica that resumed the call both have its stream: each client gets the one result."""
    call = Call(stage.stored, "ask_slow", "both sides")
    state = await call.begin(stage.at("gw-3", stage.stored))
    with stage.net.cut("gw-3", "gw-1", "gw-2"):
        sides = (insist(call, stage.at(name, stage.stored), state) for name in ("gw-1", "gw-3"))
        told = await asyncio.gather(*sides)
        assert "result" in [call.outcome(answer) for answer in told]
    assert call.outcome(await insist(call, stage.at("gw-2", stage.stored), state)) == "result"
    assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])


@pytest.mark.parametrize("lost", ["requests", "replies"])
async def test_a_one_way_cut_under_an_open_connection_loses_no_answer(stage: Stage, lost: str) -> None:
    """The other direction works: a request may arrive whose reply does not, and must then not run again."""
    first, second = (Call(stage.plain, "ask_slow", f"{lost} lost {number}") for number in (1, 2))
    owner, other = stage.at("gw-1", stage.plain), stage.at("gw-3", stage.plain)
    states = [await call.begin(owner) for call in (first, second)]
    assert first.outcome(await first.retry(other, states[0])) == "result"  # over a connection that is kept
    way = ("gw-3", "gw-1") if lost == "requests" else ("gw-1", "gw-3")
    with stage.net.cut_one_way(*way):
        told = await within(STALLED_SECONDS, second.retry(other, states[1]))
        assert (told.status, second.outcome(told)) == (503, "owner_stalled")
        assert second.outcome(await insist(second, stage.at("gw-2", stage.plain), states[1])) == "result"
    assert second.outcome(await insist(second, other, states[1])) == "result"
    assert (second.runs, second.answers) == (1, 1)


async def test_a_replica_without_a_route_to_the_owner_blames_itself(stage: Stage) -> None:
    """Its kernel refuses to send: that says nothing about the owner, whose call is neither resumed nor replayed."""
    calls = [
        Call(stage.stored, "ask_slow", "no route, resumable"),
        Call(stage.plain, "ask_read", "no route, repeatable"),
    ]
    states = [await call.begin(stage.at("gw-1", call.server)) for call in calls]
    with stage.net.unreachable("gw-2", "gw-1", "gw-3"):
        for call, state in zip(calls, states, strict=True):
            told = await within(STALLED_SECONDS, call.retry(stage.at("gw-2", call.server), state))
            assert (told.status, call.outcome(told)) == (503, "owner_stalled")
            assert (call.runs, call.answers) == (1, 0)
    for call, state in zip(calls, states, strict=True):
        assert call.outcome(await insist(call, stage.at("gw-2", call.server), state)) == "result"
        assert (call.runs, call.answers) == (1, 1)


async def test_a_replica_cut_off_from_all_others_takes_no_call_over(stage: Stage) -> None:
    """It is on the small side of the partition: nobody confirms to it that the owner is silent."""
    calls = [Call(stage.stored, "ask_slow", "alone, resumable"), Call(stage.plain, "ask_read", "alone, repeatable")]
    states = [await call.begin(stage.at("gw-2", call.server)) for call in calls]
    with stage.net.cut("gw-3", "gw-1", "gw-2"):
        for call, state in zip(calls, states, strict=True):
            told = await within(STALLED_SECONDS, call.retry(stage.at("gw-3", call.server), state))
            assert (told.status, call.outcome(told)) == (503, "owner_stalled")
            assert (call.runs, call.answers) == (1, 0)
            assert call.outcome(await insist(call, stage.at("gw-1", call.server), state)) == "result"
            assert (call.runs, call.answers) == (1, 1)


# --- in the middle of an answer ---


async def rest(reply: aiohttp.ClientResponse) -> list[Any]:
    """The messages of an SSE stream up to its end."""
    return [json.loads(line.removeprefix(b"data: ")) async for line in reply.content if line.startswith(b"data: ")]


@pytest.mark.parametrize("ways", ["both ways", "one way"])
async def test_a_cut_in_the_middle_of_a_relayed_answer(stage: Stage, tmp_path: Path, ways: str) -> None:
    call = Call(stage.plain, "ask_slow", f"mid-answer {ways}", after=Gate(tmp_path / "after"))
    state = await call.begin(stage.at("gw-1", stage.plain))
    relay = stage.at("gw-2", stage.plain)
    options: dict[str, Any] = {"state": state, "answers": accept(call.name)}
    async with relay.open(call.tool, call.arguments, **options) as reply:
        assert await reply.content.readany() == sse.KEEP_ALIVE
        with stage.net.cut("gw-1", "gw-2") if ways == "both ways" else stage.net.cut_one_way("gw-1", "gw-2"):
            async with asyncio.timeout(SILENT_SECONDS):
                (message,) = await rest(reply)
            assert message["error"]["data"]["reason"] == "owner_stalled"
            again = spawn(insist(call, stage.at("gw-3", stage.plain), state))
            open_gate(call)
            assert call.outcome(await again) == "result"
    assert (call.runs, call.answers) == (1, 1)


async def test_a_client_that_the_network_takes_away_in_the_middle_of_its_answer(stage: Stage, tmp_path: Path) -> None:
    """No packet says that it is gone; it comes back over a new connection and gets the result of the one run."""
    call = Call(stage.plain, "ask_slow", "client gone", after=Gate(tmp_path / "after"))
    state = await call.begin(stage.client)
    options: dict[str, Any] = {"state": state, "answers": accept(call.name)}
    async with stage.client.open(call.tool, call.arguments, **options) as reply:
        assert await reply.content.readany() == sse.KEEP_ALIVE
        with stage.net.cut("client", "balancer"):
            reply.close()
            await stage.net.loses(("client", "balancer"))
            open_gate(call)
            await call.ended("finished")
        assert call.outcome(await insist(call, stage.client, state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


# --- the legacy server ---


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("ways", ["both ways", "only replies"])
async def test_answers_that_cannot_be_sent_go_out_with_the_same_retry_later(
    stage: Stage, server: str, ways: str
) -> None:
    """Without the server's packets no connection opens, so nothing of the answers is sent."""
    call = Call(stage.of(server), "ask_slow", f"unheard {server} {ways}")
    owner = stage.at("gw-1", call.server)
    state = await call.begin(owner)
    net = stage.net
    with net.cut("gw-1", "server") if ways == "both ways" else net.cut_one_way("server", "gw-1"):
        told = await within(TIMEOUTS["answer_seconds"] + BUSY_SECONDS, call.retry(owner, state))
        assert call.outcome(told) == "upstream_unreachable"
        assert "The answers were not sent" in told.error["message"]
        assert (call.runs, call.answers) == (1, 0)
    assert call.outcome(await insist(call, stage.at("gw-3", call.server), state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_server_that_the_network_takes_away_while_its_tool_works(
    stage: Stage, server: str, tmp_path: Path
) -> None:
    """The silence is noticed after one to two times idle_seconds."""
    call = Call(stage.of(server), "ask_slow", f"away {server}", after=Gate(tmp_path / "after"))
    owner = stage.at("gw-2", call.server)
    state = await call.begin(owner)
    retried = spawn(call.retry(owner, state))
    await call.answered()
    with stage.net.cut("gw-2", "server"):
        open_gate(call)
        told = await within(2 * TIMEOUTS["idle_seconds"] + BUSY_SECONDS, retried)
        assert call.outcome(told) == "call_lost"
        assert "may have had effects" in told.error["message"]
    assert (call.runs, call.answers) == (1, 1)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_server_that_is_back_in_time_has_lost_nothing(stage: Stage, server: str, tmp_path: Path) -> None:
    call = Call(stage.of(server), "ask_slow", f"back {server}", after=Gate(tmp_path / "after"))
    owner = stage.at("gw-3", call.server)
    state = await call.begin(owner)
    retried = spawn(call.retry(owner, state))
    await call.answered()
    with stage.net.cut("gw-3", "server"):
        open_gate(call)
        await stage.net.loses(("server", "gw-3"), packets=2)
    assert call.outcome(await within(2 * TIMEOUTS["idle_seconds"] + BUSY_SECONDS, retried)) == "result"
    assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])


async def test_a_server_out_of_reach_is_named_in_time(stage: Stage) -> None:
    with stage.net.cut("server", *REPLICAS):
        told = await within(UNREACHABLE_SECONDS, stage.client.call("echo", {"text": "x"}))
        assert told.error["data"]["reason"] == "upstream_unreachable"
    assert (await stage.client.call("echo", {"text": "y"})).text == "y"


async def test_a_replica_that_cannot_reach_the_server_still_forwards_retries(stage: Stage) -> None:
    call = Call(stage.plain, "ask_slow", "server reached by two")
    state = await call.begin(stage.at("gw-1", stage.plain))
    cut_off = stage.at("gw-3", stage.plain)
    with stage.net.cut("gw-3", "server"):
        told = await within(UNREACHABLE_SECONDS, cut_off.call("echo", {"text": "x"}))
        assert told.error["data"]["reason"] == "upstream_unreachable"
        assert call.outcome(await insist(call, cut_off, state)) == "result"
    assert (call.runs, call.answers) == (1, 1)


# --- the balancer ---


async def test_a_balancer_that_loses_a_replica_serves_its_calls_through_the_others(stage: Stage) -> None:
    calls = [Call(stage.plain, "ask_slow", f"balanced {number}") for number in range(6)]
    states = [await call.begin(stage.client) for call in calls]
    with stage.net.cut("balancer", "gw-1"):
        # HAProxy opens a connection within 2 s (`timeout connect`), else it takes the next replica.
        told = await asyncio.gather(
            *(insist(call, stage.client, state) for call, state in zip(calls, states, strict=True))
        )
    assert [call.outcome(answer) for call, answer in zip(calls, told, strict=True)] == ["result"] * 6
    assert [(call.runs, call.answers) for call in calls] == [(1, 1)] * 6


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
        lost = await within(TIMEOUTS["answer_seconds"] + BUSY_SECONDS, insist(call, stage.client, state))
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
    assert working.outcome(await within(BUSY_SECONDS, waiting)) == "result"
    assert parked.outcome(await insist(parked, stage.client, states[1])) == "result"
    assert [(call.runs, call.answers) for call in (working, parked)] == [(1, 1)] * 2


# --- all of it ---


async def attend(call: Call, client: Wire) -> str:
    """Make a call, and come again with its answer until it has an end: which one."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            first = await client.call(call.tool, call.arguments)
    except BROKEN as exc:
        return type(exc).__name__  # in the first round there is no state to come again with
    if "error" in first.final:
        return call.outcome(first)
    while True:
        with suppress(*BROKEN):
            return call.outcome(await insist(call, client, first.state, CALL_SECONDS))


async def break_links(net: Network, dice: Random, faults: list[tuple[Way, ...]]) -> None:
    """Cut random links, some in one direction only, until they have lost some packets; then cut others."""
    while True:
        links = dice.sample(LINKS, dice.choice((1, 2, 4)))
        ways = tuple(way for one, other in links for way in ((one, other), (other, one)) if dice.random() < 0.7)
        if ways:
            faults.append(ways)
            with net.cut_ways(*ways):
                await net.loses(*ways, packets=dice.randrange(1, 8))


async def test_whatever_is_cut_each_call_ends_and_nothing_runs_twice(hosts: Stage) -> None:
    """Eight clients make calls while random links fail."""
    stage, dice = hosts, Random(12)
    faults: list[tuple[Way, ...]] = []
    ends = Counter[str]()
    breaking = asyncio.get_running_loop().create_task(break_links(stage.net, dice, faults))
    try:
        for number in range(6):
            calls = [
                Call(
                    dice.choice((stage.plain, stage.stored)), dice.choice(("ask_slow", "ask_read")), f"{number} {each}"
                )
                for each in range(8)
            ]
            work = (attend(call, stage.through_balancer(call.server)) for call in calls)
            for call, end in zip(calls, await asyncio.gather(*work), strict=True):
                told = (
                    f"{call.name}, {call.tool} of {call.server.name}: {end}, {call.runs} runs, {call.answers} answers"
                )
                ends[end] += 1
                assert end in ENDS, told
                assert call.answers <= call.runs <= (1 if call.tool == "ask_slow" else 3), told
                assert call.answers or end != "result", told
        assert not breaking.done(), breaking
    finally:
        breaking.cancel()
    print(f"\n{len(faults)} faults: {dict(ends)}")
    # What no client came back for stays parked for hold.ttl_seconds, so nothing is said of that here.
    assert ends["result"] > ends.total() / 2
