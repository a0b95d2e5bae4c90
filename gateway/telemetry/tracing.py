"""What a trace is told of a request."""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from gateway.protocol.errors import GatewayError

T = TypeVar("T")
_CONTEXT: Final = ("traceparent", "tracestate")


def with_context(given: Mapping[str, T], context: Mapping[str, T]) -> dict[str, T]:
    """Headers, or a `_meta`, with the trace context of a span in place of their own."""
    return {**{name: value for name, value in given.items() if name.lower() not in _CONTEXT}, **context}


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
