"""Limits the bytes that many unfinished messages hold together, by having all but the oldest wait."""

from dataclasses import dataclass, field
from typing import Final, Protocol

SMALL_BYTES: Final = 65_536
"""A message of at most this size is not counted."""


class Reader(Protocol):
    """What reads a message without a coroutine."""

    def pause_reading(self) -> None:
        """Read nothing more."""

    def resume_reading(self) -> None:
        """Read on."""


@dataclass(slots=True, eq=False)
class Arrivals:
    """Counts the bytes of messages that are still arriving, up to a limit.

    Past the limit only the oldest of them reads on, so that there is always one that comes to its end: together they
    hold at most the limit and one message more. Nothing fails.
    """

    limit: int
    used: int = 0
    _sizes: dict[Reader, int] = field(default_factory=dict)
    """Of the message that each reader reads, the oldest first."""
    _waiting: set[Reader] = field(default_factory=set)

    def hold(self, reader: Reader, size: int) -> bool:
        """Have a reader read on only if there is room for more of its message, of which `size` bytes are here.

        A reader that waits may have more to say, if it had read that before. Returns whether the message is counted.
        """
        was_waiting = reader in self._waiting
        if size <= SMALL_BYTES:
            self.release(reader)
        else:
            self.used += size - self._sizes.get(reader, 0)
            self._sizes[reader] = size
            if self.used > self.limit and reader is not next(iter(self._sizes)):
                self._waiting.add(reader)
                reader.pause_reading()
                return True
            self._waiting.discard(reader)
        if was_waiting:
            reader.resume_reading()
        return size > SMALL_BYTES

    def release(self, reader: Reader) -> None:
        """Stop counting a message, which is complete or not wanted, and let others read on; once."""
        size = self._sizes.pop(reader, None)
        if size is None:
            return
        self._waiting.discard(reader)
        self.used -= size
        for other in tuple(self._sizes):
            if other in self._waiting:
                self._waiting.remove(other)
                other.resume_reading()
            if self.used > self.limit:
                break  # only the oldest
