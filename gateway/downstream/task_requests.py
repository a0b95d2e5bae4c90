"""Serves the requests about tasks, by any replica.

The handle in `taskId` names the replica that follows the task. If that one is gone, the replica that `Router`
finds goes on with the task.
"""

import asyncio
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from gateway.bridge.call_context import ClientCall
from gateway.bridge.driver import Driver
from gateway.cluster.router import Held, TakeOver
from gateway.downstream.round import Round
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.parking.lot import Lot
from gateway.protocol import mcp
from gateway.protocol.errors import DownstreamError, InvalidParams, InvalidState, TasksUndeclared, UnknownTask
from gateway.protocol.request import Request
from gateway.seal.task_handle import TaskHandle
from gateway.tasks import modern_tasks, sep_2322_form
from gateway.tasks.live_task import LiveTask, TaskTable

METHODS: Final = mcp.TASK_METHODS | mcp.FIRST_FORM_METHODS


async def serve(round_: Round, lot: Lot[Driver], table: TaskTable) -> Response:
    """Serve one request; raises UnknownTask for every handle that is not accepted, or NoHandshake."""
    with round_.weigh(is_continued=True) as weight:
        request = round_.request
        if not request.said.declared.tasks and not request.said.declared.legacy_tasks:
            raise TasksUndeclared(request.method)
        sealed = sep_2322_form.task_id(request)
        try:
            handle = table.sealer.open(sealed, round_.incoming.bearer(round_.caller))
        except InvalidState as exc:
            round_.check_era(exc)
            raise UnknownTask from exc
        round_.incoming.exchange_id = handle.exchange
        task = table.find(handle.exchange) or await _elsewhere(handle, sealed, round_, lot, table)
        if not isinstance(task, LiveTask):
            return task
        await task.known()
        await task.authorise(round_.key, round_.headers)  # what follows is answered from memory (decision 4)
        task.renew(round_.headers)
        if request.input_responses is None:  # it may wait long for the task
            round_.drop_body()
            request = round_.request
            weight.change(0)
        return await round_.answer(await _answer(task, request))


def is_ours(at: Arrival, table: TaskTable) -> bool:
    """Whether this is a request about a task that the gateway gave to this caller."""
    try:
        request = at.incoming.request()
        if request.method not in METHODS:
            return False
        _ = table.sealer.open(sep_2322_form.task_id(request), at.bearer)
    except DownstreamError:
        return False
    return True


async def _elsewhere(
    handle: TaskHandle, sealed: str, round_: Round, lot: Lot[Driver], table: TaskTable
) -> Response | LiveTask:
    """Have another replica serve a request, or go on with a task whose owner is gone."""
    process = round_.live.process
    if process.is_own(handle.owner, handle.epoch) and handle.exchange not in process.draining.let_go:
        raise UnknownTask
    held = Held(handle.owner, handle.exchange, handle.upstream is not None, may_have_moved=True)
    found = await process.router.route(held, round_.incoming, round_.reply)
    if not isinstance(found, TakeOver):
        return found
    if (task := table.find(handle.exchange)) is not None:  # another request came first
        return task
    if handle.upstream is None:
        raise UnknownTask  # it did not fit into the handle, so only the owner could go on
    table.check(round_.key.principal)
    request = replace(round_.request.taken(), method=mcp.TOOLS_CALL)  # the call that made the task
    call = ClientCall(round_.live, request, round_.key, round_.headers)
    task = LiveTask(call, lot, table)
    task.go_on(handle, sealed, is_shared=not found.proven)
    return task


async def _answer(task: LiveTask, request: Request) -> bytes:
    if not request.said.declared.tasks:
        return await _answer_first_form(task, request)
    match request.method:
        case mcp.TASKS_UPDATE:
            await task.update(request.input_responses or {})
            return modern_tasks.ACKNOWLEDGED
        case mcp.TASKS_CANCEL:
            task.cancel()
            return modern_tasks.ACKNOWLEDGED
        case _:
            return modern_tasks.get_result(await task.full_view())


async def _answer_first_form(task: LiveTask, request: Request) -> bytes:
    """SEP-2322's first form, for clients of 2025-11-25's tasks."""
    match request.method:
        case mcp.TASKS_INPUT | mcp.TASKS_UPDATE:
            await task.update(request.input_responses or {})
            return modern_tasks.ACKNOWLEDGED
        case mcp.TASKS_CANCEL:
            if task.is_over:
                raise InvalidParams("The task is over, so it cannot be cancelled")
            task.cancel()
            return sep_2322_form.task(task.view())
        case mcp.TASKS_RESULT:
            with suppress(TimeoutError):
                async with asyncio.timeout(task.live.config.legs.limit_seconds):
                    while task.status == "working":
                        await task.change()
            return sep_2322_form.payload(await task.full_view())
        case _:
            return sep_2322_form.task(task.view())
