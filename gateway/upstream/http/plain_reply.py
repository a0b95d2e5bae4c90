"""Reads replies by callback: the answer to a call, the messages of its event stream, the acceptance of a message.

Rule: as long as nothing but the answer has come, what is read is kept as it came. When anything else comes, an event
stream is followed (`follow`), message by message, and nothing of it is kept. Any other reply (an error, a body that is
not the answer) goes to the coroutine that reads replies, from its beginning (`keep`). So does a stream that breaks,
with the reason. This file decides nothing that `streamable_http` decides.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ClientClosed, ListenerFailed, NoReply, NotConnected, RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.errors import GatewayError
from gateway.runtime.throttle import SMALL_BYTES, Arrival, Throttle
from gateway.upstream.channel import BegunReply, Headers, Hearer, Reading, Receive
from gateway.upstream.http.resumption import Resumption
from gateway.upstream.jsonrpc_batches import hand_over

_NO_PARTS: Final[list[bytes]] = []
"""Of a reply that keeps none: never changed."""


class Acceptance:
    """The reply to a message that needs no answer, a ReplyListener: nearly always the server just accepts it.

    The message is sent again if it met the end of a connection that had been idle. It does no harm twice: a server
    takes the first answer to a question, and what is cancelled stays so.
    """

    __slots__ = (
        "_accepted",
        "_begin_again",
        "_is_accepted",
        "_pending",
        "_rest",
        "_rest_seconds",
        "_timer",
        "_unanswered",
        "_unusual",
    )

    def __init__(  # noqa: PLR0913  (what a message may lead to)
        self,
        begin: Callable[[ReplyListener], PendingRequest],
        begin_again: Callable[[ReplyListener], PendingRequest],
        accepted: Callable[[], None],
        unusual: Callable[[AwaitedReply], None],
        seconds: float,
        rest_seconds: float,
    ) -> None:
        """Send a message by `begin`; `accepted` is called with the head that accepts it, whatever follows.

        `begin_again` sends it on a new connection.
        `unusual` is called instead if a coroutine has to read the reply: a refusal, or if no head comes in `seconds`.
        The rest of an acceptance has `rest_seconds` to come; some servers leave it open.
        """
        self._accepted, self._unusual, self._begin_again = accepted, unusual, begin_again
        self._unanswered: NoReply | None = None
        """How the first attempt ended, once there is another."""
        self._rest_seconds = rest_seconds
        self._is_accepted = False
        self._rest: AwaitedReply | None = None
        self._pending = begin(self)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._keep)

    def _keep(self) -> AwaitedReply:
        """Keep the reply for a coroutine."""
        self._timer.cancel()
        rest = self._rest = AwaitedReply(lambda _: self._pending)
        self._unusual(rest)
        return rest

    def on_head(self, head: ReplyHead, /) -> None:
        """See whether the server accepts the message."""
        if self._rest is not None:
            self._rest.on_head(head)
        elif head.status < 300:
            self._timer.cancel()
            self._accepted()
            self._is_accepted = True
            del self._begin_again  # it keeps the message, and some servers leave their reply open
            self._pending.end_within(self._rest_seconds)
        else:
            self._keep().on_head(head)

    def on_body(self, data: bytes, /) -> None:
        """Skip the body of an acceptance, which is usually empty."""
        if self._rest is not None:
            self._rest.on_body(data)

    def on_end(self) -> None:
        """The reply is complete."""
        if self._rest is not None:
            self._rest.on_end()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed, which is no matter once the message is accepted."""
        if self._is_accepted:
            return
        first = self._unanswered
        if first is None and self._rest is None and isinstance(failure, NoReply) and failure.reused:
            self._unanswered = failure
            self._pending = self._begin_again(self)
            return
        if first is not None and isinstance(failure, NotConnected):
            failure = first  # the server may have got the first one, and ended since
        (self._rest or self._keep()).on_failed(failure)


class Broken(NamedTuple):
    """How a stream broke that was followed."""

    cause: Exception | None
    """None if the server ended it without the answer."""
    retry_ms: int | None
    """The pause that the stream asked for."""


