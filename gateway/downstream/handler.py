"""The way of one HTTP request to its one reply, as a list of stages."""

import asyncio
import secrets
import time
from collections.abc import Awaitable
from typing import Final

from aiohttp import web

from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import HostCheck
from gateway.auth.oauth_proxy import OAuthProxy
from gateway.bridge import subscription
from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import ResponseQueue, ending_of
from gateway.cluster.peer_client import PeerFailed, Replied
from gateway.cluster.retry_routing import RetryRouting
from gateway.config import Config
from gateway.downstream.continuation import Continuation
from gateway.downstream.era_routing import EraRouting
from gateway.downstream.rejections import Rejections, no_route
from gateway.downstream.round import LEFT, Round, begin_span, new_round, span_ended_on_error
from gateway.exchange import handshake
from gateway.http import request_id as ids
from gateway.http.forwarded_headers import asks_as_client, joined
from gateway.http.incoming import Incoming, read_body
from gateway.http.reply import REQUEST_ID, HttpReply, ReplyWriter
from gateway.passthrough.forwarder import Passthrough
from gateway.protocol import mcp
from gateway.protocol import request as modern
from gateway.protocol.errors import DownstreamError, GatewayError, NoHandshake, Stopping, UpstreamError
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.routes.table import RouteTable
from gateway.sessions import tool_schemas
from gateway.telemetry import COMPLETE, OTHER_ERROR, Direction, Ending, Metrics, Outcome, Traces, bodies

_REFUSED_BYTES: Final = 65_536
"""The largest body that is read for the id of a request whose caller is not verified."""
_BUG: Final = Ending(Outcome.ERROR, OTHER_ERROR)


class RequestHandler:
    """Serves the routes of one listener."""

    def __init__(  # noqa: PLR0913  (the parts of a listener)
        self,
        config: Config,
        routes: RouteTable,
        lot: Lot[Driver],
        authenticator: Authenticator,
        retry_routing: RetryRouting,
        passthrough: Passthrough,
        oauth_proxy: OAuthProxy,
        metrics: Metrics,
        traces: Traces | None = None,
    ) -> None:
        self._config = config
        self._host_check = HostCheck(config.security, config.listen)
        self._routes = routes
        self._lot = lot
        self._authenticator = authenticator
        self._passthrough = passthrough
        self._oauth_proxy = oauth_proxy
        self._traces = traces
        self._continuation = Continuation(routes, lot, authenticator, retry_routing, self._run)
        self._era_routing = EraRouting(authenticator, self._continuation, passthrough)
        self._rejections = Rejections(routes, metrics)
        self._ids = ids.numbered(secrets.token_hex(6))
        self.stopping = False
        self.in_flight = 0
        """Requests whose final message has not been written yet."""
        self.running: set[Driver] = set()
        """Exchanges whose messages a client of this replica waits for."""
        self.relayed: set[Driver] = set()
        """Exchanges whose messages another replica waits for."""

    def change(self, config: Config) -> None:
        """Serve new requests by this configuration."""
        self._host_check = HostCheck(config.security, config.listen)
        self._oauth_proxy.change(config)
        self._passthrough.change(config)
        self._config = config

    def stop(self) -> None:
        """Accept no new calls and no new streams."""
        self.stopping = self._passthrough.stopping = True

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        return self.in_flight - self._passthrough.lasting

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
        """Run the stages of a request whose client another replica has checked."""
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
            _ = incoming.posted(config.limits.json_depth)
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
        posted = incoming.posted(live.config.limits.json_depth)
        if posted.id is None:
            # 2026-07-28 defines no notification over HTTP; closing the response is what cancels.
            return web.Response(status=202, headers={ids.HEADER: incoming.request_id})
        started = time.monotonic()
        request = modern.check(posted, incoming.values)
        if self._traces is not None:
            incoming.span = begin_span(self._traces, incoming, live, request)
        with span_ended_on_error(incoming.span):
            principal = await self._authenticator.principal(incoming, is_checked=asks_as_client(live.route))
            distrusted = self._authenticator.disbelieved(incoming)
            round_ = new_round(incoming, reply, live, request, principal, distrusted, started)
        return await self._serve(round_)

    async def _serve(self, round_: Round) -> web.StreamResponse:
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
        """Serve a round by its method and its state."""
        live, request, key, headers = round_.live, round_.request, round_.key, round_.headers
        if request.method == mcp.DISCOVER:
            await live.upstream.pool.authorise(key, headers)
            shaken = await live.upstream.pool.handshake(key, headers)
            return await round_.answer(handshake.discover_result(shaken, *live.route.cache.of(mcp.DISCOVER)))
        if request.request_state is not None:
            return await self._continuation.serve(round_)
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        if request.method == mcp.LISTEN:
            async with subscription.subscription(live, request, key, headers) as stream:
                round_.count(COMPLETE)  # the time that a subscription stays open is not a latency
                return await round_.write(stream)
        return await self._begin(round_)

    async def _begin(self, round_: Round) -> Replied:
        """Begin an exchange, unless the list that the client asks for is cached."""
        live, request, key, headers = round_.live, round_.request, round_.key, round_.headers
        pool = live.upstream.pool
        if request.method in mcp.ASKING:
            self._lot.check(key.principal)
        if request.method == mcp.TOOLS_CALL and not tool_schemas.mirrors_nothing(pool, key, request, headers):
            await tool_schemas.check(pool, key, request, round_.incoming.values, headers)
        ticket = pool.ticket(key, request, headers)
        if ticket is not None:
            cached = await pool.kept(ticket, headers)
            live.process.metrics.list_answered(live.route.path, from_memory=cached is not None)
            if cached is not None:
                return await round_.answer(cached)
        driver = Driver(live, self._lot, request, key, headers)
        driver.ticket = ticket
        queue = round_.queue()
        driver.begin(queue)
        return await self._run(round_, driver, queue)

    async def _run(self, round_: Round, driver: Driver, queue: ResponseQueue) -> Replied:
        """Write what an exchange sends to a round, until its final message."""
        is_relayed = round_.incoming.hop is not None
        waiting = self.relayed if is_relayed else self.running
        waiting.add(driver)
        try:
            return await round_.write(queue)
        except BaseException:
            driver.leave(queue.leg, is_relayed=is_relayed)
            raise
        finally:
            waiting.discard(driver)


def _named(response: web.StreamResponse, request_id: str) -> web.StreamResponse:
    """Name the request in a reply whose head has not been sent yet."""
    response.headers[ids.HEADER] = request_id
    return response
