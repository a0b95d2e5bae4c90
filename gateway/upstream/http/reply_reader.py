"""Reads replies by callback: JSON, or an event stream.

Rule 1: a message is handed over as soon as it is complete, and with the answer the reply is done. Rule 2: whatever
ends in another way (a refusal, a body that is not the answer, a stream that breaks) is over, and stays as it is for
the coroutine that decides what becomes of the request. This file decides nothing of that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Literal, Self, cast

import msgspec

from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_url import Endpoint
from gateway.http_client.connection import PendingRequest
from gateway.http_client.errors import ListenerFailed, RequestFailed
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.errors import Redirected
from gateway.protocol.reply_messages import EVENT_STREAM
from gateway.runtime.arrivals import SMALL_BYTES
from gateway.upstream.channel import Hearer
from gateway.upstream.http.http_upstream import HttpUpstream

DRAIN_SECONDS: Final = 1.0
"""How long a reply may go on that brought the answer or accepted a message; then its connection is closed."""
REFUSAL_BYTES: Final = 65_536
UNHEARD: Final = Hearer()
"""For a reply without messages."""


async def redirected(endpoint: Endpoint, send: Callable[[], "Awaitable[ReplyReader]"]) -> "ReplyReader":
    """Send a request, and once more where the upstream redirects it to within its origin; raises Redirected."""
    for _ in range(2):
        reply = await send()
        if reply.status not in REDIRECTS:
            return reply
        assert reply.head is not None, "it has a status"
        endpoint.follow(reply.head.text(b"location"))
    raise Redirected(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")


class ReplyReader(msgspec.Struct, eq=False):
    """One reply; the ReplyListener of its request."""

    hearer: Hearer
    max_bytes: int
    """The size of the largest message."""
    upstream: HttpUpstream
    unread: Collection[int] = ()
    """Statuses of a reply whose body is not waited for."""
    refusal_bytes: int = REFUSAL_BYTES
    """The size of the largest body with an HTTP error status."""
    pending: PendingRequest = cast("PendingRequest", None)
    """Set by whoever sends the request, of which this is the listener."""
    head: ReplyHead | None = None
    content: sse.Parser | list[bytes] | None = None
    """What parses a stream, or what has come of a body."""
    size: int = 0
    """Of what has come of a body, or of the message that is arriving on a stream."""
    stage: Literal["arriving", "done", "ended"] = "arriving"
    """Done: the answer was received, here or elsewhere. Ended: it has ended in another way."""
    failure: Exception | None = None
    """Why the reply ended, if it is over and not complete."""
    waiter: asyncio.Future[None] | None = None

    async def over(self, pending: PendingRequest) -> Self:
        """Wait until the reply is over; if that is cancelled, give the request up."""
        self.pending = pending
        if self.stage == "arriving":
            self.waiter = asyncio.Future()  # uvloop's `create_future` costs nearly twice as much (decision 61)
            try:
                await self.waiter
            except BaseException:
                self.close()
                raise
        return self

    def wake(self) -> None:
        """Have who waits for the end go on."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    @property
    def status(self) -> int:
        """The status code; 0 before the head is here."""
        return 0 if self.head is None else self.head.status

    @property
    def body(self) -> bytes:
        """What has come of a body."""
        return b"".join(self.content) if isinstance(self.content, list) else b""

    @property
    def is_stream(self) -> bool:
        """Whether it is an event stream."""
        return isinstance(self.content, sse.Parser)

    @property
    def is_done(self) -> bool:
        """Whether the answer was received, here or elsewhere."""
        return self.stage == "done"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is heard."""
        return self.stage != "arriving"

    @property
    def retry_ms(self) -> int | None:
        """The pause that the stream asked for."""
        return self.content.retry_ms if isinstance(self.content, sse.Parser) else None

    def close(self) -> None:
        """Read nothing more: the answer came another way, or is not wanted."""
        self._done()
        self.pending.abort()

    # -- from the connection ------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """The head is here."""
        self.head = head
        if head.status < 300:
            if head.content_type == EVENT_STREAM:
                self.content = sse.Parser(self.max_bytes)
            self.accepted()
        else:
            self.max_bytes = self.refusal_bytes
            if head.status in self.unread:
                self._end(None)

    def on_body(self, data: bytes, /) -> None:
        """Hand over the messages that this part of a stream completes; keep a part of a body."""
        if self.stage != "arriving":
            return
        content, before = self.content, self.size
        if isinstance(content, sse.Parser):
            try:
                events = content.feed(data)
            except sse.EventTooLarge as exc:
                self._end(exc)
                return
            for event in events:
                self.take(event)
                if self.is_over:
                    return
            self.size = content.unfinished_bytes
        else:
            if content is None:
                content = self.content = []
            content.append(data)
            self.size = before + len(data)
            if self.size > self.max_bytes:
                self._end(sse.EventTooLarge(f"a body is larger than {self.max_bytes} bytes"))
                return
        if self.size > SMALL_BYTES or before > SMALL_BYTES:  # nearly never
            _ = self.upstream.client.arriving.hold(self.pending, self.size)

    def on_end(self) -> None:
        """Hand over a body, if the server has accepted the request: it is the answer, or there is none."""
        if self.stage != "arriving":
            return
        failure = None
        if isinstance(self.content, list) and self.status < 300:
            try:
                self.hand_over(self.body)
            except Exception as exc:  # noqa: BLE001  (who decides about the request handles it, not the connection)
                failure = exc
            # At once: another request could use the connection before it is seen that this is not the answer.
            if failure is not None or not self.is_done:
                self.pending.distrust()
        self._end(failure)

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """The whole reply is here."""
        try:
            self.on_head(head)
            self.on_body(body)
        except Exception as exc:  # noqa: BLE001  (as the connection does if a reply comes in parts)
            self.pending.distrust()
            self._end(exc)
        self.on_end()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        if isinstance(failure, ListenerFailed) and isinstance(failure.__cause__, Exception):
            self._end(failure.__cause__)
        else:
            self._end(failure)

    # -----------------------------------------------------------------------------------------------------------

    def accepted(self) -> None:
        """The server has accepted the request."""

    def take(self, event: sse.Event) -> None:
        """Take one event of a stream."""
        if event.data:
            self.hand_over(event.data)

    def hand_over(self, data: bytes) -> None:
        """Hand over a message; with the answer, the reply is done."""
        if self.hearer.hear(data) and self.stage == "arriving":  # or closed meanwhile
            self.answered()

    def answered(self) -> None:
        """The answer is here; the reply should end now, so that its connection can be used again."""
        self._done()
        self.pending.end_within(DRAIN_SECONDS)

    def _done(self) -> None:
        """Forget the reply, which refers to the request."""
        if self.stage == "arriving":
            if isinstance(self.content, list):
                self.content = None
            _ = self._let_go("done")

    def _end(self, failure: Exception | None) -> None:
        """Have a coroutine decide what becomes of the request."""
        if self.stage != "arriving":
            return
        self.failure = failure
        is_awaited = self.waiter is not None and not self.waiter.done()  # before `_let_go`, which wakes it
        hearer = self._let_go("ended")
        self.pending.abort()
        if not is_awaited:
            hearer.over(self, failure)

    def _let_go(self, stage: Literal["done", "ended"]) -> Hearer:
        """Hear nothing more, and forget who did; who that was is returned."""
        self.stage, hearer = stage, self.hearer
        del self.hearer
        if self.size > SMALL_BYTES:
            self.upstream.client.arriving.release(self.pending)
        if self.waiter is not None:
            self.wake()
        return hearer


class Acceptance(ReplyReader):
    """The reply to a message of which nothing is wanted but that the server accepts it."""

    def accepted(self) -> None:
        """Read no more."""
        self.answered()


class StreamReply(ReplyReader):
    """The reply to a GET: an event stream that is silent most of the time, or else nothing."""

    def accepted(self) -> None:
        """Only a stream is what was asked for."""
        if self.is_stream and self.status == 200:
            self.head = None
            self.opened()
        else:
            self.content = None
            self._end(None)

    def opened(self) -> None:
        """The stream is here."""
        self.hearer.attached()
