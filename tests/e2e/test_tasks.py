"""Tools that run as tasks, on legacy servers of three families: what their clients see, with the extension or without.

The families differ as decision 43 says; each trap that they set has a test here.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, needs
from tests.support.gateway_process import Gateway, gateway
from tests.support.task_client import EXTENSION, FIRST_FORM, Task, TaskClient
from tests.support.workbench import Client, Json

CONFIRM: Final = {"action": "accept", "content": {"confirm": True}}


def named(name: str) -> Json:
    return {"action": "accept", "content": {"name": name}}


FAMILIES = ("tasks-ts", "tasks-py", "tasks-fm3")
ASKING_AT_ONCE = ("tasks-ts", "tasks-py")
"""A task of fastmcp 3 hangs after two questions at once."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(90),
]


@dataclass(frozen=True)
class Stage:
    """One server behind one gateway."""

    server: OldServer
    gw: Gateway
    wire: Client

    @property
    def client(self) -> TaskClient:
        return TaskClient(self.wire)


@pytest.fixture(params=FAMILIES)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    overrides: dict[str, Any] = getattr(request.node.get_closest_marker("configured"), "kwargs", {})
    async with old_server(request.param) as server, gateway(server.url, **overrides) as gw, wire(gw.url) as client:
        yield Stage(server, gw, client)


only = pytest.mark.parametrize
TS, PY, FM3 = (only("stage", [name], indirect=True) for name in FAMILIES)
BOTH_SDKS = only("stage", ASKING_AT_ONCE, indirect=True)


# --- clients without the extension ---


async def test_a_tool_that_requires_a_task_is_an_ordinary_call_with_rounds(stage: Stage) -> None:
    asked = await stage.wire.call("must_confirm", {"filename": "x"})
    assert asked.asks == ["Confirm"]
    (question,) = asked.result["inputRequests"].values()
    assert "_meta" not in question["params"]
    done = await stage.wire.answer(asked, CONFIRM)
    assert done.text == "deleted x"
    assert "related-task" not in done.data.decode()
    assert len(stage.server.ledger("run", "must_confirm")) == 1
    await stage.gw.settled()


async def test_the_error_of_a_driven_task_is_a_result_that_says_so(stage: Stage) -> None:
    failed = await stage.wire.call("failing_job")
    assert failed.result["isError"] is True
    assert failed.text == "the job failed"


@BOTH_SDKS
async def test_two_questions_in_a_row_are_two_rounds_of_a_driven_task(stage: Stage) -> None:
    first = await stage.wire.call("ask_twice")
    assert first.asks == ["First"]
    second = await stage.wire.answer(first, named("Ann"))
    assert second.asks == ["Second"]
    assert (await stage.wire.answer(second, named("Bob"))).text == "Ann, Bob"


@PY
async def test_the_same_question_asked_many_times_is_answered_each_time(stage: Stage) -> None:
    """The Python SDK gives an id again once its question is answered: of 60 ids, several are the same."""
    names = [f"n{number}" for number in range(60)]
    told = await stage.wire.call("ask_often", {"times": len(names)})
    for name in names:
        told = await stage.wire.answer(told, named(name))
    assert told.text == ", ".join(names)


@TS
@pytest.mark.configured(route={"tasks": {"optional": "drive"}})
async def test_an_optional_tool_of_typescript_that_asks_works_if_it_is_driven(stage: Stage) -> None:
    """Called plainly, the TypeScript SDK makes a hidden task, and its question reaches no client."""
    asked = await stage.wire.call("confirm_delete", {"filename": "x"})
    assert asked.asks == ["Confirm"]
    assert (await stage.wire.answer(asked, CONFIRM)).text == "deleted x"


@pytest.mark.configured(hold={"ttl_seconds": 0.5})
async def test_a_driven_task_whose_client_never_comes_back_leaves_no_session_busy(stage: Stage) -> None:
    _ = (await stage.wire.call("must_confirm", {"filename": "x"})).state
    await stage.gw.settled(10)
    assert not any("accept" in str(entry) for entry in stage.server.ledger("answered"))


# --- clients with the extension ---


async def test_a_task_asks_and_ends_as_its_client_sees_it(stage: Stage) -> None:
    task = await stage.client.task("must_confirm", {"filename": "x"})
    asked = await task.until("input_required")
    (question,) = asked["inputRequests"].values()
    assert (question["method"], question["params"]["message"]) == ("elicitation/create", "Delete x?")
    assert (await task.answer(asked, CONFIRM)).result == {"resultType": "complete"}
    assert (await task.get())["status"] in ("working", "completed")  # an answered question never comes back
    assert await task.text() == "deleted x"
    assert "related-task" not in str(await task.get())
    assert await stage.gw.metric("mcp_gateway_tasks") == 1
    assert await stage.gw.metric("mcp_gateway_tasks_ended_total", outcome="completed") == 1


