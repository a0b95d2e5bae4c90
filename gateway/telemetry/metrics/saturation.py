"""How much of each limit a process uses, read when the metrics are asked for."""

import time
from collections.abc import Callable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Gauge

_PREFIX = "mcp_gateway_"


class Use(msgspec.Struct, frozen=True):
    """What is used of a limit; None: there is no limit."""

    used: float
    limit: float | None


class RouteLoad(msgspec.Struct, frozen=True):
    """The use of one route's limits."""

    sessions_limit: int
    children_limit: int | None
    """None if the route runs no child processes."""
    of_one_address: Use


class Load(msgspec.Struct, frozen=True):
    """The use of one process's limits."""

    is_ready: bool
    connections: Use
    requests_in_flight: int
    held_of_one_address: Use
    routes: Mapping[str, RouteLoad]
    """By path."""


class Saturation:
    """The gauges of one process that `render` sets from what its parts say."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Load]) -> None:
        """`read` returns the present load of the process."""

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, text, labels, registry=registry)

        self.ready = gauge("ready", "1 while /readyz says 200, else 0.")
        self.connections = gauge("connections", "Open connections of clients.")
        self.connections_limit = gauge("connections_limit", "Maximum of `mcp_gateway_connections`.")
        self.in_flight = gauge("requests_in_flight", "Requests whose final message has not been written.")
        self.held_of_one = gauge("held_calls_of_one_address", "Held calls of the client address that has the most.")
        self.held_of_one_limit = gauge(
            "held_calls_of_one_address_limit",
            "Maximum of `mcp_gateway_held_calls_of_one_address`; +Inf without a limit.",
        )
        self.sessions_limit = gauge("sessions_limit", "Maximum number of upstream sessions.", "route")
        self.sessions_of_one = gauge(
            "sessions_of_one_address", "Sessions that the client address with the most has opened.", "route"
        )
        self.sessions_of_one_limit = gauge(
            "sessions_of_one_address_limit",
            "Maximum of `mcp_gateway_sessions_of_one_address`; +Inf without a limit.",
            "route",
        )
        self.children_limit = gauge("children_limit", "Maximum of `mcp_gateway_children`.", "route")
        self.certificate = gauge(
            "certificate_expiry_timestamp_seconds", "When a configured certificate expires, by its key.", "key"
        )
        self.reload_ok = gauge("config_last_reload_successful", "Whether the last reload was applied: 1 or 0.")
        self.reload_time = gauge(
            "config_last_reload_success_timestamp_seconds", "When the configuration in force was loaded."
        )
        self.reloaded(applied=True)
        self._read = read

    def reloaded(self, *, applied: bool) -> None:
        """Note a reload; the start of the process counts as one."""
        self.reload_ok.set(applied)
        if applied:
            self.reload_time.set(time.time())

    def show_certificates(self, expiries: Mapping[str, float]) -> None:
        """Show the certificates of a configuration in place of those before."""
        self.certificate.clear()
        for key, moment in expiries.items():
            self.certificate.labels(key).set(moment)

    def refresh(self) -> None:
        """Set the gauges."""
        load = self._read()
        self.ready.set(load.is_ready)
        self.in_flight.set(load.requests_in_flight)
        _show(load.connections, self.connections, self.connections_limit)
        self.held_of_one.set(load.held_of_one_address.used)
        self.held_of_one_limit.set(_limit(load.held_of_one_address))
        for gauge in (self.sessions_limit, self.sessions_of_one, self.sessions_of_one_limit, self.children_limit):
            gauge.clear()  # a reload may have removed a route
        for path, route in load.routes.items():
            self.sessions_limit.labels(path).set(route.sessions_limit)
            self.sessions_of_one.labels(path).set(route.of_one_address.used)
            self.sessions_of_one_limit.labels(path).set(_limit(route.of_one_address))
            if route.children_limit is not None:
                self.children_limit.labels(path).set(route.children_limit)


def _show(use: Use, used: Gauge, limit: Gauge) -> None:
    used.set(use.used)
    limit.set(_limit(use))


def _limit(use: Use) -> float:
    return float("inf") if use.limit is None else use.limit
