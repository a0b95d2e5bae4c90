"""Tasks of a client at the replica that follows them, before a fake server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final
from unittest.mock import MagicMock, Mock

import pytest
from msgspec.structs import replace

from gateway.config import Hold, InForce
from gateway.protocol import mcp
from gateway.protocol.errors import Busy
from gateway.protocol.tool_list import Tool
from gateway.sessions.call import PoolKey
from gateway.sessions.pool import tool_schemas
from gateway.sessions.pool.pool import Pool
from gateway.tasks import follower
from gateway.tasks.live_task import TaskTable
from tests.e2e.wire import wire
from tests.support import copies
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, lacks_session, text
from tests.support.gateway_process import gateway
from tests.support.host import fake
from tests.support.stand import Start
from tests.support.status import told
from tests.support.task_client import FIRST_FORM, Task, TaskClient
from tests.support.workbench import ACCEPT, KEY, Reply, Stand, eventually, later

TOOL: Final = {"name": "tool", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}


class TaskServer:
    """The script of a FAKE server whose tool is a task; it waits for the result until the test gives one."""

    def __init__(self, upstream: FakeUpstream) -> None:
        self.upstream = upstream
        self.done = asyncio.Event()
        self.result: Any = text("done")
        upstream.capabilities = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
        upstream.tools = [TOOL]
        upstream.tool(self.make)
        upstream.on(mcp.TASKS_RESULT, self.hold)
        upstream.on(mcp.TASKS_GET, self.tell)
        upstream.on(mcp.TASKS_CANCEL, self.tell)

    async def make(self, turn: Turn) -> None:
        await turn.result({"task": {"taskId": "t", "status": "working", "ttl": 60_000}})

    async def hold(self, turn: Turn) -> None:
        await turn.raw(b"")
        await self.done.wait()
        await turn.result(self.result)

    async def tell(self, turn: Turn) -> None:
        await turn.result({"taskId": "t", "status": "completed" if self.done.is_set() else "working"})

    def ask(self, *ids: int) -> None:
        """Ask each question as soon as tasks/result comes."""

        async def asking(turn: Turn) -> None:
            for id_ in ids:
                await turn.say({"id": id_, "method": mcp.ELICIT, "params": FORM})
            await self.hold(turn)

        self.upstream.on(mcp.TASKS_RESULT, asking)


@pytest.fixture
async def server(upstream: FakeUpstream, begin: Start) -> AsyncIterator[TaskServer]:
    """The server; `begin` must end before it."""
    del begin
    found = TaskServer(upstream)
    yield found
    found.done.set()


async def test_a_tool_is_a_task_though_a_change_of_the_tools_may_be_missed_once_it_is_checked(
    server: TaskServer, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side stream of any session that opens again makes the gateway forget the tools."""
    check = tool_schemas.check

    async def checked_and_missed(pool: Pool, key: PoolKey, *rest: Any) -> Tool:
        tool = await check(pool, key, *rest)
        pool.group(key).missed()
        return tool

    monkeypatch.setattr(tool_schemas, "check", checked_and_missed)
    stand = await begin()
    server.done.set()
    assert (await (await make(stand)).until("completed"))["result"]["content"] == text("done")["content"]


async def make(stand: Stand) -> Task:
    return await TaskClient(stand.client()).task()


def forget(stand: Stand) -> None:
    """Let the gateway come to rest before the time of its tasks is over."""
    stand.gateway.task_table.leave(is_resumable=False)


@pytest.mark.parametrize(
    "result",
    [{"content": [], "_meta": 5}, ["io.modelcontextprotocol/related-task"], 5],
    ids=["meta", "list", "number"],
)
async def test_a_malformed_result_is_a_failed_task(server: TaskServer, begin: Start, result: Any) -> None:
    stand = await begin()
    task = await make(stand)
    server.result = result
    server.done.set()
    failed = await task.until("completed", "failed")
    assert failed["status"] == "failed"
    assert "malformed result" in failed["error"]["message"]
    assert stand.metric("mcp_gateway_tasks_ended_total", outcome="lost") == 1
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1
    assert [error.kind for error in (await told(stand)).errors] == ["call_lost"]
    forget(stand)
    assert stand.metric("mcp_gateway_tasks") == 0


