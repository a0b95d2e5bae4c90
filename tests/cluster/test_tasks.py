"""A driven task on the replica that takes its call over, whose owner is dead or only silent."""

import asyncio
import json
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gateway.cluster.worker import Address
from gateway.exchange import events as on
from gateway.exchange.commands import Timer
from gateway.protocol import mcp
from gateway.seal.peer_messages import Told
from gateway.tasks import follower
from tests.cluster.test_witness import cut_off, is_quiet, only
from tests.support.fake_peer import tells_later
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, text
from tests.support.replicas import Cluster, drop, exchange_failing_over_to, facing, in_time, opened, resealed, steps
from tests.support.task_client import EXTENSION
from tests.support.workbench import ACCEPT, DEADLINE, Reply, Stand, eventually, later, leave
from tests.tasks.test_live_task import TaskServer, make

TOOL: Final = {"name": "tool", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}
FRAGILE: Final = f"{'0' * 32}:00000000-0000-0000-0000-000000000000"
"""The id of a task of `mcp` 1.30."""


class AskingFirst(FakeStore):
    """A FAKE server with an event store that asks before it makes the task, as a `createTask` of the SDKs may."""

    def __init__(self, upstream: FakeUpstream) -> None:
        super().__init__(upstream)
        self.ends_when_cancelled = False
        self.is_gone, self.status = False, "completed"
        upstream.capabilities = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
        upstream.tools = [TOOL]
        upstream.on(mcp.TASKS_GET, self._get)
        upstream.on(mcp.TASKS_RESULT, self._get_result)

    def outcome(self, answers: list[Any]) -> Any:
        return {"task": {"taskId": "t1", "status": "working", "ttl": 60_000}}

    async def _get(self, turn: Turn) -> None:
        await self._tell(turn, {"taskId": turn.body["params"]["taskId"], "status": self.status})

    async def _get_result(self, turn: Turn) -> None:
        task_id, answers = turn.body["params"]["taskId"], self.calls[turn.session].answers
        await self._tell(turn, text(json.dumps([task_id, *answers])))

    async def _tell(self, turn: Turn, result: Any) -> None:
        await (turn.error(-32602, "Task not found") if self.is_gone else turn.result(result))


async def _orphaned(cluster: Cluster) -> tuple[Stand, Reply]:
    """A question that came before its task was made, whose owner is dead, and the replica that goes on."""
    one, two = await cluster.begin("gw-1", "gw-2")
    _ = await one.client().post("tools/list")
    asked = await one.client().call()
    assert opened(asked.state).upstream is not None
    await cluster.crash(one)
    return two, asked


