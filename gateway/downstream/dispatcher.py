"""Serves a round by its method."""

import asyncio
from functools import partial
from typing import Final

from aiohttp import web

from gateway.bridge import subscription
from gateway.bridge.driver import Driver, NewCall
from gateway.bridge.response_queue import ending_of
from gateway.bridge.upstream_call import UpstreamCall
from gateway.cluster.reply_relay import Replied
from gateway.downstream.continuation import Continuation
from gateway.downstream.round import LEFT, Round
from gateway.downstream.task_requests import METHODS as TASK_REQUESTS
from gateway.downstream.task_requests import TaskRequests
from gateway.exchange import handshake
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError, Stopping, UpstreamError
from gateway.sessions import tool_schemas
from gateway.tasks.choice import Choice, choose
from gateway.tasks.task_call import TaskCall
from gateway.telemetry import COMPLETE, OTHER_ERROR, Ending, Outcome

_BUG: Final = Ending(Outcome.ERROR, OTHER_ERROR)


class Dispatcher:
    """Serves the rounds of one listener."""

    def __init__(self, continuation: Continuation, task_requests: TaskRequests) -> None:
        self.stopping = False
        self._lot, self._legs = continuation.lot, continuation.legs
        self._continuation = continuation
        self._task_requests = task_requests

    async def serve(self, round_: Round) -> web.StreamResponse:
        """Serve a round, and count how it ended."""
        ending = _BUG
        try:
            response, ending = await self._dispatch(round_)
        except asyncio.CancelledError:
            ending = LEFT
            raise
        except GatewayError as exc:
            ending = ending_of(exc)
            if isinstance(exc, UpstreamError) and not exc.is_counted:
                # There was no call yet: the upstream refused the handshake or the credential.
                round_.live.process.metrics.upstream_failed(round_.live.route.path, exc.reason)
                exc.is_counted = True
            raise
        finally:
            round_.count(ending)
        return response

    async def _dispatch(self, round_: Round) -> Replied:
        request = round_.request
        if request.method == mcp.DISCOVER:
            return await self._discover(round_)
        if request.request_state is not None:
            return await self._continuation.serve(round_)
        if request.method in TASK_REQUESTS:
            return await self._task_requests.serve(round_)
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        if request.method == mcp.LISTEN:
            opener = round_.opener
            async with subscription.subscription(round_.live, request, round_.key, round_.headers, opener) as stream:
                round_.count(COMPLETE)  # the time that a subscription stays open is not a latency
                return await round_.write(stream)
        return await self._begin(round_)

    async def _discover(self, round_: Round) -> Replied:
        """Answer server/discover with the capabilities that the legacy server declares in its handshake."""
        live, key, headers = round_.live, round_.key, round_.headers
        await live.upstream.pool.authorise(key, headers, opener=round_.opener)
        shaken = await live.upstream.pool.handshake(key, headers, round_.opener)
        return await round_.answer(handshake.discover_result(shaken, *live.route.cache.of(mcp.DISCOVER)))

    async def _begin(self, round_: Round) -> Replied:
        """Begin an exchange, unless the list that the client asks for is cached."""
        live, request, key, headers = round_.live, round_.request, round_.key, round_.headers
        pool = live.upstream.pool
        if request.method in mcp.ASKING:
            self._lot.check(key.principal, round_.caller.address)
        if request.method == mcp.TOOLS_CALL and not tool_schemas.mirrors_nothing(pool, key, request, headers):
            await tool_schemas.check(pool, key, request, round_.incoming.values, headers, round_.opener)
        ticket = pool.ticket(key, request, headers)
        if ticket is not None:
            cached = await pool.kept(ticket, headers, round_.opener)
            live.process.metrics.list_answered(live.route.path, from_memory=cached is not None)
            if cached is not None:
                return await round_.answer(cached)
        driver = Driver(live, self._lot, request, key, headers, round_.caller.address, self._new_call(round_))
        queue = round_.queue()
        driver.begin(queue, ticket)
        return await self._legs.write(round_, driver, queue)

    def _new_call(self, round_: Round) -> NewCall:
        """Return what makes the upstream call: a plain one, or a task."""
        live, request = round_.live, round_.request
        support = ""
        if request.method == mcp.TOOLS_CALL:
            support = tool_schemas.task_support(live.upstream.pool, round_.key, request.target)
        if not support:
            return UpstreamCall
        match choose(support, request.declared, live.route.tasks, wants=request.task is not None):
            case Choice.PLAIN:
                return UpstreamCall
            case Choice.DRIVE:
                return TaskCall
            case Choice.GIVE:
                table = self._task_requests.table
                table.check(round_.key.principal)
                return partial(TaskCall, adopt=table.adopt)
