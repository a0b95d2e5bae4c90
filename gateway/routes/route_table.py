"""The routes of a process: built from the configuration at start, rebuilt by every reload.

A call keeps the route that it began with. So a reload builds new routes and changes none, and a replaced route is
freed with its last call. The new route gets the `LiveUpstream` of the replaced one as long as everything that shapes
its sessions stays the same.
"""

from functools import partial

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher, end_children
from gateway.config import Config, Contexts, InForce, Route, RouteSettings, on_route
from gateway.exchange.machine import Policy
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_headers import asks_as_client
from gateway.http.upstream_url import Endpoint
from gateway.protocol import mcp
from gateway.routes.deadlines import Deadlines
from gateway.routes.live_route import LiveRoute, LiveUpstream, ProcessScope
from gateway.sessions.pool.pool import Pool
from gateway.telemetry.metrics.registry import BudgetStatus
from gateway.telemetry.recent_errors import RecentErrors
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.upstream.children.modern_stdio import ModernStdio
from gateway.upstream.children.shared_child import ChildHolder, SharedChannel
from gateway.upstream.children.stdio_era import StdioEra
from gateway.upstream.http.era_probe import EraProbe
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.transport_detection import connector
from gateway.upstream.stdio import StdioChannel


class RouteTable:
    """The live routes by path."""

    def __init__(
        self, config: Config, tls: Contexts, client: Client, process: ProcessScope, errors: RecentErrors
    ) -> None:
        self.live: dict[str, LiveRoute] = {}
        """The routes of new requests; a reload replaces the dict."""
        self.process = process
        self._client = client
        self._errors = errors
        self._children = dict[Child, None]()
        """The children of all upstreams, including upstreams that a reload removed."""
        self._is_prestarting = False
        self.rebuild(config, tls)

    def rebuild(self, config: Config, tls: Contexts) -> None:
        """Serve the routes of this configuration from now on."""
        live: dict[str, LiveRoute] = {}
        for route in config.routes:
            settings = RouteSettings(on_route(config, route), route)
            own = settings.config
            bounds = Bounds(own.limits, own.timeouts, tls.upstreams[route.path], route.upstream.tls.server_name)
            former = self.live.get(route.path)
            if former is not None and _shape(former.route) == _shape(route):
                upstream = former.upstream
                upstream.bounds.replace(bounds)
                upstream.settings.replace(settings)
            else:
                upstream = self._new_upstream(settings, bounds)
            live[route.path] = LiveRoute(
                config=own,
                route=route,
                policies=_policies(own, route),
                deadlines=Deadlines(own, self.process.tasks),
                upstream=upstream,
                process=self.process,
            )
            self.process.metrics.series.show_zeroes(route.path)
        before, self.live = self.live, live
        if self._is_prestarting:
            self.begin_children()
        for path, former in before.items():
            if path not in live or live[path].upstream is not former.upstream:
                # Its path no longer leads to this upstream: end its streams, so that the clients subscribe anew.
                former.upstream.retire()
                former.upstream.end_streams()

    def begin_children(self) -> None:
        """From now on, start children ahead of their sessions: on the present routes, and on those of a reload."""
        self._is_prestarting = True
        for live in self.live.values():
            if live.upstream.stdio is not None:
                live.upstream.stdio.launcher.begin_prestarting()

    def _new_upstream(self, first: RouteSettings, bound: Bounds) -> LiveUpstream:
        """Make an upstream; without a URL it is a child process."""
        metrics, tasks, serves_host = self.process.metrics, self.process.tasks, self.process.serves_host
        route = first.route
        settings, bounds = InForce(first), InForce(bound)
        client = self._client.sibling(bounds)
        url = route.upstream.url
        health = UpstreamHealth(route.path, metrics, self._errors, url=url and route.upstream.name)
        if url is None:
            launcher = ChildLauncher(route, client, tasks, health, self._children, serves_host=serves_host)
            modern = ModernStdio(launcher, metrics)
            stdio = StdioEra(launcher, modern, tasks, health)
            connect = partial(SharedChannel, ChildHolder(launcher)) if serves_host else partial(StdioChannel, launcher)
            pool = Pool(settings, connect, metrics, tasks)
            return LiveUpstream(settings, bounds, client, pool, health, stdio=stdio)
        endpoint = Endpoint(url, route.where, as_client=asks_as_client(route))
        upstream = HttpUpstream(client, endpoint, tasks)
        era = EraProbe(upstream, health)
        if route.upstream.transport == "sse":
            era.note_transport(speaks_sse=True)
        pool = Pool(settings, connector(route.upstream.transport, upstream, era), metrics, tasks)
        return LiveUpstream(settings, bounds, client, pool, health, era=era)

    def arriving(self) -> BudgetStatus:
        """Return what the unfinished messages of all upstreams hold; each upstream has the limit for itself."""
        arrivals = [live.upstream.client.arriving for live in self.live.values()]
        return BudgetStatus(sum(each.used for each in arrivals), sum(each.limit for each in arrivals), 0)

    async def end_children(self) -> None:
        """Kill the remaining children, and wait until their processes have ended."""
        await end_children(self._children)


def _shape(route: Route) -> tuple[object, ...]:
    """Everything that shapes a session of this route."""
    # Without the token: a new one belongs to the same caller, and a call that waits continues with it.
    credentials = route.credentials
    lists = route.forward_headers, route.set_headers
    return route.upstream, *lists, credentials.mode, credentials.header, route.sessions.affinity


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