async def test_a_task_id_fits_into_a_header_and_is_bound_to_its_caller(stage: Stage) -> None:
    alice, bob = (TaskClient(stage.wire.on(Authorization=f"Bearer {name}")) for name in ("alice", "bob"))
    task = await alice.task("slow_compute", {"seconds": 5})
    assert len(task.id) < 1024
    stolen = await bob.send("tasks/get", {"taskId": task.id})
    forged = await alice.send("tasks/get", {"taskId": task.id[:-4] + "AAAA"})
    unknown = await alice.send("tasks/get", {"taskId": "no-such-task"})
    assert stolen.refusal == forged.refusal == unknown.refusal == (400, -32602)
    assert stolen.error["message"] == forged.error["message"] == unknown.error["message"]
    assert (await task.get())["status"] == "working"


async def test_mcp_name_must_be_the_task_id_if_it_comes_at_all(stage: Stage) -> None:
    task = await stage.client.task("slow_compute", {"seconds": 5})
    wrong = await stage.client.send("tasks/get", {"taskId": task.id}, **{"Mcp-Name": "another"})
    assert wrong.refusal == (400, -32020)


async def test_a_cancelled_task_is_never_answered(stage: Stage) -> None:
    task = await stage.client.task("must_confirm", {"filename": "x"})
    asked = await task.until("input_required")
    assert (await task.cancel()).result == {"resultType": "complete"}
    assert (await task.answer(asked, CONFIRM)).result == {"resultType": "complete"}
    assert (await task.cancel()).result == {"resultType": "complete"}
    assert (await task.get())["status"] == "cancelled"
    assert not any("True" in str(entry) for entry in stage.server.ledger("answered"))


@PY
async def test_the_end_of_a_cancelled_task_of_the_python_sdk_ends_no_other_session(stage: Stage) -> None:
    """`mcp` 1.30 would end the session that was opened last, with its tasks, if it got tasks/cancel."""
    alice, bob = (TaskClient(stage.wire.on(Authorization=f"Bearer {name}")) for name in ("alice", "bob"))
    cancelled = await alice.task("must_confirm", {"filename": "a"})
    _ = await cancelled.until("input_required")
    other = await bob.task("must_confirm", {"filename": "b"})
    asked = await other.until("input_required")
    _ = await cancelled.cancel()
    await stage.server.wait_for("finished", "must_confirm")  # the cancelled one, which got no true answer
    _ = await other.answer(asked, CONFIRM)
    assert await other.text() == "deleted b"
    assert "unhandled" not in stage.server.stderr


@PY
async def test_tasks_of_the_python_sdk_can_be_made_after_a_session_has_ended(stage: Stage) -> None:
    """`mcp` 1.30 makes no task between the end of any session and the next handshake."""
    assert (await stage.wire.call("failing_job")).text == "the job failed"
    await stage.gw.settled()
    task = await stage.client.task("slow_compute", {"seconds": 0, "label": "b"})
    assert await task.text() == "computed b"


async def test_an_error_of_the_tool_is_a_completed_task(stage: Stage) -> None:
    task = await stage.client.task("failing_job")
    done = await task.until("completed", "failed")
    assert done["status"] == "completed"
    assert done["result"]["isError"] is True


@BOTH_SDKS
async def test_an_exception_is_a_failed_task_with_its_message(stage: Stage) -> None:
    failed = await (await stage.client.task("protocol_error_job")).until("completed", "failed")
    assert (failed["status"], failed["error"]) == ("failed", {"code": -32603, "message": "the job broke"})


@FM3
async def test_a_live_task_counts_as_the_call_in_flight(stage: Stage) -> None:
    """A question of fastmcp 3 comes on the GET stream, between two requests of the task, and names no task."""
    task = await stage.client.task("confirm_later", {"filename": "x"})
    asked = await task.until("input_required")
    _ = await task.answer(asked, CONFIRM)
    assert await task.text() == "deleted x"
    driven = await stage.wire.call("confirm_later", {"filename": "y"})
    assert (await stage.wire.answer(driven, CONFIRM)).text == "deleted y"
    assert await stage.gw.metric("mcp_gateway_nested_requests_total", outcome="refused_unsolicited") == 0


BOTH: Final = {"action": "accept", "content": {"name": "Ann", "confirm": True}}
"""An answer to both questions of `multi_input`."""


async def with_both_questions(task: Task) -> Json:
    """A task of `multi_input` once both of its questions are open."""
    async with asyncio.timeout(15):
        while len((asked := await task.until("input_required"))["inputRequests"]) < 2:
            await asyncio.sleep(0.05)
    return asked


