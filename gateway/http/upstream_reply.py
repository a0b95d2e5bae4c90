"""A reply of an upstream for the one coroutine that awaits it.

The head comes first, then the body part by part, from a bounded buffer.
"""

import asyncio
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, Self

from multidict import CIMultiDict

from gateway import world
from gateway.http_client.connection import PendingRequest
from gateway.http_client.errors import ReplyCut, RequestFailed
from gateway.http_client.reply_head import ReplyHead

_BUFFERED_BYTES: Final = 131_072
"""Nothing more is read from the socket while this much waits for the coroutine."""


def clock_ahead(headers: CIMultiDict[str]) -> int | None:
    """By how many seconds the clock behind a `Date` is ahead of this one's; None if there is none to read."""
    try:
        return round(parsedate_to_datetime(headers.get("Date", "")).timestamp() - world.wall())
    except (ValueError, OverflowError):
        return None


@dataclass(slots=True, eq=False, repr=False)
class AwaitedReply:
    """One reply. What came before a failure is handed over before the failure is raised."""

    pending: PendingRequest = field(init=False)
    """The request, once it has begun; this is its listener."""
    head: ReplyHead = field(init=False)
    """What `begun` waits for."""
    _is_begun: bool = False
    _parts: list[bytes] = field(default_factory=list)
    _buffered: int = 0
    _is_over: bool = False
    """Whether the reply has ended or failed."""
    _failure: RequestFailed | None = None
    _waiter: asyncio.Future[None] | None = None

    # -- for the coroutine --------------------------------------------------------------------------------------

    async def begun(self, pending: PendingRequest) -> Self:
        """Wait for the head of the reply to a request. Raises RequestFailed."""
        self.pending = pending
        try:
            while not self._is_begun and self._failure is None:
                await self._change()
        except BaseException:
            self.close()
            raise
        if self._failure is not None and not self._is_begun:
            raise self._failure
        return self

    @property
    def status(self) -> int:
        """The status code."""
        return self.head.status

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters."""
        return self.head.content_type or "application/octet-stream"

    @property
    def headers(self) -> CIMultiDict[str]:
        """All headers, decoded anew each time: most replies need none of them."""
        return CIMultiDict(self.head.texts())

    @property
    def is_read(self) -> bool:
        """Whether the whole body was handed over, so that the connection can carry the next request."""
        return self._is_over and not self._parts

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return what has come of the body since the last part. Raises RequestFailed."""
        while not self._parts:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                raise StopAsyncIteration
            await self._change()
        return self.taken()

    def taken(self) -> bytes:
        """Hand over what waits, without waiting for it; empty if nothing does."""
        parts, self._parts = self._parts, []
        self._buffered = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def whole_at_most(self, limit: int) -> bytes | None:
        """Return the body if all of it is here, and it is no larger than `limit` bytes."""
        if not self._is_over or self._failure is not None or self._buffered > limit:
            return None
        return self.taken()

    async def read_at_most(self, limit: int) -> bytes | None:
        """Return the whole body, or None if it is larger than `limit` bytes. Raises RequestFailed."""
        parts: list[bytes] = []
        size = 0
        async for part in self:
            parts.append(part)
            size += len(part)
            if size > limit:
                return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Read nothing more. A connection with the rest of the body in it is closed."""
        self.pending.abort()
        self._parts.clear()

    def cut(self) -> None:
        """End the reply from elsewhere: the coroutine hears that the rest will not come."""
        if not self._is_over:
            self.pending.abort()
            self.on_failed(ReplyCut())

    def _change(self) -> asyncio.Future[None]:
        """What is done once anything else has come."""
        self.pending.resume_reading()
        waiter = self._waiter = asyncio.Future()
        return waiter

    # -- from the connection ------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        """The head is here."""
        self.head = head
        self._is_begun = True
        self._wake()

    def on_body(self, data: bytes, /) -> None:
        """A part of the body is here."""
        self._parts.append(data)
        self._buffered += len(data)
        if self._buffered >= _BUFFERED_BYTES:
            self.pending.pause_reading()
        self._wake()

    def on_end(self) -> None:
        """The reply is complete."""
        self._is_over = True
        self._wake()

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """The whole reply is here."""
        self.on_head(head)
        self.on_body(body)
        self.on_end()

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""
        self._failure = failure
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