class Owner(Protocol):
    """The channel of a reply."""

    @property
    def resumption(self) -> Resumption:
        """Notes the ids of events."""

    @property
    def arriving(self) -> Throttle:
        """Limits the unfinished messages of the upstream."""

    @property
    def max_event_bytes(self) -> int:
        """The size of the largest message."""

    @property
    def drain_seconds(self) -> float:
        """How long a stream may stay open after the answer."""

    def post(self, message: bytes, headers: Headers, listener: ReplyListener) -> PendingRequest:
        """Send the request of a reply."""

    def accepted(self, headers: Headers) -> None:
        """The upstream has accepted the request."""

    def request(self, message: bytes, headers: Headers, receive: Receive, begun: AwaitedReply) -> Reading:
        """Read a reply from its beginning."""

    def go_on(self, headers: Headers, broken: Broken, receive: Receive) -> Reading:
        """Go on after a stream that broke."""


class PlainReply(BegunReply):
    """One reply, a ReplyListener."""

    __slots__ = (
        "_arrival",
        "_broken",
        "_failure",
        "_head",
        "_headers",
        "_hearer",
        "_is_begun",
        "_is_done",
        "_is_followed",
        "_is_over",
        "_is_stream",
        "_owner",
        "_parser",
        "_parts",
        "_pending",
        "_rest",
        "_size",
        "_unusual",
        "message",
    )

    def __init__(self, owner: Owner, message: bytes, headers: Headers) -> None:
        """Send a request."""
        self._owner, self.message, self._headers = owner, message, headers
        self._arrival: Arrival | None = None
        """Once the reply is large."""
        self._hearer: Hearer
        self._unusual: Callable[[], None]
        self._head: ReplyHead | None = None
        self._is_stream = False
        self._parser: sse.Parser | None = None
        """Made when a part of a stream is not one plain event."""
        self._is_begun = False
        """Whether events were read without a parser."""
        self._parts: list[bytes] = []
        self._size = 0
        self._is_done = False
        """Whether the answer was received, here or elsewhere."""
        self._is_over = False
        self._is_followed = False
        self._failure: RequestFailed | None = None
        self._rest: AwaitedReply | None = None
        self._broken: Broken | None = None
        self._pending = owner.post(message, headers, self)

    def start(self, hearer: Hearer, unusual: Callable[[], None]) -> None:
        """See `BegunReply`."""
        self._hearer, self._unusual = hearer, unusual

    def follow(self, broke: Callable[[], None]) -> bool:
        """See `BegunReply`."""
        if not self._is_stream or self._is_over or self._is_done:
            return False
        self._unusual, self._is_followed = broke, True
        self._forget_parts()
        self._parts = _NO_PARTS
        self._arrival = self._head = None
        self._pending.is_silent = True
        if self._pending.is_paused:
            self._pending.resume_reading()
        return True

    def keep(self) -> None:
        """See `BegunReply`."""
        rest = self._rest = AwaitedReply(lambda _: self._pending)
        if self._head is not None:
            rest.on_head(self._head)
        for part in self._parts:
            rest.on_body(part)
        self._done()
        self._head = self._parser = None
        if self._failure is not None:
            rest.on_failed(self._failure)
        elif self._is_over:
            rest.on_end()

    def read(self, receive: Receive) -> Reading:
        """See `BegunReply`."""
        if self._broken is not None:
            return self._owner.go_on(self._headers, self._broken, receive)
        assert self._rest is not None, "it was kept"
        return self._owner.request(self.message, self._headers, receive, self._rest)

    def close(self) -> None:
        """See `BegunReply`."""
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
            self._owner.accepted(self._headers)
            self.message = b""  # it is not sent again, and a call that waits should not keep it
            self._is_stream = head.content_type == "text/event-stream"

    def on_body(self, data: bytes, /) -> None:
        """Keep a part, and look for the answer if it is a stream."""
        if self._rest is not None:
            self._rest.on_body(data)
        elif self._is_followed:
            self._go_on(data)
        elif not self._is_done:
            self._parts.append(data)
            self._size += len(data)
            if self._size > self._owner.max_event_bytes:
                if self._becomes_followed():
                    self._go_on(data)
            elif (not self._is_stream or self._is_plain(data)) and self._size > SMALL_BYTES:
                self._hold(self._size)

    def on_end(self) -> None:
        """Look for the answer in a body; a stream that ends without one may be resumed."""
        self._is_over = True
        if self._rest is not None:
            self._rest.on_end()
        elif self._is_done:
            pass
        elif self._is_followed:
            self._break(None)
        elif self._is_stream or not self._parts:
            self._unusual()
        elif self._hearer.hear_answer(b"".join(self._parts)):
            self._done()
        else:
            # At once: another request could use the connection before the coroutine reads the body.
            self._pending.distrust()
            self._unusual()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        self._is_over, self._failure = True, failure
        if self._rest is not None:
            self._rest.on_failed(failure)
        elif isinstance(failure, ClientClosed) and self._is_followed:
            self._done()  # the whole process ends
        elif self._is_followed and not self._is_done:
            cause = failure.__cause__ if isinstance(failure, ListenerFailed) else None
            self._break(cause if isinstance(cause, Exception) else failure)
        elif isinstance(failure, ListenerFailed):
            self._done()
            raise failure.__cause__ or failure  # a bug, which the HTTP client reports; the call has ended with it
        elif not self._is_done:
            self._unusual()

    def _events(self, data: bytes) -> Sequence[sse.Event]:
        """The events that a part of a stream completes; raises EventTooLarge."""
        parser = self._parser
        if parser is None:
            only = sse.only_event(data)
            if only is not None and len(data) <= self._owner.max_event_bytes:
                self._is_begun = True
                return (sse.Event(only),)
            parser = self._parser = sse.Parser(self._owner.max_event_bytes, is_begun=self._is_begun)
        return parser.feed(data)

    # -- while only the answer is expected ----------------------------------------------------------------------

    def _is_plain(self, data: bytes) -> bool:
        """Read a part of a stream; returns whether the answer is still expected, and nothing else came."""
        try:
            events = self._events(data)
        except sse.EventTooLarge:
            self._is_stream = False  # the parser must not be fed again
            self._unusual()
            return False
        for number, event in enumerate(events):
            if event.data and not self._hearer.hear_answer(event.data):
                if self._becomes_followed():
                    _ = self._hand_over(events[number:])
                return False
            if event.id is not None:
                _ = self._owner.resumption.is_repeated(event.id)
            if event.data:
                self._answered()
                return False
        return True

    def _becomes_followed(self) -> bool:
        """Say that something else came; returns whether the stream is followed from now on."""
        self._unusual()
        return self._is_followed

    # -- while the stream is followed ---------------------------------------------------------------------------

    def _go_on(self, data: bytes) -> None:
        """Hand over the messages that this part of the stream completes."""
        if self._is_done or self._is_over:
            return
        try:
            events = self._events(data)
        except sse.EventTooLarge as exc:
            self._break(exc)
            return
        if self._hand_over(events):
            size = 0 if self._parser is None else self._parser.unfinished_bytes
            if size > SMALL_BYTES or self._arrival is not None:  # nearly never
                self._hold(size)

    def _hand_over(self, events: Sequence[sse.Event]) -> bool:
        """Hand over messages; returns whether more are wanted."""
        for event in events:
            if event.id is not None:
                _ = self._owner.resumption.is_repeated(event.id)
            if not event.data:
                continue
            try:
                is_answered = hand_over(event.data, self._hearer.hear_call)
            except GatewayError as exc:
                if not self._is_done:
                    self._break(exc)
                return False
            if is_answered and not self._is_done:
                self._answered()
            if self._is_done:  # or closed meanwhile
                return False
        return True

    def _break(self, cause: Exception | None) -> None:
        """Have a coroutine decide what becomes of the call."""
        parser, broke = self._parser, self._unusual
        self._broken = Broken(cause, None if parser is None else parser.retry_ms)
        self._is_over = True
        self._done()
        self._pending.abort()
        broke()

    # -----------------------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        """The answer is here; the stream should end now, so that its connection can be used again."""
        self._done()
        self._pending.end_within(self._owner.drain_seconds)

    def _done(self) -> None:
        """Forget the reply, which refers to the call."""
        if not self._is_done:
            self._is_done = True
            self._forget_parts()
            del self._hearer, self._unusual

    def _hold(self, size: int) -> None:
        """Read on only if there is room for more of a large reply."""
        self._arrival = self._owner.arriving.arriving(self._arrival, size, self._pending)

    def _forget_parts(self) -> None:
        self._parts.clear()
        if self._arrival is not None:
            self._arrival.release()
