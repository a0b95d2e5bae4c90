"""Reads what a modern server says of its task: pure.

A tool that can only run as a task is called again with the extension io.modelcontextprotocol/tasks declared. The
gateway then asks about the task until it ends, and its legacy client sees an ordinary call.

Source: modelcontextprotocol/ext-tasks, specification/2026-07-28/tasks.
"""

from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp

_POLL_SECONDS: Final = 1.0
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 60.0
"""The bounds of the pause that a server may ask for between two polls."""


class State(msgspec.Struct, frozen=True):
    """A task as `tasks/get` describes it; `pause` is the time until the next poll, in seconds."""

    status: str
    pause: float
    asked: jsonrpc.Fields
    result: Raw | None = None
    error: jsonrpc.Error | None = None


def is_wanted(error: jsonrpc.Error) -> bool:
    """Whether a server refused a call because its client did not declare tasks."""
    required = jsonrpc.members(jsonrpc.members(error.data).get("requiredCapabilities"))
    return error.code == mcp.MISSING_CAPABILITY and mcp.TASKS in jsonrpc.members(required.get("extensions"))


def created(result: jsonrpc.Fields) -> str:
    """The id in a CreateTaskResult; raises ValueError."""
    task_id = jsonrpc.text(result.get("taskId"))
    if not task_id:
        raise ValueError("a CreateTaskResult needs `taskId`")
    return task_id


def pause(result: jsonrpc.Fields) -> float:
    """The seconds that the server wants between two polls."""
    raw = result.get("pollIntervalMs")
    milliseconds = None if raw is None else jsonrpc.value(raw)
    if not isinstance(milliseconds, int | float) or isinstance(milliseconds, bool):
        return _POLL_SECONDS
    return min(max(milliseconds / 1000, _LEAST_SECONDS), _MOST_SECONDS)


def read(result: jsonrpc.Fields) -> State:
    """The result of `tasks/get`; raises ValueError for one that is malformed."""
    status = jsonrpc.text(result.get("status"))
    if status not in ("working", "input_required", "completed", "failed", "cancelled"):
        raise ValueError(f"a task cannot have the status {(status or '')[:80]!r}")
    asked = result.get("inputRequests", jsonrpc.EMPTY) if status == "input_required" else jsonrpc.EMPTY
    ended = result.get("result") if status == "completed" else None
    failed = result.get("error") if status == "failed" else None
    if ended is None and failed is None and status in ("completed", "failed"):
        raise ValueError(f"a task with the status {status} needs its result or error")
    error = jsonrpc.error(failed) if failed is not None else None
    return State(status, pause(result), jsonrpc.fields(asked), ended, error)
