"""A dictionary that forgets what was set longest ago once it is full."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """The entries that were set last, at most `most` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> V | None:
        """Set a value as the newest; return the oldest one if it had to make room."""
        self[key] = value
        self.move_to_end(key)
        return self.popitem(last=False)[1] if len(self) > self._most else None
