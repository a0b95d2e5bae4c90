"""HTTP+SSE of 2024-11-05 towards one legacy server.

Source: specification 2024-11-05 basic/transports (HTTP with SSE). GET opens the stream, whose first event `endpoint`
names the address for messages. The server answers a POST with 202 and sends its messages on the stream. The stream is
the session: when it ends, so does the session, and no call can be resumed. Measured: a POST to a lost session is
answered with 404 (Python SDK), with 400, or never (server-everything), so every POST has a deadline.
"""

import asyncio
from functools import partial
from typing import Final

from msgspec import Raw
from yarl import URL  # noqa: TC002  (one import style; it costs nothing here)

from gateway.config import redacted_url
from gateway.http_client.errors import ListenerFailed, RequestFailed
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, SessionLost, Unheeded, Unreachable, UpstreamError, clean
from gateway.upstream.channel import Answer, Headers, Hearer, SideListener, new_ping
from gateway.upstream.http.http_errors import (
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    initialize_result,
    read_refusal,
)
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import UNHEARD, Acceptance, ReplyReader, StreamReply, redirected
from gateway.upstream.one_stream import Answered, OneStreamChannel, settle

ENDPOINT_SECONDS: Final = 4.0
"""How long a stream may take to name its endpoint: less than half of timeouts.handshake_seconds."""
_ENDPOINT_BYTES: Final = 4096
_POST_REDIRECTS: Final = (307, 308)
"""Redirects after which the same POST is sent again. The first one was not processed."""
_FAILURES: Final = (RequestFailed, UpstreamError, sse.EventTooLarge)
_UNREAD: Final = frozenset(range(300, 500)) - {401, 403}
"""Statuses of a GET whose body does not matter."""


class _SessionStream(StreamReply, kw_only=True):
    """The stream of a session."""

    channel: "HttpSseChannel"

    def take(self, event: sse.Event) -> None:
        """The first event names the address for messages."""
        self.channel.take(event)


