"""Reads the reply to a call by callback, for as long as it holds nothing but the answer.

Rule: what is read is kept as it came. As soon as anything else happens (another message, an error, the end of a
stream), the coroutine that reads other replies gets all of it, and starts at the beginning. So this file
decides nothing that `streamable_http` decides.
"""

import asyncio
from collections.abc import Callable

from gateway.http.awaited_reply import AwaitedReply
from gateway.http_client.errors import ListenerFailed, RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.runtime.throttle import SMALL_BYTES, Arrival, Throttle
from gateway.upstream.channel import BegunReply, Reading, Receive
from gateway.upstream.resumption import Resumption


class PlainReply(BegunReply):
    """One reply, a ReplyListener."""

    __slots__ = (
        "_accepted",
        "_arrival",
        "_drain_seconds",
        "_drain_timer",
        "_failure",
        "_head",
        "_is_done",
        "_is_over",
        "_max_bytes",
        "_parser",
        "_parts",
        "_pending",
        "_read",
        "_receive",
        "_rest",
        "_resumption",
        "_size",
        "_throttle",
        "_unusual",
    )

    def __init__(  # noqa: PLR0913  (what reading a reply takes)
        self,
        begin: Callable[[ReplyListener], PendingRequest],
        accepted: Callable[[], None],
        resumption: Resumption,
        read: Callable[[AwaitedReply, Receive], Reading],
        *,
        throttle: Throttle,
        max_bytes: int,
        drain_seconds: float,
    ) -> None:
        """Send a request by `begin`; `accepted` is called when the upstream has accepted it.

        `read` reads a reply from its beginning. `drain_seconds` limits how long a stream may stay open after the
        answer.
        """
        self._read = read
        self._accepted = accepted
        self._resumption = resumption
        self._throttle = throttle
        self._arrival: Arrival | None = None
        """Once the reply is large."""
        self._max_bytes = max_bytes
        self._drain_seconds = drain_seconds
        self._drain_timer: asyncio.TimerHandle | None = None
        self._receive: Receive
        self._unusual: Callable[[], None]
        self._head: ReplyHead | None = None
        self._parser: sse.Parser | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._is_done = False
        """Whether the answer was received, here or elsewhere."""
        self._is_over = False
        self._failure: RequestFailed | None = None
        self._rest: AwaitedReply | None = None
        self._pending = begin(self)

    def start(self, receive: Receive, unusual: Callable[[], None]) -> None:
        """Say who reads: `receive` returns False for a message that is not the answer, and does nothing with it.

        `unusual` is called if the reply must be read by a coroutine; it has to call `keep`.
        """
        self._receive, self._unusual = receive, unusual

    def keep(self) -> None:
        """Keep everything for `read` from now on, and all that came before."""
        rest = self._rest = AwaitedReply(lambda _: self._pending)
        if self._head is not None:
            rest.on_head(self._head)
        for part in self._parts:
            rest.on_body(part)
        self._forget_parts()
        self._head = self._parser = None
        if self._failure is not None:
            rest.on_failed(self._failure)
        elif self._is_over:
            rest.on_end()

    def read(self, receive: Receive) -> Reading:
        """Read the reply by a coroutine, from its beginning."""
        assert self._rest is not None, "it was kept"
        return self._read(self._rest, receive)

    def close(self) -> None:
        """Read nothing more: the answer came another way, or is not wanted."""
        self._done()
        self._pending.abort()

    # -- from the connection ------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """Read on if the upstream has accepted the call."""
        self._head = head
        if self._rest is not None:
            self._rest.on_head(head)
        elif head.status >= 300:
            self._unusual()
        else:
            self._accepted()
            if head.content_type == "text/event-stream":
                self._parser = sse.Parser(self._max_bytes)

    def on_body(self, data: bytes, /) -> None:
        """Keep a part, and look for the answer if it is a stream."""
        if self._rest is not None:
            self._rest.on_body(data)
        elif not self._is_done:
            self._parts.append(data)
            self._size += len(data)
            if self._size > self._max_bytes or (self._parser is not None and not self._is_plain(self._parser, data)):
                self._unusual()
            elif self._size > SMALL_BYTES and not self._is_done:
                self._hold()

    def on_end(self) -> None:
        """Look for the answer in a body; a stream that ends without one may be resumed."""
        self._is_over = True
        if self._rest is not None:
            self._rest.on_end()
        elif self._is_done:
            self._stop_timer()
        elif self._parser is None and self._parts and self._receive(b"".join(self._parts)):
            self._done()
        else:
            self._unusual()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        self._is_over, self._failure = True, failure
        if self._rest is not None:
            self._rest.on_failed(failure)
        elif isinstance(failure, ListenerFailed):
            self._done()
            raise failure.__cause__ or failure  # a bug, which the HTTP client reports; the call has ended with it
        elif self._is_done:
            self._stop_timer()
        else:
            self._unusual()

    # -----------------------------------------------------------------------------------------------------------

    def _is_plain(self, parser: sse.Parser, data: bytes) -> bool:
        """Read a part of a stream; returns whether it held at most the answer."""
        try:
            events = parser.feed(data)
        except sse.EventTooLarge:
            return False
        for event in events:
            if event.data and not self._receive(event.data):
                return False
            if event.id is not None:
                _ = self._resumption.is_repeated(event.id)
            if event.data:
                self._done()
                self._drain_timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._pending.abort)
                return True
        return True

    def _done(self) -> None:
        """Forget the reply, which refers to the call."""
        if self._drain_timer is not None:
            self._stop_timer()
        if not self._is_done:
            self._is_done = True
            self._forget_parts()
            del self._receive, self._unusual, self._accepted

    def _hold(self) -> None:
        """Read on only if there is room for more of a large reply."""
        if self._arrival is None:
            self._arrival = self._throttle.arrival(self._pending.resume_reading)
        if not self._arrival.hold(self._size):
            self._pending.pause_reading()

    def _forget_parts(self) -> None:
        self._parts.clear()
        if self._arrival is not None:
            self._arrival.release()

    def _stop_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