@BOTH_SDKS
async def test_a_task_with_two_questions_stays_open_until_both_are_answered(stage: Stage) -> None:
    task = await stage.client.task("multi_input")
    first, second = (await with_both_questions(task))["inputRequests"]
    partly = {"inputResponses": {first: BOTH, "unknown": BOTH}, "taskId": task.id}
    assert (await stage.client.send("tasks/update", partly)).result == {"resultType": "complete"}
    left = await task.get()
    assert (left["status"], list(left["inputRequests"])) == ("input_required", [second])
    _ = await task.answer(left, BOTH)
    assert await task.text() == f"Ann: {'true' if stage.server.name == 'tasks-ts' else 'True'}"


@BOTH_SDKS
async def test_a_task_ends_that_gets_two_answers_at_once(stage: Stage) -> None:
    """After such answers the Python SDK forgets one in seven of the `tasks/result` that wait."""
    for _ in range(10):
        task = await stage.client.task("multi_input")
        _ = await task.answer(await with_both_questions(task), BOTH)
        assert (await task.text()).startswith("Ann: ")


@BOTH_SDKS
async def test_a_tool_may_ask_first_and_become_a_task_then(stage: Stage) -> None:
    asked = await stage.client.call("test_tool_with_task")
    assert asked.result["resultType"] == "input_required"
    assert "taskId" not in asked.result
    answers = {"user_name": named("Ann")}
    task = await stage.client.task("test_tool_with_task", requestState=asked.state, inputResponses=answers)
    assert await task.text() == "Hello, Ann!"


@TS
async def test_requests_without_the_extension_are_told_of_it(stage: Stage) -> None:
    task = await stage.client.task("slow_compute", {"seconds": 5})
    undeclared = TaskClient(stage.wire, capabilities={"elicitation": {}})
    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        assert (await undeclared.send(method, {"taskId": task.id})).refusal == (400, -32021)
    for method in ("tasks/result", "tasks/list"):
        assert (await stage.client.send(method, {"taskId": task.id})).refusal == (404, -32601)


@TS
async def test_the_lists_of_modern_clients_say_nothing_of_legacy_tasks(stage: Stage) -> None:
    found = (await stage.wire.post("server/discover")).result["capabilities"]
    assert found["extensions"] == {"io.modelcontextprotocol/tasks": {}}
    assert "tasks" not in found
    tools = (await stage.wire.post("tools/list", capabilities=EXTENSION)).result["tools"]
    assert len(tools) > 1
    assert not any("execution" in tool for tool in tools)


@TS
@pytest.mark.configured(hold={"max_calls_per_principal": 1})
async def test_a_finished_task_makes_room_for_another(stage: Stage) -> None:
    first = await stage.client.task("slow_compute", {"seconds": 30})
    refused = await stage.client.call("slow_compute", {"seconds": 0})
    assert refused.status == 429
    assert "hold.max_calls_per_principal" in refused.error["message"]
    _ = await first.cancel()
    second = await stage.client.task("slow_compute", {"seconds": 0})
    _ = await second.until("completed")
    assert (await first.client.send("tasks/get", {"taskId": first.id})).refusal == (400, -32602)


@BOTH_SDKS
@pytest.mark.configured(tasks={"ttl_seconds": 1})
async def test_a_task_is_forgotten_when_its_time_is_over(stage: Stage) -> None:
    task = await stage.client.task("slow_compute", {"seconds": 0})
    await stage.gw.until_metric("mcp_gateway_tasks", lambda tasks: not tasks)
    assert (await stage.client.send("tasks/get", {"taskId": task.id})).refusal == (400, -32602)
    await stage.gw.settled()


@BOTH_SDKS
@pytest.mark.configured(limits={"results_bytes": 1})
async def test_a_result_that_gave_way_is_asked_for_again(stage: Stage) -> None:
    task = await stage.client.task("slow_compute", {"seconds": 0, "label": "a"})
    for _ in range(2):
        assert await task.text() == "computed a"


@TS
async def test_a_listen_request_is_acknowledged_without_task_ids(stage: Stage) -> None:
    params = {"notifications": {"taskIds": ["a"]}}
    refused = await TaskClient(stage.wire, capabilities={}).send("subscriptions/listen", params)
    assert refused.refusal == (400, -32021)


@BOTH_SDKS
async def test_a_task_whose_server_was_restarted_is_failed(stage: Stage) -> None:
    task = await stage.client.task("slow_compute", {"seconds": 60})
    asked = await stage.wire.call("must_confirm", {"filename": "x"})
    await stage.server.restart()
    failed = await task.until("failed")
    assert failed["error"]["code"] == -32603
    lost = await stage.wire.answer(asked, CONFIRM)
    assert lost.error["data"]["reason"] in ("session_lost", "call_lost")
    assert len(stage.server.ledger("run", "must_confirm")) == 1


# --- SEP-2322's first form ---


