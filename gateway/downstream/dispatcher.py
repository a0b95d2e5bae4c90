"""Serves a round by its method."""

from collections.abc import Awaitable

from gateway.bridge import subscription
from gateway.bridge.driver import Driver
from gateway.bridge.plain_call import PlainCall
from gateway.cluster.peer_errors import PeerReplaced
from gateway.downstream import task_requests
from gateway.downstream.access_log import access
from gateway.downstream.continuation import Continuation
from gateway.downstream.direct_calls import learn
from gateway.downstream.round import Round
from gateway.exchange import handshake
from gateway.http.server.response import Response
from gateway.protocol import mcp
from gateway.protocol.errors import ShuttingDown
from gateway.protocol.tool_list import Tool
from gateway.sessions.group import Group
from gateway.sessions.pool import tool_schemas
from gateway.sessions.pool.authorisation import authorise
from gateway.sessions.session import Session
from gateway.tasks.live_task import LiveTask
from gateway.tasks.task_call import TaskCall
from gateway.tasks.task_choice import Choice, choose
from gateway.telemetry import COMPLETE


def serve(round_: Round, continuation: Continuation) -> Awaitable[Response]:
    """Return the coroutine that serves a round; each level of coroutines would cost a part of a plain call."""
    request = round_.request
    if request.request_state is not None:
        return continuation.serve(round_)
    if request.method in task_requests.METHODS:
        return task_requests.serve(round_, continuation.lot, continuation.tasks)
    if access.on:  # a plain call has no other line that needs it
        round_.exchange_id = round_.incoming.identify()
    if request.method == mcp.DISCOVER:
        return _discover(round_)
    # Behind the rounds of held calls and the requests about tasks, which are served here during a drain, too.
    if round_.live.process.draining.has_begun:
        return _send_on(round_)
    if request.method == mcp.LISTEN:
        return _listen(round_)
    return _begin(round_, continuation)


async def _listen(round_: Round) -> Response:
    """Serve a subscription."""
    with round_.weigh():
        async with subscription.subscription(round_) as stream:
            round_.count(COMPLETE)  # the time that a subscription stays open is not a latency
            return await round_.write(stream)


async def _send_on(round_: Round) -> Response:
    """Have another replica begin the call, since this one ends."""
    incoming = round_.incoming
    if incoming.peer_request is not None:
        raise PeerReplaced(incoming.peer_request.to)  # one hop only: the sender tries the next replica
    if round_.request.method != mcp.LISTEN:  # a subscription would end with this process
        with round_.weigh():
            replied = await round_.live.process.router.send_on(incoming, round_.reply)
        if replied is not None:
            return replied
    raise ShuttingDown("call again")


async def _discover(round_: Round) -> Response:
    """Answer server/discover with what the legacy server declares in its handshake to a caller whom it accepts."""
    pool, key, headers = round_.live.upstream.pool, round_.key, round_.headers
    try:
        with round_.weigh():
            async with round_.live.process.draining.preparing(round_.seconds_left):
                await authorise(pool, key, headers, is_exempt=False)
                shaken = await pool.handshake(key, headers)
    except ShuttingDown:
        return await _send_on(round_)
    return await round_.answer(handshake.discover_result(shaken, *round_.live.route.cache.of(mcp.DISCOVER)))


def _begin(round_: Round, continuation: Continuation) -> Awaitable[Response]:
    """Begin an exchange."""
    live, request, key, headers = round_.live, round_.request, round_.key, round_.headers
    if request.method in mcp.ASKING:
        continuation.lot.check(key.principal)  # before it runs: one that asks and finds no place is lost
    if round_.incoming.opened is not None:
        round_.incoming.keep_once()
    if request.method == mcp.TOOLS_CALL:
        group = live.upstream.pool.group(key)
        tool = group.tools.find(request.target, headers)
        if tool is None or tool.mirrored:
            return _call_checked(round_, continuation)
        if tool.task_support:
            return _call(round_, continuation, _choice(round_, tool))
        return _call(round_, continuation, "plain", group)
    return _call(round_, continuation)


async def _call_checked(round_: Round, continuation: Continuation) -> Response:
    """Begin a call whose headers may have to repeat its arguments, once its tool is known."""
    pool, http = round_.live.upstream.pool, round_.incoming.compared()
    preparing = continuation.legs.preparing
    preparing[round_] = None
    try:
        with round_.weigh():  # it is weighed again when it begins
            async with round_.live.process.draining.preparing(round_.seconds_left):
                tool = await tool_schemas.check(pool, round_.key, round_.request, http, round_.headers)
    except ShuttingDown:
        return await _send_on(round_)
    finally:
        del preparing[round_]
    return await _call(round_, continuation, _choice(round_, tool))


def _call(
    round_: Round,
    continuation: Continuation,
    choice: Choice = "plain",
    group: Group[Session] | None = None,
) -> Awaitable[Response]:
    """Send a call upstream; `group` is that of its key, if it was looked up already."""
    # A forwarded call may have to end its leg before the result comes, which takes an exchange.
    if choice == "plain" and round_.incoming.peer_request is None:
        plain = PlainCall(round_, continuation.lot)
        if plain.begin(group or round_.live.upstream.pool.group(round_.key)):
            if group is not None:
                learn(round_, group)
            return continuation.legs.write_plain(round_, plain)
    if choice == "give":
        continuation.tasks.check(round_.key.principal)
    weight = round_.weigh()
    try:
        if choice == "give":
            driver: Driver = LiveTask(round_, continuation.lot, continuation.tasks, weight)
        else:
            driver = Driver(round_, continuation.lot, TaskCall if choice == "drive" else None, weight)
        queue = round_.queue()
        driver.begin(queue)
    except BaseException:
        weight.release()
        raise
    return continuation.legs.write(round_, driver, queue)


def _choice(round_: Round, tool: Tool) -> Choice:
    """Whether a tool runs as a task."""
    live, request = round_.live, round_.request
    shaken = live.upstream.pool.group(round_.key).shaken
    if not tool.task_support or shaken is None or not shaken.offers_tasks:
        return "plain"
    return choose(tool.task_support, request.said.declared, live.route.tasks, wants=request.task is not None)
