"""The parking lot: holds exchanges for a later round, with a cap for all of them, another one for each principal.

Only the lot finds an exchange by its id. It also keeps exchanges that have ended, because their last reply may have
been lost, and lost ones, whose clients have still to be told. Neither count against the caps, but share a budget of
bytes.
"""

from collections.abc import Iterator, Mapping, ValuesView
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from gateway.config import Hold, InForce
from gateway.identity.principal import ANONYMOUS
from gateway.parking.cold_calls import ColdCalls, Counts
from gateway.protocol.errors import Busy
from gateway.runtime.budget import Budget, Share
from gateway.runtime.fair_shares import Holdings
from gateway.runtime.tasks import Tasks

_RETRY_AFTER_SECONDS = 5


class Parked(Protocol):
    """The part of an exchange that the lot needs."""

    principal: bytes

    @property
    def id(self) -> str:
        """The id of the exchange."""

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes after its end."""

    def forget(self) -> None:
        """Drop the kept result, or error; called for kept exchanges only."""


P = TypeVar("P", bound=Parked)
COLD_BYTES: Final = 1_073_741_824
"""What the records of cold calls may take: two million of about 0.5 KiB each. Callers reach their own caps first."""


class Lot(Generic[P]):
    """Exchanges by id."""

    def __init__(self, hold: InForce[Hold], results: Budget, tasks: Tasks) -> None:
        """`hold` has the caps; a reload that lowers them ends no parked call.

        `results` limits kept results.
        """
        self._hold = hold
        self.results = results
        self._waiting: dict[str, P] = {}
        self._kept: dict[str, tuple[P, Share]] = {}
        self._kept_of: Holdings[str] = Holdings()
        self._per_principal = Counts()
        self.cold = ColdCalls(COLD_BYTES, self._per_principal, tasks)
        """Calls that count for their callers as parked ones do, but not against `hold.max_calls`."""

    def __len__(self) -> int:
        """Return the number of parked calls, without kept results."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[P]:
        return iter([*self._waiting.values(), *(kept for kept, _ in self._kept.values())])

    def waiting(self) -> ValuesView[P]:
        """Return the parked calls, the oldest first."""
        return self._waiting.values()

    @property
    def per_principal(self) -> Mapping[bytes, int]:
        """The number of parked calls of each principal that has one, cold calls included."""
        return self._per_principal

    def find(self, exchange_id: str) -> P | None:
        """Return the exchange with this id, if this replica has it."""
        waiting = self._waiting.get(exchange_id)
        return waiting or self._kept.get(exchange_id, (None, None))[0]

    def check(self, principal: bytes) -> None:
        """Raise Busy if another call of this principal could not be parked."""
        hold = self._hold.value
        if self._per_principal.get(principal, 0) >= hold.max_calls_per_principal:
            raise too_many_of_one(hold, principal, "unanswered calls", "answer or abandon")
        if len(self._waiting) >= hold.max_calls:
            raise too_many(hold, "holds as many unanswered calls")

    def has_place(self, parked: P) -> bool:
        """Return whether this exchange is parked, or could be."""
        if parked.id in self._waiting:
            return True
        try:
            self.check(parked.principal)
        except Busy:
            return False
        return True

    def park(self, parked: P) -> None:
        """Park an exchange; raises Busy, unless it is parked already."""
        id_ = parked.id
        if id_ in self._waiting:
            return
        self.check(parked.principal)
        self._waiting[id_] = parked
        self._per_principal.change(parked.principal, 1)

    def keep(self, parked: P) -> None:
        """Keep an exchange that has ended, so that `find` finds it. One of the caller that has the most makes room."""
        if not self._leave(parked):
            return
        while len(self._kept) >= self._hold.value.max_calls:
            self._forget(self._kept[self._kept_of.first(parked.principal)][0])
        id_ = parked.id
        share = self.results.share(partial(self._forget, parked), parked.principal)
        self._kept[id_] = parked, share
        self._kept_of.add(parked.principal, id_, 1)
        share.hold(parked.kept_bytes)  # last, because this very one may have to give way

    def remove(self, parked: P) -> None:
        """Forget an exchange, if it is here."""
        _ = self._leave(parked)
        self._drop(parked)

    def _forget(self, parked: P) -> None:
        self._drop(parked)
        parked.forget()

    def _drop(self, parked: P) -> None:
        kept = self._kept.pop(parked.id, None)
        if kept is not None:
            self._kept_of.remove(parked.principal, parked.id, 1)
            kept[1].release()

    def _leave(self, parked: P) -> bool:
        if self._waiting.pop(parked.id, None) is None:
            return False
        self._per_principal.change(parked.principal, -1)
        return True


def too_many_of_one(hold: Hold, principal: bytes, what: str, fix: str) -> Busy:
    """The error for a caller that has as many calls, or tasks, as one may have."""
    return Busy(
        f"You have as many {what} as one caller may have (hold.max_calls_per_principal); {fix} some first",
        status=429,
        is_shared=principal == ANONYMOUS,
        retry_after_seconds=_RETRY_AFTER_SECONDS,
        reached={"hold.max_calls_per_principal": hold.max_calls_per_principal},
    )


def too_many(hold: Hold, has: str) -> Busy:
    """The error where this process has as many calls, or tasks, as it may."""
    return Busy(
        f"The gateway {has} as it may (hold.max_calls); call again later",
        retry_after_seconds=_RETRY_AFTER_SECONDS,
        reached={"hold.max_calls": hold.max_calls},
    )
