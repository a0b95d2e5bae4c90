"""Logs one line for each HTTP request of a client, if `log.access` is true; the switch is one per process."""

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from gateway import world
from gateway.cluster.peer_errors import PeerFailed
from gateway.config import Config
from gateway.http.incoming import Incoming, client_address
from gateway.http.reply import HttpReply
from gateway.http.server.response import Response
from gateway.passthrough.passage import UpstreamCut
from gateway.protocol.errors import Stopping
from gateway.routes.route_table import RouteTable
from gateway.telemetry import COMPLETE, Event, Outcome, get_logger
from gateway.telemetry.recent_errors import presentable

log = get_logger()

_CHARACTERS: Final = 200
_CUT: Final = "The gateway shut down before the reply was complete; the request may have had effects"


class AccessLog:
    """Logs requests if switched on."""

    on = False
    """Check this first: while it is off, a request costs nothing more."""
    _proxies: tuple[str, ...] = ()

    def use(self, config: Config) -> None:
        """Log if a configuration says so."""
        self.on, self._proxies = config.log.access, config.principal.trusted_proxies

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
        except asyncio.CancelledError:
            if not reply.http.wire.is_lost:  # its client waits, and this process ends
                outcome, reply.told = Outcome.ERROR, (Stopping.reason, _CUT)
            raise
        finally:
            incoming.note()  # if it was refused before its route took it
            path, caller, (reason, cause) = incoming.path, incoming.caller, reply.told
            is_route = path in routes.live
            target = incoming.target or (None if is_route else path)
            log.info(
                Event.REQUEST_FINISHED,
                route=path if is_route else None,
                http_method=incoming.method[:20],
                method=incoming.rpc_method or None,
                target=target and target[:_CHARACTERS],
                outcome=outcome,
                status=status or reply.status,
                reason=reason,
                cause=cause and presentable(cause),
                ms=round(1000 * (world.monotonic() - began), 1),
                caller=caller and routes.process.tags.of(caller.principal),
                remote=client_address(incoming.remote, incoming.headers, self._proxies),
                **incoming.about,
            )
        return response


access: Final = AccessLog()


def _outcome(response: Response) -> Outcome:
    """How a request ended; of one that was passed on, only its status tells."""
    if response.ending is not COMPLETE or response.status < HTTPStatus.BAD_REQUEST:
        return response.ending.outcome
    return Outcome.REJECTED if response.status < HTTPStatus.INTERNAL_SERVER_ERROR else Outcome.ERROR
