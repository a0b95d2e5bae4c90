"""Logs one line for each HTTP request of a client, if `log.access` is true; the switch is one per process."""

from collections.abc import Awaitable
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from msgspec import Raw

from gateway import world
from gateway.cluster.peer_errors import PeerFailed
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.http.server.response import Response
from gateway.passthrough.passage import UpstreamCut
from gateway.protocol import jsonrpc, mcp
from gateway.routes.route_table import RouteTable
from gateway.telemetry import COMPLETE, Event, Outcome, get_logger
from gateway.telemetry.recent_errors import presentable

log = get_logger()

_CHARACTERS: Final = 200


class AccessLog:
    """Logs requests if switched on."""

    on = False
    """Check this first: while it is off, a request costs nothing more."""

    def note(self, incoming: Incoming) -> None:
        """Note what a body asks for, which is dropped before a long call ends."""
        # Apart from what serves the request: the line changes nothing of how a body is read, or refused.
        with suppress(ValueError, RecursionError):
            message = jsonrpc.message(incoming.body)
            incoming.rpc_method = message.method
            field = mcp.TARGET_FIELD.get(message.method or "")
            if field is not None and isinstance(message.params, Raw):
                incoming.target = jsonrpc.text(jsonrpc.fields(message.params).get(field))

    async def replied(
        self, replying: Awaitable[Response], incoming: Incoming, reply: HttpReply, routes: RouteTable
    ) -> Response:
        """Wait for a reply, and log its request when that is complete, or will not be."""
        began, outcome, status = world.monotonic(), Outcome.CANCELLED, None
        try:
            response = await replying
            outcome, status = _outcome(response), response.status
        except (UpstreamCut, PeerFailed):
            outcome = Outcome.ERROR
            raise
        finally:
            if incoming.rpc_method is None:  # it was refused before its route took it
                self.note(incoming)
            path, caller, (reason, cause) = incoming.path, incoming.caller, reply.told
            is_route = path in routes.live
            target = incoming.target or (None if is_route else path)
            log.info(
                Event.REQUEST_FINISHED,
                route=path if is_route else None,
                http_method=incoming.method[:20],
                method=incoming.rpc_method and incoming.rpc_method[:_CHARACTERS],
                target=target and target[:_CHARACTERS],
                outcome=outcome,
                status=status or reply.status,
                reason=reason,
                cause=cause and presentable(cause),
                ms=round(1000 * (world.monotonic() - began), 1),
                caller=caller and routes.process.tags.of(caller.principal),
                remote=incoming.remote,
                **incoming.about,
            )
        return response


access: Final = AccessLog()


def _outcome(response: Response) -> Outcome:
    """How a request ended; of one that was passed on, only its status tells."""
    if response.ending is not COMPLETE or response.status < HTTPStatus.BAD_REQUEST:
        return response.ending.outcome
    return Outcome.REJECTED if response.status < HTTPStatus.INTERNAL_SERVER_ERROR else Outcome.ERROR
