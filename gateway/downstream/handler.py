"""The way of one HTTP request to its one reply, as a list of stages."""

from collections.abc import Awaitable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from gateway import world
from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import HostCheck
from gateway.auth.oauth_proxy import OAuthProxy
from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import ending_of
from gateway.cluster.peer_errors import PeerFailed
from gateway.cluster.peer_listener import Answer, Encode
from gateway.config import Config, InForce, Limits
from gateway.downstream.continuation import Continuation
from gateway.downstream.dispatcher import Dispatcher
from gateway.downstream.era_routing import EraRouting
from gateway.downstream.fast_path_request import FastPathHop, FastPathRequest
from gateway.downstream.legacy_routing import LegacyRouting
from gateway.downstream.pinned_clients import PinnedClients
from gateway.downstream.rejections import Rejections, no_route
from gateway.downstream.round import LEFT, NO_REPLY, Round, begin_span, new_round
from gateway.downstream.task_requests import TaskRequests
from gateway.downstream.unread_retry import UnreadRetry
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply, ReplyWriter
from gateway.http.server import request_id as ids
from gateway.http.server.body import last_id
from gateway.http.server.connection import Connection
from gateway.http.server.known_heads import ParsedHead
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, WholeResponse
from gateway.http.upstream_client import Client
from gateway.http.upstream_headers import asks_as_client
from gateway.passthrough.forwarder import Passthrough
from gateway.protocol.errors import DownstreamError, GatewayError, NoHandshake, Notification
from gateway.routes.live_route import LiveRoute
from gateway.routes.route_table import RouteTable
from gateway.telemetry import Direction, bodies

_REFUSED_BYTES: Final = 65_536
"""The largest body that is read for the id of a request whose caller is not verified."""


