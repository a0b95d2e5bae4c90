"""Log events, metrics and traces; each event and metric is declared once."""

from gateway.telemetry.bodies import Direction, bodies
from gateway.telemetry.log import Event, Logger, configure_logging, get_logger, mask, redact
from gateway.telemetry.metrics import OTHER, Metrics, bounded_kind, bounded_method, bounded_version
from gateway.telemetry.traces import ClientRequest, Operation, Span, Traces, TracesUnavailable
from gateway.telemetry.tracing_setup import check_traces, open_traces
from gateway.telemetry.words import (
    COMPLETE,
    OTHER_ERROR,
    TOOL_ERROR,
    Ending,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
    PeerReason,
    Rejection,
    SessionState,
    StateReason,
    Step,
    TrafficEra,
    UpstreamEra,
    UpstreamFailure,
)

__all__ = [
    "COMPLETE",
    "OTHER",
    "OTHER_ERROR",
    "TOOL_ERROR",
    "ClientRequest",
    "Direction",
    "Ending",
    "Event",
    "Logger",
    "Metrics",
    "NestedOutcome",
    "Operation",
    "Outcome",
    "Passed",
    "PeerOutcome",
    "PeerReason",
    "Rejection",
    "SessionState",
    "Span",
    "StateReason",
    "Step",
    "Traces",
    "TracesUnavailable",
    "TrafficEra",
    "UpstreamEra",
    "UpstreamFailure",
    "bodies",
    "bounded_kind",
    "bounded_method",
    "bounded_version",
    "check_traces",
    "configure_logging",
    "get_logger",
    "mask",
    "open_traces",
    "redact",
]
