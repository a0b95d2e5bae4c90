"""A token bucket: how often something may be done that costs others."""

from typing import NamedTuple

from gateway import world
from gateway.config import InForce


class Rate(NamedTuple):
    """A sustained rate, and how much may come at once."""

    per_second: float
    burst: int


class TokenBucket:
    """One bucket, which is full at first."""

    def __init__(self, rate: InForce[Rate]) -> None:
        self._rate = rate
        self._full_at = 0.0
        """When it will be full."""

    @property
    def per_second(self) -> float:
        """The sustained rate."""
        return self._rate.value.per_second

    def wait_seconds(self) -> float:
        """Return how long it takes until there is a token; 0 if there is one."""
        rate = self._rate.value
        missing = max(0.0, self._full_at - world.monotonic()) * rate.per_second
        return max(0.0, missing + 1 - rate.burst) / rate.per_second

    def take(self) -> None:
        """Take a token, even if there is none: then the next wait is longer."""
        self._full_at = max(world.monotonic(), self._full_at) + 1 / self._rate.value.per_second
