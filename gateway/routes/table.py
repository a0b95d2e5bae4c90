"""The bridges of a process: built from the configuration at start, and anew for every other one that a reload brings.

An exchange keeps the bridge it began with. So a reload builds bridges and changes none: what runs or waits ends under
the settings it knows, in the lot that all bridges share, and the old bridge goes with its last exchange. A pool is
handed on as long as what shapes its sessions is the same.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from gateway.bridge.driver import Driver
from gateway.cluster.witness import Witness
from gateway.config import Config, Contexts, Route, on_route
from gateway.exchange.machine import Policy
from gateway.http.client import Client, Endpoint
from gateway.http.forwarded_headers import asks_as_client
from gateway.process.child import Child  # noqa: TC001  (one import style; it costs nothing here)
from gateway.process.launcher import ChildLauncher
from gateway.protocol import mcp
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.runtime.coarse_timer import Deadlines, lengths
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Sealer
from gateway.sessions.pool import Pool
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import Health, RecentErrors
from gateway.upstream.era_probe import EraProbe
from gateway.upstream.stdio import StdioChannel
from gateway.upstream.transport_detection import connector

_KILL_SECONDS: Final = 5.0


class RouteTable:
    """The bridges by path, and what all of them share."""

    def __init__(  # noqa: PLR0913  (what a process is made of)
        self,
        config: Config,
        client: Client,
        lot: Lot[Driver],
        sealer: Sealer,
        metrics: Metrics,
        tasks: Tasks,
        owner: str,
        epoch: str,
        tls: Contexts,
        troubles: RecentErrors,
        witness: Witness,
    ) -> None:
        self._troubles = troubles
        self._witness = witness
        self.bridges: dict[str, LiveRoute] = {}
        """Where new requests go; another dict after every reload."""
        self.lot = lot
        self.sealer = sealer
        self.owner = owner
        self.epoch = epoch
        self._client = client
        self._metrics = metrics
        self._tasks = tasks
        self._children: set[Child] = set()
        """Of all bridges, also of those that a reload took away."""
        self._alarms: dict[tuple[float, ...], Deadlines] = {}
        self.change(config, tls)

    def change(self, config: Config, tls: Contexts) -> None:
        """Serve the routes of this configuration from now on."""
        endpoints = {route.path: _endpoint(route) for route in config.routes}
        there = {route.path: on_route(config, route) for route in config.routes}
        self._alarms = {
            lengths(each): self._alarms.get(lengths(each)) or Deadlines(each, self._tasks) for each in there.values()
        }
        before = self.bridges
        self.bridges = {
            route.path: self._bridge(
                there[route.path], route, endpoints[route.path], tls.upstreams[route.path], before.get(route.path)
            )
            for route in config.routes
        }
        for path, bridge in before.items():
            now = self.bridges.get(path)
            if now is None or now.pool is not bridge.pool:
                self._retire(bridge)

    def _bridge(
        self,
        config: Config,
        route: Route,
        endpoint: Endpoint | None,
        tls: ssl.SSLContext | None,
        before: LiveRoute | None,
    ) -> LiveRoute:
        """`config` is as it holds on this route; without `endpoint` the upstream is a child."""
        self._metrics.show_zeroes(route.path)
        if before is not None and _shape(before.route) == _shape(route):
            client, pool, listeners = before.client, before.pool, before.listeners
            era, streams, health = before.era, before.streams, before.health
            pool.change(config, route)
        else:
            client = self._client.sibling(config.limits, config.timeouts)
            listeners, streams = set(), set()
            health = Health(route.path, self._troubles, is_command=route.upstream.command is not None)
            if endpoint is None:
                pool, era = self._pool_of_children(config, route, client, health), None
            else:
                era = EraProbe(route.path, endpoint, client, self._metrics, self._tasks, health.ok)
                if route.upstream.transport == "sse":
                    era.transport_found(speaks_sse=True)
                found = _heard(era, health)
                connect = connector(route.upstream.transport, client, endpoint, self._tasks, found)
                pool = Pool(config, route, connect, self._metrics, self._tasks)
        client.change(config.limits, config.timeouts, tls, route.upstream.tls.server_name)
        return LiveRoute(
            config=config,
            route=route,
            client=client,
            pool=pool,
            lot=self.lot,
            sealer=self.sealer,
            metrics=self._metrics,
            tasks=self._tasks,
            alarms=self._alarms[lengths(config)],
            policies=_policies(config, route),
            owner=self.owner,
            epoch=self.epoch,
            listeners=listeners,
            era=era,
            health=health,
            streams=streams,
            witness=self._witness,
        )

    def _pool_of_children(self, config: Config, route: Route, client: Client, health: Health) -> Pool:
        nursery = ChildLauncher(route, client, self._metrics, self._tasks, self._children, health.child_ended)

        def connect() -> StdioChannel:
            return StdioChannel(nursery, lambda: self._metrics.upstream_failed(route.path, "malformed"))

        return Pool(config, route, connect, self._metrics, self._tasks, nursery.cool)

    def children(self, path: str) -> int:
        """How many processes of a route's command there are, also of before a reload."""
        return sum(child.route == path for child in self._children)

    async def end_children(self) -> None:
        """Kill the children that are left; when it returns, none of their processes is."""
        left = list(self._children)
        for child in left:
            child.kill()
        if left:
            _ = await asyncio.wait([child.gone for child in left], timeout=_KILL_SECONDS)

    def _retire(self, bridge: LiveRoute) -> None:
        """Keep no session of it but those in use.

        A subscription would live on with an upstream that its path does not lead to any more: its client is told that
        it is over, and subscribes anew.
        """
        bridge.pool.retire()
        end_streams(bridge)


def _heard(era: EraProbe, health: Health) -> Callable[[bool], None]:
    """Who hears that an upstream speaks HTTP+SSE, or does not any more."""

    def found(speaks_sse: bool) -> None:  # noqa: FBT001  (a callback)
        era.transport_found(speaks_sse)
        health.speaks_sse = speaks_sse

    return found


def end_streams(bridge: LiveRoute) -> None:
    """End what would stay open for as long as nobody leaves."""
    for listener in list(bridge.listeners):
        listener.end()
    for stream in list(bridge.streams):
        stream.end()


def _shape(route: Route) -> tuple[object, ...]:
    """What a session of this route depends on."""
    # Not the token: a new one is the same caller's, and a call that waits goes on with it.
    credentials = route.credentials
    lists = route.forward_headers, route.set_headers
    return route.upstream, *lists, credentials.mode, credentials.header, route.sessions.affinity


def _endpoint(route: Route) -> Endpoint | None:
    url = route.upstream.url
    return None if url is None else Endpoint(route.path, url, as_client=asks_as_client(route))


def _policies(config: Config, route: Route) -> dict[str, Policy]:
    holds = route.continuation == "hold"
    return {
        method: Policy(
            is_tool=method == mcp.TOOLS_CALL,
            refuse_undeclared=route.undeclared == "refuse",
            shed_rounds=config.legs.rounds if holds else 0,
            holds=holds,
        )
        for method in mcp.ASKING
    }
