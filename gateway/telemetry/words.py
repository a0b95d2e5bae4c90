"""The words of the metrics' labels: whatever can be a label's value stands in one of these lists."""

from enum import StrEnum
from typing import Final, NamedTuple


class Outcome(StrEnum):
    """How one round ended, as its client saw it."""

    __hash__ = str.__hash__  # Enum's own is a Python function, and these are keys on the hot path

    COMPLETE = "complete"
    INPUT_REQUIRED = "input_required"
    STATE_ONLY = "state_only"
    ERROR = "error"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Ending(NamedTuple):
    """How one round ended, and the kind of its error, bounded: "" where there was none."""

    outcome: Outcome
    error_type: str = ""


COMPLETE: Final = Ending(Outcome.COMPLETE)
TOOL_ERROR: Final = "tool_error"
"""The `error.type` of a tool result with `isError` (OpenTelemetry's conventions for MCP)."""
OTHER_ERROR: Final = "_OTHER"
"""OpenTelemetry's word for an `error.type` that is in no list."""


class Step(StrEnum):
    """Which step of "any replica may get the next round" served a retry."""

    HELD = "held"
    FORWARDED = "forwarded"
    RESUMED = "resumed"
    REPLAYED = "replayed"
    LOST = "lost"


class PeerOutcome(StrEnum):
    """What became of a request that went to another replica."""

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
    REPLAYED = "replayed"


class NestedOutcome(StrEnum):
    """What became of a nested request: the `outcome` of `core.commands.Count`, and what the sessions refuse."""

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
        """Take the core's words too: `undeclared` is `refused_undeclared` as a label."""
        return next((outcome for outcome in cls if outcome.value == f"refused_{value}"), None)


class SessionState(StrEnum):
    """Where an upstream session is in its pool."""

    __hash__ = str.__hash__  # Enum's own is a Python function, and these are keys on the hot path

    IDLE = "idle"
    BUSY = "busy"
    QUARANTINED = "quarantined"


class UpstreamFailure(StrEnum):
    """How an upstream failed: the `reason` of `errors.UpstreamError`, and its finer kinds."""

    ERROR = "upstream_error"
    UNREACHABLE = "upstream_unreachable"
    SESSION_LOST = "session_lost"
    CALL_LOST = "call_lost"
    CANNOT_ASK = "upstream_cannot_ask"
    REFUSED = "upstream_refused"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_ID = "unknown_id"


class UpstreamEra(StrEnum):
    """What a probe found an upstream to be."""

    LEGACY = "legacy"
    MODERN = "modern"
    UNKNOWN = "unknown"


class TrafficEra(StrEnum):
    """Whose requests pass through: an old client's, or a modern one's to a modern upstream."""

    LEGACY = "legacy"
    MODERN = "modern"


class Passed(StrEnum):
    """What became of a request that was passed through."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    CUT = "cut"
    ENDED = "ended"
    LEFT = "left"
    BRIDGED = "bridged"


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
    TOO_SLOW = "too_slow"
    BUSY = "busy"
    STOPPING = "stopping"
