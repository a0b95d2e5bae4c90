"""The standalone GET stream of a session over streamable HTTP.

Source: specification 2025-11-25 basic/transports (Listening for Messages from the Server). A server sends there what
belongs to no request. The gateway never resumes this stream from an event id, because its events may belong to a
request that has ended.

Each held call has such a stream, which is mostly silent. So no task reads it: its replies come by callback.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from gateway import world
from gateway.http.upstream_client import REDIRECTS
from gateway.http_client.errors import ClientClosed, RequestFailed
from gateway.protocol import sse
from gateway.protocol.errors import UpstreamError
from gateway.upstream.channel import Headers, Hearer, SideListener
from gateway.upstream.http.http_session import HttpSession
from gateway.upstream.http.reply_reader import StreamReply

HEAD_SECONDS: Final = 2.0
"""How long the handshake waits for the head of the stream. Some servers delay it to an event."""
REOPEN_SECONDS: Final = (0.0, 0.5, 2.0, 5.0)
"""Pauses before the stream is opened again."""
_STABLE_SECONDS: Final = 1.0
"""A stream that lasted longer than this may be opened again at once; others would hammer the server."""
_UNKNOWN: Final = 404
_UNREAD: Final = range(300, 1000)
_TAKEN: Final = 409
"""The server may still count the stream of a dead process as open."""
_DEAF: Final = SideListener()
"""In place of the listener, once the stream has ended for good."""


@dataclass(slots=True, eq=False)
class StandaloneStream(Hearer):
    """Keeps the GET stream of one session open."""

    _session: HttpSession
    _headers: Headers
    _listener: SideListener
    is_open: bool = False
    """Whether there is a stream, perhaps between its end and the next GET, or may be: no answer came in time."""
    _head: asyncio.Future[None] | None = None
    """While `open` waits for the answer to the first GET."""
    _was_open: bool = False
    """Whether there ever was a stream: `is_open` may be a guess."""
    _is_closing: bool = False
    _next: StreamReply | asyncio.TimerHandle | None = None
    """The reply to the GET in flight, or the pause before the next one."""
    _attempts: int = 0
    _failures: int = 0
    """GETs in a row that brought no stream, or a short one."""
    _began: float = 0.0

    async def open(self) -> None:
        """Open the stream and keep it open until `close`."""
        loop = asyncio.get_running_loop()
        head = self._head = loop.create_future()
        self._session.upstream.tasks.guard(self._get, "side stream")()  # a bug costs the stream, not the session
        timer = loop.call_later(HEAD_SECONDS, self._wait_no_more)
        try:
            await head
        finally:
            timer.cancel()
            self._head = None

    def _wait_no_more(self) -> None:
        """No answer came in time, so there may be a stream; between two GETs that brought none there is not."""
        self.is_open |= isinstance(self._next, StreamReply)
        self._note_head()

    def stop_reporting(self) -> None:
        """The session is about to end: the end of the stream is no news for its listener."""
        self._is_closing = True  # until then its messages count: a list may change for other sessions too

    # -- opening and ending -------------------------------------------------------------------------------------

    def _get(self) -> None:
        self._attempts += 1
        self._began = world.monotonic()
        try:
            upstream = self._session.upstream
            reply = StreamReply(self, upstream.client.limits.event_bytes, upstream, unread=_UNREAD)
            reply.pending = self._session.get(self._headers, reply)
            self._next = reply
        except BaseException:  # headers that cannot be sent, for one: `open` must not wait in vain
            self.close()
            raise

    def _broke(self, *, is_refused: bool = False) -> None:
        """There is no stream any more, or not yet; `is_refused` if the server may give one later."""
        if self._is_closing:
            self.close()  # the server ends it with the session
            return
        lasted = not is_refused and world.monotonic() - self._began > _STABLE_SECONDS
        self._failures = 0 if lasted else self._failures + 1
        if self._failures < len(REOPEN_SECONDS):
            get = self._session.upstream.tasks.guard(self._get, "side stream")
            self._next = asyncio.get_running_loop().call_later(REOPEN_SECONDS[self._failures], get)
        else:
            self.close()

    def close(self) -> None:
        """End the stream for good; a second time, the listener is told nothing."""
        listener, self._listener = self._listener, _DEAF
        self.is_open = False
        if isinstance(self._next, StreamReply):
            self._next.close()
        elif self._next is not None:
            self._next.cancel()
        self._next = None
        self._note_head()
        if not self._is_closing:
            listener.side_closed(was_open=self._was_open)

    def _note_head(self) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    # -- the reply to a GET -------------------------------------------------------------------------------------

    def attached(self) -> None:
        """The server answered with a stream."""
        self.is_open = self._was_open = True
        self._note_head()
        if self._attempts > 1:
            self._listener.side_reopened()

    def hear(self, data: bytes, /) -> bool:
        """Take a message; the stream goes on."""
        self._listener.hear_side(data)
        return False

    def over(self, reply: object, failure: Exception | None, /) -> None:
        """The stream has ended, or there was none."""
        assert isinstance(reply, StreamReply)
        match failure:
            case None if reply.is_stream:
                self._broke()
            case None if reply.status in REDIRECTS:
                assert reply.head is not None, "it has a status"
                try:
                    # A process that did not open the session does not know the redirect yet.
                    self._session.upstream.endpoint.follow(reply.head.text(b"location"))
                except UpstreamError:
                    self._note_head()
                    self._broke()
                else:
                    self._broke(is_refused=True)
            case None if reply.status == _TAKEN:
                self._broke(is_refused=True)
            case None:
                if reply.status == _UNKNOWN and self._was_open:  # a first 404 only says that there is no such stream
                    self._session.forgotten()
                self.close()  # the server does without this stream
            case ClientClosed():
                self._is_closing = True  # the whole process ends
                self.close()
            case RequestFailed() | UpstreamError() | sse.EventTooLarge():
                self._broke()
            case bug:
                self.close()
                raise bug