async def test_the_error_of_a_task_is_one_short_line(server: TaskServer, begin: Start, upstream: FakeUpstream) -> None:
    async def fail(turn: Turn) -> None:
        await turn.result({"taskId": "t", "status": "failed", "statusMessage": "no\x1b[31m\n" + "x" * 100_000})

    upstream.on(mcp.TASKS_RESULT, lambda turn: turn.error(-32603, "no result"))
    upstream.on(mcp.TASKS_GET, fail)
    stand = await begin()
    task = await make(stand)
    failed = await task.until("failed")
    assert failed["error"]["message"].startswith("no?[31m x")
    assert len(failed["error"]["message"]) < 1100


async def test_requests_at_once_for_a_result_that_gave_way_all_get_it(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    stand = await begin(limits={"results_bytes": 1})
    task = await make(stand)
    together = asyncio.Event()

    async def again(turn: Turn) -> None:
        await together.wait()
        related = {mcp.META_RELATED_TASK: {"taskId": "t"}}
        await turn.result({**text("again"), "_meta": related})

    await upstream.saw(mcp.TASKS_RESULT)
    upstream.on(mcp.TASKS_RESULT, again)
    server.done.set()
    await eventually(lambda: not stand.gateway.task_table.working, "the task has ended")
    asking = [later(task.get()) for _ in range(2)]
    await eventually(lambda: stand.gateway.downstream.in_flight == 2, "both requests are there")
    together.set()
    for found in await asyncio.gather(*asking):
        assert found["result"]["content"] == text("again")["content"]
        assert mcp.META_RELATED_TASK not in found["result"]["_meta"]


@pytest.mark.parametrize("asks", [False, True])
async def test_a_result_that_its_server_forgets_to_send_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, server: TaskServer, begin: Start, upstream: FakeUpstream, *, asks: bool
) -> None:
    async def forgets(turn: Turn) -> None:
        if len(upstream.of(mcp.TASKS_RESULT)) > 1:
            await turn.result(server.result)
            return
        if asks:
            await turn.say({"id": 1, "method": mcp.ELICIT, "params": FORM})
        await turn.raw(b"")
        await turn.for_ever()

    monkeypatch.setattr(follower, "_POLL_SECONDS", 60 if asks else 0.01)
    upstream.on(mcp.TASKS_RESULT, forgets)
    task = await make(await begin())
    if asks:
        asked = await task.until("input_required")
        monkeypatch.setattr(follower, "_POLL_SECONDS", 0.01)
        _ = await task.answer(asked)
    _ = await upstream.saw(mcp.TASKS_GET, 2)
    (held,) = upstream.of(mcp.TASKS_RESULT)
    assert not held.cut.is_set(), "the task is not over yet"
    server.done.set()
    assert (await task.until("completed"))["result"]["content"] == text("done")["content"]
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == held.body["id"]
    assert held.cut.is_set()


class TwoAnswers:
    """A client that sends two answers at once, of which the server takes the first when the test says so."""

    def __init__(self, server: TaskServer, stand: Stand) -> None:
        self._upstream = server.upstream
        self._stand = stand
        self.task: Task
        self.may_go_on: asyncio.Event
        self.sending: asyncio.Task[Reply]

    async def begin(self) -> "TwoAnswers":
        self.may_go_on = self._upstream.holding("answer", lambda turn: turn.reply(202))
        self.task = await make(self._stand)
        await eventually(lambda: self._stand.nested(mcp.ELICIT, "asked") == 2)
        asked = await self.task.until("input_required")
        self.sending = later(self.task.answer(asked))
        await self._upstream.saw("answer")
        return self


async def test_the_answers_of_a_client_that_leaves_are_all_delivered(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    server.ask(1, 2)
    stand = await begin()
    answers = await TwoAnswers(server, stand).begin()
    answers.sending.cancel()
    await asyncio.gather(answers.sending, return_exceptions=True)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0, "the gateway knows that the client has left")
    answers.may_go_on.set()
    seen = await upstream.saw("answer", 2)
    assert [answer.body["id"] for answer in seen] == [1, 2]
    assert not any(answer.cut.is_set() for answer in seen)
    assert (await answers.task.get())["status"] == "working"


