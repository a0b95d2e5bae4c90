"""The operator's listener: /healthz, /readyz, /metrics. No bodies, no contents, GET only."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from aiohttp import web

from gateway.telemetry import Metrics


class Probes(ABC):
    """Answers the probes and the scraper."""

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request of the admin listener."""
        if http.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET"}, text="GET only\n")
        match http.path:
            case "/healthz":
                return web.Response(text="ok\n")
            case "/readyz":
                # An upstream that is down is no reason to take this replica out of the balancer.
                reason = await self.unready()
                return web.Response(status=503 if reason else 200, text=f"{reason or 'ready'}\n")
            case "/metrics":
                body, content_type = await self.exposition()
                return web.Response(body=body, headers={"Content-Type": content_type})
            case _:
                return web.Response(status=404, text="try /healthz /readyz /metrics\n")

    @abstractmethod
    async def unready(self) -> str | None:
        """Say in a few words why no new client should come here; None when it should."""

    @abstractmethod
    async def exposition(self) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics."""


class Admin(Probes):
    """The listener of one process that serves."""

    def __init__(self, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._is_ready = is_ready

    async def unready(self) -> str | None:
        """See `Probes`."""
        return None if self._is_ready() else "draining"

    async def exposition(self) -> tuple[bytes, str]:
        """See `Probes`."""
        return self._metrics.render()
