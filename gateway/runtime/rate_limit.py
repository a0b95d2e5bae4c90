"""Token buckets by key: how often a caller may do what costs others."""

from collections.abc import Callable, Hashable
from itertools import islice
from typing import NamedTuple

from gateway import world
from gateway.config import InForce


class Rate(NamedTuple):
    """A sustained rate, and how much may come at once."""

    per_second: float
    burst: int


class RateLimit:
    """One token bucket for each key; a key that it does not know has a full bucket.

    It keeps only buckets that are not full, so its memory is bounded by what the callers do, not by who they are.
    """

    def __init__(self, rate: InForce[Rate], clock: Callable[[], float] | None = None) -> None:
        self._rate = rate
        self._clock = clock or world.monotonic
        self._full_at: dict[Hashable, float] = {}
        """When each bucket will be full; the least recently used first."""

    def __len__(self) -> int:
        return len(self._full_at)

    def wait_seconds(self, key: Hashable) -> float:
        """Return how long this key has to wait for a token; 0 if there is one."""
        now, rate = self._clock(), self._rate.value
        missing = max(0.0, self._full_at.get(key, now) - now) * rate.per_second
        return max(0.0, missing + 1 - rate.burst) / rate.per_second

    def take(self, key: Hashable) -> None:
        """Take a token, even if there is none: then the next wait is longer."""
        now, rate = self._clock(), self._rate.value
        self._full_at[key] = max(now, self._full_at.pop(key, now)) + 1 / rate.per_second
        self._forget_full(now)

    def _forget_full(self, now: float) -> None:
        """Look at the two least recently used buckets, so that the table shrinks whenever it could have grown."""
        for key in tuple(islice(self._full_at, 2)):
            full_at = self._full_at.pop(key)
            if full_at > now:
                self._full_at[key] = full_at
