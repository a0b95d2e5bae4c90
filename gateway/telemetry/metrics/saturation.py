"""How much of each limit a process uses, read when the metrics are asked for."""

from collections.abc import Callable, Mapping

from gateway import world
from gateway.telemetry.metrics.series import Count, Series


class Saturation:
    """The gauges of one process that are set when the metrics are asked for."""

    def __init__(self, series: Series, fill: Callable[["Saturation"], None]) -> None:
        """`fill` sets all gauges but those of reloads and certificates."""

        def one(name: str, text: str) -> Count:
            return series.gauge(name, text)[()]

        self._fill = fill
        self.ready = one("ready", "1 while /readyz says 200, else 0.")
        self.connections = one("connections", "Open connections of clients.")
        self.connections_limit = one("connections_limit", "Maximum of `mcp_gateway_connections`.")
        self.in_flight = one("requests_in_flight", "Requests whose final message has not been written.")
        self.sessions_limit = series.gauge("sessions_limit", "Maximum number of upstream sessions.", "route")
        self.children_limit = series.gauge("children_limit", "Maximum of `mcp_gateway_children`.", "route")
        self._certificate = series.gauge(
            "certificate_expiry_timestamp_seconds", "When a configured certificate expires, by its key.", "key"
        )
        self._reload_ok = one("config_last_reload_successful", "Whether the last reload was applied: 1 or 0.")
        self._reload_time = one(
            "config_last_reload_success_timestamp_seconds", "When the configuration in force was loaded."
        )
        self.reloaded(applied=True)

    def reloaded(self, *, applied: bool) -> None:
        """Note a reload; the start of the process counts as one."""
        self._reload_ok.set(applied)
        if applied:
            self._reload_time.set(world.wall())

    def show_certificates(self, expiries: Mapping[str, float]) -> None:
        """Show the certificates of a configuration in place of those before."""
        self._certificate.clear()
        for key, moment in expiries.items():
            self._certificate[key,].set(moment)

    def refresh(self) -> None:
        """Set the gauges."""
        for of_route in (self.sessions_limit, self.children_limit):
            of_route.clear()  # a reload may have removed a route
        self._fill(self)