async def test_a_task_that_is_cancelled_between_two_answers_gets_no_more(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    server.ask(1, 2)
    stand = await begin()
    answers = await TwoAnswers(server, stand).begin()
    _ = await answers.task.send(mcp.TASKS_CANCEL)
    answers.may_go_on.set()
    assert (await answers.sending).result
    assert len(upstream.of("answer")) == 1
    assert (await answers.task.get())["status"] == "cancelled"


async def test_a_request_that_waits_for_a_task_hears_that_the_gateway_lets_go_of_it(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    del server
    stand = await begin()
    task = await TaskClient(stand.client(), FIRST_FORM).first_form()
    waiting = later(task.send(mcp.TASKS_RESULT))
    await upstream.saw(mcp.TASKS_RESULT)
    await eventually(lambda: stand.gateway.downstream.in_flight == 1, "the request waits")
    forget(stand)
    assert (await waiting).outcome[2] == "stopping"


@pytest.mark.parametrize("keys", [[KEY], []])
async def test_a_task_that_works_is_lost_with_its_process_if_no_other_one_has_the_keys(
    server: TaskServer, begin: Start, keys: list[str]
) -> None:
    stand = await begin(state={"keys": keys})
    task = await TaskClient(stand.client(), FIRST_FORM).first_form()
    assert (await told(stand)).processes[0].lost_at_end == (not keys)
    server.done.set()
    _ = await task.until("completed")
    assert (await told(stand)).processes[0].lost_at_end == 0


@pytest.mark.parametrize("ephemeral", [[], ["tool"]])
async def test_a_task_of_a_server_without_sessions_is_lost_with_its_process_even_if_its_tool_may_run_twice(
    upstream: FakeUpstream, server: TaskServer, begin: Start, ephemeral: list[str]
) -> None:
    upstream.has_sessions = False
    stand = await begin(route={"ephemeral": ephemeral})
    task = await TaskClient(stand.client(), FIRST_FORM).first_form()
    assert (await told(stand)).processes[0].lost_at_end == 1
    server.done.set()
    _ = await task.until("completed")


async def test_the_open_questions_of_a_task_are_weighed(server: TaskServer, begin: Start) -> None:
    server.ask(1, 2)
    stand = await begin(limits={"calls_bytes": 100_000, "calls_bytes_per_principal": 50_000})
    task = await make(stand)
    asked = await task.until("input_required")
    await eventually(lambda: stand.gateway.calls.used > len(json.dumps(FORM)), "both questions are here")
    large = {**ACCEPT, "content": {"name": "y" * 60_000}}
    more = dict.fromkeys(asked["inputRequests"], large)
    assert (await task.send(mcp.TASKS_UPDATE, inputResponses=more)).result, "an answer always fits"
    refused = await task.client.call(arguments={"x": "y" * 60_000})
    assert refused.outcome[2] == "busy"
    forget(stand)
    assert stand.gateway.calls.used == 0


async def test_a_request_that_waits_for_a_task_keeps_nothing_of_its_body(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    del server
    stand = await begin()
    task = await TaskClient(stand.client(), FIRST_FORM).first_form()
    with copies.counted() as kept:
        waiting = later(task.send(mcp.TASKS_RESULT, **copies.LARGE))
        await upstream.saw(mcp.TASKS_RESULT)
        await eventually(lambda: stand.gateway.downstream.in_flight and not kept(), "the request waits")
        assert stand.gateway.calls.used == 0
        forget(stand)
        assert (await waiting).error


async def test_a_flood_of_questions_that_no_client_may_see_costs_one_connection(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    async def flood(turn: Turn) -> None:
        for number in range(200):
            await turn.say({"id": f"f{number}", "method": "x/y", "params": {}})
        await turn.say({"id": 1, "method": mcp.ELICIT, "params": FORM})
        await server.hold(turn)

    upstream.on(mcp.TASKS_RESULT, flood)
    is_over = upstream.holding("answer", lambda turn: turn.reply(202))
    stand = await begin()
    task = await make(stand)
    _ = await task.until("input_required")
    assert len(upstream.of("answer")) <= 1
    is_over.set()


async def test_a_task_for_which_there_is_no_place_any_more_may_have_had_effects(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    both = upstream.holding(mcp.TOOLS_CALL, server.make)
    stand = await begin(hold={"max_calls_per_principal": 1})
    client = TaskClient(stand.client())
    calls = [later(client.call()) for _ in range(2)]
    await upstream.saw(mcp.TOOLS_CALL, 2)
    both.set()
    refused, made = sorted(await asyncio.gather(*calls), key=lambda reply: "result" in reply.final)
    assert made.result["resultType"] == "task"
    assert refused.outcome[2] == "call_lost"
    assert "hold.max_calls_per_principal" in refused.error["message"]
    assert "You sent no credential" in refused.error["message"]
    await upstream.saw(mcp.TASKS_CANCEL)


def test_only_its_own_tasks_count_for_a_caller_and_the_oldest_that_is_over_makes_room() -> None:
    table = TaskTable(InForce(Hold(max_calls=3, max_calls_per_principal=2)), Mock())
    tasks = [MagicMock(id=str(number), principal=b"p", is_over=False) for number in range(2)]
    for task in tasks:
        table.add(task)
    table.check(b"q")
    with pytest.raises(Busy, match="max_calls_per_principal"):
        table.check(b"p")
    tasks[1].is_over = True
    table.check(b"p")
    assert [task.close.called for task in tasks] == [False, True]
    table.add(MagicMock(id="2", principal=b"q", is_over=False))
    tasks[1].is_over = False
    with pytest.raises(Busy, match=r"\(hold.max_calls\)"):
        table.check(b"r")


async def test_a_server_that_forgets_the_session_of_a_task_may_have_run_it(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    async def forgets(turn: Turn) -> None:
        upstream.forget()
        lacks_session(turn)

    del server
    upstream.on(mcp.TASKS_RESULT, forgets)
    stand = await begin()
    reply = await stand.client().call()
    assert reply.outcome[2] == "call_lost"
    assert "may have had effects" in reply.error["message"]


async def test_a_task_for_which_no_session_is_free_is_not_unknown(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    first = await begin()
    task = await make(first)
    await upstream.saw(mcp.TASKS_RESULT)
    first.gateway.task_table.leave(is_resumable=True)
    second = await begin(replica={"id": "gw-2"}, sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05})
    client = TaskClient(second.client())
    moved = Task(client, task.id)
    is_listed = upstream.holding(mcp.TOOLS_LIST, lambda turn: turn.result({"tools": [TOOL]}))
    using = later(client.client.post(mcp.TOOLS_LIST))
    await upstream.saw(mcp.TOOLS_LIST, 2)
    assert (await moved.send(mcp.TASKS_GET)).outcome[2] == "busy"
    is_listed.set()
    _ = await using
    server.done.set()
    assert (await moved.until("completed"))["result"]["content"] == text("done")["content"]


async def test_an_update_does_not_fail_for_an_answer_that_the_call_did_not_deliver(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    async def ask_first(turn: Turn) -> None:
        await turn.say({"id": 1, "method": mcp.ELICIT, "params": FORM})
        await upstream.saw("answer")
        await server.make(turn)

    upstream.tool(ask_first)
    is_task = upstream.holding("answer", lambda turn: turn.reply(500))
    stand = await begin()
    client = TaskClient(stand.client())
    asked = (await client.call()).result
    answers = dict.fromkeys(asked["inputRequests"], ACCEPT)
    made = (await client.call(requestState=asked["requestState"], inputResponses=answers)).result
    is_task.set()
    task = Task(client, made["taskId"])
    again = await task.until("input_required")
    upstream.on("answer", lambda turn: turn.reply(202))
    assert (await task.answer(again)).result
    assert len(upstream.of("answer")) == 2


@pytest.mark.parametrize("is_away", [False, True], ids=["waits", "is away"])
async def test_a_client_that_was_asked_before_there_was_a_task_gets_its_handle_by_a_retry_as_often_as_it_asks(
    server: TaskServer, begin: Start, upstream: FakeUpstream, *, is_away: bool
) -> None:
    may_make = asyncio.Event()

    async def ask_first(turn: Turn) -> None:
        if is_away:
            await turn.say({"id": 1, "method": mcp.ELICIT, "params": FORM})
            await may_make.wait()
        else:
            _ = await turn.elicit("q")
        await server.make(turn)

    upstream.tool(ask_first)
    stand = await begin()
    client = TaskClient(stand.client())
    asked = (await client.call()).result
    may_make.set()
    if is_away:
        await upstream.saw(mcp.TASKS_RESULT)
    answers = dict.fromkeys(asked["inputRequests"], ACCEPT)
    made = [(await client.call(requestState=asked["requestState"], inputResponses=answers)).result for _ in range(2)]
    assert {result["resultType"] for result in made} == {"task"}
    assert made[0]["taskId"] == made[1]["taskId"]
    assert (await Task(client, made[0]["taskId"]).get())["status"] == ("input_required" if is_away else "working")
    assert len(upstream.of("answer")) == (not is_away), "the question is the task's"
    assert len(upstream.of(mcp.TOOLS_CALL)) == 1
    assert len(stand.gateway.lot) == 0


async def test_only_the_keys_of_a_task_reach_its_questions(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    server.ask(1)
    stand = await begin()
    task = await make(stand)
    asked = await task.until("input_required")
    assert (await task.get())["inputRequests"] == asked["inputRequests"], "a key stays the same"
    (live,) = stand.gateway.task_table
    (own,), keys = asked["inputRequests"], stand.gateway.task_table.sealer.questions
    key = keys.open(own)
    assert key.exchange == live.id
    changed = [replace(key, exchange="another"), replace(key, method="x/y"), replace(key, upstream_id=b"7")]
    others = [*map(keys.seal, changed), "forged"]
    assert (await task.answer({"inputRequests": others})).result
    assert "answer" not in upstream.words
    assert (await task.answer(asked)).result
    assert [answer.body["id"] for answer in await upstream.saw("answer")] == [1]


async def test_the_key_of_an_answered_question_does_not_answer_a_later_one_with_its_id(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    """A client may send its answers twice."""

    async def asking(turn: Turn) -> None:
        for title in ("first", "second"):
            await turn.elicit(title, id_=1)
        await turn.result(text("done"))

    upstream.on(mcp.TASKS_RESULT, asking)
    stand = await begin()
    task = await make(stand)
    first = await task.until("input_required")
    assert (await task.answer(first)).result
    second = await task.until("input_required")
    assert (await task.answer(first)).result
    assert await task.get() == second, "it still asks"
    server.done.set()
    assert (await task.answer(second)).result
    _ = await task.until("completed")
    assert [answer.body["id"] for answer in upstream.of("answer")] == [1, 1]


async def test_a_question_that_another_replica_asked_is_answered_once(
    server: TaskServer, begin: Start, upstream: FakeUpstream
) -> None:
    """This one asks nothing, because the other may still hold `tasks/result`."""
    server.ask(1)
    first = await begin()
    task = await make(first)
    asked = await task.until("input_required")
    first.gateway.task_table.leave(is_resumable=True)
    second = await begin(replica={"id": "gw-2"})
    moved = task.on(second.client())
    assert (await moved.get())["status"] == "working"
    for _ in range(2):
        assert (await moved.answer(asked)).result
    assert [answer.body["id"] for answer in await upstream.saw("answer")] == [1]


async def test_a_task_of_another_replica_that_its_client_cancels_is_no_exchange_in_the_log(
    server: TaskServer, begin: Start
) -> None:
    del server
    first = await begin()
    task = await make(first)
    first.gateway.task_table.leave(is_resumable=True)
    second = await begin(replica={"id": "gw-2"})
    moved = task.on(second.client())
    _ = await moved.send(mcp.TASKS_CANCEL)
    assert (await moved.get())["status"] == "cancelled"
    forget(second)
    assert second.metric("mcp_gateway_rounds_per_exchange_count") == 0


async def test_an_answer_of_the_wrong_kind_leaves_the_question_of_a_task_open(
    server: TaskServer, begin: Start
) -> None:
    server.ask(1)
    stand = await begin()
    task = await make(stand)
    asked = await task.until("input_required")
    refused = await task.send(mcp.TASKS_UPDATE, inputResponses={key: {"roots": []} for key in asked["inputRequests"]})
    assert refused.error["message"].endswith("; the task still waits: send tasks/update again")
    assert (await task.get())["inputRequests"] == asked["inputRequests"]


@pytest.mark.processes
async def test_a_task_that_is_over_asks_nothing() -> None:
    async with gateway({"command": fake("fake_task_stdio.py"), "warm": 0}) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task("hasty")
        _ = await task.until("input_required")
        _ = await task.cancel()
        refused = {"method": mcp.ROOTS, "outcome": "refused_unsolicited"}
        await gw.until_metric("mcp_gateway_nested_requests_total", bool, **refused)
        assert "inputRequests" not in await task.get()
