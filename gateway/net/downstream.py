"""The client's side: one HTTP request in, one reply out; the only place where an exception becomes a response."""

import asyncio
import ipaddress
import re
import time
from typing import Final

from aiohttp import web

from gateway import principal as principals
from gateway.config import Config
from gateway.core import jsonrpc, mcp, negotiate, sse
from gateway.core import request as modern
from gateway.core.events import Leg
from gateway.core.request import Request
from gateway.errors import (
    CallLost,
    DownstreamError,
    GatewayError,
    InvalidRequest,
    InvalidState,
    MethodNotFound,
    Stopping,
    TooLarge,
    UnsupportedVersion,
    UpstreamError,
)
from gateway.net import catalog, listen
from gateway.net.driver import Bridge, Driver
from gateway.net.guard import Guard
from gateway.net.outbox import Last, Outbox
from gateway.net.sessions import PoolKey
from gateway.net.upstream import Headers
from gateway.seal.envelope import bind
from gateway.telemetry import Event, Metrics, Outcome, Step, get_logger

log = get_logger()

_JSON: Final = "application/json"
_SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_TRACE_VALUE: Final = re.compile(r"[\x20-\x7e]{1,8192}")


class Downstream:
    """Serves the routes of one listener."""

    def __init__(self, config: Config, bridges: dict[str, Bridge], metrics: Metrics) -> None:
        self._config = config
        self._bridges = bridges
        self._metrics = metrics
        self._guard = Guard(config.security, config.listen)
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]
        self.stopping = False
        self.in_flight = 0
        """Requests that have not got their final message yet."""
        self.running: set[Driver] = set()
        """Exchanges that have a leg waiting."""

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One HTTP request; never raises but for cancellation."""
        id_: bytes | None = None
        self.in_flight += 1
        try:
            bridge = self._bridge(http)
            posted = modern.read(await self._body(http), self._config.limits.json_depth)
            id_ = bytes(posted.id) if posted.id is not None else None
            return await self._serve(http, bridge, posted)
        except GatewayError as exc:
            return self._refuse(exc, exc.request_id or id_)
        except ConnectionError:
            raise  # the client is gone; aiohttp knows what to do
        except Exception:  # the outermost edge of a request
            self._metrics.task_failed()
            log.exception(Event.TASK_FAILED, task="request")
            return self._refuse(GatewayError("Internal error of the gateway; its log says more"), id_)
        finally:
            self.in_flight -= 1

    def _bridge(self, http: web.BaseRequest) -> Bridge:
        headers = http.headers
        self._guard.check(headers.get("Host"), headers.get("Origin"))
        bridge = self._bridges.get(http.path)
        if bridge is None:
            raise MethodNotFound(f"No route {http.path[:80]!r}; the routes are {', '.join(self._bridges)}")
        if http.method != "POST":
            raise _not_allowed(http.method)
        return bridge

    async def _body(self, http: web.BaseRequest) -> bytes:
        """The whole body, inflated, within limits.body_bytes and limits.receive_seconds."""
        limit = self._config.limits.body_bytes
        if http.content.is_eof():
            # The body came with its head, as small ones do: nothing to wait for.
            body = http.content.read_nowait()
            if len(body) > limit:
                raise _too_large(limit)
            return body
        if http.content_length is not None and http.content_length > limit:
            raise _too_large(limit)
        if http.headers.get("Expect", "").lower() == "100-continue":
            # aiohttp's low-level server leaves this to its handler.
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0
        received = bytearray()
        try:
            async with asyncio.timeout(self._config.limits.receive_seconds):
                while chunk := await http.content.readany():
                    received += chunk
                    if len(received) > limit:
                        raise _too_large(limit)
        except TimeoutError as exc:
            raise InvalidRequest("The body did not arrive within limits.receive_seconds") from exc
        except web.RequestPayloadError as exc:
            raise InvalidRequest(f"The body is damaged: {exc}") from exc
        return bytes(received)

    async def _serve(self, http: web.BaseRequest, bridge: Bridge, posted: modern.Posted) -> web.StreamResponse:
        versions = http.headers.getall(mcp.PROTOCOL_VERSION, ())
        if not modern.is_modern(posted, versions[0] if versions else None):
            raise _legacy(posted, versions[0] if versions else None)
        if posted.id is None:
            # 2026-07-28 defines no notification over HTTP; closing the response is what cancels.
            return web.Response(status=202)
        started = time.monotonic()
        request = modern.check(posted, lambda name: http.headers.getall(name, ()))
        headers = self._upstream_headers(http, bridge, request)
        names = bridge.route.forward_headers
        forwarded = tuple([(name, headers[name]) for name in names if name in headers]) if names else ()
        key = PoolKey(self._principal(http), bytes(request.client_info), bytes(request.capabilities), forwarded)
        outcome = Outcome.ERROR
        try:
            response, outcome = await self._dispatch(http, bridge, request, key, headers)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        except GatewayError:
            outcome = Outcome.REJECTED
            raise
        finally:
            seconds = time.monotonic() - started
            self._metrics.operation_finished(bridge.route.path, request.method, request.version, outcome, seconds)
        return response

    async def _dispatch(
        self, http: web.BaseRequest, bridge: Bridge, request: Request, key: PoolKey, headers: Headers
    ) -> tuple[web.StreamResponse, Outcome]:
        if request.method == mcp.DISCOVER:
            await bridge.pool.authorise(key, headers)
            shaken = await bridge.pool.handshake(key, headers)
            cache = bridge.route.cache
            result = negotiate.discover_result(shaken, cache.ttl_ms, cache.scope)
            return _json(jsonrpc.result(request.id, result)), Outcome.COMPLETE
        if self.stopping and request.request_state is None:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        if request.method == mcp.LISTEN:
            deadline = self._config.timeouts.handshake_seconds
            async with listen.subscription(bridge, request, key, headers, deadline) as stream:
                return await self._converse(http, stream)
        outbox = Outbox(Leg(request.id, request.progress_token, request.log_level), bridge.alarms.silence)
        driver = await self._driver(http, bridge, request, key, headers, outbox)
        self.running.add(driver)
        try:
            return await self._converse(http, outbox)
        except BaseException:
            driver.leave(outbox.leg)
            raise
        finally:
            self.running.discard(driver)

    async def _driver(  # noqa: PLR0913  (what one request is made of)
        self,
        http: web.BaseRequest,
        bridge: Bridge,
        request: Request,
        key: PoolKey,
        headers: Headers,
        outbox: Outbox,
    ) -> Driver:
        """The exchange of this request, already told of its new leg."""
        if request.request_state is not None:
            driver, round_ = self._held(bridge, request, request.request_state, key)
            if not driver.is_answered_by(request):
                # No answer of this request goes upstream, so nothing there would check its credential.
                await bridge.pool.authorise(key, headers)
            driver.answer(outbox, request, round_, headers)
            bridge.metrics.continued(bridge.route.path, Step.HELD)
            return driver
        if request.method in mcp.ASKING:
            bridge.lot.check(key.principal)
        if request.method == mcp.TOOLS_CALL and not catalog.mirrors_nothing(bridge.pool, key, request):
            await catalog.check(bridge.pool, key, request, lambda name: http.headers.getall(name, ()), headers)
        driver = Driver(bridge, request, key, headers)
        driver.begin(outbox)
        return driver

    def _held(self, bridge: Bridge, request: Request, state: str, key: PoolKey) -> tuple[Driver, int]:
        """Find the exchange whose state the client brought back."""
        envelope = bridge.sealer.open(state, bind(bridge.route.path, request, key.principal), time.time())
        if (envelope.owner, envelope.epoch) != (bridge.owner, bridge.epoch):
            bridge.metrics.continued(bridge.route.path, Step.LOST)
            raise _owner_lost(envelope.owner, restarted=envelope.owner == bridge.owner)
        driver = bridge.lot.find(envelope.exchange)
        if driver is None:
            raise InvalidState("ended")
        return driver, envelope.round

    def _principal(self, http: web.BaseRequest) -> bytes:
        config = self._config.principal
        if config.source == "header" and config.header is not None:
            value = http.headers.get(config.header) if principals.is_trusted(http.remote, self._networks) else None
            return principals.of_header(value)
        return principals.of_authorization(http.headers.get("Authorization"))

    def _upstream_headers(self, http: web.BaseRequest, bridge: Bridge, request: Request) -> Headers:
        """What of this request's headers goes upstream; everything else stays here."""
        headers: dict[str, str] = {}
        for name in ("Authorization", *bridge.route.forward_headers):
            value = http.headers.get(name)
            if value is not None:
                headers[name] = _sendable(name, value)
        meta = request.user_meta
        for name in mcp.TRACE_KEYS:
            value = (jsonrpc.text(meta.get(name)) if meta else None) or http.headers.get(name)
            if value is not None and _TRACE_VALUE.fullmatch(value):
                headers[name] = value
        return headers

    async def _converse(self, http: web.BaseRequest, outbox: Outbox) -> tuple[web.StreamResponse, Outcome]:
        """Write a leg's messages: one JSON body if nothing precedes the final message, else a stream."""
        item = await outbox.take()
        if isinstance(item, Last):
            return _json(item.body, item.status, dict(item.headers)), item.outcome
        stream = web.StreamResponse(headers=_SSE_HEADERS)
        stream.enable_chunked_encoding()
        await stream.prepare(http)
        while not isinstance(item, Last):
            await self._write(http, stream, sse.KEEP_ALIVE if item is None else sse.encode(item))
            item = await outbox.take()
        await self._write(http, stream, sse.encode(item.body))
        await stream.write_eof()
        return stream, item.outcome

    async def _write(self, http: web.BaseRequest, stream: web.StreamResponse, data: bytes) -> None:
        """Write to a client; one that does not read for timeouts.send_seconds is gone."""
        try:
            async with asyncio.timeout(self._config.timeouts.send_seconds):
                await stream.write(data)
        except TimeoutError as exc:
            if http.transport is not None:
                http.transport.abort()
            raise ConnectionResetError("the client does not read its reply") from exc

    def _refuse(self, error: GatewayError, id_: bytes | None) -> web.Response:
        if isinstance(error, InvalidState):
            self._metrics.state_rejected(error.reason)
            log.info(Event.STATE_REJECTED, reason=error.reason)
        elif isinstance(error, DownstreamError):
            self._metrics.downstream_rejected(error.rejection)
        elif isinstance(error, UpstreamError):
            log.warning(Event.UPSTREAM_FAILED, reason=error.reason, cause=error.message)
        last = Last.of_error(error, id_)
        return _json(last.body, last.status, dict(last.headers))


