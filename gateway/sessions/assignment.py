"""Decides which request gets a session, at the cost of which idle one: pure.

Every session that ends or comes free leads to an assignment, and there may be thousands of principals. So each
question of `assign` is answered by the first element of an ordered dictionary: the principal whose turn it is, its
first request, and the session that has been idle longest. The pool carries the result out, and calls `assign` again
until nothing is left to assign.

A principal is *proven* once the upstream has answered a call of it. All others are newcomers, and share a reserve:
a client that invents principals cannot take the sessions that proven ones need.
"""

import itertools
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from gateway.protocol.errors import Busy
from gateway.runtime.newest import Newest
from gateway.sessions.affinity import SharedSession

_PROVEN_KEPT: Final = 20_000
"""Principals that stay proven while they have no session; the one that came longest ago is forgotten."""


class Pooled(Protocol):
    """A session as far as its assignment depends on it."""

    lost: bool
    """The upstream does not know it any more."""

    @property
    def shared(self) -> SharedSession[Any]:
        """The session with all that speak in it."""


S = TypeVar("S", bound=Pooled)


class Limits(NamedTuple):
    """How many sessions there may be."""

    total: int
    per_principal: int
    starting: float = float("inf")
    """How many may be in their handshake at the same time."""
    newcomers: float = float("inf")
    """How many the principals may have together that are not proven."""
    per_address: float = float("inf")


class Opener(NamedTuple):
    """What the limits on new sessions depend on, of the request that needs one."""

    address: str = ""
    """The client's address; empty if no limit depends on it."""
    is_exempt: bool = True
    """Whether the request is never refused, because it continues a call."""


GATEWAY: Final = Opener()
"""The gateway itself, on behalf of a client that it serves already."""


class Request(Generic[S]):
    """A caller that needs a session; compared by identity."""

    def __init__(
        self,
        group: "Queue[S]",
        deliver: Callable[[S], None],
        refuse: Callable[[Busy], None] = lambda _: None,
        *,
        is_fresh: bool = False,
        opener: Opener = GATEWAY,
    ) -> None:
        """`deliver` takes the session, or `refuse` an error. `is_fresh`: no used session will do."""
        self.group = group
        self.deliver = deliver
        self.refuse = refuse
        self.is_fresh = is_fresh
        self.opener = opener


class Queue(Generic[S]):
    """The sessions of one pool key with the requests for such sessions."""

    def __init__(self, principal: bytes, *, is_affine: bool = False) -> None:
        """`is_affine`: all calls go to one session, except requests for a fresh one."""
        self.principal = principal
        self.is_affine = is_affine
        self.main: S | None = None
        """With affinity: the session of all calls, from before its handshake until it is dropped."""
        self.sessions: dict[S, None] = {}
        """All sessions, the oldest first."""
        self.idle: dict[S, None] = {}
        """In the order in which they became idle."""
        self.waiting: dict[Request[S], None] = {}
        """All requests, in the order of their arrival."""
        self.takers: dict[Request[S], None] = {}
        """The requests among them that a used session satisfies."""


class Quota(Generic[S]):
    """The sessions that count for one principal, or were opened by one address."""

    def __init__(self) -> None:
        self.count = 0
        """Idle ones included."""
        self.evictable: dict[S, None] = {}
        """Its idle sessions that may be closed to make room, in the order in which they became idle."""


class PrincipalQuota(Quota[S]):
    """What one principal has, and what it asks for."""

    def __init__(self, *, is_proven: bool = False) -> None:
        super().__init__()
        self.is_proven = is_proven
        self.turn = 0
        """Its place among the principals that wait for room."""
        self.openers: dict[Request[S], None] = {}
        """Its requests that room for a new session would satisfy, in the order of their arrival."""


