"""Bounds how long one connection holds the event loop.

What a connection received is parsed in pieces. Once its callback has used up a millisecond, the rest waits for the
next turn of the loop, and nothing more is read meanwhile. So a packet that is expensive to parse, such as 64 KiB of
chunks with one byte each, delays the other connections by a millisecond and one piece. A packet that is cheap to
parse is parsed in one turn, however large it is.

Rule: a connection hears that it was lost once everything is parsed that it received before.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, cast

from gateway import world

PIECE_BYTES: Final = 4096
"""A packet of at most this size is one piece: nearly every reply, which then costs nothing more."""
_SECONDS: Final = 0.001


def cut(data: bytes, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the pieces of `data`."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


class Pieces:
    """What one connection received and has not parsed yet.

    While `is_waiting`, the connection neither hands over a packet directly nor resumes reading.
    """

    __slots__ = ("_at", "_next", "_packets", "_parse", "_pause", "_resume", "_then", "is_waiting")

    def __init__(
        self, parse: Callable[[bytes], object], pause: Callable[[], object], resume: Callable[[], object]
    ) -> None:
        """`pause` stops reading; `resume` reads on, unless somebody else wants a pause."""
        self._parse, self._pause, self._resume = parse, pause, resume
        self._packets: deque[bytes] = deque()
        self._at = 0
        """Where the next piece begins in the oldest packet."""
        self._next: asyncio.Handle | None = None
        """The next turn, if there is one."""
        self._then: list[Callable[[], object]] = []
        """What comes after the rest."""
        self.is_waiting = False
        """Whether reading is paused, because the rest takes more than one turn."""

    @property
    def has_more(self) -> bool:
        """Whether something is left behind the piece that is being parsed."""
        return bool(self._packets)

    def take(self, data: bytes) -> None:
        """Parse a packet, behind what waits."""
        self._packets.append(data)
        if not self.is_waiting:
            self._turn()

    def then(self, callback: Callable[[], object]) -> None:
        """Call back once nothing waits, which may be at once."""
        if self.is_waiting:
            self._then.append(callback)
        else:
            _ = callback()

    def drop(self) -> None:
        """Parse nothing more of what is here; what was to come after it comes now."""
        self._packets.clear()
        self._at = 0
        if self._next is not None:  # without one, nothing waits, or a turn calls this and ends by itself
            self._next.cancel()
            self._end()

    def _turn(self) -> None:
        """Parse for a millisecond, and one piece at least."""
        self._next = None
        ends = world.stopwatch() + _SECONDS
        try:
            while self._packets:
                packet, at = self._packets[0], self._at
                self._at = at + PIECE_BYTES
                if self._at >= len(packet):
                    self._at = 0
                    _ = self._packets.popleft()
                _ = self._parse(packet[at : at + PIECE_BYTES])
                if self._packets and world.stopwatch() >= ends:
                    self._next = asyncio.get_running_loop().call_soon(self._turn)
                    if not self.is_waiting:
                        self.is_waiting = True
                        _ = self._pause()
                    return
        except BaseException:
            self._packets.clear()
            self._at = 0
            raise
        finally:
            if self.is_waiting and self._next is None:
                self._end()

    def _end(self) -> None:
        """Nothing waits any more."""
        self._next, self.is_waiting = None, False
        _ = self._resume()
        callbacks, self._then = self._then, []
        for callback in callbacks:
            _ = callback()


class PieceReader(asyncio.Protocol):
    """The reading end of a pipe that nobody pauses."""

    def __init__(self) -> None:
        self._transport: asyncio.ReadTransport | None = None
        self._pieces = Pieces(self.take, self._pause, self._read_on)

    def take(self, data: bytes) -> None:
        """Take a piece of what the other end wrote."""
        raise NotImplementedError

    def finish(self) -> None:
        """The pipe is closed, and everything was taken."""
        raise NotImplementedError

    async def taken(self) -> None:
        """Wait until everything is taken that was read."""
        done = asyncio.Event()
        self._pieces.then(done.set)
        _ = await done.wait()

    def then(self, callback: Callable[[], object]) -> None:
        """Call back once everything is taken that was read, which may be at once."""
        self._pieces.then(callback)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pipe is open."""
        self._transport = cast("asyncio.ReadTransport", transport)  # uvloop's transports have other bases

    def data_received(self, data: bytes) -> None:
        """Take what was read."""
        if len(data) <= PIECE_BYTES and not self._pieces.is_waiting:
            self.take(data)
        else:
            self._pieces.take(data)

    def connection_lost(self, _exc: Exception | None) -> None:
        """The pipe is closed, by whichever side."""
        self._transport = None
        self._pieces.then(self.finish)

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class Turn:
    """The share of a coroutine in the turns of the event loop.

    For a coroutine that works through what is ready, and may never have to wait for more.
    """

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        """The first turn begins, so the coroutine has just waited for something."""
        self._ends = world.stopwatch() + _SECONDS

    async def give_way(self) -> None:
        """Let everything else run once if the turn has taken its time."""
        if world.stopwatch() >= self._ends:
            await asyncio.sleep(0)
            self._ends = world.stopwatch() + _SECONDS
