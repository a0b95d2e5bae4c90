"""The reply to a request over streamable HTTP: the first stream on which it comes, and those that resume it."""

import asyncio

from gateway.http_client.errors import ClientClosed, RequestFailed
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.reply_messages import EVENT_STREAM
from gateway.runtime.arrivals import SMALL_BYTES
from gateway.upstream.channel import Headers
from gateway.upstream.http.http_session import HttpSession
from gateway.upstream.http.reply_reader import ReplyReader, StreamReply
from gateway.upstream.http.resumption import Resumption


class CallReply(ReplyReader, kw_only=True):
    """The reply to a request, over all streams on which it comes."""

    session: HttpSession
    message: bytes
    headers: Headers
    place: Resumption | None = None
    """Made with the first event id: most servers give none."""
    silence: asyncio.Timeout | None = None
    """The deadline of a resumed stream that stays silent, while one is open."""

    @property
    def resumption(self) -> Resumption:
        """The place of the request in its stream."""
        found = self.place = self.place or Resumption()
        return found

    def resumed(self, silence: asyncio.Timeout | None) -> None:
        """A stream was opened again, which may be silent until this deadline."""
        self.silence = silence
        self.restart_silence()
        self.resumption.connected()

    def restart_silence(self) -> None:
        """Measure the silence of a resumed stream from now on."""
        if self.silence is not None and not self.silence.expired():
            self.silence.reschedule(asyncio.get_running_loop().time() + self.resumption.silence_seconds)

    def accepted(self) -> None:
        """Keep nothing that is not needed any more: a call may wait for long."""
        self.session.accepted(self.headers)
        self.message = b""
        self.hearer.accepted()
        if self.is_stream:
            self.head = None

    def take(self, event: sse.Event) -> None:
        """Move the cursor on to the event."""
        if event.id is not None:
            _ = self.resumption.is_repeated(event.id)
        if event.data:
            self.hand_over(event.data)

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """Take the body of most calls at once, as it is."""
        if head.status < 300 and head.content_type != EVENT_STREAM and SMALL_BYTES >= len(body) <= self.max_bytes:
            self.session.accepted(self.headers)
            self.message, failure = b"", None
            try:
                self.hearer.accepted()
                if self.hearer.hear(body):
                    self._done()
                    return
            except Exception as exc:  # noqa: BLE001  (as in `on_end`)
                failure = exc
            self.head = head
            self.pending.distrust()
            self._end(failure)
            return
        super().on_whole(head, body)

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
        if self.newest == self.request.headers:  # a GET with another credential proves nothing of the call's
            self.hearer.accepted()
        self.request.resumed(self.deadline)
        super().opened()

    def take(self, event: sse.Event) -> None:
        """Leave out an event that was handed over before."""
        request = self.request
        if not (event.id is not None and request.resumption.is_repeated(event.id)) and event.data:
            request.resumption.heard()
            request.restart_silence()
            self.hand_over(event.data)
