"""Reads replies by callback: the answer to a call, the messages of its event stream.

Rule: as long as nothing but the answer has come, what is read is kept as it came. When anything else comes, an event
stream is followed (`follow`), message by message, and nothing of it is kept. Any other reply (an error, a body that is
not the answer) goes to the coroutine that reads replies, from its beginning (`keep`). So does a stream that breaks,
with the reason. This file decides nothing that `resumable_channel` decides.
"""

from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ClientClosed, ListenerFailed, RequestFailed
from gateway.http_client.pending_request import PendingRequest
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.errors import GatewayError
from gateway.protocol.reply_messages import EVENT_STREAM
from gateway.runtime.throttle import SMALL_BYTES, Arrival
from gateway.upstream.channel import Headers, Hearer, Reading, Receive
from gateway.upstream.http.resumable_channel import Broken, ResumableChannel

_NO_PARTS: Final[list[bytes]] = []
"""Of a reply that keeps none: never changed."""


class PlainReply(msgspec.Struct, eq=False):
    """One reply, a ReplyListener and a BegunReply."""

    owner: ResumableChannel
    message: bytes
    headers: Headers
    hearer: Hearer
    unusual: Callable[[], None]
    max_bytes: int
    """The size of the largest message."""
    parts: list[bytes] = []
    """What has come, until it is followed."""
    size: int = 0
    is_stream: bool = False
    is_begun: bool = False
    """Whether events were read without a parser."""
    is_done: bool = False
    """Whether the answer was received, here or elsewhere."""
    is_over: bool = False
    is_followed: bool = False
    pending: PendingRequest = cast("PendingRequest", None)
    """Set by whoever sends the request, of which this is the listener."""
    head: ReplyHead | None = None
    parser: sse.Parser | None = None
    """Made when a part of a stream is not one plain event."""
    arrival: Arrival | None = None
    """Once the reply is large."""
    failure: RequestFailed | None = None
    rest: AwaitedReply | None = None
    broken: Broken | None = None

    def follow(self, broke: Callable[[], None]) -> bool:
        """See `BegunReply`."""
        if not self.is_stream or self.is_over or self.is_done:
            return False
        self.unusual, self.is_followed = broke, True
        self._forget_parts()
        self.parts = _NO_PARTS
        self.arrival = self.head = None
        self.pending.is_silent = True
        if self.pending.is_paused:
            self.pending.resume_reading()
        return True

    def keep(self) -> None:
        """See `BegunReply`."""
        rest = self.rest = AwaitedReply(lambda _: self.pending)
        if self.head is not None:
            rest.on_head(self.head)
        for part in self.parts:
            rest.on_body(part)
        self._done()
        self.head = self.parser = None
        if self.failure is not None:
            rest.on_failed(self.failure)
        elif self.is_over:
            rest.on_end()

    def read(self, receive: Receive) -> Reading:
        """See `BegunReply`."""
        if self.broken is not None:
            return self.owner.go_on(self.headers, self.broken, receive)
        assert self.rest is not None, "it was kept"
        return self.owner.request(self.message, self.headers, receive, self.rest)

    def close(self) -> None:
        """See `BegunReply`."""
        self._done()
        self.pending.abort()

    # -- from the connection ------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """Read on if the upstream has accepted the call."""
        self.head = head
        if self.rest is not None:
            self.rest.on_head(head)
        elif head.status >= 300:
            self.unusual()
        else:
            self.owner.accepted(self.headers)
            self.message = b""  # it is not sent again, and a call that waits should not keep it
            if head.content_type == EVENT_STREAM:
                self.is_stream = True

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """Look for the answer in a reply that came in one piece."""
        is_large = len(body) > min(SMALL_BYTES, self.max_bytes)
        if self.is_done or is_large or head.status >= 300 or head.content_type == EVENT_STREAM:
            self.on_head(head)
            self.on_body(body)
            self.on_end()
            return
        self.is_over, self.message = True, b""
        self.owner.accepted(self.headers)
        if self.hearer.hear_answer(body):
            self._done()
        else:
            self.head, self.parts = head, [body]
            self.pending.distrust()  # as in `on_end`
            self.unusual()

    def on_body(self, data: bytes, /) -> None:
        """Keep a part, and look for the answer if it is a stream."""
        if self.rest is not None:
            self.rest.on_body(data)
        elif self.is_followed:
            self._go_on(data)
        elif not self.is_done:
            self.parts.append(data)
            size = self.size = self.size + len(data)
            if size > self.max_bytes:
                if self._becomes_followed():
                    self._go_on(data)
            elif (not self.is_stream or self._is_plain(data)) and size > SMALL_BYTES:
                self._hold(size)

    def on_end(self) -> None:
        """Look for the answer in a body; a stream that ends without one may be resumed."""
        self.is_over = True
        if self.rest is not None:
            self.rest.on_end()
        elif self.is_done:
            pass
        elif self.is_followed:
            self._break(None)
        elif self.is_stream or not self.parts:
            self.unusual()
        elif self.hearer.hear_answer(b"".join(self.parts)):
            self._done()
        else:
            # At once: another request could use the connection before the coroutine reads the body.
            self.pending.distrust()
            self.unusual()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        self.is_over, self.failure = True, failure
        if self.rest is not None:
            self.rest.on_failed(failure)
        elif isinstance(failure, ClientClosed) and self.is_followed:
            self._done()  # the whole process ends
        elif self.is_followed and not self.is_done:
            cause = failure.__cause__ if isinstance(failure, ListenerFailed) else None
            self._break(cause if isinstance(cause, Exception) else failure)
        elif isinstance(failure, ListenerFailed):
            self._done()
            raise failure.__cause__ or failure  # a bug, which the HTTP client reports; the call has ended with it
        elif not self.is_done:
            self.unusual()

    def _events(self, data: bytes) -> Sequence[sse.Event]:
        """The events that a part of a stream completes; raises EventTooLarge."""
        parser = self.parser
        if parser is None:
            only = sse.only_event(data)
            if only is not None and len(data) <= self.max_bytes:
                self.is_begun = True
                return (sse.Event(only),)
            parser = self.parser = sse.Parser(self.max_bytes, is_begun=self.is_begun)
        return parser.feed(data)

    # -- while only the answer is expected ----------------------------------------------------------------------

    def _is_plain(self, data: bytes) -> bool:
        """Read a part of a stream; returns whether the answer is still expected, and nothing else came."""
        try:
            events = self._events(data)
        except sse.EventTooLarge:
            self.is_stream = False  # the parser must not be fed again
            self.unusual()
            return False
        for number, event in enumerate(events):
            if event.data and not self.hearer.hear_answer(event.data):
                if self._becomes_followed():
                    _ = self._hand_over(events[number:])
                return False
            if event.id is not None:
                _ = self.owner.resumption.is_repeated(event.id)
            if event.data:
                self._answered()
                return False
        return True

    def _becomes_followed(self) -> bool:
        """Say that something else came; returns whether the stream is followed from now on."""
        self.unusual()
        return self.is_followed

    # -- while the stream is followed ---------------------------------------------------------------------------

    def _go_on(self, data: bytes) -> None:
        """Hand over the messages that this part of the stream completes."""
        if self.is_done or self.is_over:
            return
        try:
            events = self._events(data)
        except sse.EventTooLarge as exc:
            self._break(exc)
            return
        if self._hand_over(events):
            size = 0 if self.parser is None else self.parser.unfinished_bytes
            if size > SMALL_BYTES or self.arrival is not None:  # nearly never
                self._hold(size)

    def _hand_over(self, events: Sequence[sse.Event]) -> bool:
        """Hand over messages; returns whether more are wanted."""
        for event in events:
            if event.id is not None:
                _ = self.owner.resumption.is_repeated(event.id)
            if not event.data:
                continue
            try:
                is_answered = self.hearer.hear_call(event.data)
            except GatewayError as exc:
                if not self.is_done:
                    self._break(exc)
                return False
            if is_answered and not self.is_done:
                self._answered()
            if self.is_done:  # or closed meanwhile
                return False
        return True

    def _break(self, cause: Exception | None) -> None:
        """Have a coroutine decide what becomes of the call."""
        parser, broke = self.parser, self.unusual
        self.broken = Broken(cause, None if parser is None else parser.retry_ms)
        self.is_over = True
        self._done()
        self.pending.abort()
        broke()

    # -----------------------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        """The answer is here; the stream should end now, so that its connection can be used again."""
        self._done()
        self.pending.end_within(self.owner.drain_seconds)

    def _done(self) -> None:
        """Forget the reply, which refers to the call."""
        if not self.is_done:
            self.is_done = True
            self._forget_parts()
            del self.hearer, self.unusual

    def _hold(self, size: int) -> None:
        """Read on only if there is room for more of a large reply."""
        self.arrival = self.owner.arriving.arriving(self.arrival, size, self.pending)

    def _forget_parts(self) -> None:
        self.parts.clear()
        if self.arrival is not None:
            self.arrival.release()
