"""The metrics of one process, in their own registry.

No label value is chosen by a client or an upstream: methods, versions and reasons must be in a closed list. `route` is
always a configured path.
"""

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.telemetry.metrics.calls import CallMetrics
from gateway.telemetry.metrics.process import ProcessMetrics
from gateway.telemetry.metrics.requests import RequestMetrics
from gateway.telemetry.metrics.sessions import SessionMetrics
from gateway.telemetry.metrics.upstreams import UpstreamMetrics


class Metrics(ProcessMetrics, UpstreamMetrics, SessionMetrics, CallMetrics, RequestMetrics):
    """All kinds of metrics; they are one object, so that counting costs one call."""

    def __init__(self, version: str, routes: Iterable[str] = ()) -> None:
        super().__init__()
        self._gauge("build_info", "The running version.", "version")[version,].set(1)
        for route in routes:
            self.show_zeroes(route)

    def render(self) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics."""
        if self.saturation is not None:
            self.saturation.refresh()
        self.show_budgets()
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
