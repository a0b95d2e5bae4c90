"""One request that passes through, from its check until the end of its reply."""

import asyncio
from contextlib import nullcontext
from typing import Self

from msgspec import Raw
from yarl import URL

from gateway import world
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ConnectTimedOut, RequestFailed
from gateway.http_client.request_head import HeaderLines
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallLost, DownstreamError, Stopping, Unreachable, UpstreamError
from gateway.routes.live_route import LiveRoute
from gateway.runtime.call_bytes import Weight
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.telemetry import Passed, TrafficEra


class UpstreamCut(ConnectionResetError):
    """The upstream broke off a reply that had begun."""


class Passage:
    """One request with its reply; a context manager that counts it with its outcome, and closes the reply.

    It may open a stream that stays open for hours without belonging to a call: a standalone GET stream (legacy) or a
    subscription (modern). A drain ends such a stream instead of waiting for it.
    """

    def __init__(self, incoming: Incoming, reply: HttpReply, live: LiveRoute, era: TrafficEra) -> None:
        assert live.upstream.era is not None, "nothing passes to a child process"
        self.incoming = incoming
        self.reply = reply
        self.live = live
        self.probe = live.upstream.era
        self.era = era
        self.outcome = Passed.LEFT
        self.is_long_lived = (
            incoming.method == "GET"
            if era is TrafficEra.LEGACY
            else incoming.headers.get(mcp.METHOD_HEADER) == mcp.LISTEN
        )
        self.is_ended = False
        """Whether `end` was called."""
        self._said: AwaitedReply | None = None
        """The upstream's reply, once its head is here."""
        self._is_relayed = False
        """Whether it is on its way to the client."""

    def __enter__(self) -> Self:
        self._weight = self._weigh()
        self._started = world.monotonic()
        if self.is_long_lived:
            self.live.upstream.streams[self] = None
            self.live.process.draining.leave_out(1)
        return self

    def _weigh(self) -> Weight:
        """Weigh the request; raises Busy. What answers a call, or is about one, always fits."""
        caller, body = self.incoming.caller, self.incoming.body
        assert caller is not None, "the caller is identified before"
        calls = self.live.process.calls
        try:
            return calls.take(caller.principal, len(body))
        except Busy:
            if self.era is TrafficEra.MODERN or _may_call(body):
                raise
            return calls.take(caller.principal, len(body), is_continued=True)

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if self._said is not None:
            self._said.close()
        self._weight.release()
        metrics, path = self.live.process.metrics, self.live.route.path
        if isinstance(exc, DownstreamError):
            self.outcome = Passed.REFUSED
        elif isinstance(exc, UpstreamError):
            self.outcome = Passed.UNREACHABLE
            metrics.upstream_failed(path, exc.reason)
            if exc.status < 500:
                exc.status = 502  # for a client without a session; `status_in_session` for one that has one
        elif isinstance(exc, UpstreamCut):
            self.outcome = Passed.ENDED if self.is_ended else Passed.CUT
        seconds = None if self.is_long_lived else world.monotonic() - self._started
        metrics.passed(path, self.era, self.outcome, seconds)
        if self.is_long_lived:
            _ = self.live.upstream.streams.pop(self, None)
            self.live.process.draining.leave_out(-1)

    async def open(self, target: URL | None, headers: HeaderLines) -> AwaitedReply:
        """Send the request to `target`, else to the endpoint, and follow one redirect within the endpoint's origin.

        Returns when the reply's head is here; raises Unreachable or CallLost, and Stopping if this process ends first.
        """
        incoming, upstream, endpoint = self.incoming, self.live.upstream, self.probe.endpoint
        waits = self._waits()
        try:
            with CoarseTimeout(self.live.deadlines.idle if waits else upstream.client.answering):
                for _ in range(2):
                    url = target or _with_query(endpoint.url, incoming.url.raw_query_string)
                    reply = await upstream.client.send(incoming.method, url, headers, incoming.body, is_lenient=True)
                    if reply.head.status not in REDIRECTS:
                        upstream.health.ok()
                        self._said = reply
                        return reply
                    reply.close()
                    location = reply.head.text(b"location")
                    if target is None:
                        endpoint.follow(location)
                    else:
                        target = endpoint.within(location or "", target)
                        if target is None:
                            raise Unreachable(f"{endpoint.where} redirects messages to another origin")
        except TimeoutError as exc:
            timeouts = self.live.config.timeouts
            seconds = timeouts.idle_seconds if waits else timeouts.answer_seconds
            error = CallLost(
                f"{endpoint.where} did not begin its answer in {seconds:g} s; the request may have had effects"
            )
            error.status = 504
            raise error from exc
        except RequestFailed as exc:
            failure = exc.mapped(endpoint.where)
            if isinstance(exc, ConnectTimedOut):
                failure.status = 504
            raise failure from exc
        except asyncio.CancelledError as exc:
            if self.is_long_lived or not self.reply.is_awaited:
                raise
            self.outcome = Passed.ENDED
            raise Stopping(
                f"{endpoint.where} had not answered when the gateway shut down; the request may have had effects"
            ) from exc
        raise Unreachable(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")

    def _waits(self) -> bool:
        """Whether the head of the reply may take timeouts.idle_seconds instead of timeouts.answer_seconds.

        Some servers send a JSON reply when the tool is done; a few send the head of a stream with its first event. A
        GET without a session never gets an event: a client that only tests for a stream must not wait for one.
        """
        method = self.incoming.method
        return method == "POST" or (method == "GET" and mcp.SESSION_ID in self.incoming.headers)

    async def read(self, reply: AwaitedReply, limit: int | None = None) -> bytes:
        """The whole body of a reply, or nothing if it is larger than `limit` bytes; raises UpstreamError."""
        where = self.probe.endpoint.where
        try:
            with CoarseTimeout(self.live.deadlines.idle):
                if limit is not None:
                    return await reply.read_at_most(limit) or b""
                return b"".join([part async for part in reply])
        except TimeoutError as exc:
            raise CallLost(f"{where} did not complete its reply within timeouts.idle_seconds") from exc
        except RequestFailed as exc:
            raise exc.mapped(where) from exc

    def begin(self) -> None:
        """Relay the rest of the reply as it comes; the request is not sent again, so its body is dropped."""
        self.incoming.drop_body(None)
        self._weight.release()
        self._is_relayed = True
        if self.is_ended:
            self._cut()

    def end(self) -> None:
        """End a long-lived stream: the upstream's reply is cut off."""
        self.is_ended = True
        if self._is_relayed:
            self._cut()

    def _cut(self) -> None:
        if self._said is not None:
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
        reply.pause_reading()
    return part


def _may_call(body: bytes) -> bool:
    """Whether a body may be more than one notification, or one response to a question of the server."""
    try:
        message = jsonrpc.message(body)
    except ValueError:
        return True
    return message.method is not None and isinstance(message.id, Raw)


def _with_query(url: URL, query: str) -> URL:
    """The upstream's URL with the client's query appended to its own."""
    if not query:
        return url
    own = url.raw_query_string
    return URL(f"{url.with_query(None)}?{own}&{query}" if own else f"{url}?{query}", encoded=True)
