"""Detects whether an upstream is modern or legacy.

Requests that arrive while the era is unknown share one probe. The process remembers its result until it proves wrong.
An inconclusive probe (no answer in time, a refused credential, an error page) is not remembered: its requests are
served as if the upstream were legacy, because the handshake explains the fault, and the next request probes again.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.http.awaited_reply import AwaitedReply
from gateway.http.client import FOREIGN, REDIRECTS
from gateway.protocol import era, mcp
from gateway.protocol.errors import UpstreamError
from gateway.telemetry import Event, Metrics, UpstreamEra, get_logger
from gateway.upstream.channel import Headers
from gateway.upstream.http_upstream import HttpUpstream

log = get_logger()

PROBE_SECONDS: Final = 3.0
"""A client that waits ten seconds for its first answer must still get one after an unanswered probe."""
_DOUBT_SECONDS: Final = 5.0
"""A younger result is not doubted, whatever the upstream answers."""
_ANSWER_BYTES: Final = 262_144


class _Probe:
    """One probe in flight."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.task: asyncio.Task[None]
        self.found: bool | None = None
        self.refused = False
        """Whether the upstream refused the credentials of the probe."""


class EraProbe:
    """The era of one upstream."""

    def __init__(self, upstream: HttpUpstream, metrics: Metrics, answered: Callable[[], None]) -> None:
        """`answered` is called after every conclusive probe."""
        self._answered = answered
        self._client, self.endpoint, self._tasks, _ = upstream
        self._metrics = metrics
        self.known: bool | None = None
        """Whether the upstream is modern; None if a probe has to find out."""
        self._found = 0.0
        self._probe: _Probe | None = None

    async def is_modern(self, headers: Headers) -> bool:
        """Whether the upstream takes modern requests unchanged; `headers` carry the credentials of the request."""
        known = self.known
        while known is None:
            probe = self._probe
            mine = probe is None
            if probe is None:
                probe = self._probe = _Probe(headers)
                probe.task = self._tasks.start(self._ask(probe), "era probe")
            # The probe outlives the request that started it, because other requests wait for it too.
            _ = await asyncio.wait((probe.task,))
            known = probe.found
            if known is None and (mine or not probe.refused or probe.headers == headers):
                return False
        return known

    def transport_found(self, speaks_sse: bool) -> None:  # noqa: FBT001  (a callback)
        """A handshake used HTTP+SSE, which only legacy servers speak, or found that the upstream left it."""
        self.known, self._found = False if speaks_sse else None, time.monotonic()

    def doubt(self) -> None:
        """The upstream answered like one of the other era: probe again, unless the result is recent."""
        if time.monotonic() - self._found > _DOUBT_SECONDS:
            self.known = None

    async def _ask(self, probe: _Probe) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                probe.found = await self._answer(probe)
        except (*FOREIGN, UpstreamError):
            pass  # the handshake of a request explains the fault
        finally:
            self._probe = None
        found = probe.found
        name = UpstreamEra.UNKNOWN if found is None else UpstreamEra.MODERN if found else UpstreamEra.LEGACY
        self._metrics.era_probed(self.endpoint.route, name)
        if found is not None:
            self.known, self._found = found, time.monotonic()
            self._answered()
            log.info(Event.ERA_FOUND, route=self.endpoint.route, era=name)

    async def _answer(self, probe: _Probe) -> bool | None:
        for _ in range(2):
            async with self._client.exchange(
                "POST", self.endpoint.url, discover_headers(probe.headers), era.discover(), self.endpoint.where
            ) as response:
                if response.status in REDIRECTS:
                    self.endpoint.follow(response.headers.get("Location"))
                    continue
                probe.refused = response.status in (401, 403)
                return await _verdict(response)
        return None


def discover_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of a probe, with the credentials of its request."""
    return {
        **headers,
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        mcp.PROTOCOL_VERSION: mcp.MODERN,
        mcp.METHOD_HEADER: mcp.DISCOVER,
    }


async def _verdict(response: AwaitedReply) -> bool | None:
    """Read the response until the era is certain: a stream may stay open after the answer."""
    body = bytearray()
    async for chunk in response:
        body += chunk
        if len(body) > _ANSWER_BYTES:
            response.close()
            return None
        if response.content_type == "text/event-stream":
            found = era.verdict(response.status, response.content_type, bytes(body))
            if found is not None:
                response.close()
                return found
    return era.verdict(response.status, response.content_type, bytes(body))
