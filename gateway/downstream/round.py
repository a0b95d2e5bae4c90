"""One round: a checked request on its way to its one reply."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from gateway.bridge.response_queue import FinalMessage, ResponseQueue, ending_of
from gateway.cluster.reply_relay import Replied
from gateway.exchange.events import Leg
from gateway.http.forwarded_headers import for_call, joined, own_headers
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import GatewayError, NoHandshake
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.sessions.call import PoolKey
from gateway.telemetry import COMPLETE, ClientRequest, Ending, Operation, Outcome, Span, Step, Traces
from gateway.upstream.channel import NO_HEADERS, Headers

LEFT: Final = Ending(Outcome.CANCELLED)
"""How a round ends whose client left."""
_TRACE_CONTEXT: Final = ("traceparent", "tracestate")
_TRACE_VALUE: Final = re.compile(r"[\x20-\x7e]{1,8192}")


class Round(msgspec.Struct, eq=False):
    """One checked request, with everything that serving it needs."""

    incoming: Incoming
    reply: ReplyWriter
    live: LiveRoute
    request: Request
    key: PoolKey
    headers: Headers
    """The headers that go upstream."""
    started: float
    """Monotonic."""
    is_counted: bool = False

    def on(self, live: LiveRoute, distrusted: str | None) -> "Round":
        """Return this round as another configuration of its route serves it."""
        return new_round(self.incoming, self.reply, live, self.request, self.key.principal, distrusted, self.started)

    def queue(self) -> ResponseQueue:
        """Return a queue for the messages of an exchange to this round's client."""
        request = self.request
        leg = Leg(request.id, request.progress_token, request.log_level)
        live, incoming = self.live, self.incoming
        behind_bytes = live.config.limits.behind_bytes
        return ResponseQueue(leg, live.deadlines.silence, behind_bytes, incoming.request_id, incoming.span)

    async def answer(self, result: bytes) -> Replied:
        """Write a result that no call had to be made for."""
        body = jsonrpc.result(self.request.id, result)
        return await self.reply.whole(body, 200, NO_HEADERS, COMPLETE), COMPLETE

    async def write(self, queue: ResponseQueue) -> Replied:
        """Write messages as they come: one JSON body if the final message comes first, else a stream."""
        item = await queue.take()
        while not isinstance(item, FinalMessage):
            if not self.reply.started:
                await self.reply.start()
            await self.reply.write(sse.KEEP_ALIVE if item is None else sse.encode(item))
            item = await queue.take()
        if isinstance(item.cause, NoHandshake) and not self.reply.started:
            raise item.cause  # the upstream may be modern, and answer this very request
        return await self.reply.whole(item.body, item.status, item.headers, item.ending), item.ending

    def continued(self, step: Step) -> None:
        """Count how a retry found its call."""
        self.live.process.metrics.continued(self.live.route.path, step)
        if self.incoming.span is not None:
            self.incoming.span.note("step", step)

    def count(self, ending: Ending) -> None:
        """Count this round, once; the replica to which the client spoke counts a forwarded one."""
        if self.is_counted:
            return
        self.is_counted = True
        if self.incoming.span is not None:
            self.incoming.span.end(ending)
        if self.incoming.peer_request is None:
            request, seconds = self.request, time.monotonic() - self.started
            path, metrics = self.live.route.path, self.live.process.metrics
            metrics.operation_finished(path, request.method, request.version, ending, seconds)


def new_round(  # noqa: PLR0913  (the fields of a round)
    incoming: Incoming,
    reply: ReplyWriter,
    live: LiveRoute,
    request: Request,
    principal: bytes,
    distrusted: str | None,
    started: float,
) -> Round:
    """Make a round; `distrusted` is a header that names the principal and must not go upstream."""
    headers = _upstream_headers(incoming, live, request, distrusted)
    return Round(incoming, reply, live, request, _pool_key(live, request, principal, headers), headers, started)


def _pool_key(live: LiveRoute, request: Request, principal: bytes, headers: Headers) -> PoolKey:
    names = live.route.forward_headers
    forwarded = tuple([(name, headers[name]) for name in names if name in headers]) if names else ()
    return PoolKey(principal, bytes(request.client_info), bytes(request.capabilities), forwarded)


def _upstream_headers(incoming: Incoming, live: LiveRoute, request: Request, distrusted: str | None) -> Headers:
    """Return the headers of this request that go upstream; all others stay here."""
    sent = for_call(live.route, incoming.headers)
    _ = sent.pop(distrusted or "", None)
    meta = request.user_meta
    for name in mcp.TRACE_KEYS:
        value = (jsonrpc.text(meta.get(name)) if meta else None) or joined(incoming.headers, name)
        if value is not None and _TRACE_VALUE.fullmatch(value):
            sent[name] = value
    if incoming.span is not None:
        # The span has the client's trace context, as far as it is valid; baggage goes upstream in any case.
        for name in _TRACE_CONTEXT:
            _ = sent.pop(name, None)
        sent.update(incoming.span.headers())
    sent.update(own_headers(live.route))
    return sent


def begin_span(traces: Traces, incoming: Incoming, live: LiveRoute, request: Request) -> Span:
    """Begin the span of a round; a forwarded round continues the span of the replica that forwarded it."""
    if incoming.peer_request is not None:
        return traces.elsewhere(incoming.peer_request.trace)
    about = Operation(request.method, request.target, request.version, live.route.path)
    meta = {name: text for name, raw in request.user_meta.items() if (text := jsonrpc.text(raw)) is not None}
    headers = {name.lower(): joined(incoming.headers, name) or "" for name in incoming.headers}
    rpc_id = (jsonrpc.text(request.id) or bytes(request.id).decode()).encode("utf-8", "replace").decode()
    carried = _bounded(traces.carried(meta)), _bounded(traces.carried(headers))
    return traces.round(about, ClientRequest(rpc_id, incoming.request_id, incoming.remote, *carried))


@contextmanager
def span_ended_on_error(span: Span | None) -> Iterator[None]:
    """End a span whose request is refused, or left, before its round begins."""
    try:
        yield
    except BaseException as exc:
        if span is not None:
            span.end(ending_of(exc) if isinstance(exc, GatewayError) else LEFT)
        raise


def _bounded(values: Mapping[str, str]) -> dict[str, str]:
    """Drop the values that a propagator should not have to parse."""
    return {name: value for name, value in values.items() if _TRACE_VALUE.fullmatch(value)}
