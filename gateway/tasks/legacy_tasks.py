"""Reads the tasks of 2025-11-25 as real servers write them: pure.

Source: specification 2025-11-25 basic/utilities/tasks. The servers differ: TypeScript 1.32 answers `failed` for a
result with isError and keeps the result, `mcp` 1.30 completes it; a task that raised has the error -32603, or a result
that is `_meta` alone; fastmcp 3 refuses tasks/result until the task is over. So only two things are trusted: what
tasks/result brings, and whether the status is final.
"""

from typing import Final

from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import TaskCancelled, clean

FINAL: Final = frozenset({"completed", "failed", "cancelled"})
"""The states of a task that is over."""


Ended = on.Resulted | on.Failed | on.Broke
"""How a task ended: with a result or an error, or it was cancelled."""


def created(result: Raw) -> on.Became | None:
    """What a CreateTaskResult says; None if this is another result."""
    task = jsonrpc.members(jsonrpc.members(result).get("task"))
    if not (task_id := jsonrpc.text(task.get("taskId"))):
        return None
    ttl_ms = jsonrpc.number(task.get("ttl")) or 0.0
    return on.Became(task_id, ttl_ms / 1000 if ttl_ms > 0 else None)


def status(got: Raw | jsonrpc.Error | None) -> str | None:
    """What the answer to tasks/get says of a task; None if the server does not know it."""
    return jsonrpc.text(jsonrpc.members(got).get("status")) or None


def returned(answer: Raw | jsonrpc.Error) -> on.Resulted | None:
    """What the tool returned, if the answer to tasks/result is that."""
    if not isinstance(answer, Raw) or not {"content", "structuredContent"} & jsonrpc.members(answer).keys():
        return None
    return on.Resulted(without_task(answer))


def without_task(result: Raw) -> Raw:
    """A result without the `_meta` that names its task, which is unknown to the client; a malformed one stays."""
    if mcp.META_RELATED_TASK.encode() not in bytes(result):
        return result
    try:
        opened = jsonrpc.fields(result)
        meta = {key: raw for key, raw in jsonrpc.fields(opened["_meta"]).items() if key != mcp.META_RELATED_TASK}
    except (KeyError, ValueError):
        return result
    return jsonrpc.with_meta(opened, meta)


def ended(got: Raw | jsonrpc.Error, answer: Raw | jsonrpc.Error) -> Ended:
    """How a task ended that is over as tasks/get says, from a tasks/result that was sent after that."""
    if (result := returned(answer)) is not None:
        return result
    found = status(got)
    if found == "cancelled":
        return on.Broke(TaskCancelled())
    if found == "completed" and isinstance(answer, Raw):
        return on.Resulted(without_task(answer))
    message = jsonrpc.text(jsonrpc.members(got).get("statusMessage"))
    said = answer.message if isinstance(answer, jsonrpc.Error) else ""
    return on.Failed(jsonrpc.Error(mcp.INTERNAL_ERROR, clean(message or said or "The task failed")))
