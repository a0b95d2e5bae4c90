"""Traces by OpenTelemetry's conventions for MCP (semantic-conventions-genai, docs/gen-ai/mcp.md).

A round is a SERVER span, an upstream call a CLIENT span below it. The rounds of one exchange are linked: each span
links to that of the previous round, whose token travels in the sealed state (decision 19).

The only file that imports OpenTelemetry; `tracing_setup.py` loads it. The standard OTEL_* variables control what is
sent, where and how much. No attribute holds contents: arguments, answers, results and the text of an upstream's errors
stay out.
"""

import os
import threading
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer

from gateway.protocol import mcp
from gateway.telemetry.metrics.labels import Ending, Outcome
from gateway.telemetry.redaction import mask
from gateway.telemetry.tracing import ClientRequest, Operation, TracesUnavailable

_NAME: Final = "mrtr-gateway"
_OURS: Final = "mcp_gateway."
"""Prefix of the attributes that the conventions do not define."""
_TEXT: Final = 200
_TOKEN_BYTES: Final = 25
_FAILED: Final = (Outcome.ERROR, Outcome.REJECTED)
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TARGETS: Final = {mcp.TOOLS_CALL: "gen_ai.tool.name", mcp.PROMPTS_GET: "gen_ai.prompt.name"}


def begin(version: str, replica: str) -> "Traces | None":
    """See `tracing_setup.open_traces`."""
    if not wanted():
        return None
    own = {SERVICE_NAME: _NAME, SERVICE_VERSION: version, SERVICE_INSTANCE_ID: replica}
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    # `close` bounds the shutdown; nothing would at exit.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def wanted() -> bool:
    """Return whether the OTEL_* variables leave traces on; raises TracesUnavailable if they ask for the impossible."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise TracesUnavailable(
            f"OTEL_TRACES_EXPORTER={exporter[:40]}: only otlp is supported; unset it, and let an OpenTelemetry "
            "collector convert them"
        )
    for name in _PROTOCOLS:
        protocol = os.environ.get(name, "").strip() or "http/protobuf"
        if protocol != "http/protobuf":
            raise TracesUnavailable(
                f"{name}={protocol[:40]}: only http/protobuf is supported; unset it, and use port 4318 in "
                "OTEL_EXPORTER_OTLP_ENDPOINT"
            )
    return True


class Traces:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_NAME)
        self._fields = frozenset(propagate.get_global_textmap().fields)

    def carried(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the values that a propagator reads."""
        return {name: values[name] for name in self._fields if name in values}

    def round(self, about: Operation, request: ClientRequest) -> "Span":
        """Begin the span of one downstream request.

        Its parent is the context in `request.meta`, or else the one in `request.headers`. If both name one and they
        differ, the span links to the latter.
        """
        # Without an empty context, the current one would be the parent where the client names none.
        parent = propagate.extract(request.meta, context=Context())
        beside = propagate.extract(request.headers, context=Context())
        named, transport = (trace.get_current_span(each).get_span_context() for each in (parent, beside))
        links = []
        if not named.is_valid:
            parent = beside
        elif transport.is_valid and transport != named:
            links.append(Link(transport))
        attributes = {
            **_attributes(about),
            "jsonrpc.request.id": mask(request.rpc_id)[:_TEXT],
            "network.transport": "tcp",
            "network.protocol.name": "http",
            _OURS + "route": about.route,
            _OURS + "request.id": request.request_id,
        }
        if request.remote is not None:
            attributes["client.address"] = request.remote
        span = self._tracer.start_span(
            _name(about), context=parent, kind=SpanKind.SERVER, attributes=attributes, links=links
        )
        return Span(self._tracer, span, parent)

    def elsewhere(self, token: bytes) -> "Span":
        """Return the span of another replica; that replica ends it."""
        return Span(self._tracer, NonRecordingSpan(_opened(token)), Context())

    def close(self, seconds: float) -> None:
        """Send the remaining spans, for at most this long, and abandon a hanging exporter with its thread; blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(seconds)


class Span:
    """An open span; or a span of another replica, of which only the token is known."""

    def __init__(self, tracer: Tracer, span: trace.Span, parent: Context) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, parent)

    @property
    def token(self) -> bytes:
        """What another round or replica needs to link to this span: trace id, span id and flags, or nothing."""
        own = self._span.get_span_context()
        if not own.is_valid:
            return b""
        return bytes(own.trace_id.to_bytes(16) + own.span_id.to_bytes(8) + bytes([own.trace_flags]))

    def headers(self) -> dict[str, str]:
        """Return the headers that propagate this span: `traceparent`, and what else the propagators write."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context)
        return carrier

    def note(self, name: str, value: str | int | bool) -> None:  # noqa: FBT001  (the value of an attribute)
        """Set an attribute; never contents of a message."""
        self._span.set_attribute(_OURS + name, value)

    def happened(self, name: str) -> None:
        """Add an event."""
        self._span.add_event(_OURS + name)

    def link(self, token: bytes) -> None:
        """Link to another span."""
        other = _opened(token)
        if other.is_valid:
            self._span.add_link(other)

    def call(self, about: Operation, upstream: str | None) -> "Span":
        """Begin the span of an upstream call below this one; `upstream` is its URL, None for a child process."""
        attributes: dict[str, str | int] = {**_attributes(about), _OURS + "route": about.route}
        if upstream is None:
            attributes["network.transport"] = "pipe"
        else:
            parts = urlsplit(upstream)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            attributes |= {"network.transport": "tcp", "network.protocol.name": "http"}
            attributes |= {"server.address": parts.hostname or "", "server.port": port}
        span = self._tracer.start_span(
            _name(about), context=self._context, kind=SpanKind.CLIENT, attributes=attributes
        )
        return Span(self._tracer, span, self._context)

    def end(self, ending: Ending) -> None:
        """End the span; only the first end counts."""
        span = self._span
        if not span.is_recording():
            return
        span.set_attribute(_OURS + "outcome", ending.outcome)
        if ending.error_type:
            span.set_attribute("error.type", ending.error_type)
            span.set_status(Status(StatusCode.ERROR))
            if ending.outcome in _FAILED:
                span.set_attribute("rpc.response.status_code", ending.error_type)
        span.end()


def _opened(token: bytes) -> SpanContext:
    """Return the context that a token names; an invalid one if it is not a token."""
    if len(token) != _TOKEN_BYTES:
        return trace.INVALID_SPAN_CONTEXT
    return SpanContext(
        int.from_bytes(token[:16]), int.from_bytes(token[16:24]), is_remote=True, trace_flags=TraceFlags(token[24])
    )


def _name(about: Operation) -> str:
    """Return `{mcp.method.name} {target}`; a URI is left out, because span names must be of low cardinality."""
    if about.method not in _TARGETS:
        return about.method
    return f"{about.method} {mask(about.target)[:_TEXT]}"


def _attributes(about: Operation) -> dict[str, str]:
    attributes = {"mcp.method.name": about.method, "mcp.protocol.version": about.version}
    if about.method == mcp.TOOLS_CALL:
        attributes["gen_ai.operation.name"] = "execute_tool"
    if about.method in _TARGETS:
        attributes[_TARGETS[about.method]] = mask(about.target)[:_TEXT]
    elif about.method == mcp.RESOURCES_READ:
        # Without the query, because it holds arguments.
        attributes["mcp.resource.uri"] = mask(about.target.partition("?")[0])[:_TEXT]
    return attributes