class Capacity(Generic[S]):
    """All sessions and requests of one pool."""

    def __init__(self, limits: Limits, proven_kept: int = _PROVEN_KEPT) -> None:
        self.limits = limits
        """Changed by `change_limits`, because they decide which principals are eligible."""
        self.count = 0
        self.starting = 0
        """Sessions in their handshake."""
        self.evictable: dict[S, None] = {}
        """As in `Quota`, of all principals."""
        self.newcomers = 0
        """Sessions of principals that are not proven."""
        self.evictable_newcomers: dict[S, None] = {}
        self._quotas: dict[bytes, PrincipalQuota[S]] = {}
        self._eligible: dict[bytes, PrincipalQuota[S]] = {}
        """Quotas with an opener that are below their limit, or have a session to close for it; the next turn first."""
        self._eligible_newcomers: dict[bytes, PrincipalQuota[S]] = {}
        """As `_eligible`, for principals that are not proven."""
        self._turns = itertools.count()
        self._proven: Newest[bytes, None] = Newest(proven_kept)
        self._addresses: dict[str, Quota[S]] = {}
        self._address_of: dict[S, str] = {}

    def __len__(self) -> int:
        return len(self._quotas)

    def change_limits(self, limits: Limits) -> None:
        """Have other limits from now on."""
        self.limits = limits
        for principal, quota in tuple(self._quotas.items()):
            self._settle(principal, quota)

    def next_quota(self) -> PrincipalQuota[S] | None:
        """The quota of the principal that gets the next room."""
        proven = next(iter(self._eligible.values()), None)
        newcomer = next(iter(self._eligible_newcomers.values()), None)
        if newcomer is None or (self.lacks_newcomer_room and not self.evictable_newcomers):
            return proven
        return newcomer if proven is None or newcomer.turn < proven.turn else proven

    def is_asked_for_room(self) -> bool:
        """Whether a request waits that room for a new session would satisfy."""
        return bool(self._eligible or self._eligible_newcomers)

    @property
    def lacks_newcomer_room(self) -> bool:
        """Whether the reserve of newcomers is used up."""
        return self.newcomers >= self.limits.newcomers

    def of_address(self, address: str) -> Quota[S]:
        """The sessions that an address has opened; those without an address are not counted."""
        return self._addresses.get(address) or Quota()

    @property
    def most_of_one_address(self) -> int:
        """The number of sessions of the address that has the most."""
        return max((quota.count for quota in self._addresses.values()), default=0)

    def is_newcomer(self, principal: bytes) -> bool:
        """Whether a principal is not proven."""
        quota = self._quotas.get(principal)
        return principal not in self._proven if quota is None else not quota.is_proven

    def prove(self, principal: bytes) -> None:
        """The upstream has answered a call of this principal."""
        _ = self._proven.keep(principal, None)
        quota = self._quotas.get(principal)
        if quota is None or quota.is_proven:
            return
        _ = self._eligible_newcomers.pop(principal, None)
        quota.is_proven = True
        self.newcomers -= quota.count
        for session in quota.evictable:
            del self.evictable_newcomers[session]
        self._settle(principal, quota)

    def add(self, request: Request[S]) -> None:
        """A request waits from now on."""
        group = request.group
        group.waiting[request] = None
        if not request.is_fresh:
            group.takers[request] = None
        if request.is_fresh or not group.is_affine:
            self._set_opener(request, is_opener=True)

    def remove(self, request: Request[S]) -> None:
        """A request is satisfied or given up."""
        group = request.group
        group.waiting.pop(request, None)
        group.takers.pop(request, None)
        self._set_opener(request, is_opener=False)

    def review(self, group: Queue[S]) -> None:
        """With affinity, only the first call of a group may open a session, and only while there is no main one."""
        if group.is_affine and group.takers:
            lacks_main = group.main is None or group.main.lost
            self._set_opener(next(iter(group.takers)), is_opener=lacks_main)

    def opened(self, session: S, group: Queue[S], *, is_fresh: bool = False, address: str = "") -> None:
        """A session is in its handshake from now on; the turn passes to the next principal."""
        if group.is_affine and not is_fresh:
            group.main = session
        group.sessions[session] = None
        self.starting += 1
        self.count += 1
        quota = self._quota(group.principal)
        quota.count += 1
        self.newcomers += not quota.is_proven
        if address:
            self._address_of[session] = address
            self._addresses.setdefault(address, Quota()).count += 1
        self._lose_turn(group.principal)
        self._settle(group.principal, quota)

    def closed(self, session: S, group: Queue[S]) -> None:
        """A session was dropped."""
        self.occupied(session, group)
        del group.sessions[session]
        self.count -= 1
        quota = self._quotas[group.principal]
        quota.count -= 1
        self.newcomers -= not quota.is_proven
        address = self._address_of.pop(session, "")
        if address:
            self._addresses[address].count -= 1
            if not self._addresses[address].count:
                del self._addresses[address]
        self._settle(group.principal, quota)
        if group.main is session:
            group.main = None
            self.review(group)

    def rested(self, session: S, group: Queue[S]) -> None:
        """A session is idle from now on, or its last joiner has left it idle."""
        group.idle.setdefault(session)
        if not session.shared.joiners:
            quota = self._quotas[group.principal]
            quota.evictable[session] = self.evictable[session] = None
            if not quota.is_proven:
                self.evictable_newcomers[session] = None
            if session in self._address_of:
                self._addresses[self._address_of[session]].evictable[session] = None
            if quota.openers:
                self._settle(group.principal, quota)

    def occupied(self, session: S, group: Queue[S]) -> None:
        """A session is not idle any more, if it was."""
        group.idle.pop(session, None)
        if session in self.evictable:
            quota = self._quotas[group.principal]
            del quota.evictable[session], self.evictable[session]
            if not quota.is_proven:
                self.evictable_newcomers.pop(session, None)
            if session in self._address_of:
                del self._addresses[self._address_of[session]].evictable[session]
            if quota.openers:
                self._settle(group.principal, quota)

    def _set_opener(self, request: Request[S], *, is_opener: bool) -> None:
        principal = request.group.principal
        quota = self._quota(principal)
        if is_opener:
            quota.openers.setdefault(request)
        else:
            quota.openers.pop(request, None)
        self._settle(principal, quota)

    def _quota(self, principal: bytes) -> PrincipalQuota[S]:
        """The quota of a principal; a new one counts only once it is settled."""
        quota = self._quotas.get(principal)
        if quota is not None:
            return quota
        is_proven = principal in self._proven
        if is_proven:
            self._proven.move_to_end(principal)
        return PrincipalQuota(is_proven=is_proven)

    def _lose_turn(self, principal: bytes) -> None:
        _ = self._eligible.pop(principal, None)
        _ = self._eligible_newcomers.pop(principal, None)

    def _settle(self, principal: bytes, quota: PrincipalQuota[S]) -> None:
        if quota.count or quota.openers:
            self._quotas[principal] = quota
        else:
            self._quotas.pop(principal, None)
        if quota.openers and (quota.count < self.limits.per_principal or quota.evictable):
            eligible = self._eligible if quota.is_proven else self._eligible_newcomers
            if principal not in eligible:
                eligible[principal] = quota
                quota.turn = next(self._turns)
        else:
            self._lose_turn(principal)


