"""Passes requests through unchanged: legacy clients to their server, modern clients to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is neither delayed nor changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied (`header_rules.py`).
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from gateway.config import Config, InForce
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.http.upstream_headers import is_valid_value, passed_back
from gateway.passthrough.header_rules import HeaderRules, probe_headers
from gateway.passthrough.passage import Passage
from gateway.passthrough.rejections import not_allowed, not_passable
from gateway.passthrough.sse_endpoint import EndpointRewriter
from gateway.passthrough.upstream_reply import ReplyCut, chunks, open_reply, read_reply
from gateway.protocol import era as eras
from gateway.protocol import lost_session
from gateway.protocol.errors import DownstreamError, Stopping, UpstreamError
from gateway.routes.live_route import LiveRoute, ProcessScope
from gateway.telemetry import Passed, TrafficEra

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REFUTING_BYTES: Final = 65_536
"""The largest reply that is read whole, to see whether it shows the upstream to be of the other era."""


class Passthrough:
    """Forwards the requests of one listener."""

    def __init__(self, in_force: InForce[Config], endpoints: EndpointRewriter, process: ProcessScope) -> None:
        self.stopping = False
        self.refuses_calls = False
        """Whether a drain refuses the calls of modern upstreams, because no other replica serves them."""
        self.long_lived = 0
        """Open streams that a drain does not wait for."""
        self._headers = HeaderRules(in_force, process.epoch)
        self._endpoints = endpoints
        self._metrics = process.metrics

    async def legacy(self, incoming: Incoming, reply: HttpReply, live: LiveRoute) -> web.StreamResponse:
        """Relay the upstream's reply to a legacy request; raises GatewayError if there is none."""
        if live.upstream.era is None:
            raise not_passable(incoming)
        if self.stopping and incoming.method == "GET":
            raise Stopping("The gateway is shutting down; open the stream again, another replica will serve it")
        if incoming.method not in _METHODS:
            raise not_allowed(incoming.method, ", ".join(sorted(_METHODS)))
        passage = Passage(incoming, reply, live, live.upstream.era, TrafficEra.LEGACY)
        with self._counted(passage):
            headers = self._headers.upstream(incoming, live.route)
            with closing(await self._open(passage, headers)) as response:
                return await self._relay(passage, response)

    async def modern(
        self, incoming: Incoming, reply: HttpReply, live: LiveRoute, *, waits: bool = False
    ) -> web.StreamResponse | None:
        """Relay a modern upstream's reply; None if the upstream is not modern, or not any more.

        `waits`: until a probe of the upstream may start, if none may now.
        """
        probe = live.upstream.era
        assert probe is not None, "a child process is never modern"
        headers = self._headers.upstream(incoming, live.route)
        if not (probe.known or await probe.is_modern(probe_headers(headers), waits=waits)):
            return None
        passage = Passage(incoming, reply, live, probe, TrafficEra.MODERN)
        if self.stopping and (self.refuses_calls or passage.is_long_lived):
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        with self._counted(passage), closing(await self._open(passage, headers)) as response:
            if _may_refute(response):
                return await self._read(passage, response, headers)
            return await self._relay(passage, response)

    @contextmanager
    def _counted(self, passage: Passage) -> Iterator[None]:
        """Count a request with its outcome; while it lasts, a drain can end the stream that it opened."""
        streams, path, started = passage.live.upstream.streams, passage.live.route.path, time.monotonic()
        if passage.is_long_lived:
            streams.add(passage)
            self.long_lived += 1
        try:
            yield
        except DownstreamError:
            passage.outcome = Passed.REFUSED
            raise
        except UpstreamError as exc:
            passage.outcome = Passed.UNREACHABLE
            self._metrics.upstream_failed(path, exc.reason)
            if exc.status < 500:
                exc.status = 502  # a legacy client would take a JSON-RPC error in HTTP 200 for its answer
            raise
        except ReplyCut:
            passage.outcome = Passed.ENDED if passage.is_ended else Passed.CUT
            raise
        finally:
            seconds = None if passage.is_long_lived else time.monotonic() - started
            self._metrics.passed(path, passage.era, passage.outcome, seconds)
            if passage.is_long_lived:
                streams.discard(passage)
                self.long_lived -= 1

    async def _open(self, passage: Passage, headers: CIMultiDict[str]) -> aiohttp.ClientResponse:
        target = self._endpoints.target(passage.incoming, passage.probe.endpoint)
        return await open_reply(passage, target, headers)

    async def _read(
        self, passage: Passage, response: aiohttp.ClientResponse, headers: CIMultiDict[str]
    ) -> web.Response | None:
        """Return a refusal, unless a new probe finds that the upstream is not modern any more."""
        probe = passage.probe
        said = await read_reply(response, probe.endpoint, passage.live.config.timeouts.idle_seconds)
        if eras.refutes(response.status, said):
            probe.doubt()
            # If the upstream may have run this request, only the next one is bridged.
            is_answered = lost_session.is_answered(said, passage.incoming.body)
            if not is_answered and not await probe.is_modern(probe_headers(headers)):
                passage.outcome = Passed.BRIDGED
                return None
        passage.outcome = Passed.REFUSED
        return web.Response(body=said, status=response.status, headers=_headers(passage, response))

    async def _relay(self, passage: Passage, response: aiohttp.ClientResponse) -> web.StreamResponse:
        """Write the reply as it arrives; a reply that the upstream cuts short has no end here either."""
        passage.begin(response)
        reply, incoming = passage.reply, passage.incoming
        is_sse = response.content_type == "text/event-stream"
        reason = response.reason if is_valid_value(response.reason or "") else None
        stream = web.StreamResponse(status=response.status, reason=reason, headers=_headers(passage, response))
        if is_sse:
            stream.headers.setdefault("X-Accel-Buffering", "no")
        if self.stopping:
            stream.force_close()
        # An event stream may wait for people; any other body is complete when it begins.
        seconds = None if is_sse else passage.live.config.timeouts.idle_seconds
        first_event = self._endpoints.first_event(incoming, passage.probe.endpoint) if is_sse else None
        outcome = _outcome(response.status)
        await reply.begin(stream)
        try:
            async for part in chunks(response, seconds, first_event):
                await reply.send(part)
        except ReplyCut:
            # A standalone GET stream may end at any time; a reply without its final message must not look complete.
            if not passage.is_ended or incoming.method != "GET":
                reply.cut_short()
                raise
            stream.force_close()  # the client's next request finds another replica
            outcome = Passed.ENDED
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            reply.cut_short()
            raise
        await stream.write_eof()
        passage.outcome = outcome
        return stream


def _headers(passage: Passage, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    headers = passed_back(response.headers)
    passage.reply.rewrite_challenges(headers)
    return headers


def _may_refute(response: aiohttp.ClientResponse) -> bool:
    size = response.content_length
    return response.status in eras.REFUTING and size is not None and size <= _REFUTING_BYTES


def _outcome(status: int) -> Passed:
    return Passed.ANSWERED if status < 400 else Passed.REFUSED if status < 500 else Passed.FAILED
