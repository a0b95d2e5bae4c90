"""How far the end of this process has come: whoever begins or takes over something looks here."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum

from gateway.config import InForce
from gateway.protocol.errors import ShuttingDown


class Stage(IntEnum):
    """How far it has come."""

    SERVING = 0
    ANNOUNCED = 1
    """Load balancers are told; what they still send is served."""
    DRAINING = 2
    PARTED = 3


class Draining:
    """The state of the drain of one process; it only moves forward."""

    def __init__(self, resumable: InForce[bool]) -> None:
        """`resumable`: whether another process has the keys of this one's states, be it a new one of this name."""
        self._stage = Stage.SERVING
        self._resumable = resumable
        self.ends_at: float | None = None
        """Monotonic; by then, other replicas end each leg that this one has sent them."""
        self.deadline: float | None = None
        """Monotonic; the process ends by then. None unless it is to end."""
        self.let_go: frozenset[str] = frozenset()
        """The ids of the exchanges that it has left to others."""
        self.unawaited = 0
        """Requests in flight that the drain does not wait for: streams that end only with their clients."""
        self._preparations: dict[asyncio.Timeout, None] = {}  # a drain gives them up in this order

    @property
    def is_resumable(self) -> bool:
        """Whether another process can continue a call that waits for its client at the end of this one."""
        return self._resumable.value

    @property
    def leaves_results(self) -> bool:
        """Whether this process is to end, and another one can give the results that its clients may not have read."""
        return self._stage >= Stage.ANNOUNCED and self.is_resumable

    @property
    def has_begun(self) -> bool:
        """Whether this process begins no new calls, sessions and streams."""
        return self._stage >= Stage.DRAINING

    @property
    def has_parted(self) -> bool:
        """Whether this process takes no call over any more: it ends, and has left its own ones to others."""
        return self._stage is Stage.PARTED

    def announce(self, deadline: float) -> None:
        """This process is to end by then (monotonic)."""
        self._stage, self.deadline = Stage.ANNOUNCED, deadline

    def begin(self, ends_at: float | None) -> None:
        """Begin no new calls and no new streams.

        Other replicas serve the new calls, and end each of their legs by `ends_at` (monotonic). None: there is no
        other replica, and new calls are refused.
        """
        self._stage, self.ends_at = Stage.DRAINING, ends_at
        for preparation in self._preparations:
            preparation.reschedule(asyncio.get_running_loop().time())

    def leave_out(self, count: int) -> None:
        """Wait for so many of the requests in flight no longer; a negative `count` takes that back at their end."""
        self.unawaited += count

    @contextmanager
    def leaving_out(self, count: int = 1) -> Iterator[None]:
        """Meanwhile, do not wait for the request in flight."""
        self.leave_out(count)
        try:
            yield
        finally:
            self.leave_out(-count)

    def check(self, what: str, *, is_stream: bool = False) -> None:
        """Raise ShuttingDown for a new stream, and for a new call if no other replica begins it either.

        `what` says what its client can do.
        """
        if self.has_begun and (is_stream or self.ends_at is None):
            raise ShuttingDown(what)

    @asynccontextmanager
    async def preparing(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait for what a round needs before its call begins; raises ShuttingDown if it is not here in time.

        That is: in `seconds`, and before the drain begins. During a drain only what is here at once is in time.
        """
        had_begun = self.has_begun
        preparation = asyncio.timeout(0.0 if had_begun else seconds)
        try:
            async with preparation:
                self._preparations[preparation] = None
                yield
        except TimeoutError as exc:
            if not preparation.expired():  # what was prepared has timed out itself
                raise
            raise ShuttingDown("call again") from exc
        finally:
            _ = self._preparations.pop(preparation, None)
        # The drain began just now: what was prepared was here before the timeout could fire.
        if self.has_begun and not had_begun:
            raise ShuttingDown("call again")

    def part(self, let_go: Iterable[str]) -> None:
        """Take no call over from now on, because this process ends; it has let these exchanges go."""
        self._stage = Stage.PARTED
        self.let_go |= frozenset(let_go)
