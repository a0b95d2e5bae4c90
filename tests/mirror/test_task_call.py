"""One call of a legacy client that becomes a task at a modern server."""

import json
from typing import Any

import pytest

from gateway.exchange import events as on
from gateway.mirror.call_rounds import MAX_ROUNDS, Rounds
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from tests.mirror.test_call_rounds import ACCEPT, ALL, answered, call, encoded, ended, required
from tests.support.fake_modern import FORM

DECLARED = {"extensions": {mcp.TASKS: {}}}
NEEDS_TASKS = {"requiredCapabilities": DECLARED}


def refusal(code: int = mcp.MISSING_CAPABILITY, data: Any = NEEDS_TASKS) -> bytes:
    return encoded(error={"code": code, "message": "needs tasks", **({} if data is None else {"data": data})})


def created(**members: Any) -> bytes:
    return encoded(result={"resultType": "task", "taskId": "t1", "status": "working", **members})


def state(status: str, **members: Any) -> bytes:
    return encoded(result={"resultType": "complete", "taskId": "t1", "status": status, **members})


def sent(it: Rounds) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(it.outgoing().body)
    assert body["method"] == it.aim[0]
    params: dict[str, Any] = body["params"]
    return params


def declared(it: Rounds) -> Any:
    return sent(it)["_meta"][mcp.META_CAPABILITIES]


def task() -> Rounds:
    it = call()
    assert it.received(created(pollIntervalMs=500)) == 0.5
    return it


@pytest.mark.parametrize(
    ("code", "data", "wanted"),
    [
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": {"elicitation": {}, **DECLARED}}, True),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": {"extensions": {"other": {}}}}, False),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": 7}, False),
        (mcp.MISSING_CAPABILITY, [], False),
        (mcp.MISSING_CAPABILITY, None, False),
        (mcp.INTERNAL_ERROR, NEEDS_TASKS, False),
    ],
)
def test_only_the_error_that_names_tasks_asks_for_them(code: int, data: Any, wanted: bool) -> None:  # noqa: FBT001
    assert (call().received(refusal(code, data)) == 0) is wanted


@pytest.mark.parametrize(
    ("interval", "seconds"), [(500, 0.5), (0, 0.1), (-1, 0.1), (10**9, 60), (None, 1), ("1", 1), (True, 1)]
)
def test_the_pause_is_the_servers_within_bounds(interval: Any, seconds: float) -> None:
    assert call().received(created(pollIntervalMs=interval)) == seconds


def test_tasks_are_declared_once() -> None:
    it = call()
    _ = it.received(refusal())
    assert ended(it.received(refusal()))["result"]["isError"] is True


@pytest.mark.parametrize("method", ["prompts/get", "resources/read"])
def test_only_a_tool_becomes_a_task(method: str) -> None:
    assert "error" in ended(call(method).received(refusal()))


def test_a_task_is_asked_about_for_a_client_with_tasks() -> None:
    it = task()
    assert it.aim == ("tasks/get", "t1")
    assert sent(it).keys() == {"taskId", "_meta"}
    assert declared(it) == {**json.loads(ALL), **DECLARED}
    assert mcp.META_LOG_LEVEL not in sent(it)["_meta"]
    assert it.received(state("working", pollIntervalMs=2000)) == 2


def test_a_question_whose_answer_the_server_has_is_not_asked_again() -> None:
    it = task()
    _ = answered(it, it.received(state("input_required", inputRequests={"a": FORM})), "a", result=ACCEPT)
    _ = it.received(encoded(result={"resultType": "complete"}))
    assert it.received(state("input_required", inputRequests={"a": FORM})) == 1
    step = it.received(state("input_required", inputRequests={"a": FORM, "b": FORM}))
    assert isinstance(step, on.Asked)
    assert [each.key for each in step.questions] == ["b"]


def test_rounds_may_come_before_the_task_with_keys_of_their_own() -> None:
    it = call()
    assert it.received(refusal()) == 0.0
    assert answered(it, it.received(required("s", a=FORM)), "a", result=ACCEPT) is None
    assert (sent(it)["requestState"], declared(it)["extensions"]) == ("s", {mcp.TASKS: {}})
    assert it.received(created()) == 1
    assert sent(it).keys() == {"taskId", "_meta"}
    assert isinstance(it.received(state("input_required", inputRequests={"a": FORM})), on.Asked)


def test_an_error_of_the_task_ends_the_call_or_is_tried_again() -> None:
    def refused(code: int, *, answering: bool = False) -> tuple[Rounds, on.Event | float | None]:
        it = task()
        if answering:
            _ = answered(it, it.received(state("input_required", inputRequests={"a": FORM})), "a", result=ACCEPT)
        return it, it.received(encoded(error={"code": code, "message": "no"}))

    gone, step = refused(mcp.INVALID_PARAMS)
    assert "does not know the task" in ended(step)["result"]["content"][0]["text"]
    assert gone.live_task is None
    for it, step in (refused(mcp.METHOD_NOT_FOUND), refused(mcp.INVALID_PARAMS, answering=True)):
        assert ended(step)["result"]["isError"] is True
        assert it.live_task == "t1", "it must be cancelled"
    with pytest.raises(CallLost):
        refused(mcp.INTERNAL_ERROR)


def test_what_the_client_cannot_answer_ends_a_task_too() -> None:
    it = call(declared=b"{}")
    _ = it.received(created())
    assert ended(it.received(state("input_required", inputRequests={"a": FORM})))["result"]["isError"] is True
    assert it.live_task == "t1", "it must be cancelled"


def test_a_task_that_asks_for_ever_is_stopped() -> None:
    it = task()
    for number in range(MAX_ROUNDS - 1):
        key = f"k{number}"
        assert (
            answered(it, it.received(state("input_required", inputRequests={key: FORM})), key, result=ACCEPT) is None
        )
        _ = it.received(encoded(result={"resultType": "complete"}))
    assert ended(it.received(state("input_required", inputRequests={"last": FORM})))["result"]["isError"] is True


@pytest.mark.parametrize("named", [{}, {"taskId": ""}, {"taskId": 7}])
def test_a_task_needs_an_id(named: Any) -> None:
    with pytest.raises(ValueError, match="taskId"):
        call().received(encoded(result={"resultType": "task", **named}))


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"status": "odd"},
        {"status": "completed", "error": {"code": -1, "message": "m"}},
        {"status": "failed", "result": {}},
        {"status": "input_required", "inputRequests": 7},
    ],
)
def test_a_malformed_task_is_an_error_of_the_server(odd: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        task().received(encoded(result={"resultType": "complete", **odd}))


@pytest.mark.parametrize("status", ["working", "completed", "failed", "cancelled"])
def test_a_task_is_read_as_its_status_says(status: str) -> None:
    everything = {"result": {"a": 1}, "error": {"code": -1, "message": "m"}, "inputRequests": {"k": FORM}}
    it = task()
    said = it.received(state(status, **everything))
    assert (it.live_task is None) is (status != "working")
    match status:
        case "working":
            assert said == 1
        case "failed":
            assert ended(said)["error"]["code"] == -1
        case "completed":
            assert ended(said)["result"] == {"a": 1}
        case _:
            assert ended(said)["result"]["isError"] is True
