"""The parking lot: exchanges that a later round may want, bounded in all and per principal.

It is the only place that finds an exchange by its id; whatever lets other replicas join in goes behind it. Kept
results (exchanges that are over, but whose last reply may have got lost) make room for calls that wait.
"""

from collections.abc import Iterator, ValuesView
from typing import Generic, Protocol, TypeVar

from gateway.config import Hold, InForce
from gateway.protocol.errors import Busy

_RETRY_AFTER_SECONDS = 5


class Parked(Protocol):
    """What the lot needs of an exchange."""

    id: str
    principal: bytes

    def forget(self) -> None:
        """Drop the kept result; called for kept exchanges only."""


P = TypeVar("P", bound=Parked)


class Lot(Generic[P]):
    """Exchanges by id."""

    def __init__(self, hold: InForce[Hold]) -> None:
        """`hold` has the caps; a reload that lowers them ends no parked call."""
        self._hold = hold
        self._waiting: dict[str, P] = {}
        self._kept: dict[str, P] = {}
        self._per_principal: dict[bytes, int] = {}

    def __len__(self) -> int:
        """The calls that are parked; kept results do not count."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        return iter([*self._waiting.values(), *self._kept.values()])

    def waiting(self) -> ValuesView[P]:
        """The parked calls as they are, those first that were parked first."""
        return self._waiting.values()

    @property
    def most_of_one(self) -> int:
        """How many calls are parked of the principal that has most."""
        return max(self._per_principal.values(), default=0)

    def find(self, exchange_id: str) -> P | None:
        """The exchange of that id, if this replica has it."""
        return self._waiting.get(exchange_id) or self._kept.get(exchange_id)

    def check(self, principal: bytes) -> None:
        """Raise Busy when no further call of this principal could be parked."""
        hold = self._hold.value
        if self._per_principal.get(principal, 0) >= hold.max_calls_per_principal:
            raise Busy(
                "You have as many unanswered calls as one caller may have (hold.max_calls_per_principal); answer or "
                "abandon some first",
                status=429,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        if len(self._waiting) >= hold.max_calls:
            raise Busy(
                "The gateway holds as many unanswered calls as it may (hold.max_calls); call again later",
                status=503,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    def has_place(self, parked: P) -> bool:
        """Whether this exchange is in, or could be parked."""
        if parked.id in self._waiting:
            return True
        try:
            self.check(parked.principal)
        except Busy:
            return False
        return True

    def park(self, parked: P) -> None:
        """Take an exchange in; raises Busy. An exchange that is in already stays in."""
        if parked.id in self._waiting:
            return
        self.check(parked.principal)
        self._waiting[parked.id] = parked
        self._per_principal[parked.principal] = self._per_principal.get(parked.principal, 0) + 1

    def keep(self, parked: P) -> None:
        """The exchange is over: keep it findable, as long as there is room."""
        if not self._leave(parked):
            return
        while len(self._kept) >= self._hold.value.max_calls:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest).forget()
        self._kept[parked.id] = parked

    def remove(self, parked: P) -> None:
        """Forget an exchange; nothing happens when it is not here."""
        _ = self._leave(parked)
        self._kept.pop(parked.id, None)

    def _leave(self, parked: P) -> bool:
        if self._waiting.pop(parked.id, None) is None:
            return False
        left = self._per_principal[parked.principal] - 1
        if left:
            self._per_principal[parked.principal] = left
        else:
            del self._per_principal[parked.principal]
        return True