@BOTH_SDKS
async def test_clients_of_the_old_tasks_get_their_questions_by_tasks_result(stage: Stage) -> None:
    client = TaskClient(stage.wire, capabilities=FIRST_FORM)
    made = (await client.call("must_confirm", {"filename": "x"}, task={"ttl": 60000})).result
    task_id = made["task"]["taskId"]
    asked = (await client.send("tasks/result", {"taskId": task_id})).result
    assert asked["resultType"] == "input_required"
    assert (await client.send("tasks/get", {"taskId": task_id})).result["status"] == "input_required"
    incomplete = {"taskId": task_id, "inputResponses": {}}
    assert (await client.send("tasks/input_response", incomplete)).result == {"resultType": "complete"}
    again = (await client.send("tasks/result", {"taskId": task_id})).result
    assert again["inputRequests"] == asked["inputRequests"]
    answers = dict.fromkeys(asked["inputRequests"], CONFIRM)
    # The paper names no place for the task; both are read.
    _ = await client.send("tasks/input_response", {"task": {"taskId": task_id}, "inputResponses": answers})
    done = (await client.send("tasks/result", {"taskId": task_id})).result
    assert done["content"][0]["text"] == "deleted x"


@TS
async def test_clients_of_the_old_tasks_may_cancel_and_see_the_task(stage: Stage) -> None:
    client = TaskClient(stage.wire, capabilities=FIRST_FORM)
    made = (await client.call("slow_compute", {"seconds": 30}, task={})).result["task"]
    assert (await client.send("tasks/cancel", {"taskId": made["taskId"]})).result["status"] == "cancelled"
    assert (await client.send("tasks/cancel", {"taskId": made["taskId"]})).refusal == (400, -32602)


@TS
async def test_a_client_of_the_old_tasks_that_asks_for_none_gets_an_ordinary_call(stage: Stage) -> None:
    client = TaskClient(stage.wire, capabilities=FIRST_FORM)
    assert (await client.call("slow_compute", {"seconds": 0, "label": "a"})).text == "computed a"


# --- replicas ---


async def _owner(c: Cluster) -> Gateway:
    """The replica that follows the only task."""
    (owner,) = [each for each in c.replicas if await each.metric("mcp_gateway_tasks") == 1]
    return owner


@needs("nginx")
@pytest.mark.parametrize("name", ASKING_AT_ONCE)
async def test_any_replica_serves_a_task(name: str) -> None:
    async with old_server(name) as server, cluster(server.url) as c, wire(c.url) as client:
        task = await TaskClient(client).task("must_confirm", {"filename": "x"})
        for replica in c.replicas:
            asked = await task.until("input_required", url=replica.url)
        _ = await task.answer(asked, CONFIRM, url=c.replicas[0].url)
        for replica in c.replicas:
            assert await task.text(url=replica.url) == "deleted x"
        assert len(server.ledger("run")) == 1


@needs("nginx")
@pytest.mark.parametrize("name", ASKING_AT_ONCE)
async def test_the_task_of_a_killed_replica_is_answered_through_another(name: str) -> None:
    async with old_server(name) as server, cluster(server.url, check=False) as c, wire(c.url) as client:
        task = await TaskClient(client).task("ask_twice")
        asked = await task.until("input_required")
        await (await _owner(c)).kill()
        left, right = c.living
        assert (await task.get(url=left.url))["status"] == "working"
        _ = await task.answer(asked, named("Ann"), url=right.url)
        second = await task.until("input_required", url=left.url)
        assert [each["params"]["message"] for each in second["inputRequests"].values()] == ["Second?"]
        _ = await task.answer(second, named("Bob"), url=left.url)
        for replica in (left, right):
            assert await task.text(url=replica.url) == "Ann, Bob"
        assert len(server.ledger("run")) == 1


@needs("nginx")
@pytest.mark.parametrize("name", FAMILIES)
async def test_the_driven_task_of_a_killed_replica_continues_at_another(name: str) -> None:
    async with old_server(name) as server, cluster(server.url, check=False) as c, wire(c.replicas[0].url) as client:
        asked = await client.call("must_confirm", {"filename": "x"})
        await c.replicas[0].kill()
        assert (await client.on(c.replicas[1].url).answer(asked, CONFIRM)).text == "deleted x"
        assert len(server.ledger("run")) == 1
        assert await c.metric("mcp_gateway_continuations_total", step="resumed") == 1


@pytest.mark.parametrize("name", ASKING_AT_ONCE)
async def test_a_replica_that_is_restarted_goes_on_with_its_tasks(name: str) -> None:
    async with old_server(name) as server, gateway(server.url) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task("must_confirm", {"filename": "x"})
        asked = await task.until("input_required")
        gw.terminate()
        assert await gw.exited() == 0
        await gw.start()
        _ = await task.answer(asked, CONFIRM)
        assert await task.text() == "deleted x"
