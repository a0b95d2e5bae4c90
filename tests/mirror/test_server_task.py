"""What the mirror reads of a modern server's tasks."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from gateway.mirror import server_task as task
from gateway.protocol import jsonrpc, mcp

NEEDS_TASKS = {"requiredCapabilities": {"extensions": {mcp.TASKS: {}}}}


def fields(**members: Any) -> jsonrpc.Fields:
    return jsonrpc.fields(json.dumps(members).encode())


@pytest.mark.parametrize(
    ("code", "data", "wanted"),
    [
        (mcp.MISSING_CAPABILITY, NEEDS_TASKS, True),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": {"elicitation": {}, "extensions": {mcp.TASKS: {}}}}, True),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": {"elicitation": {}}}, False),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": {"extensions": {"other": {}}}}, False),
        (mcp.MISSING_CAPABILITY, {"requiredCapabilities": 7}, False),
        (mcp.MISSING_CAPABILITY, [], False),
        (mcp.MISSING_CAPABILITY, None, False),
        (mcp.INTERNAL_ERROR, NEEDS_TASKS, False),
    ],
)
def test_only_the_error_that_names_tasks_asks_for_them(code: int, data: Any, wanted: bool) -> None:  # noqa: FBT001
    raw = msgspec.UNSET if data is None else Raw(json.dumps(data).encode())
    assert task.is_wanted(jsonrpc.Error(code, "no", raw)) is wanted


def test_a_task_needs_an_id() -> None:
    assert task.created(fields(taskId="t")) == "t"
    for odd in (fields(), fields(taskId=""), fields(taskId=7)):
        with pytest.raises(ValueError, match="taskId"):
            task.created(odd)


@pytest.mark.parametrize(
    ("interval", "seconds"), [(500, 0.5), (0, 0.1), (-1, 0.1), (10**9, 60), (None, 1), ("1", 1), (True, 1)]
)
def test_the_pause_is_the_servers_within_bounds(interval: Any, seconds: float) -> None:
    assert task.pause(fields(pollIntervalMs=interval)) == seconds
    assert task.pause(fields()) == 1


def test_a_task_is_read_as_its_status_says() -> None:
    everything = {"result": {"a": 1}, "error": {"code": -1, "message": "m"}, "inputRequests": {"k": {}}}
    asking = task.read(fields(status="input_required", **everything))
    assert (list(asking.asked), asking.result, asking.error) == (["k"], None, None)
    done = task.read(fields(status="completed", **everything))
    assert (done.asked, done.result, done.error) == ({}, Raw(b'{"a": 1}'), None)
    failed = task.read(fields(status="failed", **everything))
    assert failed.error is not None
    assert (failed.asked, failed.result, failed.error.code) == ({}, None, -1)
    for status in ("working", "cancelled"):
        found = task.read(fields(status=status, **everything))
        assert (found.asked, found.result, found.error) == ({}, None, None)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"status": "odd"},
        {"status": "completed"},
        {"status": "failed"},
        {"status": "input_required", "inputRequests": 7},
    ],
)
def test_a_malformed_task_is_refused(odd: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        task.read(fields(**odd))
