"""The standalone GET stream of a session over streamable HTTP.

Source: specification 2025-11-25 basic/transports (Listening for Messages from the Server). A server sends there what
belongs to no request. The gateway never resumes this stream from an event id, because its events may belong to a
request that has ended.

Each held call has such a stream, which is mostly silent. So no task reads it: its replies come by callback.
"""

import asyncio
from typing import Final

from gateway import world
from gateway.http.upstream_client import REDIRECTS
from gateway.http_client.errors import ClientClosed, ListenerFailed, RequestFailed
from gateway.http_client.pending_request import PendingRequest  # noqa: TC001
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.errors import UpstreamError
from gateway.runtime.throttle import Arrival  # noqa: TC001  (one import style; it costs nothing here)
from gateway.upstream.channel import Headers, SideListener
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.resumable_channel import ResumableChannel

_STABLE_SECONDS: Final = 1.0
"""A stream that lasted longer than this may be opened again at once; others would hammer the server."""
_UNKNOWN: Final = 404
_TAKEN: Final = 409
"""The server may still count the stream of a dead process as open."""


class StandaloneStream:
    """Keeps the GET stream of one session open."""

    __slots__ = (
        "_arrival",
        "_attempts",
        "_began",
        "_failures",
        "_head",
        "_headers",
        "_is_closing",
        "_listener",
        "_owner",
        "_parser",
        "_pending",
        "_timer",
        "_upstream",
        "_was_open",
        "is_open",
    )

    def __init__(self, upstream: HttpUpstream, owner: ResumableChannel) -> None:
        self.is_open = False
        self._upstream = upstream
        self._owner = owner
        self._headers: Headers
        self._listener: SideListener | None = None
        """Until the stream has ended for good."""
        self._head: asyncio.Future[None] | None = None
        """While `open` waits for the answer to the first GET."""
        self._was_open = False
        """Whether there ever was a stream; `is_open` may be a guess."""
        self._is_closing = False
        self._pending: PendingRequest | None = None
        self._arrival: Arrival | None = None
        """While a large event is arriving."""
        self._timer: asyncio.TimerHandle | None = None
        """The pause before the next GET."""
        self._parser: sse.Parser | None = None
        """Made when the stream first says something, which most never do."""
        self._attempts = 0
        self._failures = 0
        """GETs in a row that brought no stream, or a short one."""
        self._began = 0.0

    async def open(self, headers: Headers, listener: SideListener) -> None:
        """Open the stream and keep it open until `close`."""
        self._headers, self._listener = headers, listener
        head = self._head = asyncio.get_running_loop().create_future()
        self._get_after_pause()
        # Not `wait_for`: if it is cancelled in the moment the future completes, it swallows the cancellation
        # (Python 3.11), and a call whose client has left would run on.
        _ = await asyncio.wait((head,), timeout=self._upstream.times.side_head_seconds)
        if not head.done() and self._pending is not None:  # between two GETs that were refused there is no stream
            self.is_open = True

    def stop_reporting(self) -> None:
        """The session is about to end: the end of the stream is no news for its listener."""
        self._is_closing = True

    def close(self) -> None:
        """Close the stream."""
        if self._listener is not None:
            self._end()

    # -- opening and ending -------------------------------------------------------------------------------------

    def _get_after_pause(self) -> None:
        """Open the stream after the pause that the failures so far ask for, or end it after too many."""
        pauses = self._upstream.times.reopen_seconds
        if self._failures < len(pauses):
            get = self._upstream.tasks.guard(self._get, "side stream")
            self._timer = asyncio.get_running_loop().call_later(pauses[self._failures], get)
        else:
            self._end()

    def _get(self) -> None:
        self._timer = None
        self._attempts += 1
        self._began = world.monotonic()
        try:
            newest = self._owner.get_headers(self._headers)
            client, url = self._upstream.client, self._upstream.endpoint.url
            self._pending = client.begin("GET", url, newest, b"", self)
        except BaseException:
            self._end()
            raise

    def _broke(self, *, is_refused: bool = False) -> None:
        """There is no stream any more; `is_refused` if the server may give one later."""
        if self._is_closing:
            self._end()  # the server ends it with the session
            return
        self.is_open = False
        self._let_go()
        if is_refused:
            self._failures += 1
        else:
            self._note_head()
            self._failures = 0 if world.monotonic() - self._began > _STABLE_SECONDS else self._failures + 1
        self._get_after_pause()

    def _end(self) -> None:
        """There will be no stream any more."""
        listener, self._listener = self._listener, None
        assert listener is not None, "a stream ends once"
        self.is_open = False
        self._let_go()
        self._note_head()
        if not self._is_closing:
            if self._was_open:
                listener.side_lost()
            listener.side_changed(False)

    def _let_go(self) -> None:
        """Give up the GET in flight, or the next one."""
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None
        if self._pending is not None:
            self._pending.abort()
            self._pending = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_head(self) -> None:
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_result(None)

    # -- the reply to a GET -------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """The server answered."""
        listener = self._listener
        assert listener is not None, "nothing is heard after the end"
        if head.status in REDIRECTS:
            self._follow(head.text(b"location"))
        elif head.status == _TAKEN:
            self._broke(is_refused=True)
        elif head.status != 200 or head.content_type != "text/event-stream":
            if head.status == _UNKNOWN and self._was_open:
                self._owner.forget()
            self._end()  # the server does without this stream
        else:
            self.is_open = self._was_open = True
            if self._pending is not None:
                self._pending.is_silent = True
            self._parser = None
            self._note_head()
            if self._attempts > 1:
                listener.side_changed(True)

    def _follow(self, location: str | None) -> None:
        """Follow a redirect, which a process that did not open the session does not know yet."""
        try:
            self._upstream.endpoint.follow(location)
        except UpstreamError:
            self._broke()
        else:
            self._broke(is_refused=True)

    def on_body(self, data: bytes, /) -> None:
        """A part of the stream is here."""
        listener = self._listener
        assert listener is not None, "nothing is heard after the end"
        parser = self._parser = self._parser or sse.Parser(self._upstream.client.limits.event_bytes)
        try:
            for event in parser.feed(data):
                if event.data:
                    _ = listener.hear_side(event.data)
            if self._pending is not None:
                arriving = self._upstream.client.arriving.arriving
                self._arrival = arriving(self._arrival, parser.unfinished_bytes, self._pending)
        except (UpstreamError, sse.EventTooLarge):
            if self._listener is not None:
                self._broke()

    def on_end(self) -> None:
        """The server ended the stream."""
        self._broke()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The stream broke, or there was none."""
        self._pending = None
        if isinstance(failure, ClientClosed):
            self._is_closing = True  # the whole process ends
            self._end()
        elif isinstance(failure, ListenerFailed) and failure.__cause__ is not None:
            if self._listener is not None:
                self._end()
            raise failure.__cause__
        else:
            self._broke()
