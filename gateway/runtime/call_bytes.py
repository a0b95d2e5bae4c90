"""The budget of bytes for calls under way.

A call is weighed before it begins, and refused if it does not fit: into what is left of the whole, or of the share of
its caller. One that has begun is never refused, however much heavier it becomes.
"""

from dataclasses import dataclass
from typing import Self

from gateway.config import InForce, Limits
from gateway.identity.principal import ANONYMOUS
from gateway.protocol.errors import Busy
from gateway.telemetry.metrics.registry import BudgetStatus

_RETRY_AFTER_SECONDS = 5


@dataclass(slots=True, eq=False, repr=False)
class Weight:
    """What one call weighs; a context manager that releases it."""

    _calls: "CallBytes | None"
    """None after the release."""
    _principal: bytes
    count: int
    """In bytes."""

    def change(self, count: int) -> None:
        """Weigh `count` bytes from now on. It is never refused, and does nothing after the release."""
        if self._calls is not None and count != self.count:
            self._calls.add(self._principal, count - self.count)
            self.count = count

    def release(self) -> None:
        """Weigh nothing any more; a second call does nothing."""
        self.change(0)
        self._calls = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CallBytes:
    """Counts the bytes of all calls of a process, and those of each caller."""

    name = "limits.calls_bytes"

    def __init__(self, limits: InForce[Limits]) -> None:
        self._limit = limits.part(lambda it: it.calls_bytes)
        self._share = limits.part(lambda it: it.share_of_calls_bytes)
        """The limit for the calls of one caller."""
        self._of: dict[bytes, int] = {}
        """Only callers with calls that weigh anything."""
        self.used = 0

    def status(self) -> BudgetStatus:
        """Return what /metrics and /status show."""
        return BudgetStatus(self.used, self._limit.value, 0)

    @property
    def fullest_caller(self) -> tuple[int, bytes]:
        """What the calls of the caller weigh whose calls weigh most, and the caller."""
        return max(((count, who) for who, count in self._of.items()), default=(0, b""))

    def fullest_share(self) -> BudgetStatus:
        """Return what /metrics and /status show of that caller."""
        return BudgetStatus(self.fullest_caller[0], self._share.value, 0)

    def take(self, principal: bytes, count: int, *, is_continued: bool = False) -> Weight:
        """Return the weight of a call of this caller; the call must release it. Raises Busy if it does not fit.

        The next request of a call that waits always fits (`is_continued`).
        """
        if is_continued and count:
            self.add(principal, count)
        elif count:
            self.reserve(principal, count)
        return Weight(self, principal, count)

    def reserve(self, principal: bytes, count: int) -> None:
        """Count bytes for a call that adds the opposite at its end, without a `Weight`. Raises Busy."""
        of_one, used = self._of.get(principal, 0) + count, self.used + count
        if of_one > self._share.value:
            raise Busy(
                f"This call does not fit: the calls of one caller take at most {self._share.value} bytes together "
                "(limits.calls_bytes_per_principal); let some of yours end, or answer them",
                status=429,
                is_shared=principal == ANONYMOUS,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
                reached={"limits.calls_bytes_per_principal": self._share.value},
            )
        if used > self._limit.value:
            raise Busy(
                f"This call does not fit: all calls take at most {self._limit.value} bytes together "
                "(limits.calls_bytes); call again later",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
                reached={"limits.calls_bytes": self._limit.value},
            )
        self._of[principal], self.used = of_one, used

    def add(self, principal: bytes, count: int) -> None:
        """Count more or fewer bytes for a weight, and keep no caller without any."""
        self.used += count
        of_one = self._of.get(principal, 0) + count
        if of_one:
            self._of[principal] = of_one
        else:
            del self._of[principal]
