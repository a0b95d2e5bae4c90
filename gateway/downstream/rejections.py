"""Turns an exception into the response of its request, which no other file does."""

from http import HTTPStatus
from typing import Final

from msgspec.structs import replace

from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.protocol.errors import (
    DownstreamError,
    Forbidden,
    GatewayError,
    InvalidState,
    MethodNotFound,
    OwnerStalled,
    StateFromFuture,
    UpstreamError,
)
from gateway.routes.live_route import LiveRoute
from gateway.routes.route_table import RouteTable
from gateway.telemetry import Event, Metrics, get_logger
from gateway.telemetry.upstream_health import log_failure

log = get_logger()

_STATE_NOTES: Final = {
    "unknown_key": "sealed with a key that is not in state.keys: give all replicas the same keys, and keep an old key "
    "until State keys of the status page says that it may go",
    "forged": "changed in transit, or sealed with another key of the same id: give all replicas the same state.keys",
    "expired": "the client retried after state.ttl_seconds",
    "version": "sealed by another version of the gateway: an upgrade that changes the version loses such calls",
    "other_principal": "another caller sent it: if it was the same caller, check principal.source",
    "other_headers": "it came with other credentials in routes[].bind_headers, or without them: rotating a key ends "
    "the calls that wait for answers",
    "answered": "the round has been answered with other answers, or before its call went cold (hold.cold_seconds)",
    "ended": "its call is over: it expired (hold.ttl_seconds), its client was away for longer than "
    "hold.grace_seconds, or this process was restarted",
    "too_large": "larger than limits.state_bytes: the gateway seals no state of that size",
    "malformed": "not a state of this gateway, or truncated in transit",
}
_STATE_FOREIGN: Final = "it came with another request than the one it was issued for"


def no_route(path: str) -> MethodNotFound:
    """Return the error for a path without a route; it must not tell a stranger which routes there are."""
    return MethodNotFound(f"No route has the path {path[:80]!r}; check the path of the gateway's URL")


async def reject(exc: Exception, incoming: Incoming, reply: ReplyWriter, routes: RouteTable) -> Response:
    """Write the response that an exception means, and count and log what an operator can do something about.

    Raises ConnectionResetError for a stream that answers no request: an error in it could be matched to nothing,
    and the client opens it again from the last event that it got.
    """
    metrics, live = routes.process.metrics, routes.live.get(incoming.path)
    if isinstance(exc, GatewayError):
        error = exc
    else:
        metrics.task_failures.inc()
        log.error(Event.TASK_FAILED, task="request", route=incoming.path, exc_info=exc, **incoming.about)
        error = GatewayError("Internal error of the gateway; its log has this requestId and says more")
    if live is not None:  # else the client made the path up
        live.upstream.note(error)
    _record(error, incoming, live, metrics)
    if reply.started and incoming.method == "GET":
        reply.break_off()
    # A page that must not send requests here learns nothing of its own, as the specification has it, whether the
    # body has arrived or not. A bug may be in the parser, so the body is not parsed for its sake.
    may_parse = isinstance(exc, GatewayError) or incoming.opened is not None
    id_ = error.request_id or (incoming.rpc_id if may_parse and not isinstance(exc, Forbidden) else None)
    tag = None if incoming.caller is None else routes.process.tags.of(incoming.caller.principal)
    sender = None if live is None else live.route.path, tag
    last = FinalMessage.of_error(error, id_, incoming.request_id, sender, in_session=incoming.in_session)
    if incoming.method != "POST" and last.status == HTTPStatus.OK:
        last = replace(last, status=HTTPStatus.BAD_GATEWAY)  # a 200 would begin a stream, or say that a session ended
    return await reply.whole(last)


def _record(error: GatewayError, incoming: Incoming, live: LiveRoute | None, metrics: Metrics) -> None:
    about = incoming.path[:80], live.route.upstream.name if live is not None else None, incoming.about
    if isinstance(error, InvalidState):
        metrics.state_rejections[error.reason,].inc()
        note = _STATE_NOTES.get(error.reason, _STATE_FOREIGN)
        log.info(Event.STATE_REJECTED, route=incoming.path, reason=error.reason, note=note, **incoming.about)
    elif isinstance(error, DownstreamError):
        metrics.rejections[error.rejection,].inc()
        if isinstance(error.__cause__, InvalidState):  # of another token than a requestState
            metrics.state_rejections[error.__cause__.reason,].inc()
    elif isinstance(error, UpstreamError):
        log_failure(Event.UPSTREAM_FAILED, error, *about)
    elif isinstance(error, OwnerStalled):
        if isinstance(error, StateFromFuture):
            metrics.state_rejections["future",].inc()
        log_failure(Event.PEER_FAILED, error, *about)
