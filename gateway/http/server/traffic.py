"""What the listeners of one process share: the limits of their connections, the budgets, the count of bad requests."""

from typing import Final

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server.request_parser import MAX_LINE_BYTES
from gateway.runtime.budget import Budget
from gateway.telemetry import Event, LineLimit, Malformation, Metrics, get_logger

log = get_logger()

_FIX: Final = "it is not well-formed HTTP: check what sends it; a scanner, or TLS on a port without TLS, is harmless"
_FIX_TOO_LONG: Final = f"its request line or a header has more than {MAX_LINE_BYTES} bytes: shorten cookies or tokens"


class Traffic:
    """The bounds of all clients and peers together."""

    def __init__(self, limits: InForce[Limits], timeouts: InForce[Timeouts], metrics: Metrics) -> None:
        self.limits = limits
        self.timeouts = timeouts
        self.receiving = Budget(
            "limits.receiving_bytes", limits.part(lambda it: max(it.receiving_bytes, it.body_bytes))
        )
        """Bytes of unfinished requests."""
        self.sending = Budget("limits.sending_bytes", limits.part(lambda it: max(it.sending_bytes, it.event_bytes)))
        """Bytes for clients that have not read them."""
        self.metrics = metrics
        self._lines = LineLimit()

    def malformed(self, kind: Malformation, remote: str | None) -> None:
        """Count a malformed request; the log names its sender and nothing that it sent."""
        self.metrics.malformations[kind,].inc()
        suppressed = self._lines.take()
        if suppressed is not None:
            fix = _FIX_TOO_LONG if kind is Malformation.TOO_LONG else _FIX
            log.warning(Event.REQUEST_MALFORMED, reason=kind, remote=remote, suppressed=suppressed, fix=fix)