class RequestHandler:
    """Serves the routes of one listener."""

    def __init__(  # noqa: PLR0913  (everything that a request may need)
        self,
        in_force: InForce[Config],
        routes: RouteTable,
        authenticator: Authenticator,
        continuation: Continuation,
        passthrough: Passthrough,
        legacy: LegacyRouting,
        task_requests: TaskRequests,
    ) -> None:
        self._use(in_force.value)
        in_force.after_replace(self._use)
        self._routes = routes
        self._authenticator = authenticator
        self._continuation = continuation
        self._passthrough = passthrough
        self._legacy = legacy
        self.front = legacy.front
        self._mirror = legacy.mirror
        self.stateless = legacy.stateless
        self._bodies = routes.process.traffic.bodies
        self._oauth_proxy = OAuthProxy(in_force, self._client_of, self._bodies)
        pinned = PinnedClients(routes.process, continuation.new_calls)
        self._dispatcher = Dispatcher(continuation, task_requests, pinned)
        self._era_routing = EraRouting(authenticator, continuation, passthrough, legacy, task_requests)
        self._rejections = Rejections(routes)
        self._ids = ids.numbered(world.token_hex(6))
        self._in_tasks = 0
        """Requests in flight that a task serves."""
        self._direct: dict[FastPathRequest, None] = {}
        """Those that no task serves."""
        self._hops: dict[FastPathRequest, None] = {}
        """Those of other replicas."""
        self._legs = continuation.legs

    def _use(self, config: Config) -> None:
        self._config = config
        self._host_check = HostCheck(config.security, config.listen)

    def stop(self, ends_at: float | None = None) -> None:
        """Begin no new calls and no new streams.

        Other replicas serve the new calls, and end each of their legs by `ends_at` (monotonic). None: there is no
        other replica, and new calls are refused.
        """
        self._dispatcher.stopping = self._passthrough.stopping = self._era_routing.stdio.stopping = True
        refuses = ends_at is None
        self._passthrough.refuses_calls = self._legacy.mirror.refuses_calls = refuses
        self._era_routing.stdio.refuses_calls = refuses
        self._legacy.stop()
        self._continuation.new_calls.end_legs(ends_at)

    def part(self, let_go: Iterable[str]) -> None:
        """Take no call over from now on, because this process ends; it has let these exchanges go."""
        self._continuation.part(let_go)

    @property
    def running(self) -> dict[Driver, None]:
        """The exchanges with a leg of a client of this replica."""
        return self._legs.running | dict.fromkeys(each for direct in self._direct for each in direct.exchanges)

    @property
    def in_flight(self) -> int:
        """The number of requests whose final message has not been written yet."""
        return self._in_tasks + len(self._direct) + len(self._hops)

    @property
    def relayed(self) -> dict[Driver, None]:
        """The exchanges with a leg of a request that another replica forwarded."""
        return self._legs.relayed | dict.fromkeys(each for hop in self._hops for each in hop.exchanges)

    @property
    def stopping(self) -> bool:
        """Whether this process begins no new calls."""
        return self._dispatcher.stopping

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        long_lived = self._passthrough.long_lived + self._era_routing.stdio.long_lived + self._mirror.long_lived
        return self.in_flight - long_lived + self.front.busy

    def _client_of(self, path: str) -> Client:
        """Return the HTTP client of the route at a path; raises MethodNotFound if a reload removed the route."""
        live = self._routes.live.get(path)
        if live is None:
            raise no_route(path)
        return live.upstream.client

    def handle(self, http: HttpRequest) -> Awaitable[Response]:
        """Serve one HTTP request; raises only if its connection is lost, or on cancellation."""
        # Until the body is here, the configuration of the present route holds.
        path, headers = http.path, http.headers
        live = self._routes.live.get(path)
        config = self._config if live is None else live.config
        incoming = Incoming(
            path,
            headers,
            http.remote,
            request_id=ids.request_id(headers.get(ids.HEADER), self._ids),
            method=http.method,
            url=http.url,
            json_depth=config.limits.json_depth,
        )
        reply = self._reply(http, incoming, config)
        return self._replied(self._serve_client(http, incoming, reply, config.limits), incoming, reply)

    def _reply(self, http: HttpRequest, incoming: Incoming, config: Config) -> HttpReply:
        http.id = incoming.request_id
        return HttpReply(http, config.timeouts.send_seconds, self._oauth_proxy.challenge)

    def begin(self, connection: Connection, head: ParsedHead, body: bytes) -> FastPathRequest | None:
        """Begin a whole request without a task; None if that is not possible. Raises nothing."""
        live = self._routes.live.get(head.path)
        if live is None or self._authenticator.verifies or len(body) > live.config.limits.body_bytes or bodies.on:
            return None
        given = head.values[ids.HEADER]
        incoming = Incoming(
            head.path,
            head.headers,
            connection.wire.remote,
            body,
            request_id=ids.request_id(given[0], self._ids) if given else next(self._ids),
            url=head.message.url,
            json_depth=live.config.limits.json_depth,
            known=head.values,
            caller=head.caller if head.judge is self._host_check else None,
        )
        direct = FastPathRequest(connection, head, incoming, self._go_on, self._direct)
        try:
            round_ = self._plain_round(incoming, live, head)
        except Exception:  # noqa: BLE001  (the task comes to the same error, and answers it)
            round_ = None
        if round_ is not None:
            direct.begin(round_, self._dispatcher.begin)
        return direct

    def _plain_round(self, incoming: Incoming, live: LiveRoute, head: ParsedHead) -> Round | UnreadRetry | None:
        """Return the round of a request that may need no task; None for all others. Raises DownstreamError."""
        if incoming.caller is None and incoming.peer_request is None:
            self._host_check.check(incoming.headers)
        if live.route.dialects or live.process.traces is not None:
            return None
        is_bridged = self._era_routing.is_bridged(incoming, live)
        if not is_bridged and not self._era_routing.may_continue(incoming):
            return None
        started = world.monotonic()
        caller = incoming.caller
        if caller is None:
            caller = self._authenticator.unverified(incoming, is_checked=asks_as_client(live.route))
            if self._authenticator.knows_by_head:
                # A reload makes a new host check, so this holds as long as the configuration.
                head.caller, head.judge = caller, self._host_check
        if incoming.peer_request is None:
            unread = self._continuation.unread(incoming, live, caller, started)
            if unread is not None:
                return unread
        round_ = new_round(incoming, incoming.request(), NO_REPLY, live, caller, started)
        if not is_bridged:
            _ = self._continuation.opened(round_)
        return round_

    def _go_on(self, direct: FastPathRequest, http: HttpRequest) -> Awaitable[Response]:
        """Serve a request in a task that was begun without one."""
        incoming, round_ = direct.incoming, direct.round
        live = round_.live if round_ is not None else self._routes.live.get(incoming.path)
        config = self._config if live is None else live.config
        reply = self._reply(http, incoming, config)
        if round_ is None or live is None:
            return self._replied(self._serve_client(http, incoming, reply, config.limits), incoming, reply)
        round_.reply = reply
        begun = self._dispatcher.serve(round_, direct.plain, direct.error)
        return self._replied(self._bridge_first(incoming, reply, live, begun), incoming, reply)

    def begin_hop(
        self,
        connection: Connection,
        head: ParsedHead,
        incoming: Incoming,
        answer: Answer,
        encode: Encode,
    ) -> FastPathRequest:
        """Begin a retry that another replica forwarded, without a task if its call is held here. Raises nothing.

        `answer` has it served in a task; `encode` makes the bytes of a whole reply.
        """

        def go_on(direct: FastPathRequest, http: HttpRequest) -> Awaitable[Response]:
            return answer(http, partial(self._go_on_hop, direct))

        hop = FastPathHop(connection, head, incoming, go_on, self._hops, encode)
        live = self._routes.live.get(incoming.path)
        try:
            round_ = self._plain_round(incoming, live, head) if live and not self._authenticator.verifies else None
        except Exception:  # noqa: BLE001  (the task comes to the same error, and answers it)
            round_ = None
        if isinstance(round_, Round) and round_.request.request_state is not None:
            hop.begin(round_, self._dispatcher.begin)
        return hop

    def _go_on_hop(self, hop: FastPathRequest, reply: ReplyWriter) -> Awaitable[Response]:
        """As `handle_hop`, for a request that was begun without a task."""
        round_ = hop.round
        if round_ is None:
            return self.handle_hop(hop.incoming, reply)
        round_.reply = reply
        return self._replied(self._dispatcher.serve(round_, hop.plain, hop.error), hop.incoming, reply)

    def handle_hop(self, incoming: Incoming, reply: ReplyWriter) -> Awaitable[Response]:
        """Serve one request that another replica forwarded; raises PeerFailed if this replica cannot serve it."""
        return self._replied(self._serve_replica(incoming, reply), incoming, reply)

    async def _replied(self, serving: Awaitable[Response], incoming: Incoming, reply: ReplyWriter) -> Response:
        """Wait for the reply to a request; an exception becomes a response."""
        self._in_tasks += 1
        try:
            return await serving
        except (ConnectionError, PeerFailed):
            raise  # no response can be sent: the connection is closed
        except Exception as exc:  # noqa: BLE001  (the outermost edge of a request, which logs and counts it)
            return await self._rejections.answer(exc, incoming, reply)
        finally:
            self._in_tasks -= 1

    async def _serve_client(self, http: HttpRequest, incoming: Incoming, reply: HttpReply, limits: Limits) -> Response:
        """Run the stages of a client's request; docs/protocol.md (Errors) fixes their order."""
        self._host_check.check(incoming.headers)
        if incoming.path not in self._routes.live:
            response = await self._oauth_proxy.handle(http)
            if response is not None:
                return response
            if incoming.method != "POST":
                raise no_route(incoming.path)
        try:
            if self._authenticator.verifies:
                await self._verify(http, incoming, limits)
            if not incoming.body:
                # No local variable has the body: this coroutine waits until the call has ended.
                incoming.body = self._bodies.read_now(http, limits.body_bytes) or b""
                if not incoming.body:
                    incoming.body = await self._bodies.read(http, limits.body_bytes, limits.receive_seconds)
        except GatewayError as exc:
            await self._keep_session(exc, http, incoming, limits)
            raise
        if bodies.on:
            bodies.show(Direction.FROM_CLIENT, incoming.body, route=incoming.path[:80], request_id=incoming.request_id)
        return await self._route(incoming, reply)

    def _route(self, incoming: Incoming, reply: HttpReply) -> Awaitable[Response]:
        """Bridge a request, or pass it through."""
        live = self._routes.live.get(incoming.path)  # once more: a reload may have come before the body
        if live is None:
            return self._serve_without_route(incoming, reply)
        if live.route.dialects and self.stateless.claims(incoming, live):
            return self._era_routing.stateless(incoming, reply, live)
        if self._era_routing.is_bridged(incoming, live):
            return self._bridge_first(incoming, reply, live, self._bridge(incoming, reply, live))
        return self._pass(incoming, reply, live)

    async def _pass(self, incoming: Incoming, reply: HttpReply, live: LiveRoute) -> Response:
        """Pass a request through, unless it must be bridged."""
        passed = await self._era_routing.passed(incoming, reply, live)
        if passed is not None:
            return passed
        return await self._bridge_first(incoming, reply, live, self._bridge(incoming, reply, live))

    async def _bridge_first(
        self, incoming: Incoming, reply: HttpReply, live: LiveRoute, bridging: Awaitable[Response]
    ) -> Response:
        """Bridge a request, or pass it through if the upstream turns out to be modern."""
        try:
            return await bridging
        except NoHandshake:
            if not incoming.body:
                raise  # the answers of a held call were dropped when it took them
            passed = await self._era_routing.passed_after_all(incoming, reply, live)
            if passed is None:
                raise
            return passed

    async def _serve_replica(self, incoming: Incoming, reply: ReplyWriter) -> Response:
        """Run the stages of a request that another replica received."""
        passed = await self._continuation.new_calls.pass_on(incoming, reply)
        if passed is not None:
            return passed[0]
        live = self._routes.live.get(incoming.path)
        if live is None:
            return await self._serve_without_route(incoming, reply)
        if live.route.dialects and self.stateless.claims(incoming, live):
            return await self._era_routing.stateless(incoming, reply, live)
        served = await self._era_routing.hop(incoming, reply, live)
        return served if served is not None else await self._bridge(incoming, reply, live)

    async def _verify(self, http: HttpRequest, incoming: Incoming, limits: Limits) -> None:
        """Verify a caller by its headers, before its body takes time and memory; raises Unauthorized or NoKeys."""
        try:
            _ = await self._authenticator.caller(incoming, is_checked=False)
        except GatewayError as exc:
            if 0 < (http.head.length) <= _REFUSED_BYTES:  # the error should name the request's id
                with suppress(DownstreamError):
                    incoming.body = await self._bodies.read(http, _REFUSED_BYTES, limits.receive_seconds)
            if isinstance(exc, DownstreamError) and incoming.path not in self._routes.live:
                raise no_route(incoming.path) from exc
            raise

    async def _keep_session(self, error: GatewayError, http: HttpRequest, incoming: Incoming, limits: Limits) -> None:
        """Have an error that comes before the body is read refuse one request and not the session.

        If the request has an id that cannot be read, the client would wait for ever, so the error keeps its status.
        """
        live = self._routes.live.get(incoming.path)
        if live is None or error.status_in_session == error.status or not self._legacy.names_session(incoming, live):
            return
        if not incoming.body:
            error.request_id = await last_id(http, limits.receive_seconds)
        if incoming.body or error.request_id is not None:
            incoming.found_session()

    async def _serve_without_route(self, incoming: Incoming, reply: ReplyWriter) -> Response:
        """Serve a further round of a call that began while the path had a route; raises MethodNotFound for others."""
        found = await self._continuation.find_route(incoming, reply)
        return await self._bridge(incoming, reply, found) if isinstance(found, LiveRoute) else found

    async def _bridge(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Response:
        """Check a request as JSON-RPC and as a modern request, and serve its round."""
        started = world.monotonic()
        try:
            request = incoming.request()  # it is refused before its caller is known, and without a span
        except Notification:
            return WholeResponse(status=202)  # closing the response is what cancels
        span = incoming.span = begin_span(incoming, request, live)
        try:
            caller = await self._authenticator.caller(incoming, is_checked=asks_as_client(live.route))
            round_ = new_round(incoming, request, reply, live, caller, started)
        except BaseException as exc:
            if span is not None:  # the request is refused, or left, before its round begins
                span.end(ending_of(exc) if isinstance(exc, GatewayError) else LEFT)
            raise
        del request  # the round has it, and drops it when it needs no more of it
        return await self._dispatcher.serve(round_)
