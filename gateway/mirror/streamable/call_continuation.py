"""Finds a call for an answer, a cancellation, or a client that came back, wherever the call is.

It is here, at the replica that its place names, or continued from the id alone if that replica has died.
"""

from msgspec import Raw

from gateway import world
from gateway.bridge.call_context import allows_rerun
from gateway.cluster.router import Held, TakeOver
from gateway.http.outbox import FinalMessage, error_response
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.backend import cancelled
from gateway.mirror.call_rounds import Rounds
from gateway.mirror.server_client import ModernRequest, RouteServer, initialize
from gateway.mirror.streamable import sep_1685_state
from gateway.mirror.streamable.sep_1685_state import InvalidRequestState
from gateway.mirror.streamable.streamed_call import Shared, StreamedCall
from gateway.mirror.streamable.tokens import EVENT, NESTED, CallPlace, MirroredSession
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallLost, InvalidRequest, InvalidState, OwnerLost, OwnerStalled, not_served
from gateway.telemetry import Event, Step
from gateway.telemetry.upstream_health import log_failure


async def cancel(shared: Shared, at: Arrival, session: MirroredSession, message: jsonrpc.Message) -> None:
    """Cancel the call of a session that a notification names."""
    held = shared.running.get((session.key, cancelled(message) or b""))
    if held is not None:
        at.incoming.exchange_id = held.id
        held.cancel()
    else:
        await at.live.process.router.to_all(at.incoming)


async def _route(at: Arrival, place: CallPlace) -> Response | TakeOver:
    """Have the owner of a call serve the request, or have this process take the call over, as `Router.route`."""
    held = Held(place.owner, place.exchange)
    return await at.live.process.router.route(held, at.incoming, at.reply.as_one_stream())


# -- answers --------------------------------------------------------------------------------------------------------


async def answer(shared: Shared, at: Arrival, session: MirroredSession, message: jsonrpc.Message) -> Response:
    """Take the response to a nested request, or have the replica take it that holds the call."""
    token = jsonrpc.text(message.id) if isinstance(message.id, Raw) else None
    try:
        asked = shared.tokens.place(NESTED, token or "", session.key)
    except InvalidState as exc:
        raise InvalidRequest("The id of this response is not that of a request of the gateway") from exc
    at.incoming.exchange_id = asked.exchange
    is_echo = sep_1685_state.is_echo(asked, message)
    if is_echo or sep_1685_state.DIALECT in at.live.route.dialects:
        asked, message = sep_1685_state.taken(asked, message, shared.tokens)
    held = shared.lot.find(asked.exchange)
    is_own = at.live.process.is_own(asked.owner, asked.epoch)  # this process holds the call, or held it
    if held is not None:
        _continued(at, Step.HELD)
    elif not is_own:
        found = await _route(at, asked)
        if not isinstance(found, TakeOver):
            return found
        # Looked for again: another answer may have restored the call meanwhile.
        held = shared.lot.find(asked.exchange) or _restored(shared, at, session, asked, is_proven=found.proven)
        _continued(at, Step.LOST if held is None else Step.RESUMED)
    if held is not None:
        if is_echo and not held.is_open(asked):
            raise InvalidRequestState("answered")
        held.answer(asked, message, at)
    elif is_echo:
        raise InvalidRequestState("expired" if not is_own and _is_old(at, asked) else "ended")
    return await at.accept()  # a late answer too, as legacy servers do


def _restored(
    shared: Shared, at: Arrival, session: MirroredSession, left: CallPlace, *, is_proven: bool
) -> StreamedCall | None:
    """The call of a replica that has died, as far as a token tells; None if it cannot go on.

    Without questions, the call runs from its beginning, or is a task.
    """
    if left.request is None or left.exchange in shared.ended or _is_old(at, left):
        return None
    level = shared.homes.level(session)
    rounds = Rounds(at.live, left.exchange, left.request, session.profile, at.headers, level, left.progress)
    held = StreamedCall(shared, at, session, rounds, is_continued=True)
    held.restore(left)
    held.report.spoken.taken_over(left.owner, left.progress.round, owner_is_dead=is_proven)
    return held


# -- clients that come back -------------------------------------------------------------------------------------------


async def resume(shared: Shared, at: Arrival, session: MirroredSession, token: str) -> Response:
    """Go on with a stream that broke."""
    try:
        left = shared.tokens.place(EVENT, token, session.key)
    except InvalidState as exc:
        raise InvalidRequest("This Last-Event-ID belongs to no stream of this session") from exc
    at.incoming.exchange_id = left.exchange
    if left.is_final:
        raise not_served("GET", "POST, DELETE")  # some clients ask for more after an error
    is_own, is_proven, lot = at.live.process.is_own(left.owner, left.epoch), True, shared.lot
    if lot.find(left.exchange) is None and not is_own:
        found = await _route(at, left)
        if not isinstance(found, TakeOver):
            return found
        is_proven = found.proven
    # What follows goes to whoever holds this credential, so the upstream sees it first.
    _ = await initialize(RouteServer(at.live, at.caller.principal), session.profile, at.headers)
    may_go_on = not is_own and await _may_go_on(at, session, left, is_proven=is_proven)
    held, step = lot.find(left.exchange), Step.HELD  # after the last await: it may have been restored meanwhile
    if held is None and may_go_on:
        held = _restored(shared, at, session, left, is_proven=is_proven)
        step = Step.RESUMED if left.asking or left.progress.task is not None else Step.REPLAYED
    if held is None and not is_proven and left.exchange not in shared.ended:
        raise OwnerStalled(left.owner, "does not react, and may still run the call")
    _continued(at, Step.LOST if held is None else step)
    if held is None:
        whatever = "the call may have had effects: check them before calling again"
        if is_own:
            error = CallLost(f"The call is over, because its client was away for too long or cancelled it; {whatever}")
        else:
            said = f"The replica {left.owner} ended while it ran this call; {whatever}"
            error = OwnerLost(left.owner, said)
            at.live.upstream.note(error)
            route = at.live.route
            log_failure(Event.PEER_FAILED, error, route.path, route.upstream.name, at.incoming.about)
        await at.reply.start()  # the reply to a GET is an event stream
        body = error_response(left.rpc_id, error, at.incoming.request_id, at.live.sender(at.caller.principal))
        return await at.reply.whole(FinalMessage(body, cause=error))
    if not is_own:
        held.continued(left)
    # Another process has counted the events anew, so the number of the client's last one says nothing to it.
    return await held.write(at, left.number if is_own else 0)


async def _may_go_on(at: Arrival, session: MirroredSession, left: CallPlace, *, is_proven: bool) -> bool:
    """Whether a call may go on: one that waits for its client, a task, or one that may run from its beginning.

    A task has one driver, because the second one would cancel it when its client stays away.
    """
    request = left.request
    if request is None or left.asking:
        return request is not None
    if left.progress.task is not None:
        return is_proven
    if allows_rerun(at.live.route, request.method, request.target):
        return True
    call = ModernRequest.new(request.method, {}, session.profile, at.headers, target=request.target)
    return (await RouteServer(at.live, at.caller.principal).tool(call)).ephemeral


def _continued(at: Arrival, step: Step) -> None:
    """Count how the request found its call."""
    at.live.process.metrics.continuations[at.live.route.path, step].inc()


def _is_old(at: Arrival, place: CallPlace) -> bool:
    config = at.live.config
    seconds = config.state.ttl_seconds if place.progress.task is None else config.tasks.ttl_seconds
    return place.issued + seconds < world.wall()
