"""Serves /healthz, /readyz, /metrics, /status on the admin listener; GET only."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from gateway import world
from gateway.admin.process_parts import ProcessParts
from gateway.auth.host_check import check_admin
from gateway.config import Config, InForce
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse, WholeResponse
from gateway.protocol.errors import Forbidden
from gateway.telemetry import METRICS_TYPE
from gateway.telemetry.process_status import health

if TYPE_CHECKING:
    from gateway.plugins.status_page.pages import StatusPages

_HEALTH: Final = frozenset({"/healthz", "/readyz"})


class Probes(ABC):
    """The handler of the admin listener."""

    def __init__(self, in_force: InForce[Config]) -> None:
        self._in_force = in_force

    async def handle(self, http: HttpRequest) -> Response:
        """Answer one request."""
        if http.head.method not in ("GET", "HEAD"):
            return TextResponse("GET only\n", 405, {"Allow": "GET"})
        host = http.head.headers.get("Host")
        # A name may have been rebound. Simple health checks of HTTP/1.0 name no host.
        if host is not None or http.head.path not in _HEALTH:
            try:
                check_admin(host, self._in_force.value)
            except Forbidden as exc:
                return TextResponse(f"{exc.message}\n", exc.status)
        response: Response
        match http.head.path:
            case "/healthz":
                # In a drain too: a process that is killed for draining loses its calls.
                response = TextResponse("ok\n")
            case "/readyz":
                # A failing upstream does not make this replica unready: other replicas use the same upstream.
                reason = await self.unready()
                response = TextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)
            case "/metrics":
                response = WholeResponse(await self.exposition(), headers={"Content-Type": METRICS_TYPE})
            case _:
                found = await self.page(http)
                response = found or TextResponse("try /healthz /readyz /metrics /status\n", 404)
        return response

    @abstractmethod
    async def unready(self) -> str | None:
        """Return in a few words why the load balancer should send no new requests here; None if it should."""

    @abstractmethod
    async def page(self, http: HttpRequest) -> Response | None:
        """Return the page at any other path; None if there is none."""

    @abstractmethod
    async def exposition(self) -> bytes:
        """Return the metrics."""


class Admin(Probes):
    """The handler for one serving process."""

    def __init__(self, parts: ProcessParts, pages: "StatusPages | None") -> None:
        super().__init__(parts.in_force)
        self._parts = parts
        self._pages = pages

    async def unready(self) -> str | None:
        """See `Probes`."""
        return None if self._parts.reload.is_open else "draining"

    async def page(self, http: HttpRequest) -> Response | None:
        """See `Probes`."""
        return None if self._pages is None else await self._pages.handle(http)

    async def exposition(self) -> bytes:
        """See `Probes`: with how much of its limits the process uses now, and which upstreams are up."""
        parts, metrics = self._parts, self._parts.metrics
        metrics.ready[()].set(parts.reload.is_open)
        metrics.connections[()].set(len(parts.client_listener.connections))
        metrics.connections_limit[()].set(parts.config.limits.connections)
        metrics.in_flight[()].set(parts.downstream.in_flight)
        metrics.held_of_one_caller[()].set(parts.fullest_holder[0])
        metrics.held_of_one_caller_limit[()].set(parts.config.hold.max_calls_per_principal)
        for gauge in (
            *(metrics.sessions_limit, metrics.sessions_of_one_caller, metrics.sessions_of_one_caller_limit),
            *(metrics.children_limit, metrics.upstream_reactions, metrics.upstream_up),
        ):
            gauge.clear()  # a reload may have removed a route
        for path, (count, _) in parts.fullest_callers().items():
            metrics.sessions_of_one_caller[path,].set(count)
        for path, live in parts.routes.live.items():
            pool, upstream = live.upstream.pool, live.route.upstream
            metrics.sessions_limit[path,].set(pool.most)
            metrics.sessions_of_one_caller_limit[path,].set(pool.config.sessions.max_per_principal)
            if upstream.command is not None:
                metrics.children_limit[path,].set(upstream.max_children)
            last_ok, failure = live.upstream.last_ok_seconds_ago, live.upstream.health.failure
            failed = None if failure is None else failure.seconds_ago
            if ages := [age for age in (last_ok, failed) if age is not None]:
                metrics.upstream_reactions[path,].set(world.wall() - min(ages))
                metrics.upstream_up[path,].set(health(last_ok, failure) == "ok")
        return metrics.render()
