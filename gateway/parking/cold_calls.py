"""Cold calls: parked calls that the process has let go of, but for what it takes to give them up in time.

The requestState of a cold call has everything that continues the call, as it does for another replica. A record only
keeps two promises of a held call: its answers go upstream once, and it is cancelled if its client does not come back.
A million records fit into half a gigabyte, so nothing here is kept in more than one object for each call.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from gateway.protocol import jsonrpc
from gateway.routes.live_route import LiveRoute
from gateway.seal.request_state import Whereabouts
from gateway.telemetry.metrics.registry import BudgetStatus
from gateway.upstream.channel import Headers

_RECORD_BYTES: Final = 448
"""What a record takes besides its texts, if its caller has no other: 372 bytes were measured with 1,000 of each."""


class Remains(msgspec.Struct, frozen=True, array_like=True):
    """Where a call is, with its open questions (JSON of the id, method): what it takes to give it up upstream."""

    upstream: Whereabouts
    questions: tuple[tuple[bytes, str], ...]


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
    """The records by the ids of their exchanges."""

    def __init__(self, limit_bytes: int, counts: Counts) -> None:
        """`counts` has all calls that wait for their clients, cold ones among them."""
        self._limit = limit_bytes
        self._counts = counts
        self._calls: dict[str, ColdCall] = {}
        self._due: dict[int, dict[str, None]] = {}
        """The ids of the calls by the second in which they are due."""
        self._after_add: Callable[[int], None] = lambda _: None
        self._used = 0
        self.refused = 0
        """How often a call stayed held because there was no room."""

    def __len__(self) -> int:
        return len(self._calls)

    def after_add(self, callback: Callable[[int], None]) -> None:
        """Call back whenever a record was added, with the second in which it is due."""
        self._after_add = callback

    @property
    def next_due(self) -> int | None:
        """The second in which the next call is due."""
        return min(self._due, default=None)

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
        self._after_add(call.due)

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
