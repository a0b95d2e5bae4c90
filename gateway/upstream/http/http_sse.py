"""HTTP+SSE of 2024-11-05 towards one legacy server.

Source: specification 2024-11-05 basic/transports (HTTP with SSE). GET opens the stream, whose first event `endpoint`
names the address for messages. The server answers a POST with 202 and sends its messages on the stream. The stream is
the session: when it ends, so does the session, and no call can be resumed. Measured: a POST to a lost session is
answered with 404 (Python SDK), with 400, or never (server-everything), so every POST has a deadline.
"""

import asyncio
from collections import deque
from typing import Final

from msgspec import Raw
from yarl import URL

from gateway.config import redacted_url
from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ListenerFailed, RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, GatewayError, SessionLost, Unreachable, UpstreamError, clean
from gateway.runtime.throttle import Arrival  # noqa: TC001  (one import style; it costs nothing here)
from gateway.upstream.channel import Channel, Headers, Receive, SideListener
from gateway.upstream.http.http_errors import (
    PING_PREFIX,
    InitializeAnswer,
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    ping_id,
    read_refusal,
)
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.stream_timeouts import StreamTimes

_ENDPOINT_BYTES: Final = 4096
_EARLY_KEPT: Final = 16
_PINGS_KEPT: Final = 64
_EARLY_BYTES: Final = 65_536
_POST_REDIRECTS: Final = (307, 308)
"""Redirects after which the same POST is sent again. The first one was not processed."""


class _Waiting:
    """A request whose answer is expected on the stream."""

    def __init__(self, receive: Receive, times: StreamTimes, *, is_repeatable: bool) -> None:
        self.receive, self.is_repeatable = receive, is_repeatable
        self._late_post_seconds = times.late_post_seconds
        self.over: asyncio.Future[GatewayError | ValueError | None] = asyncio.get_running_loop().create_future()
        """Done with None when it is answered, or with the reason why it will not be."""
        self.posting: asyncio.Timeout | None = None
        """The deadline of its POST, while that is in flight."""

    def end(self, error: GatewayError | ValueError | None) -> None:
        """Complete the request, and shorten the deadline of its POST, whose response matters little now."""
        if self.over.done():
            return
        self.over.set_result(error)
        if self.posting is not None and not self.posting.expired():
            now = asyncio.get_running_loop().time()
            self.posting.reschedule(now if error is not None else now + self._late_post_seconds)


