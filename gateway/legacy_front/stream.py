"""One stream of a session on its way to its client, which may come back for what it missed.

Rule 1: what is here counts against `limits.replay_bytes`, whether the client reads or not. A stream that must give way
forgets what was written; if nothing was, the session ends: a request or a response is never lost while it lives.
Rule 2: a new reader replaces the one before, and begins where its client says, or where that one ended.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from gateway.http.outbox import FinalMessage, Item, Outbox, error_response
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.protocol import sse
from gateway.protocol.errors import CallLost
from gateway.protocol.jsonrpc import RequestId
from gateway.runtime.budget import Budget
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.pieces import Turn
from gateway.telemetry import COMPLETE

_EVENT_BYTES: Final = 256
"""What an event costs besides its message."""
_FIRST_SECONDS: Final = 1.0
"""How long a reply waits for its result before it becomes a stream, so that the client can come back to it."""
ENDED: Final = FinalMessage(b"")


class Stream(Outbox):
    """The reply to one request, or the standalone stream."""

    def __init__(  # noqa: PLR0913  (what limits it)
        self,
        name: int,
        request: RequestId | None,
        budget: Budget,
        principal: bytes,
        silence: CoarseTimer,
        overflowed: Callable[[CallLost], None],
    ) -> None:
        """`principal` is that of the client. `overflowed`: messages that nobody has read had to give way."""
        super().__init__(silence)
        self.name = name
        self.is_resumable = False
        """Whether messages stay here when they have been read, because the client may ask for them again."""
        self.began = False
        """Whether the reply is a stream for certain, so that no response has an HTTP status of its own."""
        self.reader: object = None
        """Who writes what is here to the client."""
        self._request = request
        self._overflowed = overflowed
        self._read: list[tuple[int, bytes]] = []
        """What was taken, by number: the last of it may not have reached the client yet."""
        self._read_bytes = 0
        self.delivered = 0
        """The number of the last message that was written to the client."""
        self._forgotten = 0
        """The number of the last message that cannot be asked for again."""
        self._new_share = partial(budget.share, self._give_way, principal)
        self.begin_writing(self._new_share())

    @contextmanager
    def read_by(self, reader: object, position: int) -> Iterator[None]:
        """Have a reader take what comes behind a number; what it has taken and not written comes again after it."""
        self._wake()  # the reader before notices that it was replaced
        self.waits_no_more()
        self.reader = reader
        self._seek(position)
        try:
            yield
        finally:
            if self.reader is reader:
                self.reader = None
                self._seek(self.delivered)

    async def next(self, reader: object) -> Item:
        """The next message for a reader, which has written the one before; the end if another reader has come."""
        if self.reader is reader:
            self.written()
            if not self.is_ready:
                await self._wait()
        return ENDED if self.reader is not reader or self._is_final_taken else self._next()

    def written(self) -> None:
        """What was taken has been written."""
        self.delivered = self.taken
        if not self.is_resumable:
            self._forget_written()
            self._count()

    async def reply(self, reply: ReplyWriter) -> Response:
        """Write the reply to a request: one JSON body if it is the response alone, else a stream."""
        with self.read_by(reply, 0):
            first = None
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_SECONDS if self.is_resumable else None):
                    first = await self.next(reply)
            if isinstance(first, FinalMessage) and first.body:
                if first.cause is not None:
                    raise first.cause
                return await reply.only(first)
            return await self._write(reply, first)

    async def write(self, reply: ReplyWriter, position: int) -> Response:
        """Write what comes behind a number until the stream is over, or another reader takes it."""
        with self.read_by(reply, position):
            return await self._write(reply, None)

    async def _write(self, reply: ReplyWriter, item: Item) -> Response:
        """Write everything, after an item that was taken already."""
        self.began = True
        # A priming event: a client that loses the stream here has an id to come back with.
        begin = self._event(b"", self.delivered) if self.is_resumable else b""
        if isinstance(item, bytes):
            begin += self._event(item, self.taken)
        if not reply.started:
            await reply.start()
        if begin:
            await reply.write(begin)
        turn = Turn()
        while item is not ENDED:
            item = await self.next(reply)
            message = item.body if isinstance(item, FinalMessage) else item
            if message != b"":
                await reply.write(sse.KEEP_ALIVE if message is None else self._event(message, self.taken))
            if self.is_ready:
                await turn.give_way()
        return await reply.end(COMPLETE)

    def _event(self, data: bytes, number: int) -> bytes:
        encoded = sse.encode(data) if data else b"data:\n\n"
        return b"id: %d-%d\n%b" % (self.name, number, encoded) if self.is_resumable else encoded

    def can_resume(self, number: int) -> bool:
        """Whether everything behind a number is here."""
        return self._forgotten <= number <= self.last

    def move_to(self, other: Outbox) -> None:
        """Put what waits here into another outbox."""
        droppable = {*self._droppable} if self._messages else ()
        for number, message in (self._messages or {}).items():
            if other.final is None:  # else it had to give way
                (other.send if number in droppable else other.ask)(message)

    def clear(self) -> None:
        """Forget everything: nobody will ask for it."""
        self._drop_all()
        self.final = ENDED
        self.end_writing()
        self._wake()

    def _drop_all(self) -> None:
        self._messages, self._bytes, self._droppable_bytes = None, 0, 0
        self._read, self._read_bytes = [], 0
        self._forgotten = self.last

    # -- what was read --------------------------------------------------------------------------------------------

    def _next(self) -> Item:
        item = super()._next()
        if isinstance(item, bytes):
            self._read.append((self.taken, item))
            self._read_bytes += len(item)
        return item

    def _seek(self, position: int) -> None:
        """Have what comes behind a number taken next; the client has what comes before it."""
        while self._messages and next(iter(self._messages)) <= position:
            _ = self._next()
        while self._messages is not None and self._read and self._read[-1][0] > position:
            number, message = self._read.pop()
            self._read_bytes -= len(message)
            self._messages[number] = message  # not among the notifications: what was read once is not dropped
            self._messages.move_to_end(number, last=False)
            self._bytes += len(message)
        self.taken = position
        self.written()

    def _forget_written(self) -> None:
        self._forgotten = max(self._forgotten, self.delivered)
        self._read = [each for each in self._read if each[0] > self.delivered]
        self._read_bytes = sum(len(message) for _, message in self._read)

    # -- the budget -----------------------------------------------------------------------------------------------

    def _added(self) -> None:
        self._count()
        self._wake()

    def _waiting_bytes(self) -> int:
        final = b"" if self.final is None else self.final.body
        events = len(self._read) + len(self._messages or ()) + bool(final)
        return self._bytes + self._read_bytes + len(final) + events * _EVENT_BYTES

    def _give_way(self) -> None:
        self.begin_writing(self._new_share())
        before = self._waiting_bytes()
        self._forget_written()
        if self._is_final_taken and self.delivered == self.last:
            self.final = ENDED
        waiting = self._waiting_bytes()
        if waiting < before:
            self._count()  # what waits may fit now
        elif waiting:
            self._drop_all()
            error = CallLost(
                "The client did not read its messages, and they took more than limits.replay_bytes together with "
                "those of other clients: the session has ended; its open requests may have had effects"
            )
            if self.final is not None:
                self.final = FinalMessage(error_response(self._request, error), cause=error)
            self._overflowed(error)
