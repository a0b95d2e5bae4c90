"""The operator's listener: /healthz, /readyz, /metrics. No bodies, no contents, GET only."""

from collections.abc import Callable

from aiohttp import web

from gateway.telemetry import Metrics


class Admin:
    """Answers the probes and the scraper."""

    def __init__(self, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._is_ready = is_ready

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request of the admin listener."""
        if http.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET"}, text="GET only\n")
        match http.path:
            case "/healthz":
                return web.Response(text="ok\n")
            case "/readyz":
                # An upstream that is down is no reason to take this replica out of the balancer.
                ready = self._is_ready()
                return web.Response(status=200 if ready else 503, text="ready\n" if ready else "draining\n")
            case "/metrics":
                body, content_type = self._metrics.render()
                return web.Response(body=body, headers={"Content-Type": content_type})
            case _:
                return web.Response(status=404, text="try /healthz /readyz /metrics\n")
