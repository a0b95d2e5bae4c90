"""The client's side: one HTTP request in, one reply out; the only place where an exception becomes a response."""

import asyncio
import re
import time
from typing import Final

from aiohttp import web

from gateway.config import Config
from gateway.core import era as eras
from gateway.core import jsonrpc, mcp, negotiate, sse
from gateway.core import request as modern
from gateway.core.events import Leg
from gateway.core.exchange import State
from gateway.core.request import Request
from gateway.errors import (
    DownstreamError,
    GatewayError,
    InvalidState,
    MethodNotFound,
    NoHandshake,
    Stopping,
    UpstreamError,
)
from gateway.net import catalog, listen
from gateway.net.bridge import Bridge
from gateway.net.callers import Callers
from gateway.net.driver import Driver
from gateway.net.guard import Guard
from gateway.net.headers import asks_as_client, for_call
from gateway.net.outbox import Last, Outbox
from gateway.net.passthrough import Passthrough, not_allowed, probe_headers
from gateway.net.peers import PeerFailed, Replied
from gateway.net.routes import Routes
from gateway.net.sessions import PoolKey
from gateway.net.succession import Succession
from gateway.net.upstream import NO_HEADERS, Headers
from gateway.net.wellknown import WellKnown
from gateway.net.wire import HttpWire, Incoming, Wire, read_body
from gateway.seal.envelope import Envelope, bind
from gateway.seal.keyring import PREFIX
from gateway.telemetry import Event, Metrics, Outcome, Step, get_logger

log = get_logger()

_OUR_STATE: Final = f'"{PREFIX}.'.encode()
_TRACE_VALUE: Final = re.compile(r"[\x20-\x7e]{1,8192}")


