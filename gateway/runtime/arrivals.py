"""Limits the bytes that many unfinished messages hold together, by having all but the oldest wait."""

from collections.abc import Callable
from typing import Final, Protocol

SMALL_BYTES: Final = 65_536
"""A message of at most this size is not counted."""


class Arrival:
    """One message that is still arriving."""

    __slots__ = ("_arrivals", "_go_on", "is_waiting", "size")

    def __init__(self, arrivals: "Arrivals", go_on: Callable[[], None]) -> None:
        self._arrivals = arrivals
        self._go_on = go_on
        self.size = 0
        self.is_waiting = False

    def hold(self, size: int) -> bool:
        """Hold `size` bytes in all; returns False if no more may be read until `go_on` is called.

        A reader that waits may have more to say, if it had read that before. If it may read on then, it is told.
        """
        was_waiting = self.is_waiting
        if size <= SMALL_BYTES:
            self._arrivals.release(self)
        else:
            _ = self._arrivals.hold(self, size)
        if was_waiting and not self.is_waiting:
            self._go_on()
        return not self.is_waiting

    def release(self) -> None:
        """Hold nothing any more: the message is complete, or not wanted. A second call does nothing."""
        self._arrivals.release(self)

    def go_on(self) -> None:
        """Have the reader read on if it waits."""
        if self.is_waiting:
            self.is_waiting = False
            self._go_on()


class Reader(Protocol):
    """What reads a message without a coroutine."""

    def pause_reading(self) -> None:
        """Read nothing more."""

    def resume_reading(self) -> None:
        """Read on."""


class Arrivals:
    """Counts the bytes of messages that are still arriving, up to a limit.

    Past the limit only the oldest of them reads on, so that there is always one that comes to its end: together they
    hold at most the limit and one message more. Nothing fails.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._arriving: dict[Arrival, None] = {}
        self.used = 0

    def arrival(self, go_on: Callable[[], None]) -> Arrival:
        """Return the arrival of a message that holds nothing yet; its reader must release it."""
        return Arrival(self, go_on)

    def arriving(self, arrival: Arrival | None, size: int, reader: Reader) -> Arrival | None:
        """Have `reader` read on only if there is room for more of its message, of which `size` bytes are here.

        Returns its arrival while the message is large; `arrival` is what was returned before.
        """
        if arrival is None:
            if size <= SMALL_BYTES:
                return None
            arrival = self.arrival(reader.resume_reading)
        if not arrival.hold(size):
            reader.pause_reading()
        return arrival if size > SMALL_BYTES else None

    def hold(self, arrival: Arrival, size: int) -> bool:
        """Count the bytes of an arrival."""
        self._arriving.setdefault(arrival)
        self.used += size - arrival.size
        arrival.size = size
        arrival.is_waiting = self.used > self.limit and arrival is not next(iter(self._arriving))
        return not arrival.is_waiting

    def release(self, arrival: Arrival) -> None:
        """Stop counting an arrival, and let others read on."""
        if arrival not in self._arriving:
            return
        del self._arriving[arrival]
        arrival.is_waiting = False
        self.used -= arrival.size
        for other in tuple(self._arriving):
            other.go_on()
            if self.used > self.limit:
                break  # only the oldest
