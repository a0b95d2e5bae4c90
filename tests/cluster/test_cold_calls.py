"""Cold calls of one replica, with the others."""

import json

import pytest

from gateway.protocol import mcp
from tests.cluster.test_witness import telling
from tests.parts.launch import free_port
from tests.support.fake_store import SOON, FakeStore, cold, cool, ended
from tests.support.fake_upstream import FakeUpstream
from tests.support.known_calls import reply, request
from tests.support.raw_connection import raw_connection
from tests.support.replicas import Cluster, asked_peers, opened, order, reseal, retry_params, steps
from tests.support.workbench import ACCEPT, Reply, Stand, eventually


async def test_a_retry_at_another_replica_reaches_the_owner_of_a_cold_call(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream)
    one, two = await cluster.begin("gw-1", "gw-2", hold=SOON)
    asked = await cool(one, upstream)
    assert (await two.client().answer(asked)).json == [ACCEPT]
    assert (steps(one), steps(two)) == ({"resumed": 1}, {"forwarded": 1})
    assert ended(one) == {"resumed": 1}


async def test_a_cold_call_survives_the_death_of_its_owner(upstream: FakeUpstream, cluster: Cluster) -> None:
    store = FakeStore(upstream)
    one, two = await cluster.begin("gw-1", "gw-2", hold=SOON)
    asked = await cool(one, upstream)
    await cluster.crash(one)
    assert (await two.client().answer(asked)).json == [ACCEPT]
    assert steps(two) == {"resumed": 1}
    assert (len(upstream.of("answer")), store.resumed) == (1, 1)


async def continued_elsewhere(one: Stand, two: Stand, upstream: FakeUpstream) -> tuple[Reply, Reply]:
    """A cold call of `one`, and its next round at `two`, which took `one` for dead."""
    while True:
        asked = await cool(one, upstream)
        if (await order(two, opened(asked.state).exchange))[0] == "gw-2":
            break
    reseal(asked, owner="gw-3")
    again = await two.client().answer(asked)
    assert again.questions
    return asked, again


@pytest.fixture
async def pair(upstream: FakeUpstream, cluster: Cluster) -> tuple[Stand, Stand]:
    _ = FakeStore(upstream, rounds=2)
    fakes = {"gw-3": f"127.0.0.1:{free_port()}"}  # where nothing listens
    one = (await cluster.begin("gw-1", "gw-2", fakes=fakes, hold={**SOON, "ttl_seconds": 5}))[0]
    return one, cluster.stands["gw-2"]


async def test_a_cold_call_that_another_replica_has_continued_is_not_cancelled(
    upstream: FakeUpstream, pair: tuple[Stand, Stand]
) -> None:
    one, two = pair
    _, again = await continued_elsewhere(one, two, upstream)
    others = cold(one) - 1
    one.gateway.lot.cold.give_up_all()
    await eventually(lambda: sum(ended(one).values()) == others + 1)
    assert ended(one)["continued"] == 1
    await eventually(lambda: not one.busy_tasks())
    calls = {seen.body["params"]["requestId"] for seen in upstream.of(mcp.CANCELLED)}
    assert len(calls) == others
    assert upstream.of("tools/call")[-1].body["id"] not in calls
    assert (await two.client().answer(again)).json == [ACCEPT] * 2


async def test_a_later_round_of_a_cold_call_goes_to_the_replica_that_has_continued_it(
    upstream: FakeUpstream, pair: tuple[Stand, Stand]
) -> None:
    one, two = pair
    _, again = await continued_elsewhere(one, two, upstream)
    before = cold(one)
    assert (await one.client().answer(again)).json == [ACCEPT] * 2
    assert (cold(one), ended(one)) == (before - 1, {"continued": 1})
    assert len([seen for seen in upstream.of("answer") if "result" in seen.body]) == 2


async def test_a_call_that_is_cold_here_is_not_looked_for_elsewhere(upstream: FakeUpstream, cluster: Cluster) -> None:
    """Its state names a dead replica, from which this one had taken it over."""
    store = FakeStore(upstream)
    (one,) = await cluster.begin("gw-1", fakes={"gw-3": f"127.0.0.1:{free_port()}"}, hold=SOON)
    asked = await cool(one, upstream)
    reseal(asked, owner="gw-3")
    body = one.client().build("tools/call", retry_params(asked))[1]
    other = asked.state[:-6] + ("A" if asked.state[-6] != "A" else "B") + asked.state[-5:]
    forged = body.replace(asked.state.encode(), other.encode())
    async with raw_connection(one) as raw:
        for _ in range(3):  # until the head is known
            await raw.send(request(one, body=forged))
            assert b" 400 " in (await reply(raw))[0]
        await raw.send(request(one, body=body))
        _, found = await reply(raw)
    assert json.loads(json.loads(found)["result"]["content"][0]["text"]) == [ACCEPT]
    assert (asked_peers(one), ended(one), store.resumed) == ({}, {"resumed": 1}, 1)


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (("unknown", "no"), "expired"),
        (("silence", "unknown", "no"), "expired"),
        (("unknown", "yes"), "continued"),
        (("unknown",) * 3, "continued"),
    ],
)
async def test_an_expired_cold_call_is_asked_about_again_if_a_replica_could_not_be_asked(
    upstream: FakeUpstream, cluster: Cluster, words: tuple[str, ...], ending: str
) -> None:
    _ = FakeStore(upstream)
    peer = await cluster.fake(telling(*words))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, hold=SOON)
    _ = await cool(one, upstream)
    for number in range(len(words)):
        one.gateway.lot.cold.give_up_all()
        await eventually(lambda: len(peer.kinds) == number + 1 and not one.busy_tasks())  # noqa: B023
    assert (cold(one), ended(one)) == (0, {ending: 1})
    assert (mcp.CANCELLED in upstream.words) is (ending == "expired")
