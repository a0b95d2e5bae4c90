"""Cold calls: parked calls that the process has let go of, but for what it takes to give them up in time.

The requestState of a cold call has everything that continues the call, as it does for another replica. A record only
keeps two promises of a held call: its answers go upstream once, and it is cancelled if its client does not come back.
A million records fit into half a gigabyte, so nothing here is kept in more than one object for each call.
"""

import asyncio
import math
from collections import deque
from functools import lru_cache, partial
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway import world
from gateway.cluster import witness
from gateway.parking import orphans
from gateway.parking.orphans import Remains
from gateway.protocol import jsonrpc
from gateway.routes.deadlines import CANCEL_AGAIN_SECONDS
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.tasks import Tasks
from gateway.telemetry import ColdEnding
from gateway.telemetry.metrics.registry import BudgetStatus
from gateway.upstream.channel import Headers

_RECORD_BYTES: Final = 448
"""What a record takes besides its texts, if its caller has no other: 372 bytes were measured with 1,000 of each."""
_SWEEP_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 32
"""Calls that are given up at the same time; the others wait."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Remains).decode


class ColdCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One record."""

    id: str
    """That of the exchange."""
    round: int
    """The round whose requestState continues the call."""
    due: int
    """The monotonic second at which the call is given up."""
    live: LiveRoute
    principal: bytes
    is_taken_over: bool
    """Whether another replica had sent the call."""
    is_apart: bool
    """Whether another replica has, or had, a run of its own of the call."""
    packed: bytes
    """The remains."""
    headers: str
    """JSON of the headers that the upstream served last. Calls of one caller share the text."""
    inquiries: int = 0
    """How often other replicas could not be asked about the call, when its time was over."""

    @property
    def size(self) -> int:
        """The memory that the record takes, if no other call shares its headers."""
        return _RECORD_BYTES + len(self.packed) + len(self.headers)

    def unpacked(self) -> tuple[Remains, Headers]:
        """What is sent upstream at the end, with these headers."""
        return _unpack(self.packed), jsonrpc.decode(self.headers)

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica continued the exchange after that round, in the same upstream call."""
        return not self.is_apart and (self.is_taken_over or self.round > round_)


def packed(remains: Remains, headers: Headers) -> tuple[bytes, str]:
    """The texts of a record."""
    return _pack(remains), _shared(jsonrpc.encode(headers).decode())


@lru_cache(maxsize=1024)
def _shared(text: str) -> str:
    """The same object for equal texts. Not `sys.intern`: Python 3.12.0 to 3.12.6 never frees what that returns."""
    return text


class Counts(dict[bytes, int]):
    """How many calls each principal has; one that has none is not kept."""

    def change(self, principal: bytes, by: int) -> None:
        """Count more or less."""
        self[principal] = self.get(principal, 0) + by
        if not self[principal]:
            del self[principal]


class ColdCalls:
    """The records by the ids of their exchanges, each of which is given up when it is due."""

    def __init__(self, limit_bytes: int, counts: Counts, tasks: Tasks) -> None:
        """`counts` has all calls that wait for their clients, cold ones among them."""
        self._limit = limit_bytes
        self._counts = counts
        self._tasks = tasks
        self._calls: dict[str, ColdCall] = {}
        self._due: dict[int, dict[str, None]] = {}
        """The ids of the calls by the second in which they are due."""
        self._alarm = Alarm(self._sweep, _SWEEP_SECONDS, tasks, "expiry of cold calls")
        self._used = 0
        self.refused = 0
        """How often a call stayed held because there was no room."""
        self._ending: deque[tuple[ColdCall, int]] = deque()
        """Calls to be given up, each with how often its cancellation did not arrive."""
        self._running = 0

    def __len__(self) -> int:
        return len(self._calls)

    def find(self, exchange_id: str) -> ColdCall | None:
        """Return the record of an exchange."""
        return self._calls.get(exchange_id)

    def status(self) -> BudgetStatus:
        """Return what /metrics and /status show of the bytes."""
        return BudgetStatus(self._used, self._limit, self.refused)

    def has_room(self, call: ColdCall) -> bool:
        """Whether another record has room; if not, the call stays held."""
        has_room = self._used + call.size <= self._limit
        self.refused += not has_room
        return has_room

    def add(self, call: ColdCall) -> None:
        """Keep a record."""
        self._calls[call.id] = call
        self._due.setdefault(call.due, {})[call.id] = None
        self._used += call.size
        self._counts.change(call.principal, 1)
        call.live.process.metrics.cold_calls[call.live.route.path,].inc(1)
        self._alarm.set(call.due)

    def take(self, call: ColdCall) -> bool:
        """Drop a record; returns False if it is gone already. Whoever takes it may continue or end the call."""
        if self._calls.get(call.id) is not call:  # by identity: the call may have gone cold again since
            return False
        self._drop(call)
        due = self._due[call.due]
        del due[call.id]
        if not due:
            del self._due[call.due]
        return True

    def take_due(self, now: float) -> list[ColdCall]:
        """Drop the records of all calls that are due, and return them."""
        seconds = sorted(second for second in self._due if second <= now)
        due = [self._calls[each] for second in seconds for each in self._due.pop(second)]
        for call in due:
            self._drop(call)
        return due

    def _drop(self, call: ColdCall) -> None:
        del self._calls[call.id]
        self._used -= call.size
        self._counts.change(call.principal, -1)
        call.live.process.metrics.cold_calls[call.live.route.path,].inc(-1)
        if not self._calls:
            _shared.cache_clear()  # they have credentials

    # -- those whose clients did not come back --------------------------------------------------------------------

    def give_up_all(self) -> None:
        """Give all calls up, because no process has the keys to continue them."""
        self._give_up(self.take_due(math.inf))

    def _sweep(self, now: float) -> float | None:
        self._give_up(self.take_due(now))
        return min(self._due, default=None)

    def _give_up(self, calls: list[ColdCall], failures: int = 0) -> None:
        self._ending.extend((call, failures) for call in calls)
        for _ in range(min(_MOST_AT_ONCE - self._running, len(self._ending))):
            self._running += 1
            self._tasks.spawn(self._end_queued(), "end cold calls")

    async def _end_queued(self) -> None:
        """Answer the questions of the calls, cancel them, and end their sessions."""
        try:
            while self._ending:
                call, failures = self._ending.popleft()
                if not (failures or await self._is_left(call)):  # one that failed was asked about before
                    continue
                remains, headers = call.unpacked()
                reason = "the client did not answer in time"
                is_over = await orphans.end(call.live, call.id, remains, reason, headers)
                if not is_over and failures < len(CANCEL_AGAIN_SECONDS):  # the server has not heard of it
                    again = self._tasks.guard(partial(self._give_up, [call], failures + 1), "cancel again")
                    _ = asyncio.get_running_loop().call_later(CANCEL_AGAIN_SECONDS[failures], again)
        finally:
            self._running -= 1

    async def _is_left(self, call: ColdCall) -> bool:
        """Whether no other replica has continued a call; if one cannot be asked, this is tried again later."""
        process, route = call.live.process, call.live.route.path
        is_taken = await process.witness.is_taken(call.id, call.round)
        if is_taken is None and call.inquiries < len(witness.ASK_AGAIN_SECONDS):
            pause = witness.ASK_AGAIN_SECONDS[call.inquiries]
            due = math.ceil(world.monotonic() + pause)
            self.add(replace(call, due=due, inquiries=call.inquiries + 1))
            return False
        if is_taken is not False:
            process.metrics.cold_calls_ended[route, ColdEnding.CONTINUED].inc()  # or a replica could never be asked
            return False
        process.metrics.cold_calls_ended[route, ColdEnding.EXPIRED].inc()
        return True