class HttpSseChannel(Channel):
    """One session over HTTP+SSE."""

    def __init__(self, upstream: HttpUpstream) -> None:
        self._client, self._endpoint, _, self._times = upstream
        self._fixed: dict[str, str] = {"Accept": "application/json", "Content-Type": "application/json"}
        self._stream: PendingRequest | None = None
        """The GET, while it is open. No task reads its reply, which is silent most of the time."""
        self._refusal: AwaitedReply | None = None
        """That reply, if it is no event stream."""
        self._arrival: Arrival | None = None
        """While a large event is arriving."""
        self._parser: sse.Parser | None = None
        """Made with the head of the stream."""
        self._named: asyncio.Future[URL | UpstreamError | AwaitedReply]
        """Done when the first event named the address for messages, or when it will not: with the reason, or with a
        reply that is no event stream."""
        self._messages: URL | None = None
        """The address for messages, while the stream is open."""
        self._waiting: _Waiting | None = None
        self._side: SideListener | None = None
        self._early: deque[bytes] = deque(maxlen=_EARLY_KEPT)
        """Messages between the answer to `initialize` and `listen`."""
        self._pings: deque[bytes] = deque(maxlen=_PINGS_KEPT)
        """Ids of pings whose answers will come on the stream and are dropped there."""
        self._is_ready = False
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""
        self._closed = False

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Open the stream, wait for its endpoint, send `initialize`. Also raises WrongTransport."""
        await self.connect(headers)
        where = self._endpoint.where
        answer = InitializeAnswer(self._endpoint, message)
        try:
            refused = await self.request(message, headers, answer.receive)
        except SessionLost as exc:
            raise Unreachable(
                f"{where} opened a stream, but the address that it named for messages does not know the session; "
                "several replicas of an HTTP+SSE server need a sticky load balancer"
            ) from exc
        return answer.result(refused)

    async def connect(self, headers: Headers) -> None:
        """Open the stream and wait for its endpoint. Raises WrongTransport, Unreachable or Refused."""
        where, seconds = self._endpoint.where, self._times.endpoint_seconds
        self._parser = None
        try:
            async with asyncio.timeout(seconds):
                await self._open_stream(headers)
        except BaseException as exc:
            self._end(CallLost(f"{where} did not open a session"))
            if not isinstance(exc, TimeoutError):
                raise
            if self._parser is None:
                raise Unreachable(f"{where} did not answer GET within {seconds:g} s") from exc
            raise WrongTransport(
                f"{where} did not name an endpoint for messages within {seconds:g} s: it is not HTTP+SSE"
            ) from exc

    async def _open_stream(self, headers: Headers) -> None:
        """GET the stream, following one redirect. Raises WrongTransport, Unreachable, CallLost or Refused."""
        endpoint = self._endpoint
        wanted = {**headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        for _ in range(2):
            self._named = asyncio.get_running_loop().create_future()
            self._refusal = None
            self._stream = self._client.begin("GET", endpoint.url, wanted, b"", self, is_fresh=True)
            found = await self._named
            if isinstance(found, UpstreamError):
                raise found
            if not isinstance(found, AwaitedReply):
                return
            try:
                if found.status in REDIRECTS:
                    endpoint.follow(found.headers.get("Location"))
                    continue
                if found.status in (401, 403) or found.status >= 500:
                    _ = await read_refusal(found, endpoint)
            except RequestFailed as exc:
                raise exc.mapped(endpoint.where) from exc
            finally:
                found.close()
            what = f"HTTP {found.status} {clean(found.content_type, 80)}"
            raise WrongTransport(f"{endpoint.where} answered GET with {what}, which is not an event stream")
        raise Unreachable(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")

    @property
    def hears_side(self) -> bool:
        """Whether the stream is open, which is also the side stream."""
        return self._side is not None and self._messages is not None

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:  # noqa: ARG002  (the stream is open)
        """Hand over messages that belong to no request; their stream is open already."""
        self._fixed[mcp.PROTOCOL_VERSION] = version
        self._side = listener
        if not self.hears_side:
            listener.side_lost()
        while self._early:
            _ = listener.hear_side(self._early.popleft())

    def adopt(self, session_id: str, version: str) -> None:
        """Do nothing: the session is a stream of another process, and `resume` fails."""

    # -- the stream ---------------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """The head is here."""
        if head.status == 200 and head.content_type == "text/event-stream":
            self._parser = sse.Parser(self._client.limits.event_bytes)
            return
        refusal = self._refusal = AwaitedReply(self._sent)
        refusal.on_head(head)
        self._tell_named(refusal)

    def _tell_named(self, found: URL | UpstreamError | AwaitedReply) -> None:
        if not self._named.done():  # else its time is over
            self._named.set_result(found)

    def _sent(self, _: ReplyListener) -> PendingRequest:
        assert self._stream is not None, "its reply is here"
        return self._stream

    def on_body(self, data: bytes, /) -> None:
        """A part of the stream is here."""
        if self._refusal is not None:
            self._refusal.on_body(data)
            return
        parser = self._parser
        assert parser is not None, "the head came first"
        try:
            for event in parser.feed(data):
                if self._messages is None:
                    self._messages = self._named_endpoint(event)
                    self._tell_named(self._messages)
                elif event.data and event.event == "message":
                    self._receive(event.data)
            if self._stream is not None:
                arriving = self._client.arriving.arriving
                self._arrival = arriving(self._arrival, parser.unfinished_bytes, self._stream)
        except UpstreamError as exc:
            self._end(exc)
        except sse.EventTooLarge:
            self._end(CallLost(f"{self._endpoint.where} sent an event larger than limits.event_bytes"))

    def on_end(self) -> None:
        """The server ended the stream."""
        if self._refusal is not None:
            self._refusal.on_end()
            return
        self._end(CallLost(f"{self._endpoint.where} ended the stream of its session"))

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The stream broke."""
        if self._refusal is not None:
            self._refusal.on_failed(failure)
            return
        self._end(failure.mapped(self._endpoint.where))
        if isinstance(failure, ListenerFailed) and failure.__cause__ is not None:
            raise failure.__cause__

    def _end(self, ended: UpstreamError) -> None:
        """Close the stream, fail the request in flight and report the loss."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.abort()
        if self._arrival is not None:
            self._arrival.release()
        self._messages = None
        self._tell_named(ended)
        if self._waiting is not None:
            cause = ended.message.partition(";")[0]
            self._waiting.end(CallLost(f"{cause} under a call; the call may have had effects"))
        if self._side is not None and not self._closed:
            self._side.side_lost()

    def _named_endpoint(self, event: sse.Event) -> URL:
        """Return the address that the first event names. Raises WrongTransport or Unreachable."""
        where = self._endpoint.where
        if event.event != "endpoint":
            raise WrongTransport(f"{where} opened a stream whose first event names no endpoint: it is not HTTP+SSE")
        target = None
        if len(event.data) <= _ENDPOINT_BYTES:
            target = self._endpoint.within(event.data.decode(errors="replace"))
        if target is None:
            raise Unreachable(
                f"{where} wants messages sent to {_without_secrets(event.data)}, which is not at the origin of "
                "upstream.url: credentials are not sent there; set upstream.url to the server's own address, or have "
                "the server name a path"
            )
        return target

    def _receive(self, data: bytes) -> None:
        """Pass one message to the request in flight, or else to the side listener."""
        if self._pings and PING_PREFIX in data and self._is_pong(data):
            return
        waiting = self._waiting
        if waiting is None:
            if self._side is not None:
                _ = self._side.hear_side(data)
            elif len(data) <= _EARLY_BYTES:
                self._early.append(data)
            return
        try:
            answered = waiting.receive(data)
        except (GatewayError, ValueError) as exc:
            answered = True
            self._waiting = None
            waiting.end(exc)
        if answered and not waiting.over.done():
            if self._waiting is waiting:  # the next request may have been sent while the answer was received
                self._waiting = None
            waiting.end(None)

    def _is_pong(self, data: bytes) -> bool:
        """Whether a message answers a ping of the gateway."""
        try:
            opened = jsonrpc.message(data)
        except ValueError:
            return False
        if opened.method is not None or not isinstance(opened.id, Raw) or bytes(opened.id) not in self._pings:
            return False
        self._pings.remove(bytes(opened.id))
        return True

    # -- messages -----------------------------------------------------------------------------------------------

    async def request(
        self, message: bytes, headers: Headers, receive: Receive, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and wait until its answer comes on the stream."""
        self._check_stream()
        waiting = self._waiting = _Waiting(receive, self._times, is_repeatable=is_repeatable)
        self.taken = False
        try:
            refused = await self._request(message, headers, waiting)
            if refused is not None:
                return refused
            message = b""  # it is not sent again, and a call that waits should not keep it
            error = await waiting.over
            if error is not None:
                raise error
            return None
        finally:
            if self._waiting is waiting:
                self._waiting = None

    def _check_stream(self) -> None:
        """Raise SessionLost if the stream, which is the session, has ended."""
        if self._messages is None:
            raise SessionLost(f"{self._endpoint.where} ended the stream of its session")

    async def _request(self, message: bytes, headers: Headers, waiting: _Waiting) -> jsonrpc.Error | Raw | None:
        """POST a request; return the body of an HTTP error, unless the stream brought the answer."""
        try:
            try:
                refused = await self._post(message, headers, waiting)
            except SuspectedSessionLoss as exc:
                if not self._is_ready:
                    raise
                self.forgotten = await exc.is_confirmed(self.ping(headers))
                refused = exc.conclude(is_gone=self.forgotten)
        except UpstreamError as exc:
            # Whatever happened to the POST, the server accepted a request that it answered. If the stream ended, the
            # call may have run, so the loss of the stream is reported and not SessionLost.
            if waiting.over.done() and (waiting.over.result() is None or isinstance(exc, SessionLost)):
                return None
            raise
        return None if waiting.over.done() else refused

    async def resume(self, *_: object, **__: object) -> None:
        """Raise CallGone, because a call ends with its stream."""
        raise CallGone(
            f"{self._endpoint.where} speaks HTTP+SSE, where no call can be picked up by another process; the call may "
            "have had effects"
        )

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        self._check_stream()
        try:
            refused = await self._post(message, headers, None)
        except SuspectedSessionLoss as exc:
            if not self._is_ready:
                raise
            refused = exc.conclude(is_gone=await exc.is_confirmed(self.ping(headers)))
        if refused is not None:
            said = refused.message if isinstance(refused, jsonrpc.Error) else "it answered with a result"
            raise CallLost(f"{self._endpoint.where} refused a message: {self._endpoint.quoted(said)}")
        self._is_ready = True

    async def ping(self, headers: Headers) -> None:
        """POST a `ping`. Its acceptance proves the session, so its answer is dropped."""
        self._check_stream()
        id_ = ping_id()
        self._pings.append(id_)
        refused = await self._post(jsonrpc.request(id_, mcp.PING, {}), headers, None)
        if refused is not None:
            check_ping_answer(refused, self._endpoint)

    async def _post(self, message: bytes, headers: Headers, waiting: _Waiting | None) -> jsonrpc.Error | Raw | None:
        """Send a message and wait until it is accepted, or until the request is answered."""
        where = self._endpoint.where
        try:
            async with asyncio.timeout(self._client.timeouts.answer_seconds) as deadline:
                if waiting is not None:
                    waiting.posting = deadline
                return await self._deliver(message, headers, waiting)
        except (TimeoutError, CallLost) as exc:
            if waiting is not None and waiting.over.done():
                return None  # the stream brought the answer
            if isinstance(exc, CallLost):
                raise
            raise CallLost(
                f"{where} did not accept a message within timeouts.answer_seconds; the call may have had effects"
            ) from exc
        finally:
            if waiting is not None:
                waiting.posting = None

    async def _deliver(self, message: bytes, headers: Headers, waiting: _Waiting | None) -> jsonrpc.Error | Raw | None:
        """POST a message, following one redirect within the origin."""
        where, target = self._endpoint.where, self._messages
        for _ in range(2):
            if target is None:
                break
            own = {**headers, **self._fixed}
            # An answer, a notification or a ping may come twice.
            is_repeatable = waiting is None or waiting.is_repeatable
            posting = self._client.exchange("POST", target, own, message, where, is_repeatable=is_repeatable)
            async with posting as response:
                if response.status in _POST_REDIRECTS:
                    target = self._endpoint.within(response.headers.get("Location", ""), target)
                    continue
                if response.status >= 300:
                    return await read_refusal(response, self._endpoint, message)
                if self._messages is not None:
                    self._messages = target
                response.let_end(self._times.drain_seconds)
                if waiting is not None and waiting is self._waiting:
                    self.taken = True
                return None
        raise Unreachable(f"{where} redirects messages in a circle or to another origin; have it name their address")

    async def close(self, *, end_session: bool) -> None:  # noqa: ARG002  (the stream is the session)
        """Close the stream, and the session with it."""
        self._closed = True
        self._end(CallLost("The gateway closed the stream of the session"))


def _without_secrets(data: bytes) -> str:
    """Return the address without secrets, such as a session id in its query."""
    address = data[:200].decode(errors="replace")
    return repr(redacted_url(address) if "://" in address else address.partition("?")[0].partition("#")[0])
