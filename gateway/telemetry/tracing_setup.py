"""Loads OpenTelemetry if traces are on."""

from types import ModuleType
from typing import TYPE_CHECKING

from gateway.plugins.loader import plugin
from gateway.telemetry.tracing import TracesUnavailable

__all__ = ["Span", "Traces", "check_traces", "open_traces"]

if TYPE_CHECKING:
    from gateway.plugins.otel.traces import Span, Traces
else:
    Span = Traces = object  # only annotations name them: OpenTelemetry is an extra


def open_traces(version: str, replica: str) -> Traces | None:
    """Begin tracing as the OTEL_* variables say; None if they switch traces off.

    Raises TracesUnavailable, in particular if the extra is not installed.
    """
    opened: Traces | None = _otel().begin(version, replica)
    return opened


def check_traces() -> None:
    """Raise TracesUnavailable if `open_traces` would, without starting anything."""
    _ = _otel().wanted()


def _otel() -> ModuleType:
    try:
        found: ModuleType = plugin("otel")
    except ImportError as exc:
        raise TracesUnavailable(
            f"traces: true needs OpenTelemetry, but {exc.name or exc} is not installed: run "
            "`pip install 'mrtr-gateway[otel]'`, or set traces: false"
        ) from exc
    return found
