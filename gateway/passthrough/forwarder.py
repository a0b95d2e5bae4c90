"""Passes requests through unchanged: legacy clients to their server, modern clients to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is neither delayed nor changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied (`header_rules.py`).
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import aiohttp
from aiohttp import web

from gateway.config import Config, InForce
from gateway.http.endpoint import Endpoint
from gateway.http.incoming import Incoming
from gateway.http.reply import Challenge, leave_open, send
from gateway.passthrough.header_rules import HeaderRules, probe_headers
from gateway.passthrough.long_lived_stream import LongLivedStream, is_long_lived
from gateway.passthrough.rejections import id_of, not_allowed, not_passable
from gateway.passthrough.sse_endpoint import EndpointRewriter
from gateway.passthrough.upstream_reply import ReplyCut, chunks, open_reply, read_reply
from gateway.protocol import era as eras
from gateway.protocol import lost_session
from gateway.protocol.errors import DownstreamError, Stopping, UpstreamError
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Metrics, Passed, TrafficEra
from gateway.upstream.era_probe import EraProbe

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REFUTING_BYTES: Final = 65_536
"""The largest reply that is read whole, to see whether it shows the upstream to be of the other era."""

Replied = tuple[web.StreamResponse | None, Passed]


class Passthrough:
    """Forwards the requests of one listener."""

    def __init__(
        self,
        in_force: InForce[Config],
        challenge: Challenge,
        endpoints: EndpointRewriter,
        metrics: Metrics,
        epoch: str,
    ) -> None:
        self.stopping = False
        self.long_lived = 0
        """Open streams that a drain does not wait for."""
        self.headers = HeaderRules(in_force, challenge, epoch)
        self._endpoints = endpoints
        self._metrics = metrics

    async def legacy(self, http: web.BaseRequest, live: LiveRoute, incoming: Incoming) -> web.StreamResponse:
        """The upstream's reply to a legacy request; raises GatewayError if there is none."""
        if live.upstream.era is None:
            raise not_passable(http, live, incoming)
        if self.stopping and http.method == "GET":
            raise Stopping("The gateway is shutting down; open the stream again, another replica will serve it")
        reply = await self._forward(http, live, live.upstream.era, incoming, TrafficEra.LEGACY)
        assert reply is not None, "only a modern request can be bridged instead"
        return reply

    async def modern(self, http: web.BaseRequest, live: LiveRoute, incoming: Incoming) -> web.StreamResponse | None:
        """The modern upstream's reply; None if the upstream is not modern any more and did not run the request."""
        assert live.upstream.era is not None, "only a probe finds a modern upstream"
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        return await self._forward(http, live, live.upstream.era, incoming, TrafficEra.MODERN)

    async def _forward(
        self, http: web.BaseRequest, live: LiveRoute, era: EraProbe, incoming: Incoming, kind: TrafficEra
    ) -> web.StreamResponse | None:
        """Forward a request, and count its outcome."""
        if http.method not in _METHODS:
            raise not_allowed(http.method, ", ".join(sorted(_METHODS)))
        outcome, started = Passed.LEFT, time.monotonic()
        with self._stream(http, live, kind) as stream:
            try:
                reply, outcome = await self._exchange(http, live, era, incoming.body, kind, stream)
            except DownstreamError as exc:
                outcome = Passed.REFUSED
                exc.request_id = id_of(incoming, live.config.limits.json_depth)
                raise
            except UpstreamError as exc:
                outcome = Passed.UNREACHABLE
                self._metrics.upstream_failed(live.route.path, exc.reason)
                exc.request_id = id_of(incoming, live.config.limits.json_depth)
                raise
            except ReplyCut:
                outcome = Passed.ENDED if stream is not None and stream.ended else Passed.CUT
                raise
            finally:
                seconds = None if stream is not None else time.monotonic() - started
                self._metrics.passed(live.route.path, kind, outcome, seconds)
        return reply

    @contextmanager
    def _stream(self, http: web.BaseRequest, live: LiveRoute, kind: TrafficEra) -> Iterator[LongLivedStream | None]:
        """Register the long-lived stream of a request, if the request opens one."""
        if not is_long_lived(http, kind):
            yield None
            return
        stream = LongLivedStream()
        live.upstream.streams.add(stream)
        self.long_lived += 1
        try:
            yield stream
        finally:
            live.upstream.streams.discard(stream)
            self.long_lived -= 1

    async def _exchange(  # noqa: PLR0913  (what one request consists of)
        self,
        http: web.BaseRequest,
        live: LiveRoute,
        era: EraProbe,
        body: bytes,
        kind: TrafficEra,
        stream: LongLivedStream | None,
    ) -> Replied:
        headers = self.headers.upstream(http, live)
        target = self._endpoints.target(http, era.endpoint)
        response = await open_reply(http, live, era.endpoint, target, headers, body)
        try:
            if kind is TrafficEra.MODERN and _may_refute(response):
                said = await read_reply(response, era.endpoint, live.config.timeouts.idle_seconds)
                if eras.refutes(response.status, said):
                    era.doubt()
                    # If the upstream may have run this request, only the next one is bridged.
                    if not lost_session.is_answered(said, body) and not await era.is_modern(probe_headers(headers)):
                        return None, Passed.BRIDGED
                kept = self.headers.downstream(http, response)
                return web.Response(body=said, status=response.status, headers=kept), Passed.REFUSED
            if stream is not None:
                stream.begin(response)
            return await self._relay(http, live, era.endpoint, response, stream)
        finally:
            response.close()

    async def _relay(
        self,
        http: web.BaseRequest,
        live: LiveRoute,
        endpoint: Endpoint,
        response: aiohttp.ClientResponse,
        stream: LongLivedStream | None,
    ) -> Replied:
        """Write the reply as it arrives; a reply that the upstream cuts short has no end here either."""
        timeouts = live.config.timeouts
        is_sse = response.content_type == "text/event-stream"
        reply = self._prepared(http, response, is_sse=is_sse)
        first_event = self._endpoints.first_event(http, endpoint) if is_sse else None
        await reply.prepare(http)
        try:
            # An event stream may wait for people; any other body is complete when it begins.
            async for part in chunks(response, None if is_sse else timeouts.idle_seconds, first_event):
                await send(http, reply, part, timeouts.send_seconds)
        except ReplyCut:
            # A standalone GET stream may end at any time; a reply without its final message must not look complete.
            if stream is None or not stream.ended or http.method != "GET":
                _cut_short(http, timeouts.send_seconds)
                raise
            reply.force_close()  # the client's next request finds another replica
            await reply.write_eof()
            return reply, Passed.ENDED
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            _cut_short(http, timeouts.send_seconds)
            raise
        await reply.write_eof()
        return reply, _outcome(response.status)

    def _prepared(
        self, http: web.BaseRequest, response: aiohttp.ClientResponse, *, is_sse: bool
    ) -> web.StreamResponse:
        """The client's reply before its body."""
        headers = self.headers.downstream(http, response)
        reply = web.StreamResponse(status=response.status, reason=response.reason, headers=headers)
        if is_sse:
            reply.headers.setdefault("X-Accel-Buffering", "no")
        if http.method != "HEAD" and "Content-Length" not in reply.headers:
            leave_open(http, reply)
        if self.stopping:
            reply.force_close()
        return reply


def _cut_short(http: web.BaseRequest, seconds: float) -> None:
    """Close the connection without the end that the client waits for; bytes written before are still sent."""
    transport = http.transport
    if transport is not None:
        transport.close()
        _ = asyncio.get_running_loop().call_later(seconds, transport.abort)


def _may_refute(response: aiohttp.ClientResponse) -> bool:
    size = response.content_length
    return response.status in eras.REFUTING and size is not None and size <= _REFUTING_BYTES


def _outcome(status: int) -> Passed:
    return Passed.ANSWERED if status < 400 else Passed.REFUSED if status < 500 else Passed.FAILED
