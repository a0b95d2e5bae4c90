"""The values of the metrics' labels: no label has a value that is not in one of these lists."""

from enum import StrEnum
from typing import Final, NamedTuple

from gateway.protocol import mcp


class Outcome(StrEnum):
    """How a round ended, from the client's point of view."""

    COMPLETE = "complete"
    INPUT_REQUIRED = "input_required"
    STATE_ONLY = "state_only"
    ERROR = "error"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Ending(NamedTuple):
    """How a round ended, and the bounded type of its error: "" if there was none."""

    outcome: Outcome
    error_type: str = ""


COMPLETE: Final = Ending(Outcome.COMPLETE)
ASKED: Final = Ending(Outcome.INPUT_REQUIRED)
GIVEN_UP: Final = Ending(Outcome.CANCELLED)
"""Also of a round whose client left."""
TOOL_ERROR: Final = "tool_error"
"""The `error.type` of a tool result with `isError` (OpenTelemetry's conventions for MCP)."""
TOOL_FAILED: Final = Ending(Outcome.COMPLETE, TOOL_ERROR)
OTHER: Final = "other"
"""In place of a text that is not in the list of its label."""
OTHER_ERROR: Final = "_OTHER"
"""OpenTelemetry's fallback for `error.type`."""


class Step(StrEnum):
    """How a retry got back to its call."""

    HELD = "held"
    FORWARDED = "forwarded"
    RESUMED = "resumed"
    REPLAYED = "replayed"
    LOST = "lost"


class ColdEnding(StrEnum):
    """How a cold call ended: its client came back, it expired, or another replica had continued it."""

    RESUMED = "resumed"
    EXPIRED = "expired"
    CONTINUED = "continued"


class PeerOutcome(StrEnum):
    """How a request to another replica ended."""

    SERVED = "served"
    GONE = "gone"
    DEAD = "dead"
    SILENT = "silent"
    REFUSED = "refused"
    STALLED = "stalled"
    BROKE = "broke"


STATE_REASONS: Final = (
    *("too_large", "malformed", "unknown_key", "forged", "version", "expired", "future", "other_route"),
    *("other_method", "other_target", "other_arguments", "other_principal", "other_headers", "answered"),
    "ended",
)
"""Why a requestState was rejected: the `reason` of `errors.InvalidState`."""


PEER_REASONS: Final = (
    *("malformed", "unknown_key", "forged", "version", "expired", "future", "replayed"),
    "older_than_process",
)
"""Why the peer listener refused a request: the `reason` of `errors.InvalidState`."""


class NestedOutcome(StrEnum):
    """What happened to a nested request: the `outcome` of `exchange.commands.Count`, or a refusal by its session."""

    ASKED = "asked"
    ANSWERED = "answered"
    GIVEN = "given"
    REPLAYED = "replayed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    REFUSED = "refused"
    UNDECLARED = "refused_undeclared"
    UNSOLICITED = "refused_unsolicited"


class TaskOutcome(StrEnum):
    """How a task of a client ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"


class SessionState(StrEnum):
    """The state of an upstream session in its pool."""

    IDLE = "idle"
    BUSY = "busy"
    QUARANTINED = "quarantined"


class SessionLimit(StrEnum):
    """The limits that refuse a request for a session, by their keys in the configuration, or how they are known."""

    ALL = "sessions.max"
    OF_CALLER = "sessions.max_per_principal"
    CHILDREN = "upstream.max_children"
    RATE = "sessions.new_per_second"
    CHILD_RATE = "upstream.new_children_per_second"
    DESCRIPTORS = "ulimit -n"


UPSTREAM_FAILURES: Final = (
    *("upstream_unreachable", "session_lost", "call_lost", "upstream_cannot_ask", "upstream_refused"),
    *("malformed", "unknown_id"),
)
"""How an upstream failed: the `reason` of `errors.UpstreamError`, or a protocol violation."""


class UpstreamEra(StrEnum):
    """What an era probe found."""

    LEGACY = "legacy"
    MODERN = "modern"
    UNKNOWN = "unknown"


class TrafficEra(StrEnum):
    """Which request is passed through: a legacy client's, or a modern client's to a modern upstream."""

    LEGACY = "legacy"
    MODERN = "modern"


class Passed(StrEnum):
    """How a request that is passed through ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    CUT = "cut"
    ENDED = "ended"
    LEFT = "left"
    BRIDGED = "bridged"
    RELAYED = "relayed"
    MIRRORED = "mirrored"


class Malformation(StrEnum):
    """What is wrong with a request that is not well-formed HTTP."""

    REQUEST_LINE = "request_line"
    METHOD = "method"
    TARGET = "target"
    HEADER = "header"
    TOO_LONG = "too_long"
    BODY = "body"
    PIPELINED = "pipelined"


REJECTIONS: Final = (
    *("parse_error", "invalid_request", "invalid_params", "header_mismatch", "unsupported_version"),
    *("method_not_found", "missing_capability", "unauthorized", "forbidden", "too_large"),
    *("unsupported_encoding", "busy", "no_session"),
)
"""Why a downstream request was refused before it reached an upstream."""
NESTED_METHODS: Final = frozenset({mcp.ELICIT, mcp.SAMPLE, mcp.ROOTS})
METHODS: Final = frozenset(
    {
        *mcp.METHODS,
        *mcp.FIRST_FORM_METHODS,
        *NESTED_METHODS,
        mcp.INITIALIZE,
        mcp.PING,
        mcp.SET_LEVEL,
        mcp.SUBSCRIBE,
        mcp.UNSUBSCRIBE,
    }
)
VERSIONS: Final = frozenset({*mcp.SUPPORTED_VERSIONS, *mcp.LEGACY_VERSIONS})
NOTIFICATIONS: Final = tuple(
    name.removeprefix("notifications/")
    for name in (
        mcp.CANCELLED,
        mcp.PROGRESS,
        mcp.LOG,
        mcp.TOOLS_CHANGED,
        mcp.PROMPTS_CHANGED,
        mcp.RESOURCES_CHANGED,
        mcp.RESOURCE_UPDATED,
    )
)
"""The methods of notifications, without what they have in common."""
_CODES: Final = (
    mcp.PARSE_ERROR,
    mcp.INVALID_REQUEST,
    mcp.METHOD_NOT_FOUND,
    mcp.INVALID_PARAMS,
    mcp.INTERNAL_ERROR,
    mcp.HEADER_MISMATCH,
    mcp.MISSING_CAPABILITY,
    mcp.UNSUPPORTED_VERSION,
)
_ODD_CODES: Final = (0, -32000, -32001)
"""Codes outside the specification that legacy SDKs answer with: any exception, a lost connection, a timeout."""
ERROR_TYPES: Final = frozenset({"", TOOL_ERROR, *map(str, _CODES + _ODD_CODES)})
"""The values of `error_type` besides OTHER_ERROR: for MCP, OpenTelemetry's `error.type` is the JSON-RPC code."""
