"""Sends the requests of one session over streamable HTTP, whose replies it reads to the answer.

A request whose stream broke is resumed by GET with Last-Event-ID (`upstream.http.resumption`). `streamable_http` has
the rest of the session: its handshake, its standalone stream, its answers and its end.
"""

import asyncio
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, Final

from msgspec import Raw

from gateway.http.upstream_client import Prepared  # noqa: TC001  (one import style; it costs nothing here)
from gateway.http_client.errors import ClientClosed, RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.request_head import HeaderLines
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, Refused
from gateway.protocol.reply_messages import EVENT_STREAM
from gateway.runtime.arrivals import SMALL_BYTES
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Hearer
from gateway.upstream.http.http_errors import (
    StreamCut,
    SuspectedSessionLoss,
    is_local,
    read_refusal,
    stream_cut,
)
from gateway.upstream.http.http_upstream import HttpUpstream, StreamTimes
from gateway.upstream.http.reply_reader import ReplyReader, StreamReply
from gateway.upstream.http.resumption import Resumption, asked_seconds

_MAY_PASS: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses of a GET that may succeed later. A server answers 409 while it takes the broken stream for an open one."""


@lru_cache(maxsize=16)
def fixed_headers(version: str) -> Headers:
    """The headers of all messages of a version; "" before it is negotiated."""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    return {**headers, mcp.PROTOCOL_VERSION: version} if version else headers


class CallReply(ReplyReader, kw_only=True):
    """The reply to a request, over all streams on which it comes."""

    channel: "ResumableChannel"
    message: bytes
    headers: Headers
    is_taken: bool = False
    """Whether the server has accepted the request, with its credential."""
    place: Resumption | None = None
    """Made with the first event id: most servers give none."""
    silence: asyncio.Timeout | None = None
    """The deadline of a resumed stream that stays silent, while one is open."""

    @property
    def resumption(self) -> Resumption:
        """The place of the request in its stream."""
        found = self.place = self.place or Resumption(self.channel.times)
        return found

    def restart_silence(self) -> None:
        """Measure the silence of a resumed stream from now on."""
        if self.silence is not None and not self.silence.expired():
            self.silence.reschedule(asyncio.get_running_loop().time() + self.resumption.silence_seconds)

    def conclude(self, hearer: Hearer) -> Coroutine[Any, Any, jsonrpc.Error | Raw | None]:
        """See `BegunReply`."""
        return self.channel.conclude(self, hearer)

    def accepted(self) -> None:
        """Keep nothing that is not needed any more: a call may wait for long."""
        self.channel.note_headers(self.headers)
        self.is_taken, self.message = True, b""
        if self.is_stream:
            self.head = None

    def take(self, event: sse.Event) -> None:
        """Move the cursor on to the event."""
        if event.id is not None:
            _ = self.resumption.is_repeated(event.id)
        if event.data:
            self.hand_over(event.data)
            # Most streams end with their first message, so memory is saved only behind that.
            self.pending.is_silent = True

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """Take a reply that came in one piece."""
        if head.status < 300 and head.content_type != EVENT_STREAM and SMALL_BYTES >= len(body) <= self.max_bytes:
            self.head = head
            self.accepted()
            self.hear_body(body)
            return
        try:
            self.on_head(head)
            self.on_body(body)
        except Exception as exc:  # noqa: BLE001  (as the connection does if a reply comes in parts)
            self._end(exc)
        self.on_end()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        if self.waiter is None and isinstance(failure, ClientClosed):
            self._done()  # the whole process ends
        else:
            super().on_failed(failure)


class ResumedReply(StreamReply, kw_only=True):
    """The stream of a request, opened again behind one of its events."""

    request: CallReply
    newest: Headers
    """Those that it is opened with."""
    deadline: asyncio.Timeout | None = None
    """Of its head, then of the silence behind it."""
    is_late: bool = False
    """Whether it was given up before it was over."""

    def close(self) -> None:
        """See `ReplyReader`."""
        self.is_late |= not self.is_over
        super().close()

    def opened(self) -> None:
        """The request goes on."""
        request = self.request
        request.is_taken = request.is_taken or self.newest == request.headers
        request.silence = self.deadline
        request.restart_silence()
        request.resumption.connected()
        super().opened()

    def take(self, event: sse.Event) -> None:
        """Leave out an event that was handed over before."""
        request = self.request
        if not (event.id is not None and request.resumption.is_repeated(event.id)) and event.data:
            request.resumption.heard()
            request.restart_silence()
            self.hand_over(event.data)


class ResumableChannel(Channel):
    """The requests of one session."""

    __slots__ = (
        "_client",
        "_endpoint",
        "_fixed",
        "_headers",
        "_prepared",
        "_request",
        "_session_line",
        "_upstream",
        "forgotten",
    )

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream = upstream
        self._client, self._endpoint = upstream.client, upstream.endpoint
        self._fixed = fixed_headers("")
        """The headers of all messages but the session id, shared by the sessions of a version."""
        self._session_line = b""
        """The header with the session id, as it is sent; empty without one."""
        self._headers = NO_HEADERS
        """The headers of the last message that the server accepted: GET and DELETE need a credential too."""
        self.forgotten = False
        self._prepared: Prepared | None = None
        self._request: CallReply | None = None
        """The newest request."""

    def _identify(self, session_id: str | None, version: str) -> None:
        """Send these with all messages from now on. Raises ValueError for an id that cannot be sent."""
        self._fixed = fixed_headers(version)
        self._session_line = HeaderLines.of([(mcp.SESSION_ID, session_id)]).text if session_id else b""

    @property
    def session_id(self) -> str | None:  # type: ignore[override]  # read-only
        """The id that the server gave the session."""
        return self._session_line[len(mcp.SESSION_ID) + 2 : -2].decode() or None

    @property
    def taken(self) -> bool:  # type: ignore[override]  # read-only
        """Whether the server accepted the newest request, with the credential that was sent with it."""
        return self._request is not None and self._request.is_taken

    @property
    def _place(self) -> Resumption | None:
        return None if self._request is None else self._request.place

    @property
    def cursor(self) -> str | None:
        """The last event id on the stream of the newest request."""
        return None if self._place is None else self._place.cursor

    @property
    def times(self) -> StreamTimes:
        """The pauses and deadlines of the upstream."""
        return self._upstream.times

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

    # -- requests ---------------------------------------------------------------------------------------------

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

    def note_headers(self, headers: Headers) -> None:
        """Keep the newest headers that the server accepted, for messages without a client: GET and DELETE."""
        self._headers = headers

    def begin(self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False) -> CallReply:
        """POST a request for whose reply no coroutine waits."""
        client = self._client
        self._request = reply = CallReply(
            hearer,
            client.limits.event_bytes,
            client.arriving,
            self._upstream.times.drain_seconds,  # without the property: every call comes here
            channel=self,
            message=message,
            headers=headers,
        )
        pending = reply.pending = self.post(message, headers, reply, is_repeatable=is_repeatable)
        pending.hear_whole = reply.on_whole
        return reply

    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and read its reply until it is answered; resume it if the server supports that."""
        reply = self.begin(message, headers, hearer, is_repeatable=is_repeatable)
        message = b""  # a call that waits should not keep it
        return await self.conclude(await reply.over(reply.pending), hearer)

    async def conclude(self, reply: CallReply, hearer: Hearer) -> jsonrpc.Error | Raw | None:
        """Decide what becomes of a request whose reply is over; see `Channel.request`."""
        if reply.is_done:
            return None
        try:
            return read_refusal(reply, self._endpoint, reply.message)
        except SuspectedSessionLoss as exc:
            self.forgotten = await exc.is_confirmed(self.ping(reply.headers))
            return exc.conclude(is_gone=self.forgotten)
        except StreamCut as exc:
            cut = exc
        finally:
            reply.message, reply.parts = b"", None  # the session keeps its newest request for as long as it is idle
        place = reply.place
        if place is None or place.cursor is None:  # only an event id shows that the server stores events
            raise cut
        place.start(place.cursor)
        await asyncio.sleep(asked_seconds(cut.retry_ms))
        try:
            await self._resume(reply, hearer)
        except Refused as exc:
            # The server did accept the call, so this must not read as if it had not.
            raise CallLost(
                f"{exc.message} when the call's stream was picked up again; the call may have had effects"
            ) from exc
        return None

    def forget(self) -> None:
        """The server does not know the session any more."""
        self.forgotten = True

    # -- broken streams -----------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """See `Channel.give_up`."""
        if self._request is not None:
            self._request.resumption.give_up()

    async def resume(self, cursor: str, headers: Headers, hearer: Hearer, *, is_shared: bool) -> None:
        """Resume a request that another process sent."""
        client = self._client
        request = self._request = CallReply(
            hearer, client.limits.event_bytes, client.arriving, 0.0, channel=self, message=b"", headers=headers
        )
        request.place = Resumption(self.times, cursor)
        request.place.start(cursor, counts_local=is_shared)
        await self._resume(request, hearer)

    async def _resume(self, request: CallReply, hearer: Hearer) -> None:
        """GET the stream from one place, again and again, until the request is answered."""
        while (pause_seconds := await self._read_again(request, hearer)) is not None:
            await asyncio.sleep(pause_seconds)

    async def _read_again(self, request: CallReply, hearer: Hearer) -> float | None:
        """GET the stream once; return the pause before the next attempt, or None if the request is answered."""
        client, resumption, newest = self._client, request.resumption, self._headers or request.headers
        reply = ResumedReply(
            hearer,
            client.limits.event_bytes,
            client.arriving,
            0.0,  # a resumed stream stays open after the answer
            unread=_MAY_PASS,
            request=request,
            newest=newest,
        )
        get = self.get_headers(request.headers) | {mcp.LAST_EVENT_ID: resumption.place}
        try:
            async with asyncio.timeout(self._upstream.times.resume_head_seconds) as deadline:
                reply.deadline = deadline
                _ = await reply.over(client.begin("GET", self._endpoint.url, get, b"", reply))
        except TimeoutError:
            pass  # `is_late`, unless the reply was over by then, in a process that has stood still
        finally:
            request.silence = None
        if not reply.is_stream:
            why, is_here = f"{self._endpoint.where} broke the connection (TimeoutError)", False
            if not reply.is_late:
                why, is_here = await self._refused_resume(reply, newest)
            pause_seconds = resumption.failed(is_local=is_here)
            if pause_seconds is None:
                cause = f"{why.partition(';')[0]} when a running call was to be picked up"
                raise CallLost(f"{cause}; the call may have had effects") from reply.failure
            return pause_seconds
        if reply.is_late:
            resumption.silent()
            return 0.0
        if reply.is_done:
            return None
        cut = stream_cut(reply, self._endpoint.where)
        pause_seconds = resumption.cut(cut.retry_ms)
        if pause_seconds is None:
            raise cut
        return pause_seconds

    async def _refused_resume(self, reply: ReplyReader, headers: Headers) -> tuple[str, bool]:
        """Return why the stream cannot be resumed now, and whether that says nothing of the server, but of this host.

        Raises Refused if the credential is not accepted.
        """
        status, where = reply.status, self._endpoint.where
        if isinstance(reply.failure, RequestFailed):
            return reply.failure.mapped(where).message, is_local(reply.failure)
        if status < 300 or status in _MAY_PASS:
            return f"{where} answered HTTP {status} to GET with Last-Event-ID", False
        try:
            _ = read_refusal(reply, self._endpoint)
        except SuspectedSessionLoss as exc:
            if await exc.is_confirmed(self.ping(headers), of_get=True):
                raise CallGone(
                    f"{where} does not know the session of a running call any more (HTTP {status}), it was probably "
                    "restarted; the call may have had effects: check them before calling again"
                ) from exc
        except CallLost:
            pass
        raise CallLost(f"{where} cannot pick up a call (HTTP {status}); the call may have had effects")
