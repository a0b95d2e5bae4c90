"""What the rest of the gateway knows of traces; OpenTelemetry itself is in `otel.py`, imported only where it is on.

A round is a server's span, an upstream call a client's below it. The rounds of one exchange are linked: each points
at the one before it, whose token travels in the sealed state (decision 19).
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from gateway.errors import GatewayError
from gateway.telemetry.words import Ending

TOKEN_BYTES = 25
"""A trace id, a span id and the flags: all that is needed to point at a span from elsewhere."""


class TracesUnavailable(GatewayError):
    """Traces are on and cannot be had on this machine; the message says why and what to do."""


class Operation(NamedTuple):
    """What a span is about."""

    method: str
    target: str
    """The tool's or prompt's name, or the resource's URI; empty where there is none."""
    version: str
    """MCP's, as spoken with this side."""
    route: str


class Span(ABC):
    """One span at work, or one of another replica that only its token is known of."""

    @property
    @abstractmethod
    def token(self) -> bytes:
        """What another round, or another replica, needs to point at this span: TOKEN_BYTES bytes, or none."""

    @abstractmethod
    def headers(self) -> dict[str, str]:
        """What carries the context of this span on: `traceparent` and what else the propagators write."""

    @abstractmethod
    def note(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001  (the value of an attribute)
        """Set an attribute; never a content."""

    @abstractmethod
    def happened(self, name: str) -> None:
        """Note a moment."""

    @abstractmethod
    def link(self, token: bytes) -> None:
        """Point at another span."""

    @abstractmethod
    def call(self, about: Operation, upstream: str | None) -> "Span":
        """Begin the span of an upstream call below this one; `upstream` is its URL, None for a child process."""

    @abstractmethod
    def end(self, ending: Ending) -> None:
        """End the span; only the first end counts."""


class Traces(ABC):
    """Makes the spans of one process."""

    @abstractmethod
    def round(  # noqa: PLR0913  (what is known of a request)
        self,
        about: Operation,
        rpc_id: str,
        request_id: str,
        remote: str | None,
        meta: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> Span:
        """Begin the span of one downstream request.

        Its parent is the context in `meta` (`params._meta`, SEP-414), else the one in `headers`; where both name one
        and they differ, the latter is linked.
        """

    @abstractmethod
    def carried(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return those of the values that a propagator reads."""

    @abstractmethod
    def elsewhere(self, token: bytes) -> Span:
        """The span of another replica, which ends it."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """Send what has not been sent, for this long at most; blocks."""


def open_traces(version: str, replica: str) -> Traces | None:
    """Begin tracing as the OTEL_* variables say; None where they say that there shall be none.

    Raises TracesUnavailable, in particular where the extra is not installed.
    """
    opened: Traces | None = _otel().begin(version, replica)
    return opened


def check_traces() -> None:
    """Raise TracesUnavailable where `open_traces` would, and begin nothing."""
    _ = _otel().wanted()


def _otel() -> ModuleType:
    try:
        return importlib.import_module("gateway.telemetry.otel")
    except ImportError as exc:
        raise TracesUnavailable(
            f"traces: true needs OpenTelemetry, and {exc.name or exc} is not installed: run "
            "`pip install 'mrtr-gateway[otel]'`, or set traces: false"
        ) from exc