class Downstream:
    """Serves the routes of one listener."""

    def __init__(  # noqa: PLR0913  (what serves a listener)
        self,
        config: Config,
        routes: Routes,
        callers: Callers,
        succession: Succession,
        passthrough: Passthrough,
        wellknown: WellKnown,
        metrics: Metrics,
    ) -> None:
        self._routes = routes
        self._callers = callers
        self._wellknown = wellknown
        self._succession = succession
        self._passthrough = passthrough
        self._metrics = metrics
        self.change(config)
        self.stopping = False
        self.in_flight = 0
        """Requests that have not got their final message yet."""
        self.running: set[Driver] = set()
        """Exchanges that have a leg waiting here."""
        self.relayed: set[Driver] = set()
        """Exchanges that have a leg waiting at another replica."""

    def change(self, config: Config) -> None:
        """Serve new requests by this configuration."""
        self._guard = Guard(config.security, config.listen)
        self._wellknown.change(config)
        self._passthrough.change(config)
        self._config = config

    def stop(self) -> None:
        """Take no new calls and no new streams."""
        self.stopping = self._passthrough.stopping = True

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        return self.in_flight - self._passthrough.lasting

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One HTTP request; never raises but for cancellation."""
        # What comes before the body can only be known of the route that there is now.
        bridge = self._routes.bridges.get(http.path)
        config = self._config if bridge is None else bridge.config
        wire = HttpWire(http, config.timeouts.send_seconds, self._wellknown.challenge)
        self.in_flight += 1
        try:
            self._guard.check(http.headers.get("Host"), http.headers.get("Origin"))
            if http.path not in self._routes.bridges:
                if self._wellknown.serves(http.path):
                    return await self._wellknown.handle(http)
                if http.method != "POST":
                    raise self._no_route(http.path)
            body = await read_body(http, config.limits.body_bytes, config.limits.receive_seconds)
            return await self._reply(Incoming(http.path, http.headers, http.remote, body), wire, http)
        except GatewayError as exc:
            return await self._refuse(wire, exc, exc.request_id, http.path)
        finally:
            self.in_flight -= 1

    async def handle_hop(self, incoming: Incoming, wire: Wire) -> web.StreamResponse:
        """One request that came through another replica; raises PeerFailed where this one cannot serve it."""
        self.in_flight += 1
        try:
            return await self._reply(incoming, wire)
        finally:
            self.in_flight -= 1

    async def _reply(self, incoming: Incoming, wire: Wire, http: web.BaseRequest | None = None) -> web.StreamResponse:
        """`http` where the client itself is there: what passes through comes from it and goes to it."""
        id_: bytes | None = None
        try:
            # Looked up when the body is here: a reload may have come before it.
            bridge = self._routes.bridges.get(incoming.path)
            if bridge is None:
                return await self._serve_former(incoming, wire)
            if http is not None and (passed := await self._pass(http, incoming, bridge)) is not None:
                return passed
            posted = modern.read(incoming.body, bridge.config.limits.json_depth)
            id_ = bytes(posted.id) if posted.id is not None else None
            try:
                return await self._serve(incoming, wire, bridge, posted)
            except NoHandshake:
                if http is None or bridge.era is None:
                    raise
                bridge.era.doubt()
                if (passed := await self._pass_modern(http, incoming, bridge)) is None:
                    raise
                return passed
        except GatewayError as exc:
            return await self._refuse(wire, exc, exc.request_id or id_, incoming.path)
        except (ConnectionError, PeerFailed):
            raise  # nobody is there to be told; aiohttp, or the peer listener, knows what to do
        except Exception:  # the outermost edge of a request
            self._metrics.task_failed()
            log.exception(Event.TASK_FAILED, task="request")
            bug = GatewayError("Internal error of the gateway; its log says more")
            return await self._refuse(wire, bug, id_, incoming.path)

    async def _pass(self, http: web.BaseRequest, incoming: Incoming, bridge: Bridge) -> web.StreamResponse | None:
        """The reply to what is not bridged; None to what is."""
        header = incoming.headers.get(mcp.PROTOCOL_VERSION)
        if not eras.is_modern(http.method, header, incoming.body, bridge.config.limits.json_depth):
            await self._verify(incoming, bridge)
            return await self._passthrough.legacy(http, bridge, incoming.body)
        if http.method != "POST":
            raise not_allowed(http.method, "POST")
        return await self._pass_modern(http, incoming, bridge)

    async def _pass_modern(
        self, http: web.BaseRequest, incoming: Incoming, bridge: Bridge
    ) -> web.StreamResponse | None:
        """A modern upstream's reply to a modern request; None where it must be bridged."""
        era = bridge.era
        if era is None or era.known is False or await self._is_ours(incoming, bridge):
            return None
        if not (era.known or await era.is_modern(probe_headers(self._passthrough.headers(http, bridge)))):
            return None
        await self._verify(incoming, bridge)
        return await self._passthrough.modern(http, bridge, incoming.body)

    async def _verify(self, incoming: Incoming, bridge: Bridge) -> None:
        """Let nobody through to an upstream whom the configuration wants verified; raises Unauthorized."""
        _ = await self._callers.principal(incoming, is_checked=asks_as_client(bridge.route))

    async def _is_ours(self, incoming: Incoming, bridge: Bridge) -> bool:
        """Whether this is a round of a call that the gateway holds, of a time when the upstream seemed to be old."""
        if _OUR_STATE not in incoming.body:
            return False
        try:
            posted = modern.read(incoming.body, self._config.limits.json_depth)
            request = modern.check(posted, lambda name: incoming.headers.getall(name, ()))
            principal = await self._callers.principal(incoming, is_checked=asks_as_client(bridge.route))
            binding = bind(bridge.route.path, request, principal)
            _ = bridge.sealer.open(request.request_state or "", binding, time.time())
        except DownstreamError:
            return False
        return True

    def _no_route(self, path: str) -> MethodNotFound:
        return MethodNotFound(f"No route {path[:80]!r}; the routes are {', '.join(self._routes.bridges)}")

    async def _serve_former(self, incoming: Incoming, wire: Wire) -> web.StreamResponse:
        """A path without a route: what began while it had one goes on, all else is told that there is none.

        Who was there is not remembered: the state opens or it does not, whichever replica knew the route.
        """
        started, no_route = time.monotonic(), self._no_route(incoming.path)
        try:
            posted = modern.read(incoming.body, self._config.limits.json_depth)
            if posted.id is None:
                raise no_route
            no_route.request_id = bytes(posted.id)
            request = modern.check(posted, lambda name: incoming.headers.getall(name, ()))
            envelope = await self._open_former(incoming, request)
        except DownstreamError as exc:
            raise no_route from exc
        try:
            driver = self._routes.lot.find(envelope.exchange)
            if driver is not None:
                return await self._serve(incoming, wire, driver.bridge, posted)
            if (envelope.owner, envelope.epoch) == (self._routes.owner, self._routes.epoch):
                raise InvalidState("ended")
            replied = await self._succession.elsewhere(envelope, incoming, wire)
            if replied is None:  # nobody holds it, and to run it again would be to serve the route
                raise no_route
        except GatewayError as exc:
            exc.request_id = bytes(request.id)
            raise
        response, outcome = replied
        if incoming.hop is None:
            # The state was sealed for this path, so it was a route once: the label is no client's.
            self._metrics.continued(incoming.path, Step.FORWARDED)
            seconds = time.monotonic() - started
            self._metrics.operation_finished(incoming.path, request.method, request.version, outcome, seconds)
        return response

    async def _open_former(self, incoming: Incoming, request: Request) -> Envelope:
        """Open a state of a path without a route: whether its upstream saw the credential is not known any more."""
        sealed = request.request_state or ""
        try:
            principal = await self._callers.principal(incoming, is_checked=True)
            return self._routes.sealer.open(sealed, bind(incoming.path, request, principal), time.time())
        except InvalidState:
            principal = await self._callers.principal(incoming, is_checked=False)
            return self._routes.sealer.open(sealed, bind(incoming.path, request, principal), time.time())

    async def _serve(
        self, incoming: Incoming, wire: Wire, bridge: Bridge, posted: modern.Posted
    ) -> web.StreamResponse:
        if posted.id is None:
            # 2026-07-28 defines no notification over HTTP; closing the response is what cancels.
            return web.Response(status=202)
        started = time.monotonic()
        request = modern.check(posted, lambda name: incoming.headers.getall(name, ()))
        headers = self._upstream_headers(incoming, bridge, request)
        principal = await self._callers.principal(incoming, is_checked=asks_as_client(bridge.route))
        key = _pool_key(bridge, request, principal, headers)
        outcome = Outcome.ERROR
        try:
            response, outcome = await self._dispatch(incoming, wire, bridge, request, key, headers)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        except GatewayError:
            outcome = Outcome.REJECTED
            raise
        finally:
            if incoming.hop is None:  # else the replica that the client speaks to counts it
                seconds = time.monotonic() - started
                self._metrics.operation_finished(bridge.route.path, request.method, request.version, outcome, seconds)
        return response

    async def _dispatch(  # noqa: PLR0913  (what one request is made of)
        self, incoming: Incoming, wire: Wire, bridge: Bridge, request: Request, key: PoolKey, headers: Headers
    ) -> Replied:
        if request.method == mcp.DISCOVER:
            await bridge.pool.authorise(key, headers)
            shaken = await bridge.pool.handshake(key, headers)
            result = negotiate.discover_result(shaken, *bridge.route.cache.of(mcp.DISCOVER))
            return await _answer(wire, request, result)
        if request.request_state is not None:
            return await self._continue(incoming, wire, bridge, request, key, headers)
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        if request.method == mcp.LISTEN:
            async with listen.subscription(bridge, request, key, headers) as stream:
                return await _converse(wire, stream)
        if request.method in mcp.ASKING:
            bridge.lot.check(key.principal)
        if request.method == mcp.TOOLS_CALL and not catalog.mirrors_nothing(bridge.pool, key, request):
            await catalog.check(bridge.pool, key, request, lambda name: incoming.headers.getall(name, ()), headers)
        ticket = bridge.pool.ticket(key, request)
        if ticket is not None:
            kept = await bridge.pool.kept(ticket, headers)
            bridge.metrics.list_answered(bridge.route.path, from_memory=kept is not None)
            if kept is not None:
                return await _answer(wire, request, kept)
        driver = Driver(bridge, request, key, headers)
        driver.ticket = ticket
        outbox = _outbox(bridge, request)
        driver.begin(outbox)
        return await self._run(driver, outbox, wire, self.running)

    async def _continue(  # noqa: PLR0913  (what one request is made of)
        self, incoming: Incoming, wire: Wire, bridge: Bridge, request: Request, key: PoolKey, headers: Headers
    ) -> Replied:
        """A further round: here if the call is held here, else where it is, else wherever it can be picked up."""
        assert request.request_state is not None
        binding = bind(bridge.route.path, request, key.principal)
        envelope = bridge.sealer.open(request.request_state, binding, time.time())
        driver = bridge.lot.find(envelope.exchange)
        if driver is not None and driver.bridge.pool is not bridge.pool:
            # A reload gave the path another upstream; the call goes on where it began.
            bridge = driver.bridge
            headers = self._upstream_headers(incoming, bridge, request)
            key = _pool_key(bridge, request, key.principal, headers)
        if driver is None:
            if (envelope.owner, envelope.epoch) == (bridge.owner, bridge.epoch):
                raise InvalidState("ended")
            replied = await self._succession.elsewhere(envelope, incoming, wire)
            if replied is not None:
                if incoming.hop is None:
                    bridge.metrics.continued(bridge.route.path, Step.FORWARDED)
                return replied
        if not _goes_upstream(driver, envelope, request):
            await bridge.pool.authorise(key, headers)
        # While others were asked, a second retry may have come.
        driver = bridge.lot.find(envelope.exchange) or driver
        if driver is None:
            driver = Driver.take_over(bridge, request, key, headers, envelope)
        else:
            bridge.metrics.continued(bridge.route.path, Step.HELD)
        outbox = _outbox(bridge, request)
        try:
            driver.answer(outbox, request, envelope.round, headers)
        except GatewayError:
            driver.discard()
            raise
        return await self._run(driver, outbox, wire, self.running if incoming.hop is None else self.relayed)

    async def _run(self, driver: Driver, outbox: Outbox, wire: Wire, waiting: set[Driver]) -> Replied:
        """Write a leg of an exchange as it comes."""
        waiting.add(driver)
        try:
            return await _converse(wire, outbox)
        except BaseException:
            driver.leave(outbox.leg)
            raise
        finally:
            waiting.discard(driver)

    def _upstream_headers(self, incoming: Incoming, bridge: Bridge, request: Request) -> Headers:
        """What of this request's headers goes upstream; everything else stays here."""
        sent = for_call(bridge.route, incoming.headers)
        meta = request.user_meta
        for name in mcp.TRACE_KEYS:
            value = (jsonrpc.text(meta.get(name)) if meta else None) or incoming.headers.get(name)
            if value is not None and _TRACE_VALUE.fullmatch(value):
                sent[name] = value
        return sent

    async def _refuse(self, wire: Wire, error: GatewayError, id_: bytes | None, path: str) -> web.StreamResponse:
        bridge = self._routes.bridges.get(path)
        if bridge is not None:  # else there is no such route, and the path is its client's
            bridge.health.note(error)
        if isinstance(error, InvalidState):
            self._metrics.state_rejected(error.reason)
            log.info(Event.STATE_REJECTED, reason=error.reason)
        elif isinstance(error, DownstreamError):
            self._metrics.downstream_rejected(error.rejection)
        elif isinstance(error, UpstreamError):
            log.warning(Event.UPSTREAM_FAILED, reason=error.reason, cause=error.message)
        last = Last.of_error(error, id_)
        return await wire.whole(last.body, last.status, last.headers, Outcome.REJECTED)


