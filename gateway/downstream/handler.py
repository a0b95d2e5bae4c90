"""The client's side: one HTTP request in, one reply out; the only place where an exception becomes a response."""

import asyncio
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from aiohttp import web

from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import HostCheck
from gateway.auth.oauth_proxy import OAuthProxy
from gateway.bridge import subscription
from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import FinalMessage, ResponseQueue, ending_of
from gateway.cluster.peer_errors import PeerFailed
from gateway.cluster.reply_relay import Replied
from gateway.cluster.retry_routing import RetryRouting, TakeOver
from gateway.config import Config, InForce
from gateway.exchange import handshake
from gateway.exchange.events import Leg
from gateway.http import request_id as ids
from gateway.http.forwarded_headers import asks_as_client, for_call, joined, own_headers
from gateway.http.reply import REQUEST_ID, HttpReply, Incoming, ReplyWriter, read_body
from gateway.identity import principal as principals
from gateway.passthrough.forwarder import Passthrough
from gateway.passthrough.header_rules import probe_headers
from gateway.passthrough.rejections import id_of, not_allowed
from gateway.protocol import era as eras
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol import request as modern
from gateway.protocol.errors import (
    DownstreamError,
    GatewayError,
    InvalidState,
    MethodNotFound,
    NoHandshake,
    OwnerStalled,
    Stopping,
    UpstreamError,
)
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.routes.table import RouteTable
from gateway.seal.cipher import PREFIX
from gateway.seal.request_state import Envelope, Sealer, bind
from gateway.sessions import tool_schemas
from gateway.sessions.session import PoolKey
from gateway.telemetry import (
    COMPLETE,
    OTHER_ERROR,
    ClientRequest,
    Direction,
    Ending,
    Event,
    Metrics,
    Operation,
    Outcome,
    Span,
    Step,
    Traces,
    bodies,
    get_logger,
)
from gateway.upstream.channel import NO_HEADERS, Headers

log = get_logger()

_REFUSED_BYTES: Final = 65_536
"""Of a body from a caller that is not verified: a larger one is neither read nor opened."""
_OUR_STATE: Final = f'"{PREFIX}.'.encode()
_BUG: Final = Ending(Outcome.ERROR, OTHER_ERROR)
_LEFT: Final = Ending(Outcome.CANCELLED)
_STATE_NOTES: Final = {
    "unknown_key": "sealed with a key that is not among state.keys: give all replicas the same keys, and keep an old "
    "one for state.ttl_seconds",
    "forged": "changed on its way, or sealed with another key of the same id: give all replicas the same state.keys",
    "expired": "the client came back after state.ttl_seconds",
    "future": "sealed by a replica whose clock is ahead by more than a minute: compare the clocks",
    "version": "sealed by another version of the gateway: such calls are lost in an upgrade that says so",
    "other_principal": "somebody else came back with it: look at principal.source, if it was the same caller",
    "other_headers": "it came back with other credentials in routes[].bind_headers, or without them: a key that is "
    "rotated ends its open questions",
    "answered": "the round was answered before, with other answers",
    "ended": "its call is over: it expired (hold.ttl_seconds), or this process was restarted",
    "too_large": "larger than limits.state_bytes: the gateway seals none of that size",
    "malformed": "no state of this gateway, or cut off on its way",
}
_STATE_FOREIGN: Final = "it came back with another request than the one that it was given to"
_TRACE_CONTEXT: Final = ("traceparent", "tracestate")
_TRACE_VALUE: Final = re.compile(r"[\x20-\x7e]{1,8192}")


class Round(msgspec.Struct, eq=False):
    """One checked request on its way to its reply."""

    incoming: Incoming
    wire: ReplyWriter
    live: LiveRoute
    request: Request
    key: PoolKey
    headers: Headers
    """What of the request's headers goes upstream."""
    started: float
    """Monotonic."""
    noted: bool = False
    """Whether it was counted."""

    def outbox(self) -> ResponseQueue:
        """The way of an exchange's messages to this round's client."""
        request = self.request
        leg = Leg(request.id, request.progress_token, request.log_level)
        live, incoming = self.live, self.incoming
        behind_bytes = live.config.limits.behind_bytes
        return ResponseQueue(leg, live.deadlines.silence, behind_bytes, incoming.request_id, incoming.span)


