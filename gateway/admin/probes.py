"""Serves /healthz, /readyz, /metrics, /status on the admin listener; GET only."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.admin.cluster_status import chosen
from gateway.admin.cluster_view import ClusterView
from gateway.admin.documents import document
from gateway.admin.merge_statuses import Heard
from gateway.admin.snapshot import SnapshotSource, show_load, take_snapshot
from gateway.admin.status_page import HEADERS, every_seconds, page, prefers_json
from gateway.auth.host_check import admin_names, check_admin
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse, WholeResponse
from gateway.protocol.errors import Forbidden
from gateway.telemetry.process_status import Status

_HEALTH: Final = frozenset({"/healthz", "/readyz"})
_DOCS: Final = "/docs/"
OTHERS_PATH: Final = "/others.json"
"""Where the supervisor asks a worker for the statuses of the other replicas."""


class Probes(ABC):
    """The handler of the admin listener."""

    async def handle(self, http: HttpRequest) -> Response:
        """Answer one request."""
        if http.method not in ("GET", "HEAD"):
            return TextResponse("GET only\n", 405, {"Allow": "GET"})
        names, host = self.names(), http.headers.get("Host")
        # A name may have been rebound. Simple health checks of HTTP/1.0 name no host.
        if names is not None and (host is not None or http.path not in _HEALTH):
            try:
                check_admin(host, names)
            except Forbidden as exc:
                return TextResponse(f"{exc.message}\n", exc.status)
        return await self._serve(http)

    async def _serve(self, http: HttpRequest) -> Response:
        match http.path:
            case "/healthz":
                return TextResponse("ok\n")
            case "/readyz":
                # A failing upstream does not make this replica unready: other replicas use the same upstream.
                reason = await self.unready()
                return TextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)
            case "/metrics":
                body, content_type = await self.exposition()
                return WholeResponse(body=body, headers={"Content-Type": content_type})
            case "/status" | "/status.json":
                return await self._status(http)
            case path if path.startswith(_DOCS) and (text := document(path.removeprefix(_DOCS))) is not None:
                return TextResponse(text, headers=HEADERS)
            case _:
                return TextResponse("try /healthz /readyz /metrics /status\n", 404)

    async def _status(self, http: HttpRequest) -> Response:
        replica = http.url.query.get("replica")
        if replica == self.name():
            status = await self.status()  # without a wait for a replica that is silent
        else:
            own, heard = await asyncio.gather(self.status(), self.others())
            status = chosen(own, heard, replica)
        if http.path == "/status.json" or prefers_json(http.headers.get("Accept", "")):
            body, content_type = msgspec.json.encode(status), "application/json"
        else:
            refresh, route = every_seconds(http.url.query.get("refresh")), http.url.query.get("route")
            only_replica = replica if replica == status.replica and status.covers == "replica" else None
            body, content_type = page(status, refresh, route, only_replica).encode(), "text/html"
        return WholeResponse(body, headers={"Content-Type": f"{content_type}; charset=utf-8", **HEADERS})

    @abstractmethod
    async def unready(self) -> str | None:
        """Return in a few words why the load balancer should send no new requests here; None if it should."""

    @abstractmethod
    async def status(self) -> Status:
        """Return the status of this replica."""

    @abstractmethod
    def name(self) -> str:
        """Return the id of this replica."""

    @abstractmethod
    async def others(self) -> dict[str, Heard]:
        """Return what the other replicas tell of themselves."""

    @abstractmethod
    def names(self) -> frozenset[str] | None:
        """Return the configured host names under which this listener is served; None for any name."""

    @abstractmethod
    async def exposition(self) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics."""


class Admin(Probes):
    """The handler for one serving process."""

    def __init__(
        self, source: Callable[[], SnapshotSource], salt: bytes, cluster: ClusterView, *, is_private: bool
    ) -> None:
        """`is_private`: the listener is a worker's socket, which no browser reaches, so any name is served."""
        self._source = source
        self._salt = salt
        self._cluster = cluster
        self._is_private = is_private

    async def _serve(self, http: HttpRequest) -> Response:
        if self._is_private and http.path == OTHERS_PATH:
            return WholeResponse(body=msgspec.json.encode(await self._cluster.others()))
        return await super()._serve(http)

    async def unready(self) -> str | None:
        """See `Probes`."""
        return None if self._source().is_ready else "draining"

    def names(self) -> frozenset[str] | None:
        """See `Probes`."""
        return None if self._is_private else admin_names(self._source().config)

    async def status(self) -> Status:
        """See `Probes`."""
        return take_snapshot(self._source(), self._salt)

    def name(self) -> str:
        """See `Probes`."""
        return self._source().members.own

    async def others(self) -> dict[str, Heard]:
        """See `Probes`; a worker's own status is that of one process."""
        return {} if self._is_private else await self._cluster.others()

    async def exposition(self) -> tuple[bytes, str]:
        """See `Probes`."""
        source = self._source()
        show_load(source)
        return source.metrics.render()
