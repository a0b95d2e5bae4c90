"""Serves /healthz, /readyz, /metrics, /status on the admin listener; GET only."""

from abc import ABC, abstractmethod
from typing import Final

import msgspec

from gateway.admin.cluster_view import ClusterView
from gateway.admin.documents import document
from gateway.admin.snapshot import SnapshotSource
from gateway.admin.status_page import HEADERS, every_seconds, page
from gateway.auth.host_check import check_admin
from gateway.config import Config, InForce
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse, WholeResponse
from gateway.protocol.errors import Forbidden
from gateway.telemetry import METRICS_TYPE

_HEALTH: Final = frozenset({"/healthz", "/readyz"})
_DOCS: Final = "/docs/"


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
            case "/status" | "/status.json":
                response = await self.status(http)
            case path if path.startswith(_DOCS) and (text := document(path.removeprefix(_DOCS))) is not None:
                response = TextResponse(text, headers=HEADERS)
            case _:
                response = TextResponse("try /healthz /readyz /metrics /status\n", 404)
        return response

    @abstractmethod
    async def unready(self) -> str | None:
        """Return in a few words why the load balancer should send no new requests here; None if it should."""

    @abstractmethod
    async def status(self, http: HttpRequest) -> Response:
        """Return the status that a query asks for, as a page or as JSON."""

    @abstractmethod
    async def exposition(self) -> bytes:
        """Return the metrics."""


def wants_json(http: HttpRequest) -> bool:
    """Return whether the status is for a program: by its path, or by an Accept header that names JSON and no HTML."""
    accept = http.head.headers.get("Accept", "")
    return http.head.path == "/status.json" or ("application/json" in accept and "text/html" not in accept)


def status_response(http: HttpRequest, status: bytes) -> Response:
    """Return the response with a page, or with JSON."""
    kind = "application/json" if wants_json(http) else "text/html"
    return WholeResponse(status, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})


class Admin(Probes):
    """The handler for one serving process."""

    def __init__(self, source: SnapshotSource, cluster: ClusterView) -> None:
        super().__init__(source.in_force)
        self._source = source
        self._cluster = cluster

    async def unready(self) -> str | None:
        """See `Probes`."""
        return None if self._source.reload.is_open else "draining"

    async def status(self, http: HttpRequest) -> Response:
        """See `Probes`: of the whole cluster, unless the query names one replica of it."""
        query = http.head.url.query
        replica = query.get("replica")
        status = await self._cluster.status(replica)
        if wants_json(http):
            return status_response(http, msgspec.json.encode(status))
        only_replica = replica if replica == status.replica and status.covers == "replica" else None
        seconds = every_seconds(query.get("refresh"))
        return status_response(http, page(status, seconds, query.get("route"), only_replica).encode())

    async def exposition(self) -> bytes:
        """See `Probes`: with how much of its limits the process uses now."""
        source, metrics = self._source, self._source.metrics
        metrics.ready[()].set(source.reload.is_open)
        metrics.connections[()].set(source.clients.connections)
        metrics.connections_limit[()].set(source.config.limits.connections)
        metrics.in_flight[()].set(source.downstream.in_flight)
        for of_routes in (metrics.sessions_limit, metrics.children_limit):
            of_routes.clear()  # a reload may have removed a route
        for path, live in source.routes.live.items():
            pool, upstream = live.upstream.pool, live.route.upstream
            metrics.sessions_limit[path,].set(pool.most)
            if upstream.command is not None:
                metrics.children_limit[path,].set(upstream.max_children)
        return metrics.render()