class Downstream:
    """Serves the routes of one listener."""

    def __init__(  # noqa: PLR0913  (what serves a listener)
        self,
        in_force: InForce[Config],
        routes: RouteTable,
        lot: Lot[Driver],
        callers: Authenticator,
        succession: RetryRouting,
        passthrough: Passthrough,
        wellknown: OAuthProxy,
        metrics: Metrics,
        traces: Traces | None = None,
    ) -> None:
        self._routes = routes
        self._lot = lot
        self._callers = callers
        self._wellknown = wellknown
        self._succession = succession
        self._passthrough = passthrough
        self._metrics = metrics
        self._traces = traces
        self._ids = ids.numbered(secrets.token_hex(6))
        self._use(in_force.value)
        in_force.after_replace(self._use)
        self.stopping = False
        self.in_flight = 0
        """Requests that have not got their final message yet."""
        self.running: set[Driver] = set()
        """Exchanges that have a leg waiting here."""
        self.relayed: set[Driver] = set()
        """Exchanges that have a leg waiting at another replica."""

    def _use(self, config: Config) -> None:
        """Serve new requests by this configuration."""
        self._guard = HostCheck(config.security, config.listen)
        self._config = config

    def stop(self) -> None:
        """Take no new calls and no new streams."""
        self.stopping = self._passthrough.stopping = True

    @property
    def busy(self) -> int:
        """Requests that a drain waits for."""
        return self.in_flight - self._passthrough.long_lived

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One HTTP request; never raises but for cancellation."""
        # What comes before the body can only be known of the route that there is now.
        live = self._routes.live.get(http.path)
        config = self._config if live is None else live.config
        request_id = http[REQUEST_ID] = ids.request_id(http.headers.get(ids.HEADER), self._ids)
        wire = HttpReply(http, config.timeouts.send_seconds, self._wellknown.challenge)
        self.in_flight += 1
        try:
            self._guard.check(http.headers.get("Host"), joined(http.headers, "Origin"))
            if http.path not in self._routes.live:
                if self._wellknown.serves(http.path):
                    return _named(await self._wellknown.handle(http), request_id)
                if http.method != "POST":
                    raise self._no_route(http.path)
            incoming = Incoming(http.path, http.headers, http.remote, b"", request_id=request_id)
            if self._callers.verifies:
                await self._admit(http, incoming, config)
            body = incoming.body = await read_body(http, config.limits.body_bytes, config.limits.receive_seconds)
            if bodies.on:
                bodies.show(Direction.FROM_CLIENT, body, route=http.path[:80], request_id=request_id)
            return await self._reply(incoming, wire, http)
        except GatewayError as exc:
            return await self._refuse(wire, exc, exc.request_id, http.path, request_id)
        finally:
            self.in_flight -= 1

    async def _admit(self, http: web.BaseRequest, incoming: Incoming, config: Config) -> None:
        """Verify a caller by its headers, before its body takes time and memory; raises Unauthorized or NoKeys."""
        try:
            _ = await self._callers.principal(incoming, is_checked=False)
        except GatewayError as exc:
            id_ = await self._id_of_refused(http, incoming, config)
            if isinstance(exc, DownstreamError) and incoming.path not in self._routes.live:
                no_route = self._no_route(incoming.path)
                no_route.request_id = id_
                raise no_route from exc
            exc.request_id = id_
            raise

    async def _id_of_refused(self, http: web.BaseRequest, incoming: Incoming, config: Config) -> bytes | None:
        """The id that a refusal repeats; a caller that nobody verified has a small body opened for it, no other."""
        if not 0 < (http.content_length or 0) <= _REFUSED_BYTES:
            return None
        try:
            incoming.body = await read_body(http, _REFUSED_BYTES, config.limits.receive_seconds)
            _ = incoming.posted(config.limits.json_depth)
        except DownstreamError:
            pass
        return incoming.rpc_id

    async def handle_hop(self, incoming: Incoming, wire: ReplyWriter) -> web.StreamResponse:
        """One request that came through another replica; raises PeerFailed where this one cannot serve it."""
        self.in_flight += 1
        try:
            return await self._reply(incoming, wire)
        finally:
            self.in_flight -= 1

    async def _reply(
        self, incoming: Incoming, wire: ReplyWriter, http: web.BaseRequest | None = None
    ) -> web.StreamResponse:
        """`http` where the client itself is there: what passes through comes from it and goes to it."""
        try:
            # Looked up when the body is here: a reload may have come before it.
            live = self._routes.live.get(incoming.path)
            if live is None:
                return await self._serve_former(incoming, wire)
            if http is not None and (passed := await self._pass(http, incoming, live)) is not None:
                return passed
            posted = incoming.posted(live.config.limits.json_depth)
            try:
                return await self._serve(incoming, wire, live, posted)
            except NoHandshake:
                if http is None or live.upstream.era is None:
                    raise
                live.upstream.era.doubt()
                if (passed := await self._pass_modern(http, incoming, live)) is None:
                    raise
                return passed
        except GatewayError as exc:
            return await self._refuse(wire, exc, exc.request_id or incoming.rpc_id, incoming.path, incoming.request_id)
        except (ConnectionError, PeerFailed):
            raise  # nobody is there to be told; aiohttp, or the peer listener, knows what to do
        except Exception:  # the outermost edge of a request
            self._metrics.task_failed()
            log.exception(Event.TASK_FAILED, task="request", route=incoming.path, request_id=incoming.request_id)
            error = GatewayError("Internal error of the gateway; its log has this requestId and says more")
            return await self._refuse(wire, error, incoming.rpc_id, incoming.path, incoming.request_id)

    async def _pass(self, http: web.BaseRequest, incoming: Incoming, live: LiveRoute) -> web.StreamResponse | None:
        """The reply to what is not bridged; None to what is."""
        header = incoming.headers.get(mcp.PROTOCOL_VERSION)
        if not eras.is_modern(http.method, header, lambda: incoming.posted(live.config.limits.json_depth)):
            await self._verify(incoming, live)
            return await self._passthrough.legacy(http, live, incoming)
        if http.method != "POST":
            raise not_allowed(http.method, "POST")
        return await self._pass_modern(http, incoming, live)

    async def _pass_modern(
        self, http: web.BaseRequest, incoming: Incoming, live: LiveRoute
    ) -> web.StreamResponse | None:
        """A modern upstream's reply to a modern request; None where it must be bridged."""
        era = live.upstream.era
        if era is None or era.known is False or await self._is_ours(incoming, live):
            return None
        await self._verify(incoming, live)  # before the probe, which carries this request's headers upstream
        with _naming_the_request(incoming, live):
            headers = self._passthrough.headers.upstream(http, live)
        if not (era.known or await era.is_modern(probe_headers(headers))):
            return None
        return await self._passthrough.modern(http, live, incoming)

    async def _verify(self, incoming: Incoming, live: LiveRoute) -> None:
        """Let nobody through to an upstream whom the configuration wants verified; raises Unauthorized."""
        with _naming_the_request(incoming, live):
            _ = await self._callers.principal(incoming, is_checked=asks_as_client(live.route))

    async def _is_ours(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether this is a round of a call that the gateway holds, of a time when the upstream seemed to be old."""
        if _OUR_STATE not in incoming.body:
            return False
        try:
            request = modern.check(incoming.posted(live.config.limits.json_depth), incoming.values)
            principal = await self._callers.principal(incoming, is_checked=asks_as_client(live.route))
            _ = self._open(live.process.sealer, incoming, request, principal, live.route.bound_headers)
        except DownstreamError:
            return False
        return True

    def _no_route(self, path: str) -> MethodNotFound:
        """The answer to a stranger too, who must not learn from it which routes there are."""
        return MethodNotFound(f"No route has the path {path[:80]!r}; check the path of the gateway's URL")

    async def _serve_former(self, incoming: Incoming, wire: ReplyWriter) -> web.StreamResponse:
        """A path without a route: what began while it had one goes on, all else is told that there is none.

        Who was there is not remembered: the state opens or it does not, whichever replica knew the route.
        """
        started, no_route = time.monotonic(), self._no_route(incoming.path)
        try:
            posted = incoming.posted(self._config.limits.json_depth)
            if posted.id is None:
                raise no_route
            no_route.request_id = bytes(posted.id)
            request = modern.check(posted, incoming.values)
            envelope = await self._open_former(incoming, request)
        except DownstreamError as exc:
            raise no_route from exc
        try:
            driver = self._lot.find(envelope.exchange)
            if driver is not None:
                return await self._serve(incoming, wire, driver.live, posted)
            if (envelope.owner, envelope.epoch) == (self._routes.process.owner, self._routes.process.epoch):
                raise InvalidState("ended")
            replied = await self._succession.route(envelope, incoming, wire)
            if isinstance(replied, TakeOver):  # nobody holds it, and to run it again would be to serve the route
                raise no_route
        except GatewayError as exc:
            exc.request_id = bytes(request.id)
            raise
        response, ending = replied
        if incoming.hop is None:
            # The state was sealed for this path, so it was a route once: the label is no client's.
            self._metrics.continued(incoming.path, Step.FORWARDED)
            seconds = time.monotonic() - started
            self._metrics.operation_finished(incoming.path, request.method, request.version, ending, seconds)
        return response

    async def _open_former(self, incoming: Incoming, request: Request) -> Envelope:
        """Open a state of a path without a route: whether its upstream saw the credential is not known any more."""
        try:
            principal = await self._callers.principal(incoming, is_checked=True)
            return self._open(self._routes.process.sealer, incoming, request, principal, None)
        except InvalidState:
            principal = await self._callers.principal(incoming, is_checked=False)
            return self._open(self._routes.process.sealer, incoming, request, principal, None)

    def _open(
        self, sealer: Sealer, incoming: Incoming, request: Request, principal: bytes, names: tuple[str, ...] | None
    ) -> Envelope:
        """The envelope of a request's state; `names` are the bound headers of its route. Raises InvalidState."""
        disbelieved = self._callers.disbelieved(incoming)

        def value_of(name: str) -> str | None:
            return joined(incoming.headers, name) if name != disbelieved else None

        def digest(names: Sequence[str]) -> bytes:
            return principals.of_headers(names, value_of)

        binding = bind(incoming.path, request, principal, names, digest)
        return sealer.open(request.request_state or "", binding, time.time(), digest)

    async def _serve(
        self, incoming: Incoming, wire: ReplyWriter, live: LiveRoute, posted: modern.Posted
    ) -> web.StreamResponse:
        if posted.id is None:
            # 2026-07-28 defines no notification over HTTP; closing the response is what cancels.
            return web.Response(status=202, headers={ids.HEADER: incoming.request_id})
        started = time.monotonic()
        request = modern.check(posted, incoming.values)
        if self._traces is not None:
            incoming.span = _begin_span(self._traces, incoming, live, request)
        try:
            headers = self._upstream_headers(incoming, live, request)
            principal = await self._callers.principal(incoming, is_checked=asks_as_client(live.route))
            key = _pool_key(live, request, principal, headers)
        except BaseException as exc:
            if incoming.span is not None:
                incoming.span.end(ending_of(exc) if isinstance(exc, GatewayError) else _LEFT)
            raise
        return await self._counted(Round(incoming, wire, live, request, key, headers, started))

    async def _counted(self, round_: Round) -> web.StreamResponse:
        """Serve a round, and note how it ended."""
        ending = _BUG
        try:
            response, ending = await self._dispatch(round_)
        except asyncio.CancelledError:
            ending = _LEFT
            raise
        except GatewayError as exc:
            ending = ending_of(exc)
            if isinstance(exc, UpstreamError) and not exc.is_counted:
                # Before there was a call: its server did not even shake hands, or refused the credential.
                round_.live.process.metrics.upstream_failed(round_.live.route.path, exc.reason)
                exc.is_counted = True
            raise
        finally:
            self._note(round_, ending)
        return response

    def _note(self, round_: Round, ending: Ending) -> None:
        """Count a round, once; one that came through another replica is counted by that one."""
        if round_.noted:
            return
        round_.noted = True
        if round_.incoming.span is not None:
            round_.incoming.span.end(ending)
        if round_.incoming.hop is None:
            request, seconds = round_.request, time.monotonic() - round_.started
            path = round_.live.route.path
            self._metrics.operation_finished(path, request.method, request.version, ending, seconds)

    async def _dispatch(self, round_: Round) -> Replied:
        wire, live, request, key, headers = round_.wire, round_.live, round_.request, round_.key, round_.headers
        if request.method == mcp.DISCOVER:
            await live.upstream.pool.authorise(key, headers)
            shaken = await live.upstream.pool.handshake(key, headers)
            result = handshake.discover_result(shaken, *live.route.cache.of(mcp.DISCOVER))
            return await _answer(wire, request, result)
        if request.request_state is not None:
            return await self._continue(round_)
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        if request.method == mcp.LISTEN:
            async with subscription.subscription(live, request, key, headers) as stream:
                self._note(round_, COMPLETE)  # how long it stays open is no latency
                return await _converse(wire, stream)
        if request.method in mcp.ASKING:
            self._lot.check(key.principal)
        if request.method == mcp.TOOLS_CALL and not tool_schemas.mirrors_nothing(
            live.upstream.pool, key, request, headers
        ):
            await tool_schemas.check(live.upstream.pool, key, request, round_.incoming.values, headers)
        ticket = live.upstream.pool.ticket(key, request, headers)
        if ticket is not None:
            kept = await live.upstream.pool.kept(ticket, headers)
            live.process.metrics.list_answered(live.route.path, from_memory=kept is not None)
            if kept is not None:
                return await _answer(wire, request, kept)
        driver = Driver(live, self._lot, request, key, headers)
        driver.ticket = ticket
        outbox = round_.outbox()
        driver.begin(outbox)
        return await self._run(driver, outbox, wire, self.running)

    async def _continue(self, round_: Round) -> Replied:
        """A further round: here if the call is held here, else where it is, else wherever it can be picked up."""
        incoming, live, request = round_.incoming, round_.live, round_.request
        envelope = self._open(live.process.sealer, incoming, request, round_.key.principal, live.route.bound_headers)
        if incoming.span is not None:
            incoming.span.note("round", envelope.round + 1)
            incoming.span.link(envelope.trace or b"")
        driver = self._lot.find(envelope.exchange)
        if driver is not None and driver.live.upstream.pool is not live.upstream.pool:
            # A reload gave the path another upstream; the call goes on where it began.
            live = round_.live = driver.live
            round_.headers = self._upstream_headers(incoming, live, request)
            round_.key = _pool_key(live, request, round_.key.principal, round_.headers)
        key, headers = round_.key, round_.headers
        is_proven = True
        if driver is None:
            if (envelope.owner, envelope.epoch) == (live.process.owner, live.process.epoch):
                raise InvalidState("ended")
            found = await self._succession.route(envelope, incoming, round_.wire)
            if not isinstance(found, TakeOver):
                if incoming.hop is None:
                    live.process.metrics.continued(live.route.path, Step.FORWARDED)
                    _note_step(incoming.span, Step.FORWARDED)
                return found
            is_proven = found.proven
        # Before anything is answered or claimed: what the upstream says meanwhile goes to whoever waits.
        if driver is not None:
            await driver.authorise(key, headers)
        else:
            await live.upstream.pool.authorise(key, headers, elsewhere=_session_of(envelope))
        # While others were asked, a second retry may have come.
        driver = self._lot.find(envelope.exchange) or driver
        outbox = round_.outbox()
        if driver is None:
            driver = Driver.take_over(live, self._lot, request, key, headers, envelope, outbox, is_proven=is_proven)
        else:
            live.process.metrics.continued(live.route.path, Step.HELD)
            _note_step(incoming.span, Step.HELD)
            driver.answer(outbox, request, envelope.round, headers)
        return await self._run(driver, outbox, round_.wire, self.running if incoming.hop is None else self.relayed)

    async def _run(self, driver: Driver, outbox: ResponseQueue, wire: ReplyWriter, waiting: set[Driver]) -> Replied:
        """Write a leg of an exchange as it comes."""
        waiting.add(driver)
        try:
            return await _converse(wire, outbox)
        except BaseException:
            driver.leave(outbox.leg, is_relayed=waiting is self.relayed)
            raise
        finally:
            waiting.discard(driver)

    def _upstream_headers(self, incoming: Incoming, live: LiveRoute, request: Request) -> Headers:
        """What of this request's headers goes upstream; everything else stays here."""
        sent = for_call(live.route, incoming.headers)
        _ = sent.pop(self._callers.disbelieved(incoming) or "", None)
        meta = request.user_meta
        for name in mcp.TRACE_KEYS:
            value = (jsonrpc.text(meta.get(name)) if meta else None) or joined(incoming.headers, name)
            if value is not None and _TRACE_VALUE.fullmatch(value):
                sent[name] = value
        if incoming.span is not None:
            # What the client said of the trace is in the span, as far as it could be read; baggage goes on anyway.
            for name in _TRACE_CONTEXT:
                _ = sent.pop(name, None)
            sent.update(incoming.span.headers())
        sent.update(own_headers(live.route))
        return sent

    async def _refuse(
        self, wire: ReplyWriter, error: GatewayError, id_: bytes | None, path: str, request_id: str
    ) -> web.StreamResponse:
        live = self._routes.live.get(path)
        if live is not None:  # else there is no such route, and the path is its client's
            live.upstream.health.note(error)
        if isinstance(error, InvalidState):
            self._metrics.state_rejected(error.reason)
            note = _STATE_NOTES.get(error.reason, _STATE_FOREIGN)
            log.info(Event.STATE_REJECTED, route=path, reason=error.reason, note=note, request_id=request_id)
        elif isinstance(error, DownstreamError):
            self._metrics.downstream_rejected(error.rejection)
        elif isinstance(error, UpstreamError):
            self._log(Event.UPSTREAM_FAILED, error, path, request_id, reason=error.reason)
        elif isinstance(error, OwnerStalled):
            self._log(Event.PEER_FAILED, error, path, request_id)
        last = FinalMessage.of_error(error, id_, request_id)
        return await wire.whole(last.body, last.status, last.headers, last.ending)

    def _log(self, event: Event, error: GatewayError, path: str, request_id: str, **fields: object) -> None:
        """What an operator can do something about."""
        live = self._routes.live.get(path)
        upstream = live.route.upstream.name if live is not None else None
        log.warning(
            event,
            route=path[:80],
            upstream=upstream,
            **fields,
            cause=error.message,
            fix=error.fix,
            request_id=request_id,
        )


@contextmanager
def _naming_the_request(incoming: Incoming, live: LiveRoute) -> Iterator[None]:
    """Have a refusal carry the id of a request that is not read yet."""
    try:
        yield
    except GatewayError as exc:
        exc.request_id = id_of(incoming, live.config.limits.json_depth)
        raise


def _named(response: web.StreamResponse, request_id: str) -> web.StreamResponse:
    """A reply that has not begun yet, with the name of its request."""
    response.headers[ids.HEADER] = request_id
    return response


def _begin_span(traces: Traces, incoming: Incoming, live: LiveRoute, request: Request) -> Span:
    """The span of a round; that of another replica, where it came in there."""
    if incoming.hop is not None:
        return traces.elsewhere(incoming.hop.trace)
    about = Operation(request.method, request.target, request.version, live.route.path)
    meta = {name: text for name, raw in request.user_meta.items() if (text := jsonrpc.text(raw)) is not None}
    headers = {name.lower(): joined(incoming.headers, name) or "" for name in incoming.headers}
    rpc_id = (jsonrpc.text(request.id) or bytes(request.id).decode()).encode("utf-8", "replace").decode()
    carried = _bounded(traces.carried(meta)), _bounded(traces.carried(headers))
    return traces.round(about, ClientRequest(rpc_id, incoming.request_id, incoming.remote, *carried))


def _bounded(values: Mapping[str, str]) -> dict[str, str]:
    """What no propagator has to read does not reach one."""
    return {name: value for name, value in values.items() if _TRACE_VALUE.fullmatch(value)}


def _note_step(span: Span | None, step: Step) -> None:
    if span is not None:
        span.note("step", step)


def _pool_key(live: LiveRoute, request: Request, principal: bytes, headers: Headers) -> PoolKey:
    names = live.route.forward_headers
    forwarded = tuple([(name, headers[name]) for name in names if name in headers]) if names else ()
    return PoolKey(principal, bytes(request.client_info), bytes(request.capabilities), forwarded)


def _session_of(envelope: Envelope) -> tuple[str, str] | None:
    """Id and version of the session in which another replica's call runs."""
    upstream = envelope.upstream
    return (upstream.session, upstream.version) if upstream is not None else None


async def _answer(wire: ReplyWriter, request: Request, result: bytes) -> Replied:
    """A result that nothing was asked for."""
    body = jsonrpc.result(request.id, result)
    return await wire.whole(body, 200, NO_HEADERS, COMPLETE), COMPLETE


async def _converse(wire: ReplyWriter, outbox: ResponseQueue) -> Replied:
    """Write a leg's messages: one JSON body if nothing precedes the final message, else a stream."""
    item = await outbox.take()
    while not isinstance(item, FinalMessage):
        if not wire.started:
            await wire.start()
        await wire.write(sse.KEEP_ALIVE if item is None else sse.encode(item))
        item = await outbox.take()
    if isinstance(item.cause, NoHandshake) and not wire.started:
        raise item.cause  # the upstream may be modern, and answer this very request
    return await wire.whole(item.body, item.status, item.headers, item.ending), item.ending
