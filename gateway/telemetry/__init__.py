"""What the gateway tells its operator: log events and metrics, each declared once."""

from gateway.telemetry.bodies import Direction, bodies
from gateway.telemetry.log import Event, Logger, configure_logging, get_logger, mask, redact
from gateway.telemetry.metrics import OTHER, Metrics, bounded_kind, bounded_method, bounded_version
from gateway.telemetry.words import (
    COMPLETE,
    OTHER_ERROR,
    TOOL_ERROR,
    Ending,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
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
    "Direction",
    "Ending",
    "Event",
    "Logger",
    "Metrics",
    "NestedOutcome",
    "Outcome",
    "Passed",
    "PeerOutcome",
    "Rejection",
    "SessionState",
    "StateReason",
    "Step",
    "TrafficEra",
    "UpstreamEra",
    "UpstreamFailure",
    "bodies",
    "bounded_kind",
    "bounded_method",
    "bounded_version",
    "configure_logging",
    "get_logger",
    "mask",
    "redact",
]
