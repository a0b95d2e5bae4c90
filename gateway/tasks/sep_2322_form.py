"""Writes the tasks of clients in SEP-2322's first form, for those that declare the tasks of 2025-11-25: pure.

A task that needs input says so in tasks/get; tasks/result then brings `inputRequests`, and tasks/input_response takes
the answers. SEP-2663 withdrew this form, so clients of the extension never see it.
"""

from gateway.exchange import input_requests as inputs
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams, UnknownTask
from gateway.protocol.request import Request
from gateway.tasks import modern_tasks
from gateway.tasks.modern_tasks import View


def task_id(request: Request) -> str:
    """The id of the task that a request is about. The paper leaves open where tasks/input_response has it.

    Raises InvalidParams.
    """
    related = request.said.user_meta.get(mcp.META_RELATED_TASK)
    for place in (request.params, jsonrpc.members(request.task), jsonrpc.members(related)):
        if (raw := place.get("taskId")) is not None:
            found = jsonrpc.text(raw)
            if found is None:
                raise UnknownTask
            return found
    raise InvalidParams('"params.taskId" is missing; it names the task')


def create_result(view: View) -> bytes:
    """CreateTaskResult of 2025-11-25, with the result type of 2026-07-28."""
    members = jsonrpc.merge(modern_tasks.fields(view, in_ms=""))
    return jsonrpc.merge({"resultType": b'"complete"', "task": members, "_meta": _meta(view)})


def task(view: View) -> bytes:
    """The answer to tasks/get or tasks/cancel."""
    return jsonrpc.merge({"resultType": b'"complete"', **modern_tasks.fields(view, in_ms=""), "_meta": _meta(view)})


def payload(view: View) -> bytes:
    """The answer to tasks/result: what the tool returned, else what it asks.

    A task that still works gives an InputRequiredResult without questions, after which the client calls again.
    Raises InvalidParams for a task without a result.
    """
    if view.status == "completed" and view.result is not None:
        return view.result
    if view.status in ("failed", "cancelled"):
        said = view.error.message if view.error is not None else "it was cancelled"
        raise InvalidParams(f"The task has no result: {said}")
    result = {"resultType": b'"input_required"'}
    if view.questions:
        result["inputRequests"] = inputs.input_requests(view.questions)
    else:
        result["requestState"] = jsonrpc.encode(view.id)
    return jsonrpc.merge({**result, "_meta": _meta(view)})


def _meta(view: View) -> bytes:
    related = jsonrpc.encode({"taskId": view.id})
    return jsonrpc.merge({mcp.META_SERVER_INFO: view.server_info, mcp.META_RELATED_TASK: related})
