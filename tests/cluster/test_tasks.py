"""A driven task whose owner died before it knew the id of the task, on the replica that takes the call over."""

import json
from typing import Any, Final

from gateway.protocol import mcp
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import Cluster, in_time, opened, steps
from tests.support.workbench import ACCEPT, Reply, Stand, eventually

TOOL: Final = {"name": "tool", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}


class AskingFirst(FakeStore):
    """A FAKE server with an event store that asks before it makes the task, as a `createTask` of the SDKs may."""

    def __init__(self, upstream: FakeUpstream) -> None:
        super().__init__(upstream)
        self.ends_when_cancelled = False
        self.is_gone = False
        upstream.capabilities = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
        upstream.tools = [TOOL]
        upstream.on(mcp.TASKS_GET, self._get)
        upstream.on(mcp.TASKS_RESULT, self._get_result)

    def outcome(self, answers: list[Any]) -> Any:
        return {"task": {"taskId": "t1", "status": "working", "ttl": 60_000}}

    async def _get(self, turn: Turn) -> None:
        await self._tell(turn, {"taskId": turn.body["params"]["taskId"], "status": "completed"})

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
    assert json.loads(reply.text) == ["t1", ACCEPT]
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 1
    assert steps(two) == {"resumed": 1}


async def test_a_tool_that_made_no_task_in_the_end_gives_its_result(upstream: FakeUpstream, cluster: Cluster) -> None:
    store = AskingFirst(upstream)
    store.outcome = lambda answers: text(json.dumps(answers))  # type: ignore[method-assign]
    two, asked = await _orphaned(cluster)
    assert json.loads((await in_time(two.client().answer(asked))).text) == [ACCEPT]
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
    upstream.on("answer", upstream._plain)
    two, asked = await _orphaned(cluster)
    reply = await in_time(two.client().answer(asked))
    assert reply.outcome == (200, -32603, "owner_lost")
    assert len(upstream.of("tools/call")) == 1
    assert "answer" not in upstream.words
    await eventually(lambda: steps(two) == {"lost": 1})
