"""Which era the upstream of a route speaks: found by one probe, remembered by this process until it proves wrong.

Requests that come while nothing is known share a probe. What it cannot tell (no answer in time, a refused credential,
an error page) is not remembered: those requests are served as if the upstream were old, whose handshake then says in
the client's words what is wrong, and the next request asks again.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import aiohttp

from gateway.http.client import FOREIGN, REDIRECTS, Client
from gateway.http.endpoint import Endpoint
from gateway.protocol import era, mcp
from gateway.protocol.errors import UpstreamError
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Event, Metrics, UpstreamEra, get_logger
from gateway.upstream.channel import Headers

log = get_logger()

PROBE_SECONDS: Final = 3.0
"""A client that waits ten seconds for its first answer must get one after a probe that did not."""
_DOUBT_SECONDS: Final = 5.0
"""A verdict this young is not asked for again, whatever an upstream answers."""
_ANSWER_BYTES: Final = 262_144


def _nothing() -> None:
    """For who does not want to know."""


class _Probe:
    """One probe under way."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.task: asyncio.Task[None]
        self.found: bool | None = None
        self.refused = False
        """Whether it ended at the credentials it was sent with."""


class EraProbe:
    """What is known of one upstream."""

    def __init__(  # noqa: PLR0913  (what it asks with, and who hears of it)
        self,
        route: str,
        endpoint: Endpoint,
        client: Client,
        metrics: Metrics,
        tasks: Tasks,
        answered: Callable[[], None] = _nothing,
    ) -> None:
        """`answered` hears of every probe that the upstream answered as one of either era does."""
        self._answered = answered
        self.endpoint = endpoint
        self._route = route
        self._client = client
        self._metrics = metrics
        self._tasks = tasks
        self.known: bool | None = None
        """Whether the upstream is modern; None when that has to be asked."""
        self._found = 0.0
        self._probe: _Probe | None = None

    async def is_modern(self, headers: Headers) -> bool:
        """Whether modern requests go to the upstream as they are; `headers` carry the credentials of this one."""
        known = self.known
        while known is None:
            probe = self._probe
            mine = probe is None
            if probe is None:
                probe = self._probe = _Probe(headers)
                probe.task = self._tasks.start(self._ask(probe), "era probe")
            # Not cancelled with the client that came first: others wait for it too.
            _ = await asyncio.wait((probe.task,))
            known = probe.found
            if known is None and (mine or not probe.refused or probe.headers == headers):
                return False
        return known

    def transport_found(self, speaks_sse: bool) -> None:  # noqa: FBT001  (a callback)
        """The bridge found HTTP+SSE, which is of the old era only; or that it is not spoken any more."""
        self.known, self._found = False if speaks_sse else None, time.monotonic()

    def doubt(self) -> None:
        """The upstream answered as one of the other era does: ask anew, unless it has just been asked."""
        if time.monotonic() - self._found > _DOUBT_SECONDS:
            self.known = None

    async def _ask(self, probe: _Probe) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                probe.found = await self._answer(probe)
        except (*FOREIGN, UpstreamError):
            pass  # a request says it better
        finally:
            self._probe = None
        found = probe.found
        name = UpstreamEra.UNKNOWN if found is None else UpstreamEra.MODERN if found else UpstreamEra.LEGACY
        self._metrics.era_probed(self._route, name)
        if found is not None:
            self.known, self._found = found, time.monotonic()
            self._answered()
            log.info(Event.ERA_FOUND, route=self._route, era=name)

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
    """Those of the probe, with the credentials of the request that it is for."""
    return {
        **headers,
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
        mcp.PROTOCOL_VERSION: mcp.MODERN,
        mcp.METHOD_HEADER: mcp.DISCOVER,
    }


async def _verdict(response: aiohttp.ClientResponse) -> bool | None:
    """Read as much as the verdict needs: a stream may stay open after the answer."""
    body = bytearray()
    async for chunk in response.content.iter_any():
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