class HttpSseChannel(OneStreamChannel):
    """One session over HTTP+SSE."""

    def __init__(self, upstream: HttpUpstream) -> None:
        super().__init__()
        self._upstream, self._endpoint = upstream, upstream.endpoint
        self._fixed: dict[str, str] = {"Accept": "application/json", "Content-Type": "application/json"}
        self._stream: _SessionStream | None = None
        """The reply to the GET, while it is open. No task reads it, because it is silent most of the time."""
        self._messages: URL | None = None
        """The address for messages, while the stream is open."""
        self._is_ready = False
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Open the stream, wait for its endpoint, send `initialize`. Also raises WrongTransport."""
        where, seconds = self._endpoint.where, ENDPOINT_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._open_stream(headers)
        except BaseException as exc:
            stream = self._stream
            self._end(CallLost(f"{where} did not open a session"))
            if not isinstance(exc, TimeoutError):
                raise
            if stream is None or not stream.is_stream:
                raise Unreachable(f"{where} did not answer GET within {seconds:g} s") from exc
            raise WrongTransport(
                f"{where} did not name an endpoint for messages within {seconds:g} s: it is not HTTP+SSE"
            ) from exc
        answer = Answer(message)
        try:
            refused = await self.request(message, headers, answer)
        except SessionLost as exc:
            raise Unreachable(
                f"{where} opened a stream, but the address that it named for messages does not know the session; "
                "several replicas of an HTTP+SSE server need a sticky load balancer"
            ) from exc
        return initialize_result(refused if answer.found is None else answer.found, self._endpoint)

    async def _open_stream(self, headers: Headers) -> None:
        """GET the stream, following one redirect. Raises WrongTransport, Unreachable, CallLost or Refused."""
        endpoint, client = self._endpoint, self._upstream.client
        wanted = {**headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}

        async def send() -> ReplyReader:
            stream = _SessionStream(self, client.limits.event_bytes, self._upstream, unread=_UNREAD, channel=self)
            # Each GET opens a session, so it is not repeated, and needs a connection that is surely alive.
            pending = client.begin("GET", endpoint.url, wanted, b"", stream, sending="fresh")
            self._stream = stream
            return await stream.over(pending)

        stream = await redirected(endpoint, send)
        if self._messages is not None:
            return
        if stream.is_stream or stream.is_done or stream.failure is not None:
            raise self._loss(stream.failure)
        assert stream.head is not None, "it is a reply"
        if stream.status >= 400 and stream.status not in _UNREAD:
            _ = read_refusal(stream, endpoint)
        what = f"HTTP {stream.status} {clean(stream.head.content_type or 'application/octet-stream', 80)}"
        raise WrongTransport(f"{endpoint.where} answered GET with {what}, which is not an event stream")

    @property
    def hears_side(self) -> bool:
        """Whether the stream is open, which is also the side stream."""
        return self._side is not None and self._messages is not None

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:  # noqa: ARG002  (the stream is open)
        """Hand over messages that belong to no request; their stream is open already."""
        self._fixed[mcp.PROTOCOL_VERSION] = version
        self._side = listener
        if not self.hears_side:
            listener.side_closed(was_open=True)

    def adopt(self, session_id: str, version: str) -> None:
        """Do nothing: the session is a stream of another process, and `resume` fails."""

    # -- the stream ---------------------------------------------------------------------------------------------

    def take(self, event: sse.Event) -> None:
        """Take the address for messages from the first event, and hear the others.

        Raises WrongTransport or Unreachable.
        """
        if self._messages is not None:
            if event.data and event.event == "message":
                self.hear(event.data)
            return
        where = self._endpoint.where
        if event.event != "endpoint":
            raise WrongTransport(f"{where} opened a stream whose first event names no endpoint: it is not HTTP+SSE")
        if len(event.data) <= _ENDPOINT_BYTES:
            self._messages = self._endpoint.within(event.data.decode(errors="replace"))
        if self._messages is None:
            said = event.data[:200].decode(errors="replace")
            # Without secrets, such as a session id in its query.
            named = redacted_url(said) if "://" in said else said.partition("?")[0].partition("#")[0]
            raise Unreachable(
                f"{where} wants messages sent to {named!r}, which is not at the origin of "
                "upstream.url: credentials are not sent there; set upstream.url to the server's own address, or have "
                "the server name a path"
            )
        if self._stream is not None:
            self._stream.wake()  # `_open_stream` waits for the address, not for the end of the stream

    def over(self, _: object, failure: Exception | None, /) -> None:
        """The stream has ended, or there is none."""
        if self._messages is None:
            return  # `initialize` waits for it
        self._end(self._loss(failure))
        if failure is not None and not isinstance(failure, _FAILURES):
            raise failure  # a bug

    def _loss(self, failure: Exception | None) -> UpstreamError:
        where = self._endpoint.where
        if failure is None:
            return CallLost(f"{where} ended the stream of its session")
        if isinstance(failure, sse.EventTooLarge):
            return CallLost(f"{where} sent an event larger than limits.event_bytes")
        if isinstance(failure, UpstreamError):
            return failure
        return (failure if isinstance(failure, RequestFailed) else ListenerFailed()).mapped(where)

    def _end(self, ended: UpstreamError) -> None:
        """Close the stream, fail the request in flight and report the loss."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        self._messages = None
        if self._call is not None:
            cause = ended.message.partition(";")[0]
            settle(self._call[1], CallLost(f"{cause} under a call; the call may have had effects"))
        if self._side is not None:
            self._side.side_closed(was_open=True)

    # -- messages -----------------------------------------------------------------------------------------------

    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and wait until its answer comes on the stream."""
        self._check_stream()
        with self._awaited(hearer) as answered:
            try:
                refused = await self._post_in_session(message, headers, answered, is_repeatable=is_repeatable)
            except UpstreamError as exc:
                # Whatever happened to the POST, the server accepted a request that it answered. If the stream ended,
                # the call may have run, so the loss of the stream is reported and not SessionLost.
                is_over = answered.done() and (answered.exception() is None or isinstance(exc, SessionLost | CallLost))
                if not is_over:
                    raise
                refused = None
            if refused is not None and not answered.done():
                return refused
            message = b""  # it is not sent again, and a call that waits should not keep it
            await answered
        return None

    def _check_stream(self) -> None:
        """Raise SessionLost if the stream, which is the session, has ended."""
        if self._messages is None:
            raise SessionLost(f"{self._endpoint.where} ended the stream of its session")

    async def resume(self, *_: object, **__: object) -> None:
        """Raise CallGone, because a call ends with its stream."""
        why = "speaks HTTP+SSE, where no call can be picked up by another process"
        raise CallGone.by(self._endpoint.where, why)

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        self._check_stream()
        refused = await self._post_in_session(message, headers)
        if refused is not None:
            said = refused.message if isinstance(refused, jsonrpc.Error) else "it answered with a result"
            raise CallLost(f"{self._endpoint.where} refused a message: {self._endpoint.quoted(said)}")
        self._is_ready = True

    async def ping(self, headers: Headers) -> None:
        """POST a `ping`. Its acceptance proves the session, so its answer is dropped."""
        self._check_stream()
        refused = await self._post(new_ping(), headers)
        if refused is not None:
            check_ping_answer(refused, self._endpoint)

    async def _post_in_session(
        self, message: bytes, headers: Headers, answered: Answered | None = None, *, is_repeatable: bool = True
    ) -> jsonrpc.Error | Raw | None:
        """POST as `_post` does; raises SessionLost only if a ping proves that the session is gone."""
        try:
            return await self._post(message, headers, answered, is_repeatable=is_repeatable)
        except SuspectedSessionLoss as exc:
            if not self._is_ready:
                raise
            self.forgotten = await exc.is_confirmed(self.ping(headers))
            return exc.conclude(is_gone=self.forgotten)

    async def _post(
        self, message: bytes, headers: Headers, answered: Answered | None = None, *, is_repeatable: bool = True
    ) -> jsonrpc.Error | Raw | None:
        """POST a message, following one redirect within the origin, until it is accepted or its request is over.

        An answer, a notification or a ping may come twice.
        """
        where, target, client = self._endpoint.where, self._messages, self._upstream.client
        try:
            async with asyncio.timeout(client.timeouts.answer_seconds):
                for _ in range(2):
                    if target is None:
                        break
                    reply = Acceptance(UNHEARD, 0, self._upstream, unread=_POST_REDIRECTS)
                    own = {**headers, **self._fixed}
                    pending = client.begin(
                        "POST", target, own, message, reply, sending="repeatable" if is_repeatable else "usual"
                    )
                    if answered is not None:
                        answered.add_done_callback(partial(_wait_no_more, reply))
                    _ = await reply.over(pending)
                    if reply.is_done:
                        if self._messages is not None:  # the stream may have ended meanwhile
                            self._messages = target
                        if self._call is not None and self._call[1] is answered and not answered.done():
                            self._call[0].accepted()
                        return None
                    if reply.status not in _POST_REDIRECTS:
                        return read_refusal(reply, self._endpoint, message)
                    assert reply.head is not None, "it has a status"
                    target = self._endpoint.within(reply.head.text(b"location") or "", target)
        except TimeoutError as exc:
            raise Unheeded.by(where, "did not accept a message within timeouts.answer_seconds") from exc
        raise Unreachable(f"{where} redirects messages in a circle or to another origin; have it name their address")

    async def close(self, *, end_session: bool) -> None:  # noqa: ARG002  (the stream is the session)
        """Close the stream, and the session with it."""
        self._side = None  # the end of the session is no news
        self._end(CallLost("The gateway closed the stream of the session"))


def _wait_no_more(reply: ReplyReader, _: Answered) -> None:
    """The request of a POST is over, so the outcome of the POST matters little."""
    reply.answered()
