"""The values of the metrics' labels: no label has a value that is not in one of these lists."""

from enum import StrEnum
from typing import Final, NamedTuple


class Outcome(StrEnum):
    """How a round ended, from the client's point of view."""

    __hash__ = str.__hash__  # Enum's own is a slow Python function, and these are keys on the hot path

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
TOOL_ERROR: Final = "tool_error"
"""The `error.type` of a tool result with `isError` (OpenTelemetry's conventions for MCP)."""
TOOL_FAILED: Final = Ending(Outcome.COMPLETE, TOOL_ERROR)
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
    STALLED = "stalled"
    BROKE = "broke"


class StateReason(StrEnum):
    """Why a requestState was rejected: the `reason` of `errors.InvalidState`."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    FORGED = "forged"
    VERSION = "version"
    EXPIRED = "expired"
    FUTURE = "future"
    OTHER_ROUTE = "other_route"
    OTHER_METHOD = "other_method"
    OTHER_TARGET = "other_target"
    OTHER_ARGUMENTS = "other_arguments"
    OTHER_PRINCIPAL = "other_principal"
    OTHER_HEADERS = "other_headers"
    ANSWERED = "answered"
    ENDED = "ended"


class PeerReason(StrEnum):
    """Why the peer listener refused a request: the `reason` of `errors.InvalidState`."""

    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    FORGED = "forged"
    VERSION = "version"
    EXPIRED = "expired"
    FUTURE = "future"
    REPLAYED = "replayed"


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

    @classmethod
    def _missing_(cls, value: object) -> "NestedOutcome | None":
        """Accept the core's words too: `undeclared` becomes the label `refused_undeclared`."""
        return next((outcome for outcome in cls if outcome.value == f"refused_{value}"), None)


class TaskOutcome(StrEnum):
    """How a task of a client ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"


class SessionState(StrEnum):
    """The state of an upstream session in its pool."""

    __hash__ = str.__hash__  # as above

    IDLE = "idle"
    BUSY = "busy"
    QUARANTINED = "quarantined"


class SessionLimit(StrEnum):
    """The limits that refuse a request for a new session, by their keys in the configuration."""

    PRINCIPAL_RATE = "sessions.new_per_second_per_principal"
    RATE = "sessions.new_per_second"
    CHILD_RATE = "upstream.new_children_per_second"
    ADDRESS = "sessions.max_per_address"
    NEWCOMERS = "sessions.max_newcomers"


class UpstreamFailure(StrEnum):
    """How an upstream failed: the `reason` of `errors.UpstreamError`, or a protocol violation."""

    UNREACHABLE = "upstream_unreachable"
    SESSION_LOST = "session_lost"
    CALL_LOST = "call_lost"
    CANNOT_ASK = "upstream_cannot_ask"
    REFUSED = "upstream_refused"
    MALFORMED = "malformed"
    UNKNOWN_ID = "unknown_id"


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


class Rejection(StrEnum):
    """Why a downstream request was refused before it reached an upstream."""

    PARSE = "parse_error"
    REQUEST = "invalid_request"
    PARAMS = "invalid_params"
    HEADERS = "header_mismatch"
    VERSION = "unsupported_version"
    METHOD = "method_not_found"
    CAPABILITY = "missing_capability"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "too_large"
    ENCODING = "unsupported_encoding"
    BUSY = "busy"
    SESSION = "no_session"
