"""The bridges of a process: built from the configuration at start, and anew for every other one that a reload brings.

An exchange keeps the bridge it began with. So a reload builds bridges and changes none: what runs or waits ends under
the settings it knows, in the lot that all bridges share, and the old bridge goes with its last exchange. A pool is
handed on as long as what shapes its sessions is the same.
"""

import asyncio
from typing import Final

from gateway.config import Config, Route
from gateway.core import mcp
from gateway.core.exchange import Policy
from gateway.net.alarms import Alarms
from gateway.net.bridge import Bridge
from gateway.net.child import Child  # noqa: TC001  (one import style; it costs nothing here)
from gateway.net.client import Client, Endpoint
from gateway.net.driver import Driver
from gateway.net.nursery import Nursery
from gateway.net.parking import Lot
from gateway.net.pool import Pool
from gateway.net.stdio import StdioChannel
from gateway.net.streamable import StreamableChannel
from gateway.net.tasks import Tasks
from gateway.seal.envelope import Sealer
from gateway.telemetry import Metrics

_KILL_SECONDS: Final = 5.0


class Routes:
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
    ) -> None:
        self.bridges: dict[str, Bridge] = {}
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
        self._alarms = Alarms(config, tasks)
        self.change(config)

    def change(self, config: Config) -> None:
        """Serve the routes of this configuration from now on."""
        endpoints = {route.path: _endpoint(route) for route in config.routes if route.upstream.command is None}
        if not self._alarms.fit(config):
            self._alarms = Alarms(config, self._tasks)
        before = self.bridges
        self.bridges = {
            route.path: self._bridge(config, route, endpoints.get(route.path), before.get(route.path))
            for route in config.routes
        }
        for path, bridge in before.items():
            now = self.bridges.get(path)
            if now is None or now.pool is not bridge.pool:
                self._retire(bridge)

    def _bridge(self, config: Config, route: Route, endpoint: Endpoint | None, before: Bridge | None) -> Bridge:
        self._metrics.show_zeroes(route.path)
        if before is not None and _shape(before.route) == _shape(route):
            pool, listeners = before.pool, before.listeners
            pool.change(config, route)
        elif endpoint is None:
            pool, listeners = self._pool_of_children(config, route), set()
        else:

            def connect() -> StreamableChannel:
                return StreamableChannel(self._client, endpoint, self._tasks)

            pool, listeners = Pool(config, route, connect, self._metrics, self._tasks), set()
        return Bridge(
            config=config,
            route=route,
            pool=pool,
            lot=self.lot,
            sealer=self.sealer,
            metrics=self._metrics,
            tasks=self._tasks,
            alarms=self._alarms,
            policies=_policies(config, route),
            owner=self.owner,
            epoch=self.epoch,
            listeners=listeners,
        )

    def _pool_of_children(self, config: Config, route: Route) -> Pool:
        nursery = Nursery(route, self._client, self._metrics, self._tasks, self._children)

        def connect() -> StdioChannel:
            return StdioChannel(nursery, lambda: self._metrics.upstream_failed(route.path, "malformed"))

        return Pool(config, route, connect, self._metrics, self._tasks, nursery.cool)

    async def end_children(self) -> None:
        """Kill the children that are left; when it returns, none of their processes is."""
        left = list(self._children)
        for child in left:
            child.kill()
        if left:
            _ = await asyncio.wait([child.gone for child in left], timeout=_KILL_SECONDS)

    def _retire(self, bridge: Bridge) -> None:
        """Keep no session of it but those in use.

        A subscription would live on with an upstream that its path does not lead to any more: its client is told that
        it is over, and subscribes anew.
        """
        bridge.pool.retire()
        end_subscriptions(bridge)


def end_subscriptions(bridge: Bridge) -> None:
    """End those that there are."""
    for listener in list(bridge.listeners):
        listener.end()


def _shape(route: Route) -> tuple[object, ...]:
    """What a session of this route depends on."""
    return route.upstream, route.forward_headers


def _endpoint(route: Route) -> Endpoint:
    assert route.upstream.url is not None, "the configuration admits streamable HTTP only"
    return Endpoint(route.path, route.upstream.url)


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
