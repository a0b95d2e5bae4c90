"""The tracing interface; `otel.py` implements it with OpenTelemetry, imported only if traces are on.

A round is a SERVER span, an upstream call a CLIENT span below it. The rounds of one exchange are linked: each span
links to that of the previous round, whose token travels in the sealed state (decision 19).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from gateway.protocol.errors import GatewayError
from gateway.telemetry.metrics.labels import Ending

TOKEN_BYTES = 25
"""Trace id, span id and flags: all that another process needs to link to a span."""


class TracesUnavailable(GatewayError):
    """Traces are on, but cannot work on this machine; the message says why and what to do."""


class Operation(NamedTuple):
    """What a span is about."""

    method: str
    target: str
    """The tool's or prompt's name, or the resource's URI; empty for other methods."""
    version: str
    """The MCP version spoken with this side."""
    route: str


class ClientRequest(NamedTuple):
    """The downstream request that begins a round."""

    rpc_id: str
    request_id: str
    """The gateway's own id, as in its log."""
    remote: str | None
    meta: Mapping[str, str]
    """Trace context from `params._meta` (SEP-414)."""
    headers: Mapping[str, str]
    """Trace context from the HTTP headers."""


class Span(ABC):
    """An open span; or a span of another replica, of which only the token is known."""

    @property
    @abstractmethod
    def token(self) -> bytes:
        """What another round or replica needs to link to this span: TOKEN_BYTES bytes, or none."""

    @abstractmethod
    def headers(self) -> dict[str, str]:
        """Return the headers that propagate this span: `traceparent`, and what else the propagators write."""

    @abstractmethod
    def note(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001  (the value of an attribute)
        """Set an attribute; never contents of a message."""

    @abstractmethod
    def happened(self, name: str) -> None:
        """Add an event."""

    @abstractmethod
    def link(self, token: bytes) -> None:
        """Link to another span."""

    @abstractmethod
    def call(self, about: Operation, upstream: str | None) -> "Span":
        """Begin the span of an upstream call below this one; `upstream` is its URL, None for a child process."""

    @abstractmethod
    def end(self, ending: Ending) -> None:
        """End the span; only the first end counts."""


class Traces(ABC):
    """Makes the spans of one process."""

    @abstractmethod
    def round(self, about: Operation, request: ClientRequest) -> Span:
        """Begin the span of one downstream request.

        Its parent is the context in `request.meta`, or else the one in `request.headers`. If both name one and they
        differ, the span links to the latter.
        """

    @abstractmethod
    def carried(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the values that a propagator reads."""

    @abstractmethod
    def elsewhere(self, token: bytes) -> Span:
        """Return the span of another replica; that replica ends it."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """Send the remaining spans, for at most this long; blocks."""
