"""A call that was restored from its state, and whose client is only asked again, keeps its way upstream."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.exchange.commands import Timer
from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.cluster.test_witness import is_quiet, is_unharmed, only
from tests.support.fake_store import SOON, FakeStore, cold, cool, ended
from tests.support.fake_upstream import READ_ONLY, FakeUpstream, lacks_session
from tests.support.replicas import (
    TWICE,
    Cluster,
    in_time,
    opened,
    reseal,
    resealed,
    steps,
)
from tests.support.workbench import ACCEPT, Reply, Stand, eventually, later

QUICK: dict[str, Any] = {"hold": {"drain_seconds": 0.05}}


async def ask_again(stand: Stand, asked: Reply) -> Reply:
    """Send a retry without answers."""
    again = await stand.client().call(state=asked.state, answers={})
    assert again.questions == asked.questions
    return again


async def orphaned(cluster: Cluster, *names: str, **sections: Any) -> tuple[Reply, Stand, list[Stand]]:
    """A call whose owner is dead, asked again: its newest round, the replica that restored it, and the others."""
    asked, (one, *others) = await cluster.asked("gw-1", *names, **sections)
    await cluster.crash(one)
    again = await ask_again(others[0], asked)
    (holder,) = [stand for stand in others if len(stand.gateway.lot)]
    assert only(holder).glance(0.0).state == State.RESTORED
    others.remove(holder)
    return again, holder, others


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_survives_the_death_of_a_replica_that_only_asked_again(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster, times: int
) -> None:
    again, holder, (third,) = await orphaned(cluster, "gw-2", "gw-3")
    for _ in range(times - 1):
        again = await ask_again(third, again)
    await cluster.crash(holder)
    assert (await third.client().answer(again)).json == [ACCEPT]
    assert (store.resumed, len(upstream.of("answer"))) == (1, 1)
    assert is_unharmed(upstream)


async def test_the_state_of_a_call_that_is_asked_again_has_all_that_the_older_one_had(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream, rounds=2)
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tools = [READ_ONLY]
    _ = await one.client().post("tools/list")
    asked = await one.client().answer(await one.client().call())
    reseal(asked, sheds=3)
    before = opened(asked.state)
    await cluster.crash(one)
    again = await ask_again(two, asked)
    after = opened(again.state)
    changed = {"issued", "expires", "owner", "epoch"}
    assert {name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)} <= changed
    assert (before.repeatable, before.record is not None, before.upstream is not None) == (True, True, True)
    assert again.result["_meta"] == asked.result["_meta"], "the server's description of itself, too"
    assert (await two.client().answer(again)).json == [ACCEPT] * 2


async def test_a_cold_call_that_was_asked_again_survives_the_death_of_its_owner(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", hold={**SOON, "cold_seconds": 0.3})
    again = await ask_again(one, await cool(one, upstream))
    assert only(one).glance(0.0).state == State.RESTORED
    await cluster.crash(one)
    assert (await two.client().answer(again)).json == [ACCEPT]
    assert (store.resumed, len(upstream.of("answer"))) == (1, 1)


async def test_a_call_that_was_only_asked_again_goes_cold(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    again, holder, _ = await orphaned(cluster, "gw-2", hold=SOON)
    for taken in range(3):
        await eventually(lambda: cold(holder) == 1, "it is cold")
        assert (holder.held, len(holder.gateway.lot), store.resumed) == (0, 0, 0)
        assert ended(holder) == ({"resumed": taken} if taken else {})
        again = await ask_again(holder, again)
    await eventually(lambda: cold(holder) == 1, "it is cold")
    record = holder.gateway.lot.cold.find(opened(again.state).exchange)
    assert record is not None
    assert record.is_taken_over
    assert (await holder.client().answer(again)).json == [ACCEPT]
    assert (store.resumed, len(upstream.of("answer"))) == (1, 1)
    assert is_unharmed(upstream)


async def test_a_cold_call_that_finds_no_session_is_kept_as_long_as_its_newest_state(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    hold = {**SOON, "cold_seconds": 0.3}
    (one,) = await cluster.begin("gw-1", hold=hold, sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05})
    asked = await cool(one, upstream)
    record = one.gateway.lot.cold.find(opened(asked.state).exchange)
    assert record is not None
    again = await ask_again(one, asked)
    only(one)._takeover.cold = replace(record, due=0)  # as if the first state was sealed long ago
    again = await ask_again(one, again)
    store.hold.clear()
    other = await one.client().call()
    working = later(one.client().answer(other))
    await upstream.saw("answer")
    assert (await one.client().answer(again)).status == 503
    record = one.gateway.lot.cold.find(opened(asked.state).exchange)
    assert record is not None
    assert record.due > 0
    store.hold.set()
    assert (await working).json == [ACCEPT]
    await eventually(lambda: not one.sessions("busy"), "the session is free")
    assert (await one.client().answer(again)).json == [ACCEPT]


@pytest.mark.parametrize("is_asked_again", [False, True])
async def test_a_dead_owners_call_for_which_no_session_is_free_can_be_continued_later(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster, *, is_asked_again: bool
) -> None:
    asked, (one, two) = await cluster.asked(
        "gw-1", "gw-2", sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05}
    )
    await cluster.crash(one)
    if is_asked_again:
        asked = await ask_again(two, asked)
    store.hold.clear()
    working = later(two.client().answer(await two.client().call()))
    await upstream.saw("answer")
    assert (await two.client().answer(asked)).status == 503
    store.hold.set()
    assert (await in_time(working)).json == [ACCEPT]
    await eventually(lambda: not two.sessions("busy"), "the session is free")
    assert (await two.client().answer(asked)).json == [ACCEPT]
    assert mcp.CANCELLED not in upstream.words


@pytest.mark.parametrize("which", ["older", "newer"])
async def test_a_drain_leaves_a_call_that_was_only_asked_again_to_others(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster, which: str
) -> None:
    again, holder, (third,) = await orphaned(cluster, "gw-2", "gw-3", **QUICK)
    older = resealed(again.state, owner="gw-1", epoch="gone")
    await in_time(drain(holder.gateway, delay_seconds=0))
    if which == "older":
        again.messages[-1]["result"]["requestState"] = older
    assert (await third.client().answer(again)).json == [ACCEPT]
    assert (steps(holder), steps(third)["resumed"], store.resumed) == ({}, 1, 1)
    assert is_unharmed(upstream)


async def test_a_drain_leaves_a_call_to_others_that_may_run_twice(cluster: Cluster) -> None:
    again, holder, (third,) = await orphaned(cluster, "gw-2", "gw-3", **QUICK, **TWICE)
    await in_time(drain(holder.gateway, delay_seconds=0))
    assert (await third.client().answer(again)).json == ACCEPT
    assert (steps(holder), steps(third)["replayed"]) == ({}, 1)


@pytest.mark.parametrize("at", ["session", "stream"])
async def test_a_drain_gives_a_call_back_whose_stream_is_not_open_yet(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster, at: str
) -> None:
    """Its answers wait for the stream: they would be lost with this replica, and a new state would not ask again."""
    sections = {"sessions": {"max": 1}, "timeouts": {"session_wait_seconds": 60}} if at == "session" else {}
    again, holder, (third,) = await orphaned(cluster, "gw-2", "gw-3", **QUICK, **sections)

    if at == "stream":
        upstream.once("resume", lambda turn: turn.for_ever())
    else:
        store.hold.clear()
        working = later(holder.client().answer(await holder.client().call()))
        await upstream.saw("answer")
    waiting = later(holder.client().answer(again))
    if at == "session":
        await eventually(lambda: holder.gateway.downstream.in_flight == 2)
    else:
        _ = await upstream.saw("resume")
    await in_time(drain(holder.gateway, delay_seconds=0))
    reply = await in_time(waiting)
    assert reply.outcome == (503, -32603, "stopping")
    assert "the same requestState and inputResponses" in reply.error["message"]
    store.hold.set()
    assert (await third.client().answer(again)).json == [ACCEPT]
    assert mcp.CANCELLED not in upstream.words
    if at == "session":
        _ = await working
    else:
        assert len(upstream.of("answer")) == 1


async def test_a_drain_cancels_a_dead_owners_call_that_cannot_be_continued(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    again, holder, (third,) = await orphaned(cluster, "gw-2", "gw-3", **QUICK)
    await in_time(drain(holder.gateway, delay_seconds=0))
    _ = await upstream.saw(mcp.CANCELLED)
    reply = await third.client().answer(again)
    assert reply.outcome == (503, -32603, "stopping")
    assert "it was cancelled" in reply.error["message"]


async def test_a_call_that_was_only_asked_again_is_given_up_when_its_client_stays_away(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    _, holder, _ = await orphaned(cluster, "gw-2")
    only(holder).fire(Timer.TTL)
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    (call,) = store.calls.values()
    assert cancelled.body["params"]["requestId"] == call.id
    assert call.answers[0] == {"action": "cancel"}


async def test_a_call_that_another_replica_has_resumed_is_not_given_up_by_one_that_asked_again(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream, rounds=2)
    asked, (one, two, three) = await cluster.asked("gw-1", "gw-2", "gw-3")
    await cluster.crash(one)
    _ = await ask_again(two, asked)
    holder, other = (two, three) if len(two.gateway.lot) else (three, two)
    held = only(holder)
    assert held.glance(0.0).state == State.RESTORED

    async def only_own(_: str) -> list[str]:
        return [other.gateway.members.own]

    other.gateway.members.candidates = only_own  # type: ignore[method-assign]  # it takes the holder for dead
    later_round = await other.client().answer(asked)
    assert later_round.questions
    held.fire(Timer.TTL)
    await is_quiet(holder)
    assert (await other.client().answer(later_round)).json == [ACCEPT] * 2
    assert is_unharmed(upstream)
    assert not len(holder.gateway.lot)


# -- what the error says ----------------------------------------------------------------------------------------------


TOLD = "Its server is told to cancel it"
WORDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no event ids": ({}, ["no event id", "does not say that it may run twice", TOLD]),
    "no session": ({"upstream": None}, ["does not say where it runs", "no session yet", "It may have had effects"]),
    "no record": ({"record": None}, ["no event id", "answers did not fit", TOLD]),
}


@pytest.mark.parametrize("why", WORDS)
async def test_the_error_of_a_lost_call_says_why_it_is_lost(
    upstream: FakeUpstream, cluster: Cluster, why: str
) -> None:
    sections = TWICE if why == "no record" else {}
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **sections)
    changes, words = WORDS[why]
    reseal(asked, **changes)
    await cluster.crash(one)
    reply = await two.client().answer(asked)
    assert reply.outcome == (200, -32603, "owner_lost")
    message = reply.error["message"]
    assert [each for each in words if each not in message] == []
    if words[-1] is TOLD:
        _ = await upstream.saw(mcp.CANCELLED)


async def test_a_call_whose_session_its_server_has_lost_is_not_said_to_lack_an_event_store(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    again, holder, _ = await orphaned(cluster, "gw-2")

    for word in ("resume", "ping", "answer"):
        upstream.on(word, lacks_session)
    reply = await holder.client().answer(again)
    assert (reply.outcome[1], "event id" in reply.error["message"]) == (-32603, False)
    assert "404" in reply.error["message"] or "session" in reply.error["message"]
