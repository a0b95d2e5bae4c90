"""A replica whose drain is over still answers for a moment: it has parted, and its calls are for others."""

from typing import Any
from unittest.mock import patch

import pytest

from gateway.bridge.driver import Driver
from gateway.protocol import mcp
from gateway.server import drain as drain_steps
from gateway.server.drain import drain
from gateway.tasks.follower import Follower
from tests.support.fake_store import SOON, FakeStore, cool
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import TWICE, Cluster, asked_peers, in_time, opened, order, steps
from tests.support.workbench import ACCEPT, Stand, eventually, jwt, later
from tests.tasks.test_live_task import TaskServer, make

QUICK: dict[str, Any] = {"hold": {**SOON, "cold_seconds": 0, "drain_seconds": 0.05}}
STOPPING = (503, -32603, "stopping")
USER_1, USER_2 = (jwt(iss="https://issuer.example", sub="user", client_id="app", number=number) for number in (1, 2))
"""Two tokens of one principal."""


async def part(stand: Stand) -> None:
    """Drain a replica to its end; as in its last second, its listener for other replicas is still open."""
    await in_time(drain(stand.gateway, delay_seconds=0))


async def test_a_call_that_a_parted_owner_let_go_is_resumed_elsewhere(store: FakeStore, cluster: Cluster) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK)
    await part(one)
    assert (await two.client().answer(asked)).json == [ACCEPT]
    assert (steps(one), steps(two)) == ({}, {"resumed": 1})
    assert asked_peers(two)["gone"] >= 1
    assert store.resumed == 1


async def test_a_retry_at_the_parted_owner_itself_is_served_by_another_replica(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **QUICK)
    asked = await one.client().call()  # over a connection that stays open
    await part(one)
    reply = await one.client().answer(asked)
    if reply.result["resultType"] != "complete":  # a process that ends waits for no result
        assert not reply.questions
        reply = await two.client().call(state=reply.state)
    assert reply.json == [ACCEPT]
    assert steps(one) == {"forwarded": 1}
    assert (steps(two)["resumed"], store.resumed, len(upstream.of("answer"))) == (1, 1, 1)


async def test_an_answer_that_a_parting_owner_has_taken_but_not_yet_sent_is_sent(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster
) -> None:
    """Its client gets a state without questions, so it does not give the answer again."""
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK)
    take = Driver.answer

    def take_and_part(driver: Driver, *leg: Any) -> None:
        take(driver, *leg)
        drain_steps._end_remaining(one.gateway)

    with patch.object(Driver, "answer", take_and_part):
        reply = await one.client().answer(asked)
    assert reply.questions == {}
    assert (await two.client().call(state=reply.state)).json == [ACCEPT]
    assert (steps(two), len(upstream.of("answer"))) == ({"resumed": 1}, 1)


async def test_a_parted_owner_without_others_tells_its_client_to_come_again(
    store: FakeStore, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK)
    await cluster.crash(two)
    await part(one)
    reply = await one.client().answer(asked)
    assert reply.outcome == STOPPING
    assert "the same requestState" in reply.error["message"]
    assert (reply.headers["Retry-After"], store.resumed) == ("1", 0)


async def test_a_call_that_a_parted_owner_had_to_cancel_ends_with_the_true_error(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK)
    await part(one)
    _ = await upstream.saw(mcp.CANCELLED)
    reply = await two.client().answer(asked)
    assert reply.outcome == STOPPING
    assert "it was cancelled" in reply.error["message"]


async def test_a_call_that_may_run_twice_runs_again_after_its_owner_parted(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK, **TWICE)
    await part(one)
    assert (await two.client().answer(asked)).json == ACCEPT
    assert (steps(two), len(upstream.of("tools/call"))) == ({"replayed": 1}, 2)


async def test_a_call_that_is_over_is_not_continued_because_its_owner_parted(
    store: FakeStore, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **QUICK)
    assert (await one.client().answer(asked)).json == [ACCEPT]
    await part(one)
    assert (await two.client().answer(asked)).json == [ACCEPT], "its result is still kept"
    for driver in list(one.gateway.lot):
        driver.forget()
        one.gateway.lot.remove(driver)
    assert (await two.client().answer(asked)).outcome == (400, -32602, "invalid_request_state")
    assert store.resumed == 0


