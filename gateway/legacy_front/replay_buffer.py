"""The messages of one stream on their way to a client, with those that it may ask for again.

Rule 1: a request or a response is never dropped while its session lives. Notifications are, if the client does not
read, the oldest first. Rule 2: what is here counts against `limits.replay_bytes`. A stream that must give way forgets
what it has delivered; if a message waits for the client, the session ends.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.runtime.budget import Budget, Share

_EVENT_BYTES: Final = 256
"""What an event costs besides its message."""


class Entry(NamedTuple):
    """One message with its number in the stream."""

    number: int
    data: bytes
    is_droppable: bool


class ReplayBuffer:
    """The messages of one stream, numbered from 1; one reader at a time."""

    def __init__(
        self, name: int, budget: Budget, principal: bytes, behind_bytes: int, overflowed: Callable[[], None]
    ) -> None:
        """`principal` is that of the client. `behind_bytes` limits the notifications that wait.

        `overflowed`: messages that wait had to give way.
        """
        self.name = name
        self.is_resumable = False
        """Whether messages stay here after their delivery, because the client may ask for them again."""
        self.is_over = False
        """Whether the last message is in."""
        self.reader: object = None
        """Who writes what is here to the client; a new reader replaces it."""
        self._new_share = partial(budget.share, self._give_way, principal)
        self._behind_bytes = behind_bytes
        self._overflowed = overflowed
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        """What waits for the client, by number."""
        self._droppable: deque[int] = deque()
        """The numbers of the notifications among them."""
        self._kept: list[Entry] = []
        """What was delivered, and may be asked for again."""
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

    def put(self, data: bytes, *, is_droppable: bool = False) -> bool:
        """Append a message; return False if it had to give way at once.

        The oldest notifications that wait make room for a notification.
        """
        self.last += 1
        entry = self._waiting[self.last] = Entry(self.last, data, is_droppable)
        if is_droppable:
            self._droppable.append(entry.number)
            self._behind += len(data)
            while self._behind > self._behind_bytes and len(self._droppable) > 1:
                self._release(self._take(self._droppable[0]))
        self._wake()
        if self._share is None:
            self._share = self._new_share()
        self._share.grow(_size(entry))
        return self._forgotten < entry.number

    def finish(self) -> None:
        """The last message is in."""
        self.is_over = True
        self._wake()

    def after(self, number: int) -> Entry | None:
        """The first message behind a number."""
        if number < self.delivered:
            index = bisect_right(self._kept, number, key=_number)
            if index < len(self._kept):
                return self._kept[index]
        return next(iter(self._waiting.values()), None)

    def deliver(self, number: int) -> None:
        """The client has the messages up to a number."""
        while (entry := self.after(self.delivered)) is not None and entry.number <= number:
            _ = self._take(entry.number)
            if self.is_resumable:
                self._kept.append(entry)
            else:
                self._forgotten = entry.number
                self._release(entry)
        self.delivered = max(self.delivered, number)
        self._free()

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

    def waiting(self) -> list[Entry]:
        """Return the messages that were not delivered."""
        return list(self._waiting.values())

    def clear(self) -> None:
        """Forget everything."""
        self._forget_kept()
        self._forget_waiting()
        self._free()
        self.finish()

    def _wake(self) -> None:
        change, self._change = self._change, None
        if change is not None and not change.done():
            change.set_result(None)

    def _take(self, number: int) -> Entry:
        """Take the oldest message that waits, or the oldest notification."""
        entry = self._waiting.pop(number)
        if entry.is_droppable:
            _ = self._droppable.popleft()
            self._behind -= len(entry.data)
        return entry

    def _forget_kept(self) -> None:
        self._forgotten = max(self._forgotten, self.delivered)
        for entry in self._kept:
            self._release(entry)
        self._kept.clear()

    def _forget_waiting(self) -> None:
        self._forgotten = self.last
        while self._waiting:
            self._release(self._take(next(iter(self._waiting))))

    def _release(self, entry: Entry) -> None:
        if self._share is not None:
            self._share.grow(-_size(entry))

    def _free(self) -> None:
        """Give the share back if nothing is here."""
        if self._share is not None and not (self._waiting or self._kept):
            self._share.release()
            self._share = None

    def _give_way(self) -> None:
        self._share = None
        has_kept = bool(self._kept)
        self._forget_kept()
        waiting = sum(map(_size, self._waiting.values()))
        if waiting and has_kept:  # what waits may fit now
            self._share = self._new_share()
            self._share.grow(waiting)
        elif waiting:
            self._forget_waiting()
            self._overflowed()


def _size(entry: Entry) -> int:
    return len(entry.data) + _EVENT_BYTES


def _number(entry: Entry) -> int:
    return entry.number
