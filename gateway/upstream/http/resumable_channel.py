"""Sends the requests of one session over streamable HTTP, whose replies it reads to the answer.

A request whose stream broke is resumed by GET with Last-Event-ID (`upstream.http.resumption`). `streamable_http` has
the rest of the session: its handshake, its standalone stream, its answers and its end.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import Raw

from gateway.http.upstream_client import FOREIGN, Prepared, mapped
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.request_head import HeaderLines
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, Refused
from gateway.runtime.pieces import InTurns
from gateway.runtime.throttle import AwaitedArrival, Throttle
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Receive
from gateway.upstream.http.http_errors import RetryLater, SuspectedSessionLoss, is_local, read_refusal, read_response
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.resumption import Resumption, asked_seconds

_MAY_PASS: Final = (408, 409, 425, 429)
"""Statuses of a GET that may succeed later. A server answers 409 while it takes the broken stream for an open one."""


@lru_cache(maxsize=16)
def fixed_headers(version: str) -> Headers:
    """The headers of all messages of a version; "" before it is negotiated."""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    return {**headers, mcp.PROTOCOL_VERSION: version} if version else headers


class Broken(NamedTuple):
    """How a stream broke that was read by callback."""

    cause: Exception | None
    """None if the server ended it without the answer."""
    retry_ms: int | None
    """The pause that the stream asked for."""


class StreamCut(CallLost):
    """The event stream of a request ended before the answer, so the request may be resumed."""

    def __init__(self, message: str, retry_ms: int | None) -> None:
        super().__init__(message)
        self.retry_ms = retry_ms


class ResumableChannel(Channel):
    """The requests of one session."""

    __slots__ = (
        "_client",
        "_endpoint",
        "_fixed",
        "_headers",
        "_note_accepted",
        "_prepared",
        "_reply_began",
        "_resumption",
        "_session_line",
        "_silence",
        "_upstream",
        "forgotten",
        "taken",
    )

    def __init__(self, upstream: HttpUpstream, accepted: Callable[[Headers], None]) -> None:
        """`accepted` is told of headers that the server accepted."""
        self._upstream = upstream
        self._client, self._endpoint = upstream.client, upstream.endpoint
        self._fixed = fixed_headers("")
        """The headers of all messages but the session id, shared by the sessions of a version."""
        self._session_line = b""
        """The header with the session id, as it is sent; empty without one."""
        self._note_accepted = accepted
        self._headers = NO_HEADERS
        """The headers of the last message that the server accepted: GET and DELETE need a credential too."""
        self.taken = self.forgotten = False
        self._reply_began = False
        """Whether the response to the current request has begun."""
        self._prepared: Prepared | None = None
        self._resumption: Resumption | None = None
        """Made with the first event id: most servers give none."""
        self._silence: asyncio.Timeout | None = None
        """The deadline of a resumed stream that stays silent, while one is open."""

    def _identify(self, session_id: str | None, version: str) -> None:
        """Send these with all messages from now on. Raises ValueError for an id that cannot be sent."""
        self._fixed = fixed_headers(version)
        self._session_line = HeaderLines.of([(mcp.SESSION_ID, session_id)]).text if session_id else b""

    @property
    def session_id(self) -> str | None:  # type: ignore[override]  # read-only
        """The id that the server gave the session."""
        return self._session_line[len(mcp.SESSION_ID) + 2 : -2].decode() or None

    @property
    def resumption(self) -> Resumption:
        """The place of the current request in its stream."""
        found = self._resumption = self._resumption or Resumption(self._upstream.times)
        return found

    @property
    def cursor(self) -> str | None:
        """The last event id on the stream of the current request."""
        return None if self._resumption is None else self._resumption.cursor

    @property
    def arriving(self) -> Throttle:
        """Limits the unfinished messages of the upstream."""
        return self._client.arriving

    @property
    def max_event_bytes(self) -> int:
        """The size of the largest message."""
        return self._client.limits.event_bytes

    @property
    def drain_seconds(self) -> float:
        """How long a stream may stay open after the answer."""
        return self._upstream.times.drain_seconds

    def _whole(self, headers: Headers) -> dict[str, str]:
        """The headers of one message."""
        whole = {**headers, **self._fixed}
        if (session_id := self.session_id) is not None:
            whole[mcp.SESSION_ID] = session_id
        return whole

    def get_headers(self, headers: Headers) -> dict[str, str]:
        """The headers of a GET, with the newest accepted credential: the credential of the call may have expired."""
        whole = self._whole(self._headers or headers) | {"Accept": "text/event-stream"}
        del whole["Content-Type"]
        return whole

    def _keep_headers(self, response: AwaitedReply, headers: Headers) -> None:
        """Keep the newest headers that the upstream accepted, for messages without a client: GET and DELETE."""
        if response.status < 300:
            self._headers = headers
            self._note_accepted(headers)

    # -- requests ---------------------------------------------------------------------------------------------

    def _start_request(self) -> None:
        """Forget the request before."""
        self._reply_began = self.taken = False
        if self._resumption is not None:
            self._resumption.begin()

    def post(
        self,
        message: bytes,
        headers: Headers,
        listener: ReplyListener,
        *,
        is_repeatable: bool = False,
    ) -> PendingRequest:
        """POST a message whose reply goes to `listener`. The messages of a session often have the same head."""
        client = self._client
        prepared = self._prepared = client.prepared(self._endpoint.url, headers, self._fixed, self._prepared)
        return client.begin_prepared(prepared, self._session_line, message, listener, is_repeatable=is_repeatable)

    def accepted(self, headers: Headers) -> None:
        """The server has accepted a request that was sent by callback."""
        self._reply_began = self.taken = True
        self._headers = headers

    async def request(
        self,
        message: bytes,
        headers: Headers,
        receive: Receive,
        begun: AwaitedReply | None = None,
        *,
        is_repeatable: bool = False,
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and read its reply until it is answered; resume it if the server supports that."""
        endpoint = self._endpoint
        try:
            # Without the context managers of the other requests: this is the hot path.
            if begun is None:
                self._start_request()
                whole = self._whole(headers)
                response = await self._client.send("POST", endpoint.url, whole, message, is_repeatable=is_repeatable)
            else:
                response = begun
                await response.begun()
            self._reply_began = True
            try:
                self._keep_headers(response, headers)
                self.taken = response.status < 300
                if self.taken:
                    message = b""  # it is not sent again, and a call that waits should not keep it
                return await self._read(response, receive, message)
            finally:
                response.close()
        except SuspectedSessionLoss as exc:
            self.forgotten = await exc.is_confirmed(self.ping(headers))
            return exc.conclude(is_gone=self.forgotten)
        except StreamCut as exc:
            cut = exc
        except FOREIGN as exc:
            raise mapped(exc, endpoint.where) from exc
        await self._pick_up(cut, headers, receive)
        return None

    async def go_on(self, headers: Headers, broken: Broken, receive: Receive) -> None:
        """Resume a stream that broke while it was read by callback, if the server supports that."""
        await self._pick_up(self._cut(broken.cause, broken.retry_ms), headers, receive)

    def forget(self) -> None:
        """The server does not know the session any more."""
        self.forgotten = True

    # -- replies ------------------------------------------------------------------------------------------------

    async def _read(self, response: AwaitedReply, receive: Receive, sent: bytes | None) -> jsonrpc.Error | Raw | None:
        if response.status >= 300:
            return await read_refusal(response, self._endpoint, sent)
        if response.content_type == "text/event-stream":
            if sent is not None:
                response.expect_silence()
            await self._read_events(response, receive)
            return None
        where = self._endpoint.where
        body = await read_response(response, self.max_event_bytes, where, self.arriving)
        if not body or not receive(body):
            response.distrust()
            raise CallLost(f"{where} answered HTTP {response.status} without a result; the call may have had effects")
        return None

    async def _read_events(self, response: AwaitedReply, receive: Receive, *, again: bool = False) -> None:
        """Hand over events until the request is answered; `again` skips events that were handed over before."""
        parser = sse.Parser(self.max_event_bytes)
        arrival = AwaitedArrival(self.arriving)
        try:
            async for piece in InTurns(response):
                for event in parser.feed(piece):
                    if event.id is not None and self.resumption.is_repeated(event.id) and again:
                        continue
                    if event.data and receive(event.data):
                        if not again:  # a resumed stream stays open after the answer
                            await self._drain(response)
                        return
                await arrival.hold(parser.unfinished_bytes)
            cut = self._cut(None, parser.retry_ms)
        except (*FOREIGN, sse.EventTooLarge) as exc:
            cut = self._cut(exc, parser.retry_ms)
        finally:
            arrival.release()
        raise cut

    async def _drain(self, response: AwaitedReply) -> None:
        """Read to the end, so that the connection can be reused. Some servers never end the stream."""
        if response.is_read:
            return
        with suppress(TimeoutError, RequestFailed):
            async with asyncio.timeout(self.drain_seconds):
                await response.skip()

    # -- broken streams -----------------------------------------------------------------------------------------

    def _cut(self, cause: Exception | None, retry_ms: int | None) -> StreamCut:
        """Return why a stream broke (`cause` is None if the server ended it); raises what cannot be resumed."""
        where = self._endpoint.where
        if cause is None:
            return StreamCut(
                f"{where} ended the call's stream without a result; the call may have had effects", retry_ms
            )
        if isinstance(cause, FOREIGN):
            return StreamCut(mapped(cause, where).message, retry_ms)
        if isinstance(cause, sse.EventTooLarge):
            raise CallLost(
                f"{where} sent an event larger than limits.event_bytes; the call may have had effects"
            ) from cause
        raise cause

    async def _pick_up(self, cut: StreamCut, headers: Headers, receive: Receive) -> None:
        """Resume the stream of a request; raises the cut if the server does not store events."""
        cursor = self.cursor
        if cursor is None:  # only an event id on this stream shows that it does
            raise cut
        self.resumption.start(cursor)
        await asyncio.sleep(asked_seconds(cut.retry_ms))
        try:
            await self._resume(headers, receive, None)
        except Refused as exc:
            # The server did accept the call, so this must not read as if it had not.
            raise CallLost(
                f"{exc.message} when the call's stream was picked up again; the call may have had effects"
            ) from exc

    def give_up(self) -> None:
        """See `Channel.give_up`."""
        self.resumption.give_up()

    async def resume(
        self, cursor: str, headers: Headers, receive: Receive, attached: Callable[[], None], *, is_shared: bool
    ) -> None:
        """Resume a request that another process sent."""
        self.resumption.begin(cursor)
        self.resumption.start(cursor, counts_local=is_shared)
        self.taken = False
        await self._resume(headers, receive, attached)

    async def _resume(self, headers: Headers, receive: Receive, attached: Callable[[], None] | None) -> None:
        """GET the stream from one place, again and again, until the request is answered."""
        resumption = self.resumption

        def hear(data: bytes) -> bool:
            resumption.heard()
            self._restart_silence()
            return receive(data)

        while True:
            try:
                response = await self._get_again(headers)
                resumption.connected()
                if attached is not None:
                    attached()
                    attached = None
                try:
                    response.expect_silence()
                    async with asyncio.timeout(resumption.silence_seconds) as self._silence:
                        await self._read_events(response, hear, again=True)
                    return
                finally:
                    self._silence = None
                    response.close()
            except TimeoutError:
                resumption.silent()
                continue
            except RetryLater as exc:
                pause_seconds = resumption.failed(is_local=exc.is_local)
                if pause_seconds is None:
                    cause = f"{exc.message.partition(';')[0]} when a running call was to be picked up"
                    raise CallLost(f"{cause}; the call may have had effects") from exc
            except StreamCut as exc:
                pause_seconds = resumption.cut(exc.retry_ms)
                if pause_seconds is None:
                    raise
            await asyncio.sleep(pause_seconds)

    def _restart_silence(self) -> None:
        """Measure the silence of a resumed stream from now on."""
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(asyncio.get_running_loop().time() + self.resumption.silence_seconds)

    async def _get_again(self, headers: Headers) -> AwaitedReply:
        """Open the stream of a request; the caller releases it. Raises RetryLater, or another error that is final."""
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(self._upstream.times.resume_head_seconds):
                newest_headers = self._headers or headers
                newest = self.get_headers(headers) | {mcp.LAST_EVENT_ID: self.resumption.place}
                response = await self._client.send("GET", endpoint.url, newest, b"")
                if response.status == 200 and response.content_type == "text/event-stream":
                    self.taken = self.taken or newest_headers == headers
                    return response
                try:
                    raise await self._refused_resume(response, newest_headers)
                finally:
                    response.close()
        except FOREIGN as exc:
            raise RetryLater(mapped(exc, endpoint.where).message, is_local=is_local(exc)) from exc

    async def _refused_resume(self, response: AwaitedReply, headers: Headers) -> CallLost:
        """Explain why the stream cannot be resumed. Raises Refused if the credential is not accepted."""
        status, where = response.status, self._endpoint.where
        if status < 300 or status in _MAY_PASS or status >= 500:
            return RetryLater(f"{where} answered HTTP {status} to GET with Last-Event-ID")
        try:
            _ = await read_refusal(response, self._endpoint)
        except SuspectedSessionLoss as exc:
            if await exc.is_confirmed(self.ping(headers), of_get=True):
                return CallGone(
                    f"{where} does not know the session of a running call any more (HTTP {status}), it was probably "
                    "restarted; the call may have had effects: check them before calling again"
                )
        except CallLost:
            pass
        return CallLost(f"{where} cannot pick up a call (HTTP {status}); the call may have had effects")