async def test_a_parted_replica_takes_no_call_over(store: FakeStore, cluster: Cluster) -> None:
    """It comes before the others in the order of the candidates."""
    stands = await cluster.begin("gw-1", "gw-2", "gw-3", **QUICK)
    while True:
        asked = await stands[0].client().call()
        first, second = [name for name in await order(stands[1], opened(asked.state).exchange) if name != "gw-1"]
        if first == "gw-2":
            break
    await cluster.crash(stands[0])
    _ = await stands[1].client().post("tools/list")  # over a connection that stays open
    await part(stands[1])
    for stand in (stands[2], stands[1]):
        assert (await stand.client().answer(asked)).json == [ACCEPT]
    assert second == "gw-3"
    assert (steps(stands[1]), steps(stands[2]), store.resumed) == ({"forwarded": 1}, {"resumed": 1, "held": 1}, 1)


@pytest.mark.parametrize("kind", ["held", "cold"])
async def test_a_call_that_is_let_go_while_a_credential_is_checked_is_resumed_elsewhere(
    upstream: FakeUpstream, store: FakeStore, cluster: Cluster, kind: str
) -> None:
    hold = {**SOON, "cold_seconds": 0.05 if kind == "cold" else 0, "drain_seconds": 0.05}
    one, two = await cluster.begin("gw-1", "gw-2", hold=hold)
    client = one.client(USER_1)
    asked = await (cool(one, upstream, authorization=USER_1) if kind == "cold" else client.call())
    go = upstream.holding("ping")
    retry = later(two.client(USER_2).answer(asked))
    _ = await upstream.saw("ping")
    await part(one)
    go.set()
    assert (await in_time(retry)).json == [ACCEPT]
    assert (steps(two)["resumed"], store.resumed) == (1, 1)


async def test_a_call_that_no_replica_holds_is_not_run_by_a_parted_one(cluster: Cluster) -> None:
    hold = {**QUICK["hold"], "drain_seconds": 60}  # by then, the other replica ends its leg
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", hold=hold, route={"continuation": "replay"})
    assert opened(asked.state).owner == ""
    await part(one)
    assert (await one.client().answer(asked)).json == ACCEPT
    assert (steps(one), steps(two)) == ({"forwarded": 1}, {"replayed": 1})


async def test_a_task_that_its_parted_owner_let_go_is_followed_elsewhere(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    server = TaskServer(upstream)
    one, two = await cluster.begin("gw-1", "gw-2", **QUICK)
    task = await make(one)
    await part(one)
    # As it closes, with its listener still open.
    one.gateway.draining.part([each.id for each in one.gateway.task_table])
    one.gateway.task_table.leave(is_resumable=True)
    task = task.on(two.client())
    assert (await task.get())["status"] == "working"
    assert [len(tuple(stand.gateway.task_table)) for stand in (one, two)] == [0, 1]
    server.done.set()
    _ = await task.until("completed")


async def test_the_session_of_a_task_that_ends_as_its_owner_parts_is_left_to_the_next_one(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    server = TaskServer(upstream)
    one, two = await cluster.begin("gw-1", "gw-2", **QUICK)
    hold = Follower._hold

    async def hold_and_part(driven: Follower, id_: bytes) -> object:
        result = await hold(driven, id_)
        drain_steps._end_remaining(one.gateway)
        return result

    server.ask(0)
    with patch.object(Follower, "_hold", hold_and_part):
        asked = await one.client().call()
        answering = later(one.client().answer(asked))
        _ = await upstream.saw("answer")
        server.done.set()
        reply = await answering
    assert reply.questions == {}
    await eventually(lambda: not one.tasks(), "the owner has sent all that it had to")
    assert "DELETE" not in upstream.words
    assert (await two.client().call(state=reply.state)).text == "done"
