"""Detects whether an upstream is modern or legacy.

Requests that arrive while the era is unknown share one probe. The process remembers its result until it proves wrong.
An inconclusive probe (no answer in time, a refused credential, an error page) is not remembered: its requests are
served as if the upstream were legacy, because the handshake explains the fault, and a later request probes again.

Clients choose the credentials of a probe, so they could have the upstream refuse one after the other. At most one
starts in a second. Until the next one may start, requests are served as after an inconclusive one. A request whose
handshake shows that the upstream takes its credentials but is not legacy waits for its turn, before all others.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from gateway import world
from gateway.http.upstream_client import REDIRECTS
from gateway.protocol import era, mcp
from gateway.protocol.errors import UpstreamError
from gateway.runtime.own_ids import new_id
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.upstream.channel import Headers, Hearer
from gateway.upstream.http.http_session import fixed_headers
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import ReplyReader, redirected

PAUSE_SECONDS: Final = 1.0
"""The shortest time between the starts of two probes."""
PROBE_SECONDS: Final = 3.0
"""A client that waits ten seconds for its first answer must still get one after an unanswered probe."""
_DOUBT_SECONDS: Final = 5.0
"""A younger result is not doubted, whatever the upstream answers."""
_ANSWER_BYTES: Final = 262_144


@dataclass(eq=False)
class _Probe(Hearer):
    """One probe in flight; the hearer of its reply."""

    _upstream: HttpUpstream
    headers: Headers
    found: bool | None = None
    _asked: bytes = field(default_factory=new_id)
    _reply: ReplyReader | None = None
    """Once the probe was sent."""

    @property
    def refused(self) -> bool:
        """Whether the upstream refused the credentials of the probe."""
        return self._reply is not None and self._reply.status in (401, 403)

    async def send(self) -> ReplyReader:
        """Send the probe, and wait for the end of its reply; raises UpstreamError."""
        upstream, largest = self._upstream, _ANSWER_BYTES
        reply = self._reply = ReplyReader(self, largest, upstream, unread=REDIRECTS, refusal_bytes=largest)
        headers, message = discover_headers(self.headers), era.discover(self._asked)
        url, client = upstream.endpoint.url, upstream.client
        return await reply.over(client.begin("POST", url, headers, message, reply, sending="repeatable"))

    def hear(self, data: bytes, /) -> bool:
        """Take a message, or a body; whether it tells the era. A stream may stay open after that."""
        assert self._reply is not None
        assert self._reply.head is not None, "it has said something"
        content_type = "application/json" if self._reply.is_stream else self._reply.head.content_type
        self.found = era.verdict(self._reply.status, content_type, data, self._asked)
        return self.found is not None


class EraProbe:
    """The era of one upstream, and its transport, as the last handshake found it."""

    def __init__(self, upstream: HttpUpstream, health: UpstreamHealth) -> None:
        self._health = health
        self.upstream, self.endpoint = upstream, upstream.endpoint
        self.known: bool | None = None
        """Whether the upstream is modern; None if a probe has to find out."""
        self.refuses_legacy = False
        """Whether a modern upstream refused the last request of a legacy client, as one that is modern only does."""
        self.speaks_sse: bool | None = None
        """Whether the last handshake used HTTP+SSE; None if there was none."""
        self._found = 0.0
        self._probe: _Probe | None = None
        self._asking: asyncio.Task[None]
        """That of the newest probe."""
        self._next_start = float("-inf")
        """Monotonic time from which the next probe may start."""
        self._waiting = 0
        """Requests that wait for that time."""

    async def is_modern(self, headers: Headers, *, waits: bool = False) -> bool:
        """Whether the upstream takes modern requests unchanged; `headers` carry the credentials of the request.

        `waits`: until a probe may start, if none may now.
        """
        while self.known is None:
            probe = self._probe
            mine = probe is None
            if probe is None:
                if not await self._may_start(waits=waits):
                    return False
                if self._probe is not None or self.known is not None:
                    continue  # another request that waited came first
                self._next_start = world.monotonic() + PAUSE_SECONDS
                probe = self._probe = _Probe(self.upstream, headers)
                self._asking = self.upstream.tasks.start(self._ask(probe), "era probe")
            # The probe outlives the request that started it, because other requests wait for it too.
            _ = await asyncio.wait((self._asking,))
            if probe.found is not None:
                return probe.found
            # Refused with another caller's credential, the probe is made again with this one.
            if mine or not probe.refused or probe.headers == headers:
                return False
        return self.known

    async def _may_start(self, *, waits: bool) -> bool:
        """Return whether this request may start a probe, after the wait for that if it `waits`."""
        pause = self._next_start - world.monotonic()
        if not waits:
            return pause <= 0 and not self._waiting
        self._waiting += 1
        try:
            await asyncio.sleep(pause)
        finally:
            self._waiting -= 1
        return True

    def note_transport(self, *, speaks_sse: bool) -> None:
        """A handshake succeeded over this transport; only legacy servers speak HTTP+SSE."""
        before, self.speaks_sse = bool(self.speaks_sse), speaks_sse
        if speaks_sse != before:
            self.known, self._found = False if speaks_sse else None, world.monotonic()

    def note_legacy(self, *, is_refused: bool) -> None:
        """The server has served a request of a legacy client, or has refused it because it is modern."""
        self.refuses_legacy = is_refused

    def doubt(self) -> None:
        """The upstream answered like one of the other era: probe again, unless the result is recent."""
        if world.monotonic() - self._found > _DOUBT_SECONDS:
            self.known = None

    async def _ask(self, probe: _Probe) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reply = await redirected(self.endpoint, probe.send)
            if not reply.is_done and reply.failure is None and reply.status >= 300 and not probe.hear(reply.body):
                reply.pending.distrust()  # it may be the response to another request
        except (TimeoutError, UpstreamError):
            pass  # the handshake of a request explains the fault
        finally:
            self._probe = None
        found = probe.found
        self._health.era_probed(is_modern=found)
        if found is not None:
            self.known, self._found = found, world.monotonic()
            self._health.ok(is_probe=True)


def discover_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of a probe, with the credentials of its request."""
    return {**headers, **fixed_headers(mcp.MODERN), mcp.METHOD_HEADER: mcp.DISCOVER}
