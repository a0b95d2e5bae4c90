"""A budget of bytes that many holders share, in which old holders give way when it is full."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gateway.config import InForce
from gateway.runtime.fair_shares import Holdings
from gateway.telemetry.metrics.registry import BudgetStatus


class Share(msgspec.Struct, eq=False):
    """The bytes of one holder in a budget."""

    budget: "Budget"
    owner: bytes
    give_way: Callable[[], None]
    used: int = 0
    is_over: bool = False
    """Whether it was released, or has given way: it holds nothing any more."""

    def hold(self, count: int) -> None:
        """Hold `count` bytes from now on. Old holders give way if the budget is full; this one may be among them.

        Its age counts from the first byte after none. Does nothing once it is over.
        """
        if not self.is_over and count != self.used:
            change, self.used = count - self.used, count
            self.budget.grow(self, change)

    def release(self) -> None:
        """Hold nothing any more; a second call does nothing."""
        if self.used:
            self.hold(0)
        self.is_over = True

    def evict(self) -> None:
        """Hold nothing any more, and tell the holder so."""
        self.used, self.is_over = 0, True  # first, because the holder may release it in the callback
        self.give_way()


@dataclass(slots=True, eq=False)
class Budget:
    """Counts bytes up to a limit.

    A holder that has given way is released, and told so once: it must drop its bytes soon. The oldest gives way,
    because honest peers are done soon, and a hostile one could otherwise keep the budget full for everybody else.
    Where the callers are known, it is the oldest of the caller that holds the most.
    """

    name: str
    """The key in the configuration that sets the limit."""
    _limit: InForce[int]
    used: int = 0
    given_way: int = 0
    """How many holders have given way so far."""
    _holdings: Holdings[Share] = field(default_factory=Holdings)

    @property
    def limit(self) -> int:
        """The limit as it holds now; a reload that lowers it makes holders give way when the next bytes come."""
        return self._limit.value

    def status(self) -> BudgetStatus:
        """Return what /metrics and /status show."""
        return BudgetStatus(self.used, self.limit, self.given_way)

    def share(self, give_way: Callable[[], None], owner: bytes = b"") -> Share:
        """Return a share without bytes; its holder must release it. `give_way` is called at most once.

        `owner` is the principal for whom the bytes are held; those without one count as one owner.
        """
        return Share(self, owner, give_way)

    def grow(self, share: Share, change: int) -> None:
        """Count the bytes of a share that has grown, or shrunk."""
        if share.used == change:  # it had none
            self._holdings.add(share.owner, share, 0)
        self.used += change
        self._holdings.grow(share.owner, change)
        if not share.used:
            self._remove(share)
        while self.used > self._limit.value:
            oldest = self._holdings.first(share.owner)
            self._remove(oldest)
            self.given_way += 1
            oldest.evict()

    def _remove(self, share: Share) -> None:
        self._holdings.remove(share.owner, share, share.used)
        self.used -= share.used
