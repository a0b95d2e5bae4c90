"""The messages of one stream on their way to a client, with those that it may ask for again.

Rule 1: a request or a response is never dropped while its session lives. Notifications are, if the client does not
read, the oldest first. Rule 2: what is here counts against `limits.replay_bytes`. A stream that must give way forgets
what it has delivered; if a message waits for the client, the session ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.runtime.budget import Budget, Share

_EVENT_BYTES: Final = 256
"""What an event costs besides its message."""


class Entry(NamedTuple):
    """One message with its number in the stream."""

    number: int
    data: bytes
    is_droppable: bool


class Outbox:
    """The messages of one stream, numbered from 1; one reader at a time."""

    def __init__(self, name: int, budget: Budget, behind_bytes: int, overflowed: Callable[[], None]) -> None:
        """`behind_bytes` limits the notifications that wait. `overflowed`: messages that wait had to give way."""
        self.name = name
        self.is_resumable = False
        """Whether messages stay here after their delivery, because the client may ask for them again."""
        self.is_over = False
        """Whether the last message is in."""
        self.reader: object = None
        """Who writes what is here to the client; a new reader replaces it."""
        self._budget = budget
        self._behind_bytes = behind_bytes
        self._overflowed = overflowed
        self._entries: deque[Entry] = deque()
        self._share: Share | None = None
        self.last = 0
        """The number of the last message so far."""
        self.delivered = 0
        """The number of the last message that was written to the client."""
        self._forgotten = 0
        """The number of the last message that cannot be asked for again."""
        self._behind = 0
        """The size of the notifications that wait."""
        self._change: asyncio.Future[None] | None = None

    def put(self, data: bytes, *, is_droppable: bool = False) -> None:
        """Append a message; the oldest notifications that wait make room for a notification."""
        self.last += 1
        self._entries.append(Entry(self.last, data, is_droppable))
        if is_droppable:
            self._behind += len(data)
            while self._behind > self._behind_bytes and self._drop_oldest():
                pass
        self._wake()
        if self._share is None:
            self._share = self._budget.share(self._give_way)
        self._share.grow(len(data) + _EVENT_BYTES)

    def finish(self) -> None:
        """The last message is in."""
        self.is_over = True
        self._wake()

    def after(self, number: int) -> Entry | None:
        """The first message behind a number."""
        return next((entry for entry in self._entries if entry.number > number), None)

    def deliver(self, entry: Entry) -> None:
        """A message was written to the client."""
        if entry.number > self.delivered:
            self.delivered = entry.number
            if entry.is_droppable:
                self._behind -= len(entry.data)
        if not self.is_resumable:
            self._forget_to(entry.number)

    def can_resume(self, number: int) -> bool:
        """Whether everything behind a number is here."""
        return self._forgotten <= number <= self.last

    def attach(self, reader: object) -> None:
        """Have a reader take the messages from now on; the previous one ends."""
        self.reader = reader
        self._wake()

    def detach(self, reader: object) -> None:
        """A reader has ended."""
        if self.reader is reader:
            self.reader = None

    async def changed(self, seconds: float) -> bool:
        """Wait until something changes here; return False if the time is over first."""
        self._change = change = self._change or asyncio.get_running_loop().create_future()
        _ = await asyncio.wait((change,), timeout=seconds)
        return change.done()

    def waiting(self) -> list[bytes]:
        """Return the messages that were not delivered."""
        return [entry.data for entry in self._entries if entry.number > self.delivered]

    def clear(self) -> None:
        """Forget everything."""
        self._forget_to(self.last)
        self.finish()

    def _wake(self) -> None:
        change, self._change = self._change, None
        if change is not None and not change.done():
            change.set_result(None)

    def _drop_oldest(self) -> bool:
        """Drop the oldest notification that waits, unless it is the newest message."""
        for entry in self._entries:
            if entry.is_droppable and self.delivered < entry.number < self.last:
                self._entries.remove(entry)
                self._behind -= len(entry.data)
                self._release(entry)
                return True
        return False

    def _forget_to(self, number: int) -> None:
        self._forgotten = max(self._forgotten, number)
        while self._entries and self._entries[0].number <= number:
            self._release(self._entries.popleft())
        if not self._entries and self._share is not None:
            self._share.release()
            self._share = None

    def _release(self, entry: Entry) -> None:
        if self._share is not None:
            self._share.grow(-len(entry.data) - _EVENT_BYTES)

    def _give_way(self) -> None:
        self._share = None
        count = len(self._entries)
        self._forget_to(self.delivered)
        if not self._entries:
            return
        if len(self._entries) < count:  # what waits may fit now
            self._share = self._budget.share(self._give_way)
            self._share.grow(sum(len(entry.data) + _EVENT_BYTES for entry in self._entries))
        else:
            self._forget_to(self.last)
            self._overflowed()
