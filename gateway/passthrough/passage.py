"""One request that passes to a server, from its check until the end of its reply."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Final, Self

from msgspec import Raw
from multidict import CIMultiDict
from yarl import URL

from gateway import world
from gateway.http.server.response import BODILESS, Response, StreamResponse, WholeResponse
from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_headers import is_valid_value, passed_back
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ConnectTimedOut, RequestFailed
from gateway.legacy_front.arrival import Arrival
from gateway.passthrough import header_rules, sse_endpoint
from gateway.passthrough.sse_endpoint import FirstEventRewriter
from gateway.passthrough.whole_reply import FamiliarResponse, start_of
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    Busy,
    CallLost,
    CallSilent,
    DownstreamError,
    Redirected,
    Stopping,
    Unheeded,
    UpstreamError,
)
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.pieces import Turn, cut
from gateway.telemetry import COMPLETE, Passed, TrafficEra
from gateway.telemetry.log import Event
from gateway.telemetry.upstream_health import log_failure

_WHOLE_BYTES: Final = 65_536
"""The largest body that goes to the client in one write, if it is here when the reply begins."""
REFUSAL_BYTES: Final = 65_536
"""The largest reply that is read whole, to see whether it shows the upstream to be of the other era."""


class UpstreamCut(ConnectionResetError):
    """The upstream broke off a reply that had begun."""


class Passage(ABC):
    """A request on its way to a server that reads it as it is; a context manager that weighs and counts it.

    It may open a stream that stays open for hours without belonging to a call: a standalone GET stream (legacy) or a
    subscription (modern). A drain ends such a stream instead of waiting for it.
    """

    copies = 1
    """How often the body is kept."""

    def __init__(self, at: Arrival, era: TrafficEra, *, is_long_lived: bool) -> None:
        self.incoming = at.incoming
        self.live = at.live
        self.caller = at.caller
        self.era = era
        self.is_long_lived = is_long_lived
        self.outcome = Passed.LEFT

    def __enter__(self) -> Self:
        """Weigh the request; raises Busy."""
        caller, calls, size = self.caller, self.live.process.calls, self.copies * len(self.incoming.body)
        try:
            self._weight = calls.take(caller.principal, size)
        except Busy:
            if self.era is TrafficEra.MODERN or _may_call(self.incoming.body):
                raise
            # What answers a call, or is about one, always fits.
            self._weight = calls.take(caller.principal, size, is_continued=True)
        if self.is_long_lived:
            self.live.upstream.streams[self] = None
            self.live.process.draining.leave_out(1)
        else:
            self.live.process.passing[self.incoming] = world.monotonic()
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        self._weight.release()
        if isinstance(exc, DownstreamError):
            self.outcome = Passed.REFUSED
        elif isinstance(exc, UpstreamError):
            self.outcome = Passed.UNREACHABLE
            self.live.upstream.health.count(exc)
        metrics, path = self.live.process.metrics, self.live.route.path
        metrics.passed[path, self.era, self.outcome].inc()
        if self.is_long_lived:
            _ = self.live.upstream.streams.pop(self, None)
            self.live.process.draining.leave_out(-1)
        else:
            began = self.live.process.passing.pop(self.incoming)
            metrics.passing[path, self.era].observe(world.monotonic() - began)

    @abstractmethod
    def end(self) -> None:
        """See `Endable`."""


class HttpPassage(Passage):
    """A request with its reply over HTTP, which it closes."""

    def __init__(self, at: Arrival, era: TrafficEra) -> None:
        is_legacy, method = era is TrafficEra.LEGACY, at.incoming.headers.get(mcp.METHOD_HEADER)
        is_long_lived = at.incoming.method == "GET" if is_legacy else method == mcp.LISTEN
        super().__init__(at, era, is_long_lived=is_long_lived)
        assert at.live.upstream.era is not None, "nothing passes to a child process"
        self.reply = at.http_reply()
        self.probe = at.live.upstream.era
        self.is_ended = False
        """Whether `end` was called."""
        self._said: AwaitedReply | None = None
        """The upstream's reply, once its head is here."""
        self._is_relayed = False
        """Whether it is on its way to the client."""

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if self._said is not None:
            self._said.close()
        if isinstance(exc, UpstreamCut):
            self.outcome = Passed.ENDED if self.is_ended else Passed.CUT
            if self.outcome is Passed.CUT and self.incoming.method == "POST" and not self.is_long_lived:
                self._lost(CallLost.by(self.probe.endpoint.where, "did not complete its reply"))
        super().__exit__(kind, exc, traceback)
        if isinstance(exc, UpstreamError) and exc.status < 500:
            exc.status = 502  # for a client without a session; `status_in_session` for one that has one

    def _lost(self, error: CallLost) -> None:
        """Tell the operator: the client cannot be told, since its reply has begun."""
        upstream, route = self.live.upstream, self.live.route
        upstream.note(error)
        upstream.health.count(error)
        log_failure(Event.UPSTREAM_FAILED, error, route.path, route.upstream.name, self.incoming.about)

    async def open(self) -> AwaitedReply:
        """Send the request to its address, else to the endpoint; follow one redirect within the endpoint's origin.

        Returns when the reply's head is here; raises Unreachable or CallLost, and Stopping if this process ends first.
        Raises InvalidRequest if the request cannot be sent.
        """
        incoming, upstream, endpoint = self.incoming, self.live.upstream, self.probe.endpoint
        target = sse_endpoint.target(self.live.process.addresses.value, incoming, endpoint)
        headers = header_rules.lines(incoming, self.live)
        # Some servers send a JSON reply when the tool is done; a few send the head of a stream with its first event. A
        # GET without a session never gets an event: a client that only tests for a stream must not wait for one.
        waits = incoming.method == "POST" or (incoming.method == "GET" and mcp.SESSION_ID in incoming.headers)
        try:
            with CoarseTimeout(self.live.deadlines.idle if waits else upstream.client.answering):
                for _ in range(2):
                    url = target or _with_query(endpoint.url, incoming.url.raw_query_string)
                    # A header that HTTP forbids is left out (`passed_back`), and does not cost the reply.
                    reply = await upstream.client.send(incoming.method, url, headers, incoming.body)
                    if reply.head.status not in REDIRECTS:
                        upstream.health.ok()
                        self._said = reply
                        return reply
                    reply.close()  # without its body, which may never end
                    location = reply.head.text(b"location")
                    if target is None:
                        endpoint.follow(location)
                    else:
                        target = endpoint.within(location or "", target)
                        if target is None:
                            raise Redirected(f"{endpoint.where} redirects messages to another origin")
        except TimeoutError as exc:
            timeouts = self.live.config.timeouts
            seconds = timeouts.idle_seconds if waits else timeouts.answer_seconds
            lost = CallSilent if waits else Unheeded
            raise lost(
                f"{endpoint.where} did not begin its answer in {seconds:g} s; the request may have had effects",
                status=504,
            ) from exc
        except RequestFailed as exc:
            failure = exc.mapped(endpoint.where)
            if isinstance(exc, ConnectTimedOut):
                failure.status = 504
            raise failure from exc
        except asyncio.CancelledError as exc:
            if self.is_long_lived or self.reply.http.wire.is_lost:  # the client has left, or opens another stream
                raise
            self.outcome = Passed.ENDED
            raise Stopping(
                f"{endpoint.where} had not answered when the gateway shut down; the request may have had effects"
            ) from exc
        raise Redirected(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")

    async def refusal(self, said: AwaitedReply) -> WholeResponse:
        """The reply as a whole, without its body if that is large; raises UpstreamError."""
        where = self.probe.endpoint.where
        try:
            with CoarseTimeout(self.live.deadlines.idle):
                body = await said.read_at_most(REFUSAL_BYTES) or b""
        except TimeoutError as exc:
            raise CallSilent(f"{where} did not complete its reply within timeouts.idle_seconds") from exc
        except RequestFailed as exc:
            raise exc.mapped(where) from exc
        self.outcome = Passed.REFUSED
        return WholeResponse(body, said.status, self._headers(said))

    async def relay(self, said: AwaitedReply) -> Response:
        """Send the reply to the client: whole if all of it is here, else as it arrives."""
        head = said.head
        status, is_sse = head.status, head.content_type == "text/event-stream"
        rewriter: FirstEventRewriter | None = None
        if is_sse and self.era is TrafficEra.LEGACY and sse_endpoint.may_begin(self.incoming):
            rewriter = FirstEventRewriter(self.live.process.addresses.value, self.incoming, self.probe.endpoint)
        asked = self.reply.http.head
        may_be_whole = rewriter is None and asked.is_1_1 and asked.method != "HEAD" and status not in BODILESS
        body = said.whole_at_most(_WHOLE_BYTES) if may_be_whole else None
        response: Response
        if body is not None and self.reply.http.page is None and (start := start_of(head)) is not None:
            response = FamiliarResponse(body, status, start)
        else:
            headers = self._headers(said)
            if is_sse:
                headers.setdefault("X-Accel-Buffering", "no")  # nginx in front would hold events back
            reason = head.reason if head.reason and is_valid_value(head.reason) else None
            if body is not None:
                response = WholeResponse(body, status, headers, reason)
            else:
                response = StreamResponse(status, headers, reason)
        response.closes = self.live.process.draining.has_begun
        if isinstance(response, StreamResponse):
            self.incoming.note()
            self.incoming.drop_body(None)  # the request is not sent again
            self._weight.release()
            self._is_relayed = True
            if self.is_ended:
                said.cut()
            # An event stream may wait for people; any other body is complete when it begins.
            await self._stream(said, response, None if is_sse else self.live.deadlines.idle, rewriter)
        if self.outcome is not Passed.ENDED:
            self.outcome = Passed.ANSWERED if status < 400 else Passed.REFUSED if status < 500 else Passed.FAILED
        return response

    async def _stream(
        self,
        said: AwaitedReply,
        stream: StreamResponse,
        deadline: CoarseTimer | None,
        first_event: FirstEventRewriter | None,
    ) -> None:
        """Write the reply as it arrives; a reply that the upstream cuts short has no end here either."""
        reply, turn = self.reply, Turn()
        reply.begin(stream)
        try:
            while (part := await next_part(said, deadline)) is not None:
                if first_event is None or first_event.is_done:
                    await stream.write(part)
                    continue
                for piece in cut(part):
                    if passed := first_event.feed(piece):
                        await stream.write(passed)
                    await turn.give_way()
            if first_event is not None and (rest := first_event.rest()):
                await stream.write(rest)
        except UpstreamCut:
            # A standalone GET stream may end at any time; a reply without its final message must not look complete.
            if not self.is_ended or self.incoming.method != "GET":
                reply.http.wire.end()  # without its end; what was written before is still sent
                raise
            stream.closes = True  # the client's next request finds another replica
            self.outcome = Passed.ENDED
        except ConnectionError:
            raise  # the client has disconnected
        except Exception:
            reply.http.wire.end()
            raise
        _ = await reply.end(COMPLETE)

    def _headers(self, said: AwaitedReply) -> CIMultiDict[str]:
        """The headers of the reply that go to the client."""
        headers = passed_back(said.head)
        self.reply.rewrite_challenges(headers)
        return headers

    def end(self) -> None:
        """End a long-lived stream: the upstream's reply is cut off."""
        self.is_ended = True
        if self._is_relayed and self._said is not None:
            self._said.cut()


async def next_part(reply: AwaitedReply, deadline: CoarseTimer | None) -> bytes | None:
    """What has come of the body since the last part, None at its end; raises UpstreamCut.

    Until the next call, nothing more is read from the upstream: what a slow client does not take stays there.
    """
    try:
        with nullcontext() if deadline is None else CoarseTimeout(deadline):
            part = await anext(reply, None)
    except (TimeoutError, RequestFailed) as exc:
        raise UpstreamCut("the upstream broke off its reply") from exc
    if part is not None:
        reply.pending.pause_reading()
    return part


def _may_call(body: bytes) -> bool:
    """Whether a body may be more than one notification, or one response to a question of the server."""
    try:
        message = jsonrpc.message(body)
    except ValueError:
        return True  # such as a batch, which may have calls in it
    return message.method is not None and isinstance(message.id, Raw)


def _with_query(url: URL, query: str) -> URL:
    """The upstream's URL with the client's query appended to its own."""
    if not query:
        return url
    own = url.raw_query_string
    return URL(f"{url.with_query(None)}?{own}&{query}" if own else f"{url}?{query}", encoded=True)