class Drop(NamedTuple, Generic[S]):
    """An idle session is dropped, because it was lost, or because its address needs the room."""

    session: S


class Refuse(NamedTuple, Generic[S]):
    """A request is refused: its address has as many sessions as it may, and none of them is idle."""

    request: Request[S]


class Reuse(NamedTuple, Generic[S]):
    """A request gets an idle session."""

    request: Request[S]
    session: S


class Join(NamedTuple, Generic[S]):
    """A request joins the session of a call that waits for its user."""

    request: Request[S]
    owner: S


class Open(NamedTuple, Generic[S]):
    """A request may open a session, once `evicted` is closed."""

    request: Request[S]
    evicted: S | None


Assignment = Drop[S] | Refuse[S] | Reuse[S] | Join[S] | Open[S]


def assign(group: Queue[S] | None, capacity: Capacity[S]) -> Assignment[S] | None:
    """The next assignment after a change in `group`, or in no group; None when there is none.

    The first request of the group gets a session of the group, if one can take its call. Room for new sessions goes
    to the principals in turn, and to the first request of each.
    """
    if group is not None:
        capacity.review(group)
    if group is not None and group.takers:
        session = reusable(group)
        if session is not None:
            return Drop(session) if session.lost else Reuse(next(iter(group.takers)), session)
        if group.main is not None and group.main.shared.has_room:
            return Join(next(iter(group.takers)), group.main)
    return _opening(capacity)


def reusable(group: Queue[S]) -> S | None:
    """The idle session that the next call of a group would get; it may turn out to be lost."""
    newest = next(reversed(group.idle), None)
    if newest is not None and newest.shared.joiners and not newest.shared.can_begin:
        return None
    return newest


def _opening(capacity: Capacity[S]) -> Open[S] | Drop[S] | Refuse[S] | None:
    quota, limits = capacity.next_quota(), capacity.limits
    if quota is None or capacity.starting >= limits.starting:
        return None
    request = next(iter(quota.openers))
    address = capacity.of_address(request.opener.address)
    if address.count >= limits.per_address and not request.opener.is_exempt:
        idle = next(iter(address.evictable), None)
        return Drop(idle) if idle is not None else Refuse(request)
    if quota.count >= limits.per_principal:
        return Open(request, next(iter(quota.evictable)))
    if not quota.is_proven and capacity.lacks_newcomer_room:
        return Open(request, next(iter(capacity.evictable_newcomers)))
    if capacity.count < limits.total:
        return Open(request, None)
    oldest = next(iter(capacity.evictable), None)
    return Open(request, oldest) if oldest is not None else None