def _sendable(name: str, value: str) -> str:
    """A header value that can go upstream: bytes that are no UTF-8 came in as surrogates."""
    try:
        _ = value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"The header {name} is not UTF-8") from exc
    return value


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type=_JSON)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes (limits.body_bytes)")


def _not_allowed(method: str) -> GatewayError:
    error = InvalidRequest(f"HTTP {method[:20]} is not served here: a modern endpoint takes POST only")
    error.status = 405
    error.headers["Allow"] = "POST"
    return error


def _legacy(posted: modern.Posted, version: str | None) -> GatewayError:
    """The answer to traffic of the handshake era; pass-through is not built yet."""
    params_version = jsonrpc.text(posted.params.get("protocolVersion"))
    error = UnsupportedVersion(params_version or version or "none")
    error.message += (
        "; this request is of the initialize era, which this gateway does not pass through yet: reach the server "
        f"directly, or send {mcp.PROTOCOL_VERSION}: {mcp.MODERN} with the same version in params._meta"
    )
    return error


def _owner_lost(owner: str, *, restarted: bool) -> CallLost:
    what = "was restarted, or another process answers for it" if restarted else "is not reachable from here"
    return CallLost(
        f"The replica {owner} that held this call {what}; the call is lost and may have had effects. Check before "
        "you call again without requestState",
        data={"reason": "owner_lost"},
    )
