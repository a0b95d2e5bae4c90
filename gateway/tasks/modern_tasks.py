"""Writes the messages of the extension io.modelcontextprotocol/tasks: pure.

Source: modelcontextprotocol/ext-tasks, specification/2026-07-28/tasks. All of them are flat, and no state of the
gateway is in them but the task's id and the keys of its questions.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.exchange import input_requests as inputs
from gateway.exchange.input_requests import Question
from gateway.protocol import jsonrpc, mcp

POLL_MS: Final = 500  # not the server's: with the 5,000 of fastmcp 3, clients see a task of 1 s after 5 s


class View(msgspec.Struct, frozen=True):
    """A task as its client may see it. `result` is of 2026-07-28, `error` is JSON-RPC's; times are ISO 8601."""

    id: str
    status: str
    created: str
    updated: str
    ttl_ms: int
    questions: Mapping[str, Question]
    server_info: bytes
    result: bytes | None = None
    error: jsonrpc.Error | None = None


def create_result(view: View) -> bytes:
    """CreateTaskResult. The task works, whatever it does by now: tasks/get tells."""
    begun = replace(view, status="working", error=None)
    return jsonrpc.merge({"resultType": b'"task"', **fields(begun), "_meta": _meta(view)})


def get_result(view: View) -> bytes:
    """The answer to tasks/get."""
    result = {"resultType": b'"complete"', **fields(view)}
    if view.status == "input_required":
        result["inputRequests"] = inputs.input_requests(view.questions)
    elif view.status == "completed" and view.result is not None:
        result["result"] = view.result
    elif view.status == "failed" and view.error is not None:
        result["error"] = jsonrpc.encode(view.error)
    return jsonrpc.merge({**result, "_meta": _meta(view)})


ACKNOWLEDGED: Final = b'{"resultType":"complete"}'
"""The answer to tasks/update and tasks/cancel."""


def fields(view: View, in_ms: str = "Ms") -> dict[str, bytes]:
    """The members of a task; `in_ms` ends the names of those that are times in milliseconds."""
    members = {
        "taskId": jsonrpc.encode(view.id),
        "status": jsonrpc.encode(view.status),
        "createdAt": jsonrpc.encode(view.created),
        "lastUpdatedAt": jsonrpc.encode(view.updated),
        f"ttl{in_ms}": b"%d" % view.ttl_ms,
        f"pollInterval{in_ms}": b"%d" % POLL_MS,
    }
    if view.error is not None and view.error.message:
        members["statusMessage"] = jsonrpc.encode(view.error.message)
    return members


def _meta(view: View) -> bytes:
    return jsonrpc.merge({mcp.META_SERVER_INFO: view.server_info})
