"""The way of one request to its one reply: its stages, then what its route and its era want."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from gateway import world
from gateway.auth.authenticator import Authenticator
from gateway.bridge.plain_call import PlainCall
from gateway.cluster.peer_errors import PeerFailed
from gateway.config import Config, InForce
from gateway.downstream import dispatcher, stdio_forwarding
from gateway.downstream.access_log import access
from gateway.downstream.continuation import Continuation
from gateway.downstream.direct_calls import DirectCalls
from gateway.downstream.legacy_routing import LegacyRouting
from gateway.downstream.pinned_clients import placed
from gateway.downstream.rejections import reject
from gateway.downstream.round import Round, new_round
from gateway.downstream.stages import Stages
from gateway.downstream.task_requests import is_ours
from gateway.http.incoming import Caller, Incoming, received
from gateway.http.outbox import ending_of
from gateway.http.reply import HttpReply, ReplyWriter
from gateway.http.server.request import HttpRequest, numbered
from gateway.http.server.response import Response, WholeResponse
from gateway.http.upstream_headers import asks_as_client
from gateway.legacy_front.arrival import Arrival
from gateway.passthrough.forwarder import pass_modern
from gateway.protocol import era as eras
from gateway.protocol import mcp
from gateway.protocol.errors import (
    DownstreamError,
    GatewayError,
    NoHandshake,
    Notification,
    UpstreamError,
    not_served,
)
from gateway.routes.live_route import LiveRoute
from gateway.routes.route_table import RouteTable
from gateway.seal.keyring import IN_JSON
from gateway.telemetry import GIVEN_UP, OTHER_ERROR, Direction, Ending, Outcome, bodies

_BUG: Final = Ending(Outcome.ERROR, OTHER_ERROR)

W = TypeVar("W", bound=ReplyWriter)
Serve = Callable[[Incoming, W], Awaitable[Response]]


class RequestHandler:
    """Serves the routes of one listener."""

    def __init__(
        self,
        in_force: InForce[Config],
        routes: RouteTable,
        authenticator: Authenticator,
        continuation: Continuation,
        legacy: LegacyRouting,
    ) -> None:
        self._routes = routes
        self._authenticator = authenticator
        self.continuation = continuation
        self.legacy = legacy
        self.stages = Stages(in_force, routes, authenticator, legacy, self._route)
        self._ids = numbered(world.token_hex(6))
        self._served = 0
        """The requests in flight that coroutines serve."""
        legs = self.legs = continuation.legs
        self.direct = DirectCalls(
            routes.process.draining, self.stages.challenge, legs, continuation.lot, self._ids, self._serve_rest
        )

    @property
    def in_flight(self) -> int:
        """The number of requests whose final message has not been written yet."""
        return self._served + self.direct.in_flight

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        return self.in_flight - self._routes.process.draining.unawaited + self.legacy.sessions.open_requests

    def handle(self, http: HttpRequest) -> Awaitable[Response]:
        """Serve one HTTP request; raises only if its connection is lost, or on cancellation."""
        http.identify(self._ids)
        known = http.head.values
        incoming = received(http, None if known is None else known.caller)
        reply = HttpReply(http, self.stages.challenge)
        replied = self._replied(self.stages.serve, incoming, reply)
        return access.replied(replied, incoming, reply, self._routes) if access.on else replied

    def _serve_rest(self, round_: Round, plain: PlainCall) -> Awaitable[Response]:
        """Serve a direct call that turned out not to be plain, or whose result takes longer to write."""
        return self._replied(lambda *_: self._serve_round(round_, plain), round_.incoming, round_.reply)

    def handle_hop(self, incoming: Incoming, reply: ReplyWriter) -> Awaitable[Response]:
        """Serve one request that another replica forwarded; raises PeerFailed if this replica cannot serve it."""
        return self._replied(self._serve_hop, incoming, reply)

    def handle_message(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Awaitable[Response]:
        """Serve one modern request of a host, which is not in HTTP."""
        return self._replied(partial(self._pass_modern, live=live), incoming, reply)

    def has_taken_over(self, exchange: str, round_: int) -> bool:
        """Whether this replica continued an exchange in the same upstream call after that round, or follows a task."""
        lot, tasks = self.continuation.lot, self.continuation.tasks
        found = lot.find(exchange) or lot.cold.find(exchange) or tasks.find(exchange)
        return found is not None and found.has_taken_over(round_)

    async def _replied(self, serve: Serve[W], incoming: Incoming, reply: W) -> Response:
        """Serve a request up to its reply; an exception becomes a response."""
        self._served += 1
        try:
            return await serve(incoming, reply)
        except (ConnectionError, PeerFailed):
            raise  # no response can be sent: the connection is closed
        except Notification:
            return WholeResponse(status=202)  # closing the response is what cancels
        except Exception as exc:  # noqa: BLE001  (the outermost edge of a request, which logs and counts it)
            return await reject(exc, incoming, reply, self._routes)
        finally:
            self._served -= 1

    async def _serve_hop(self, incoming: Incoming, reply: ReplyWriter) -> Response:
        """Serve a request that another replica received, unless another process of this host has to."""
        passed = await self._routes.process.router.pass_on(incoming, reply)
        return passed if passed is not None else await self._route(incoming, reply, is_hop=True)

    async def _route(self, incoming: Incoming, reply: ReplyWriter, *, is_hop: bool = False) -> Response:
        """Bridge a request, or pass it through because the client is legacy or the upstream is modern."""
        if access.on and not is_hop:
            incoming.note()
        if bodies.on and not is_hop:
            bodies.show(Direction.FROM_CLIENT, incoming.body, route=incoming.path[:80], about=incoming.about)
        live = self._routes.live.get(incoming.path)
        if live is None:  # a call may have begun while the path had a route
            found = await self.continuation.find_route(incoming, reply)
            return await self._bridge(incoming, reply, found) if isinstance(found, LiveRoute) else found
        stateless = self.legacy.stateless
        if stateless is not None and stateless.claims(incoming, live):
            return await stateless.serve(await self._arrival(incoming, reply, live))
        if is_hop:  # also a round of this gateway's own (SEP-1442), which no replica has forwarded
            is_relayed = incoming.peer_request is not None and incoming.peer_request.kind == "session"
            if is_relayed or _is_legacy(incoming):
                at = await self._arrival(incoming, reply, live)
                if (served := await self.legacy.hop(at, is_relayed=is_relayed)) is not None:
                    return served
            return await self._bridge(incoming, reply, live)
        if _is_legacy(incoming):
            return await self.legacy.serve(await self._arrival(incoming, reply, live))
        return await self._pass_modern(incoming, reply, live)

    async def _arrival(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Arrival:
        return Arrival(incoming, reply, live, incoming.caller or await self._caller(incoming, live))

    async def _pass_modern(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Response:
        """Pass a modern request through, unless it turns out that it has to be bridged."""
        if incoming.method != "POST":
            raise not_served(incoming.method, "POST")
        if live.route.era != "bridge" and live.upstream.is_modern is not False:
            passed = await self._passed(incoming, reply, live)
            if passed is not None:
                return passed
        return await self._bridge(incoming, reply, live)

    async def _passed(
        self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute, *, waits: bool = False
    ) -> Response | None:
        """Return a modern server's own reply to a modern request; None if the request must be bridged."""
        # The caller is known before the probe, which carries this request's headers upstream.
        at = await self._arrival(incoming, reply, live)
        # A call or a task is the gateway's that it began when the upstream seemed to be legacy.
        if IN_JSON in incoming.body:
            if is_ours(at, self.continuation.tasks):
                return None
            with suppress(DownstreamError):
                _ = incoming.open_state(live.process.states, at.caller)
                return None
        is_http = live.upstream.era is not None and isinstance(reply, HttpReply)
        return await (pass_modern(at, waits=waits) if is_http else stdio_forwarding.serve(at))

    async def _caller(self, incoming: Incoming, live: LiveRoute) -> Caller:
        """Authenticate a caller, and remember it if the same head tells it again."""
        caller = await self._authenticator.caller(incoming, is_checked=asks_as_client(live.route))
        known = incoming.known
        if known is not None and incoming.peer_request is None and self._authenticator.knows_by_head:
            known.caller = caller
        return caller

    async def _bridge(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Response:
        """Check a request as JSON-RPC and as a modern request, and serve its round."""
        started = world.monotonic()
        request = incoming.request()  # it is refused before its caller is known, and without a span
        if (traces := live.process.traces) is not None:
            incoming.begin_round_span(traces, live.route.path)
        try:
            caller = incoming.caller or await self._caller(incoming, live)
            serving = self._serve_round(new_round(incoming, request, reply, live, caller, started))
        except BaseException as exc:
            if incoming.span is not None:  # the request is refused, or left, before its round begins
                incoming.span.end(ending_of(exc) if isinstance(exc, GatewayError) else GIVEN_UP)
            raise
        del request  # the round has it, and drops it when it needs no more of it
        return await serving

    async def _serve_round(self, round_: Round, begun: PlainCall | None = None) -> Response:
        """Serve a round, or the rest of a call that has begun, and count how it ended."""
        ending = _BUG
        try:
            if begun is not None:
                response = await self.legs.write_plain(round_, begun)
            else:
                found = await placed(round_) if round_.live.route.dialects else round_
                if isinstance(found, Round):
                    round_ = found
                    response = await dispatcher.serve(round_, self.continuation)
                else:
                    response = found
            ending = response.ending
        except asyncio.CancelledError:
            ending = GIVEN_UP
            raise
        except GatewayError as exc:
            ending = ending_of(exc)
            incoming, reply, live, era = round_.incoming, round_.reply, round_.live, round_.live.upstream.era
            if isinstance(exc, UpstreamError):
                _ = incoming.identify()  # for the line of the failure
                # There may have been no call yet: the upstream refused the handshake or the credential.
                live.upstream.health.count(exc)
            # A held call has its answers already, and another replica decides for itself.
            may_pass = incoming.body and isinstance(reply, HttpReply) and live.route.era != "bridge"
            if isinstance(exc, NoHandshake) and may_pass and era is not None:
                round_.count(ending)  # before the wait, which is no part of it; a second time counts nothing
                era.doubt()  # it refused `initialize`, so a new probe may find that it is modern now
                passed = await self._passed(incoming, reply, live, waits=True)
                if passed is not None:
                    return passed
            raise
        finally:
            round_.count(ending)
        return response


def _is_legacy(incoming: Incoming) -> bool:
    """Whether a request is one of a legacy client."""
    version = incoming.headers.get(mcp.PROTOCOL_VERSION)
    return not eras.is_modern(incoming.method, version, incoming.body, incoming.parsed)