async def test_a_task_that_was_made_after_its_owner_died_is_followed_to_its_result(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    reply = await in_time(two.client().answer(asked))
    assert reply.json == ["t1", ACCEPT]
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 1
    assert steps(two) == {"resumed": 1}


async def test_a_tool_that_made_no_task_in_the_end_gives_its_result(upstream: FakeUpstream, cluster: Cluster) -> None:
    store = AskingFirst(upstream)
    store.outcome = lambda answers: text(json.dumps(answers))  # type: ignore[method-assign]
    two, asked = await _orphaned(cluster)
    assert (await in_time(two.client().answer(asked))).json == [ACCEPT]
    assert mcp.TASKS_GET not in upstream.words


async def test_a_task_that_its_server_does_not_know_any_more_is_lost(upstream: FakeUpstream, cluster: Cluster) -> None:
    store = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    store.is_gone = True
    reply = await in_time(two.client().answer(asked))
    assert reply.outcome == (200, -32603, "call_lost")
    assert "does not know the task any more" in reply.error["message"]
    assert len(upstream.of("tools/call")) == 1


async def test_a_task_that_was_made_on_a_stream_that_cannot_be_resumed_is_lost(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    store = AskingFirst(upstream)

    async def without_ids(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await turn.result(store.outcome([]))

    upstream.tool(without_ids)
    for word in ("answer", mcp.CANCELLED):
        upstream.on(word, upstream.plain)
    two, asked = await _orphaned(cluster)
    reply = await in_time(two.client().answer(asked))
    assert reply.outcome == (200, -32603, "owner_lost")
    assert "a task that it had made before may still run" in reply.error["message"]
    assert len(upstream.of("tools/call")) == 1
    assert "answer" not in upstream.words
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: steps(two) == {"lost": 1})


def _of_task(asked: Reply, task_id: str = "t1", **changes: Any) -> str:
    """The state of a call that has become a task already."""
    upstream = opened(asked.state).upstream
    assert upstream is not None
    return resealed(asked.state, upstream=replace(upstream, task=task_id), **changes)


async def test_a_task_that_is_not_picked_up_before_its_client_is_given_up_is_cancelled(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    again = await two.client().call(state=_of_task(asked), answers={})
    assert again.questions == asked.questions
    await drop(two)
    (cancelled,) = await upstream.saw(mcp.TASKS_CANCEL)
    assert cancelled.body["params"] == {"taskId": "t1"}
    assert cancelled.session == upstream.of(mcp.TOOLS_CALL)[0].session
    assert mcp.CANCELLED not in upstream.words, "the request that made the task has its answer"


async def test_a_task_of_a_server_that_cancelling_would_harm_is_left_alone(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    again = await two.client().call(state=_of_task(asked, FRAGILE), answers={})
    assert again.questions == asked.questions
    await drop(two)
    await is_quiet(two)
    assert mcp.TASKS_CANCEL not in upstream.words


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
async def test_a_task_that_takes_too_long_after_its_owner_died_is_cancelled_before_its_session_ends(
    upstream: FakeUpstream, cluster: Cluster, *, is_known: bool
) -> None:
    _ = AskingFirst(upstream)
    one, two = await cluster.begin("gw-1", "gw-2", tasks={"ttl_seconds": 0.1})
    _ = await one.client().post("tools/list")
    asked = await one.client().call()
    await cluster.crash(one)
    upstream.on(mcp.TASKS_RESULT, lambda turn: turn.for_ever())
    state = _of_task(asked) if is_known else asked.state
    reply = await two.client().call(state=state, answers=dict.fromkeys(asked.questions, ACCEPT))
    assert "tasks.ttl_seconds" in reply.error["message"]
    (cancelled,) = await upstream.saw(mcp.TASKS_CANCEL)
    assert cancelled.body["params"] == {"taskId": "t1"}
    await is_quiet(two)
    session = upstream.of(mcp.TOOLS_CALL)[0].session
    assert session not in [
        seen.session for seen in upstream.seen[: upstream.seen.index(cancelled)] if seen.word == "DELETE"
    ]


async def test_a_task_that_waits_for_an_answer_that_its_dead_owner_was_asked_for_is_lost(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold(turn: Turn) -> None:
        await turn.raw(b"")
        await turn.for_ever()

    monkeypatch.setattr(follower, "_POLL_SECONDS", 0.01)
    store = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    store.status = "input_required"
    upstream.once(mcp.TASKS_RESULT, hold)
    answers = dict.fromkeys(asked.questions, ACCEPT)
    lost = await in_time(two.client().call(state=_of_task(asked, FRAGILE), answers=answers))
    assert lost.outcome == (200, -32603, "call_lost")
    assert "that no client has seen" in lost.error["message"]
    await is_quiet(two)
    assert "DELETE" not in upstream.words
    store.status = "completed"
    newer = _of_task(asked, FRAGILE, round=opened(asked.state).round + 1)
    reply = await in_time(two.client().call(state=newer, answers=answers))
    assert reply.json == [FRAGILE, ACCEPT, ACCEPT], "a client that the owner did ask can still answer"


async def test_a_task_is_not_lost_whose_answer_takes_long_to_be_accepted(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(turn: Turn) -> None:
        await turn.say({"id": 1, "method": mcp.ELICIT, "params": FORM})
        _ = await upstream.saw("answer", 2)
        await go.wait()
        await turn.result(text("done"))

    monkeypatch.setattr(follower, "_POLL_SECONDS", 0.01)
    go = asyncio.Event()
    store = AskingFirst(upstream)
    two, asked = await _orphaned(cluster)
    store.status = "input_required"
    upstream.on(mcp.TASKS_RESULT, ask)
    first = await in_time(
        two.client().call(state=_of_task(asked, FRAGILE), answers=dict.fromkeys(asked.questions, ACCEPT))
    )
    store.hold.clear()
    looks = len(upstream.of(mcp.TASKS_GET))
    answering = later(two.client().answer(first))
    await upstream.saw(mcp.TASKS_GET, looks + 4)
    store.hold.set()
    go.set()
    assert (await in_time(answering)).text == "done"


async def test_a_task_of_a_client_that_its_dead_owner_may_have_asked_is_not_lost(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(turn: Turn) -> None:
        await turn.result({"taskId": FRAGILE, "status": "completed" if server.done.is_set() else "input_required"})

    monkeypatch.setattr(follower, "_POLL_SECONDS", 0.01)
    server = TaskServer(upstream)
    upstream.tool(lambda turn: turn.result({"task": {"taskId": FRAGILE, "status": "working"}}))
    upstream.on(mcp.TASKS_GET, tell)
    one, two = await cluster.begin("gw-1", "gw-2")
    task = await make(one)
    await cluster.crash(one)
    task = task.on(two.client())
    assert (await task.get())["status"] == "working"
    await upstream.saw(mcp.TASKS_GET, len(upstream.of(mcp.TASKS_GET)) + 4)
    server.done.set()
    _ = await task.until("completed")


# -- a silent owner ---------------------------------------------------------------------------------------------------


async def test_a_task_that_is_made_while_its_owner_is_silent_is_followed_beside_it(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    _ = AskingFirst(upstream)
    one, two, three = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"))
    _ = await one.client().post("tools/list")
    asked = await one.client().call()
    reply = await in_time(two.client().answer(asked))
    assert reply.json == ["t1", ACCEPT]
    assert len(upstream.of("answer")) == len(upstream.of(mcp.TOOLS_CALL)) == 1
    assert steps(two).get("resumed", 0) + steps(three).get("resumed", 0) == 1
    assert len(upstream.of(mcp.TASKS_GET)) == 2, "tasks/result would take the questions from the owner"
    await eventually(lambda: only(one).is_finished, "the owner has the result too")
    for stand in (one, two, three):
        await is_quiet(stand)
    ended = [seen.session for seen in upstream.of("DELETE")]
    assert upstream.of(mcp.TOOLS_CALL)[0].session not in ended, "another replica may still read the result"
    assert not {mcp.CANCELLED, mcp.TASKS_CANCEL}.intersection(upstream.words)
    assert (await one.client().answer(asked)).json == ["t1", ACCEPT]


async def test_a_silent_owners_task_is_not_cancelled_when_the_client_of_a_take_over_leaves(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    _ = AskingFirst(upstream)
    one, two, _ = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"))
    _ = await one.client().post("tools/list")
    asked = await one.client().call()
    upstream.once(mcp.TASKS_GET, lambda turn: turn.for_ever())
    answers = dict.fromkeys(asked.questions, ACCEPT)
    state = _of_task(asked, exchange=await exchange_failing_over_to(two, "gw-2"))
    retry = later(two.client().call(state=state, answers=answers))
    (looking,) = await upstream.saw(mcp.TASKS_GET)
    await leave(retry)
    await eventually(looking.cut.is_set, "the take-over is given up")
    await eventually(lambda: len(two.gateway.lot) == 0)
    await is_quiet(two)
    assert not {mcp.CANCELLED, mcp.TASKS_CANCEL, "answer", "DELETE"}.intersection(upstream.words)
    assert (await one.client().answer(asked)).json == ["t1", ACCEPT]


async def test_a_call_that_becomes_a_task_while_others_are_asked_about_it_has_not_expired(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    go = asyncio.Event()
    one, peer = await facing(cluster, tells_later(go, Told("no")), timeouts={"peer_accept_seconds": DEADLINE})
    _ = AskingFirst(upstream)
    client = one.client(capabilities=EXTENSION)
    _ = await client.post(mcp.TOOLS_LIST)
    _ = await client.call()
    task = only(one)
    task.fire(Timer.TTL)
    await eventually(lambda: peer.kinds == ["holds"])
    task.hear(on.Became("t1"))
    go.set()
    await eventually(lambda: "ask about an expired call" not in one.tasks())
    task.check()
    assert task.status == "input_required"
