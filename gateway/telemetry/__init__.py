"""Log events, metrics, traces: each event or metric is declared once."""

from gateway.telemetry.body_log import Direction, bodies
from gateway.telemetry.log import Event, LineLimit, configure_logging, get_logger
from gateway.telemetry.metrics.labels import (
    ASKED,
    COMPLETE,
    GIVEN_UP,
    OTHER,
    OTHER_ERROR,
    TOOL_FAILED,
    ColdEnding,
    Ending,
    Malformation,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
    SessionLimit,
    SessionState,
    Step,
    TaskOutcome,
    TrafficEra,
    UpstreamEra,
)
from gateway.telemetry.metrics.registry import METRICS_TYPE, Metrics
from gateway.telemetry.redaction import secret_arguments
from gateway.telemetry.tracing import ClientRequest, Operation, TracesUnavailable, with_context
from gateway.telemetry.tracing_setup import Span, Traces, check_traces, open_traces
