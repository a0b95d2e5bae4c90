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
from gateway.http.incoming import Caller, Incoming
from gateway.http.server.response import Response
from gateway.parking.lot import Lot
from gateway.protocol import mcp
from gateway.protocol.errors import DownstreamError, InvalidParams, InvalidState, TasksUndeclared, UnknownTask
from gateway.protocol.request import Request
from gateway.routes.live_route import ProcessScope
from gateway.seal.task_handle import TaskHandle
from gateway.tasks import modern_tasks, sep_2322_form
from gateway.tasks.follower import holder
from gateway.tasks.live_task import LiveTask, TaskTable
from gateway.telemetry import Step

METHODS: Final = mcp.TASK_METHODS | mcp.FIRST_FORM_METHODS


class TaskRequests:
    """The requests about tasks that reach one listener."""

    def __init__(self, process: ProcessScope, lot: Lot[Driver], table: TaskTable) -> None:
        self.table = table
        self._lot = lot
        self._process = process

    async def serve(self, round_: Round) -> Response:
        """Serve one request; raises UnknownTask for every handle that is not accepted, or NoHandshake."""
        with round_.weigh(is_continued=True) as weight:
            request = round_.request
            if not request.said.declared.tasks and not request.said.declared.legacy_tasks:
                raise TasksUndeclared(request.method)
            sealed = sep_2322_form.task_id(request)
            try:
                handle = self.table.sealer.open(sealed, round_.incoming.bearer(round_.caller))
            except InvalidState as exc:
                round_.check_era(exc)
                raise UnknownTask from exc
            task = self.table.find(handle.exchange) or await self._elsewhere(handle, sealed, round_)
            if not isinstance(task, LiveTask):
                return task
            await task.known()
            await task.authorise(round_.key, round_.headers)
            task.renew(round_.headers)
            if request.input_responses is None:  # it may wait long for the task
                round_.drop_body()
                request = round_.request
                weight.change(0)
            return await round_.answer(await self._answer(task, request))

    def is_ours(self, incoming: Incoming, caller: Caller) -> bool:
        """Whether this is a request about a task that the gateway gave to this caller."""
        try:
            request = incoming.request()
            if request.method not in METHODS:
                return False
            _ = self.table.sealer.open(sep_2322_form.task_id(request), incoming.bearer(caller))
        except DownstreamError:
            return False
        return True

    async def _elsewhere(self, handle: TaskHandle, sealed: str, round_: Round) -> Response | LiveTask:
        """Have another replica serve a request, or go on with a task whose owner is gone."""
        if self._process.is_own(handle.owner, handle.epoch) and handle.exchange not in self._process.draining.let_go:
            raise UnknownTask
        incoming, reply, router = round_.incoming, round_.reply, self._process.router
        held = Held(handle.owner, handle.exchange, handle.upstream is not None)
        found = await router.route(held, incoming, reply)
        if isinstance(found, TakeOver) and found.proven:
            found = await router.follower_serves(handle.exchange, incoming, reply) or found
        if not isinstance(found, TakeOver):
            if incoming.peer_request is None:
                round_.continued(Step.FORWARDED)
            return found
        if (task := self.table.find(handle.exchange)) is not None:  # another request came first
            return task
        if handle.upstream is None:
            raise UnknownTask
        self.table.check(round_.key.principal)
        request = replace(round_.request.taken(), method=mcp.TOOLS_CALL)  # the call that made the task
        call = ClientCall(round_.live, request, round_.key, round_.headers)
        task = LiveTask(call, self._lot, self.table, former_holder=holder(handle.owner, handle.epoch))
        task.go_on(handle, sealed, is_shared=not found.proven)
        return task

    async def _answer(self, task: LiveTask, request: Request) -> bytes:
        if not request.said.declared.tasks:
            return await self._answer_first_form(task, request)
        match request.method:
            case mcp.TASKS_UPDATE:
                await task.update(request.input_responses or {})
                return modern_tasks.ACKNOWLEDGED
            case mcp.TASKS_CANCEL:
                task.cancel()
                return modern_tasks.ACKNOWLEDGED
            case _:
                return modern_tasks.get_result(await task.full_view())

    async def _answer_first_form(self, task: LiveTask, request: Request) -> bytes:
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
