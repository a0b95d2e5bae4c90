"""A budget of bytes that many holders share, in which old holders give way when it is full."""

from collections.abc import Callable

from gateway.config import InForce
from gateway.runtime.fair_shares import Holdings
from gateway.telemetry.metrics.registry import BudgetStatus


class Share:
    """The bytes of one holder in a budget."""

    def __init__(self, budget: "Budget", owner: bytes, give_way: Callable[[], None]) -> None:
        self._budget = budget
        self.owner = owner
        self.give_way = give_way
        self.used = 0

    def grow(self, count: int) -> None:
        """Hold `count` more bytes. Old holders give way if the budget is full; this one may be among them.

        Does nothing after the release.
        """
        self._budget.took(self, count)

    def release(self) -> None:
        """Hold nothing any more; a second call does nothing."""
        self._budget.release(self)


class Budget:
    """Counts bytes up to a limit.

    A holder that has given way is released, and told so once: it must drop its bytes soon. The oldest gives way,
    because honest peers are done soon, and a hostile one could otherwise keep the budget full for everybody else.
    Where the callers are known, it is the oldest of the caller that holds the most.
    """

    def __init__(self, name: str, limit: InForce[int]) -> None:
        self.name = name
        """The key in the configuration that sets the limit."""
        self._limit = limit
        self._shares: set[Share] = set()
        self._holdings: Holdings[Share] = Holdings()
        self.used = 0
        self.given_way = 0
        """How many holders have given way so far."""

    @property
    def limit(self) -> int:
        """The limit as it holds now; a reload that lowers it makes holders give way when the next bytes come."""
        return self._limit.value

    def status(self) -> BudgetStatus:
        """Return what /metrics and /status show."""
        return BudgetStatus(self.used, self.limit, self.given_way)

    def __len__(self) -> int:
        """Return the number of holders."""
        return len(self._shares)

    def share(self, give_way: Callable[[], None], owner: bytes = b"") -> Share:
        """Return a share without bytes; its holder must release it. `give_way` is called at most once.

        `owner` is the principal for whom the bytes are held; those without one count as one owner.
        """
        share = Share(self, owner, give_way)
        self._shares.add(share)
        self._holdings.add(owner, share, 0)
        return share

    def took(self, share: Share, count: int) -> None:
        """Count bytes of a share."""
        if share not in self._shares:
            return
        share.used += count
        self.used += count
        self._holdings.grow(share.owner, count)
        while self.used > self._limit.value and self._shares:
            oldest = self._holdings.first(share.owner)
            self.release(oldest)
            self.given_way += 1
            oldest.give_way()

    def release(self, share: Share) -> None:
        """Stop counting a share, if it is counted still."""
        if share in self._shares:
            self._shares.remove(share)
            self._holdings.remove(share.owner, share, share.used)
            self.used -= share.used
