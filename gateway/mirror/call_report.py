"""Reports how one mirrored call goes, in metrics or in the log."""

from gateway import world
from gateway.bridge.call_context import Spoken
from gateway.exchange import commands as do
from gateway.http.incoming import Incoming
from gateway.http.upstream_headers import own_headers
from gateway.mirror.call_rounds import Rounds
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.telemetry import ASKED, COMPLETE, Ending, Operation, Outcome, Span
from gateway.upstream.channel import NO_HEADERS, Headers


class CallReport:
    """Collects how one call goes."""

    def __init__(self, rounds: Rounds, incoming: Incoming | None) -> None:
        """`incoming` is the request of the client; None if something else reports the call, or nothing does."""
        self._rounds, self._live, self._request = rounds, rounds.live, rounds.request
        self._started = world.monotonic()
        self._asked_at: float | None = None
        self._thought = 0.0
        """Seconds in which the client was asked, and nothing was upstream."""
        self._is_over = incoming is None
        self._span: Span | None = None
        self._round: Span | None = None
        self.request_id = "" if incoming is None else incoming.request_id
        """The id of the HTTP request that waits, or has brought the call here."""
        self.principal = b"" if incoming is None or incoming.caller is None else incoming.caller.principal
        if incoming is None:
            return
        request, path, traces = self._request, self._live.route.path, self._live.process.traces
        self._live.process.metrics.mirrored_calls[path,].inc(1)
        if traces is not None:  # each round is a span below that of the call
            about = Operation(request.method, request.target, rounds.profile.version, path)
            meta = jsonrpc.members(jsonrpc.members(request.params).get("_meta"))
            self._span = incoming.begin_span(traces, about, request.id, meta)

    def asked(self) -> None:
        """The client is asked, or asked again."""
        self._end_round(ASKED)
        self._asked_at = world.monotonic()

    def count(self, count: do.Count) -> None:
        """Count a question."""
        if not self._is_over:
            self._live.process.metrics.nested_requests[self._live.route.path, count.method, count.outcome].inc()

    def sending(self) -> Headers:
        """A round goes upstream; returns its trace context."""
        self._end_round(ASKED)  # it asked for nothing but to be called again
        if self._span is None:
            return NO_HEADERS
        request, route = self._request, self._live.route
        about = Operation(request.method, request.target, mcp.MODERN, route.path)
        self._round = self._span.call(about, route.upstream.url)
        is_set = any(name.lower() == "traceparent" for name in own_headers(route))
        return NO_HEADERS if is_set else self._round.headers()

    def _end_round(self, ending: Ending) -> None:
        if self._asked_at is not None:
            self._thought += world.monotonic() - self._asked_at
            self._asked_at = None
        if self._round is not None:
            self._round.end(ending)

    @property
    def spoken(self) -> Spoken:
        """The call, as the log speaks of it."""
        about = {"request_id": self.request_id, "exchange_id": self._rounds.exchange}
        return Spoken(self._live, self._request.method, self._request.target, self.principal, about)

    def finished(self, ending: Ending = COMPLETE, error: GatewayError | None = None, cause: str = "") -> None:
        """The call is over, with the server's response unless it is said otherwise; what comes later is not told."""
        if self._is_over:
            return
        if error is not None:
            self._live.upstream.note(error)
            ending = Ending(Outcome.ERROR, str(error.code))
        self._is_over = True
        self._end_round(ending)
        if self._span is not None:
            self._span.end(ending)
        metrics, path, seconds = self._live.process.metrics, self._live.route.path, world.monotonic() - self._started
        metrics.mirrored_calls[path,].inc(-1)
        version, rounds = self._rounds.profile.version, self._rounds.progress.round + 1
        metrics.operations[path, self._request.method, version, *ending].observe(seconds - self._thought)
        if rounds == 1 and ending is COMPLETE:  # as in the bridge, such calls are in the metrics alone
            return
        cause = cause if error is None else error.message
        self.spoken.finished(rounds, ending.outcome, self._started, error, cause)
