"""One call of a legacy client that becomes a task at a modern server."""

import json
from typing import Any

import pytest

from gateway.exchange import events as on
from gateway.mirror.call_rounds import MAX_ROUNDS, Rounds
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, Refused, Unreachable
from tests.mirror.test_call_rounds import ACCEPT, answered, call, encoded, ended, required
from tests.mirror.test_linked_backend import Host, Json, host
from tests.support.fake_modern import FORM
from tests.support.fake_server import Sent
from tests.support.workbench import eventually

__all__ = ["host"]
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
    ("interval", "seconds"),
    [(500, 0.5), (0, 0.1), (-1, 0.1), (10**9, 60), (None, 1), ("1", 1), (True, 1), (10**400, 1)],
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
    assert gone.progress.task is None
    for it, step in (refused(mcp.METHOD_NOT_FOUND), refused(mcp.INVALID_PARAMS, answering=True)):
        assert ended(step)["result"]["isError"] is True
        assert it.progress.task == "t1", "it must be cancelled"
    with pytest.raises(CallLost):
        refused(mcp.INTERNAL_ERROR)


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
    assert (it.progress.task is None) is (status != "working")
    match status:
        case "working":
            assert said == 1
        case "failed":
            assert ended(said)["error"]["code"] == -1
        case "completed":
            assert ended(said)["result"] == {"a": 1}
        case _:
            assert ended(said)["result"]["isError"] is True


# -- at work -------------------------------------------------------------------------------------------------------

CREATED: Json = {"resultType": "task", "taskId": "t1", "status": "working", "pollIntervalMs": 1}


async def polled(host: Host, count: int = 1) -> Sent:
    """The poll with that number, once it is at the server."""
    return await host.at_server(mcp.TASKS_GET, count)


async def begun(host: Host) -> Sent:
    """The first poll of a call that has become a task."""
    (await host.call()).says(error={"code": mcp.MISSING_CAPABILITY, "message": "no", "data": NEEDS_TASKS})
    (await host.at_server(mcp.TOOLS_CALL, 2)).says(result=CREATED)
    return await polled(host)


def says(sent: Sent, status: str, **more: Any) -> None:
    sent.completes(taskId="t1", status=status, pollIntervalMs=1, **more)


async def asked(host: Host) -> None:
    """The task asks its question."""
    says(await begun(host), "input_required", inputRequests={"a": FORM})
    assert [message["method"] for message, _ in host.link.sent] == [mcp.ELICIT]


def answers(host: Host, **members: Any) -> None:
    host.says(id=host.link.sent.pop()[0]["id"], **members)


def results(host: Host) -> list[Json]:
    """The results that the client has got, and no error."""
    assert host.link.refused == []
    return [message["result"] for message, _ in host.link.sent]


async def failed(host: Host) -> GatewayError:
    """The error with which the call has failed."""
    await eventually(lambda: host.link.refused, "the call fails")
    ((_, error),) = host.link.refused
    return error


async def cancelled(host: Host) -> Sent:
    """The request that cancels the task."""
    sent = await host.at_server(mcp.TASKS_CANCEL)
    sent.completes()
    return sent


async def test_the_answers_of_the_client_go_to_the_task_with_its_newest_headers(host: Host) -> None:
    await asked(host)
    host.headers = {"Authorization": "newer"}
    answers(host, result=ACCEPT)
    update = await host.at_server(mcp.TASKS_UPDATE)
    assert (update.request.target, update.request.headers) == ("t1", {"Authorization": "newer"})
    update.completes()
    says(await polled(host, 2), "completed", result={"content": []})
    assert results(host) == [{"content": []}]


async def test_only_the_first_round_of_a_call_that_cannot_be_sent_has_had_no_effects(host: Host) -> None:
    (await host.call()).fails(Unreachable("no connection"))
    assert isinstance(await failed(host), Unreachable)
    host.link.refused.clear()
    (await host.call(2)).asks(a=FORM)
    answers(host, result=ACCEPT)
    (await host.at_server(mcp.TOOLS_CALL, 3)).fails(Unreachable("no connection"))
    error = await failed(host)
    assert isinstance(error, CallLost)
    assert "may have had effects" in error.message


@pytest.mark.parametrize("when", ["before a poll", "in a poll", "while it asks"])
async def test_a_task_is_cancelled_with_its_call(host: Host, when: str) -> None:
    if when == "while it asks":
        await asked(host)
    else:
        poll = await begun(host)
        if when == "before a poll":
            says(poll, "working")
    for _ in range(2):
        host.says(method=mcp.CANCELLED, params={"requestId": 1})
    sent = await cancelled(host)
    assert (sent.params["taskId"], sent.request.target, sent.request.headers) == ("t1", "t1", host.headers)
    await eventually(lambda: host.server.of(mcp.TASKS_GET)[0].is_aborted == (when == "in a poll"))
    assert (len(host.server.of(mcp.TASKS_CANCEL)), len(host.server.of(mcp.TASKS_GET))) == (1, 1)
    assert host.link.refused == []


async def test_a_call_that_ends_without_its_task_cancels_it(host: Host) -> None:
    await asked(host)
    answers(host, error={"code": -1, "message": "User rejected"})
    _ = await cancelled(host)
    assert "User rejected" in str(results(host))


async def test_a_poll_that_failed_is_repeated(host: Host) -> None:
    (await begun(host)).fails(Unreachable("no connection"))
    (await polled(host, 2)).says(error={"code": mcp.INTERNAL_ERROR, "message": "busy"})
    says(await polled(host, 3), "completed", result={"content": []})
    assert results(host) == [{"content": []}]


async def test_a_task_is_lost_after_too_many_failures(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.mirror.mirrored_call.TASK_AGAIN_SECONDS", (0.0, 0.0))
    (await begun(host)).fails(CallLost("one"))
    for number, word in ((2, "two"), (3, "three")):
        (await polled(host, number)).fails(CallLost(word))
    assert (await failed(host)).message == "three"
    _ = await cancelled(host)


async def test_a_refused_credential_ends_the_call(host: Host) -> None:
    (await begun(host)).fails(Refused("no", status=401, challenge=None, is_clients=True))
    assert isinstance(await failed(host), Refused)
    _ = await cancelled(host)


async def test_a_task_has_a_time_limit(host: Host) -> None:
    host.live.config.tasks.ttl_seconds = 0.0
    (await host.call()).says(result=CREATED)
    assert "tasks.ttl_seconds" in (await failed(host)).message
    _ = await cancelled(host)
    assert not host.server.of(mcp.TASKS_GET)
