"""The way of one HTTP request to its one reply, as a list of stages."""

import secrets
import time
from collections.abc import Awaitable
from typing import Final

from aiohttp import web

from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import HostCheck
from gateway.auth.oauth_proxy import OAuthProxy
from gateway.bridge.driver import Driver
from gateway.cluster.peer_errors import PeerFailed
from gateway.cluster.retry_routing import RetryRouting
from gateway.config import Config, InForce
from gateway.downstream.continuation import Continuation
from gateway.downstream.dispatcher import Dispatcher
from gateway.downstream.era_routing import EraRouting
from gateway.downstream.legs import Legs
from gateway.downstream.rejections import Rejections, no_route
from gateway.downstream.round import begin_span, new_round, span_ended_on_error
from gateway.http import request_id as ids
from gateway.http.forwarded_headers import asks_as_client, joined
from gateway.http.incoming import Incoming, read_body
from gateway.http.reply import REQUEST_ID, HttpReply, ReplyWriter
from gateway.passthrough.forwarder import Passthrough
from gateway.protocol.errors import DownstreamError, GatewayError, NoHandshake
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.routes.table import RouteTable
from gateway.telemetry import Direction, Metrics, Traces, bodies

_REFUSED_BYTES: Final = 65_536
"""The largest body that is read for the id of a request whose caller is not verified."""