def _pool_key(bridge: Bridge, request: Request, principal: bytes, headers: Headers) -> PoolKey:
    names = bridge.route.forward_headers
    forwarded = tuple([(name, headers[name]) for name in names if name in headers]) if names else ()
    return PoolKey(principal, bytes(request.client_info), bytes(request.capabilities), forwarded)


def _goes_upstream(driver: Driver | None, envelope: Envelope, request: Request) -> bool:
    """Whether an answer of this request goes upstream, where its credential is checked with it."""
    if driver is not None:
        return driver.is_answered_by(request)
    answers = request.input_responses or {}
    return envelope.state == State.PARKED and any(each.key in answers for each in envelope.open)


def _outbox(bridge: Bridge, request: Request) -> Outbox:
    return Outbox(Leg(request.id, request.progress_token, request.log_level), bridge.alarms.silence)


async def _answer(wire: Wire, request: Request, result: bytes) -> Replied:
    """A result that nothing was asked for."""
    body = jsonrpc.result(request.id, result)
    return await wire.whole(body, 200, NO_HEADERS, Outcome.COMPLETE), Outcome.COMPLETE


async def _converse(wire: Wire, outbox: Outbox) -> Replied:
    """Write a leg's messages: one JSON body if nothing precedes the final message, else a stream."""
    item = await outbox.take()
    while not isinstance(item, Last):
        if not wire.started:
            await wire.start()
        await wire.write(sse.KEEP_ALIVE if item is None else sse.encode(item))
        item = await outbox.take()
    if isinstance(item.cause, NoHandshake) and not wire.started:
        raise item.cause  # the upstream may be modern, and answer this very request
    return await wire.whole(item.body, item.status, item.headers, item.outcome), item.outcome