class RequestHandler:
    """Serves the routes of one listener."""

    def __init__(  # noqa: PLR0913  (the parts of a listener)
        self,
        in_force: InForce[Config],
        routes: RouteTable,
        lot: Lot[Driver],
        authenticator: Authenticator,
        retry_routing: RetryRouting,
        passthrough: Passthrough,
        oauth_proxy: OAuthProxy,
        metrics: Metrics,
        traces: Traces | None = None,
    ) -> None:
        self._use(in_force.value)
        in_force.after_replace(self._use)
        self._routes = routes
        self._authenticator = authenticator
        self._passthrough = passthrough
        self._oauth_proxy = oauth_proxy
        self._traces = traces
        legs = Legs()
        self._continuation = Continuation(routes, lot, authenticator, retry_routing, legs)
        self._dispatcher = Dispatcher(lot, self._continuation, legs)
        self._era_routing = EraRouting(authenticator, self._continuation, passthrough)
        self._rejections = Rejections(routes, metrics)
        self._ids = ids.numbered(secrets.token_hex(6))
        self.in_flight = 0
        """Requests whose final message has not been written yet."""
        self.running, self.relayed = legs.running, legs.relayed

    def _use(self, config: Config) -> None:
        """Serve new requests by this configuration."""
        self._config = config
        self._host_check = HostCheck(config.security, config.listen)

    def stop(self) -> None:
        """Accept no new calls and no new streams."""
        self._dispatcher.stopping = self._passthrough.stopping = True

    @property
    def stopping(self) -> bool:
        """Whether new calls are refused."""
        return self._dispatcher.stopping

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        return self.in_flight - self._passthrough.long_lived

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Serve one HTTP request; raises only if its connection is lost, or on cancellation."""
        # Until the body is here, the configuration of the present route holds.
        live = self._routes.live.get(http.path)
        config = self._config if live is None else live.config
        request_id = http[REQUEST_ID] = ids.request_id(http.headers.get(ids.HEADER), self._ids)
        incoming = Incoming(http.path, http.headers, http.remote, b"", request_id=request_id)
        reply = HttpReply(http, config.timeouts.send_seconds, self._oauth_proxy.challenge)
        return await self._replied(self._serve_client(http, incoming, reply, config), incoming, reply)

    async def handle_hop(self, incoming: Incoming, reply: ReplyWriter) -> web.StreamResponse:
        """Serve one request that another replica forwarded; raises PeerFailed if this replica cannot serve it."""
        return await self._replied(self._serve_replica(incoming, reply), incoming, reply)

    async def _replied(
        self, serving: Awaitable[web.StreamResponse], incoming: Incoming, reply: ReplyWriter
    ) -> web.StreamResponse:
        """Wait for the reply to a request; an exception becomes a response."""
        self.in_flight += 1
        try:
            return await serving
        except (ConnectionError, PeerFailed):
            raise  # no response can be sent: aiohttp, or the peer listener, closes the connection
        except Exception as exc:  # noqa: BLE001  (the outermost edge of a request, which logs and counts it)
            return await self._rejections.answer(exc, incoming, reply)
        finally:
            self.in_flight -= 1

    async def _serve_client(
        self, http: web.BaseRequest, incoming: Incoming, reply: ReplyWriter, config: Config
    ) -> web.StreamResponse:
        """Run the stages of a client's request; docs/protocol.md (Errors) fixes their order."""
        self._host_check.check(http.headers.get("Host"), joined(http.headers, "Origin"))
        if http.path not in self._routes.live:
            if self._oauth_proxy.serves(http.path):
                return _named(await self._oauth_proxy.handle(http), incoming.request_id)
            if http.method != "POST":
                raise no_route(http.path)
        if self._authenticator.verifies:
            await self._verify(http, incoming, config)
        await self._receive(http, incoming, config)
        live = self._routes.live.get(incoming.path)  # once more: a reload may have come before the body
        if live is None:
            return await self._serve_without_route(incoming, reply)
        passed = await self._era_routing.passed(http, incoming, live)
        if passed is not None:
            return passed
        try:
            return await self._bridge(incoming, reply, live)
        except NoHandshake:
            passed = await self._era_routing.passed_after_all(http, incoming, live)
            if passed is None:
                raise
            return passed

    async def _serve_replica(self, incoming: Incoming, reply: ReplyWriter) -> web.StreamResponse:
        """Run the stages of a request that another replica received."""
        live = self._routes.live.get(incoming.path)
        if live is None:
            return await self._serve_without_route(incoming, reply)
        return await self._bridge(incoming, reply, live)

    async def _verify(self, http: web.BaseRequest, incoming: Incoming, config: Config) -> None:
        """Verify a caller by its headers, before its body takes time and memory; raises Unauthorized or NoKeys."""
        try:
            _ = await self._authenticator.principal(incoming, is_checked=False)
        except GatewayError as exc:
            await self._receive_refused(http, incoming, config)
            if isinstance(exc, DownstreamError) and incoming.path not in self._routes.live:
                raise no_route(incoming.path) from exc
            raise

    async def _receive_refused(self, http: web.BaseRequest, incoming: Incoming, config: Config) -> None:
        """Read the request of a caller that is not verified for its id, if its body is small."""
        if not 0 < (http.content_length or 0) <= _REFUSED_BYTES:
            return
        try:
            incoming.body = await read_body(http, _REFUSED_BYTES, config.limits.receive_seconds)
            _ = incoming.parsed(config.limits.json_depth)
        except DownstreamError:
            pass

    async def _receive(self, http: web.BaseRequest, incoming: Incoming, config: Config) -> None:
        """Read the body; raises TooLarge or InvalidRequest."""
        incoming.body = await read_body(http, config.limits.body_bytes, config.limits.receive_seconds)
        if bodies.on:
            bodies.show(Direction.FROM_CLIENT, incoming.body, route=http.path[:80], request_id=incoming.request_id)

    async def _serve_without_route(self, incoming: Incoming, reply: ReplyWriter) -> web.StreamResponse:
        """Serve a further round of a call that began while the path had a route; raises MethodNotFound for others."""
        found = await self._continuation.find_route(incoming, reply, self._config.limits.json_depth)
        return await self._bridge(incoming, reply, found) if isinstance(found, LiveRoute) else found

    async def _bridge(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> web.StreamResponse:
        """Check a request as JSON-RPC and as a modern request, and serve its round."""
        json_depth = live.config.limits.json_depth
        if incoming.parsed(json_depth).id is None:
            # 2026-07-28 defines no notification over HTTP; closing the response is what cancels.
            return web.Response(status=202, headers={ids.HEADER: incoming.request_id})
        started = time.monotonic()
        request = incoming.request(json_depth)
        if self._traces is not None:
            incoming.span = begin_span(self._traces, incoming, live, request)
        with span_ended_on_error(incoming.span):
            principal = await self._authenticator.principal(incoming, is_checked=asks_as_client(live.route))
            distrusted = self._authenticator.distrusted_header(incoming)
            round_ = new_round(incoming, reply, live, request, principal, distrusted, started)
        return await self._dispatcher.serve(round_)


def _named(response: web.StreamResponse, request_id: str) -> web.StreamResponse:
    """Name the request in a reply whose head has not been sent yet."""
    response.headers[ids.HEADER] = request_id
    return response
