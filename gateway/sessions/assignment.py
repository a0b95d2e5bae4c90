"""Decides which request gets a session, at the cost of which idle one: pure.

Every session that ends or comes free leads to an assignment, and there may be thousands of principals. So each
question of `assign` is answered by the first element of an ordered dictionary: the principal whose turn it is, its
first request, and the session that has been idle longest. The pool carries the result out, and calls `assign` again
until nothing is left to assign.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple

from gateway.sessions.affinity import S
from gateway.sessions.group import Group, SessionRequest


@dataclass(slots=True, eq=False)
class Quota(Generic[S]):
    """What one principal has, and what it asks for."""

    count: int = 0
    """Its sessions, idle ones included."""
    evictable: dict[S, None] = field(default_factory=dict)
    """Its idle sessions that may be closed to make room, in the order in which they became idle."""
    openers: dict[SessionRequest[S], None] = field(default_factory=dict)
    """Its requests that room for a new session would satisfy, in the order of their arrival."""


class Reuse(NamedTuple, Generic[S]):
    """A request gets an idle session."""

    request: SessionRequest[S]
    session: S


class Join(NamedTuple, Generic[S]):
    """A request joins the session of a call that waits for its user."""

    request: SessionRequest[S]
    owner: S


class Open(NamedTuple, Generic[S]):
    """A request may open a session, once `evicted` is closed."""

    request: SessionRequest[S]
    evicted: S | None


Assignment = Reuse[S] | Join[S] | Open[S]


@dataclass(slots=True, eq=False)
class Capacity(Generic[S]):
    """All sessions and requests of one pool."""

    _most: int
    """Sessions that there may be; of one principal; and in their handshake at a time."""
    _most_of_one: int
    _most_starting: float = inf
    count: int = 0
    starting: int = 0
    """Sessions in their handshake."""
    evictable: dict[S, None] = field(default_factory=dict)
    """As in `Quota`, of all principals."""
    quotas: dict[bytes, Quota[S]] = field(default_factory=dict)
    """Those of principals with a session or an opener."""
    eligible: dict[bytes, Quota[S]] = field(default_factory=dict)
    """Quotas with an opener that are below their limit, or have a session to close for it; the next turn first."""

    def change_limits(self, most: int, most_of_one: int) -> None:
        """Have other limits from now on; that of a principal decides who is eligible."""
        self._most, self._most_of_one = most, most_of_one
        for principal, quota in tuple(self.quotas.items()):
            self._settle(principal, quota)

    def assign(self, group: Group[S]) -> Assignment[S] | None:
        """The next assignment after a change in `group`; None when there is none.

        The first request of the group gets a session of the group, if one can take its call. Room for new sessions
        goes to the principals in turn, and to the first request of each.
        """
        if group.takers:
            first = next(iter(group.takers))
            if group.is_affine:  # only its first call may open a session, and only while there is no main one
                self._set_opener(first, is_opener=group.main is None or group.main.lost)
            session = reusable(group)
            if session is not None:
                return Reuse(first, session)
            if group.main is not None and group.main.shared.has_room:
                return Join(first, group.main)
        quota = next(iter(self.eligible.values()), None)
        if quota is None or self.starting >= self._most_starting:
            return None
        opener = next(iter(quota.openers))
        if quota.count >= self._most_of_one:
            return Open(opener, next(iter(quota.evictable)))  # at its limit, it is eligible only if it has one
        if self.count < self._most:
            return Open(opener, None)
        oldest = next(iter(self.evictable), None)
        return Open(opener, oldest) if oldest is not None else None

    def add(self, request: SessionRequest[S]) -> None:
        """A request waits from now on."""
        group = request.group
        group.waiting[request] = None
        if not request.is_fresh:
            group.takers[request] = None
        if request.is_fresh or not group.is_affine:  # of an affine group, `assign` chooses one at a time
            self._set_opener(request, is_opener=True)

    def remove(self, request: SessionRequest[S]) -> None:
        """A request is satisfied or given up."""
        group = request.group
        group.waiting.pop(request, None)
        group.takers.pop(request, None)
        self._set_opener(request, is_opener=False)

    def opened(self, session: S, group: Group[S], *, is_fresh: bool = False) -> None:
        """A session is in its handshake from now on; the turn passes to the next principal."""
        group.add(session, is_fresh=is_fresh)
        self.starting += 1
        self.count += 1
        quota = self.quotas.get(group.key.principal) or Quota()
        quota.count += 1
        _ = self.eligible.pop(group.key.principal, None)  # `_settle` adds it again, behind the others
        self._settle(group.key.principal, quota)

    def started(self) -> None:
        """The handshake of a session has ended, well or not."""
        self.starting -= 1

    def closed(self, session: S, group: Group[S]) -> None:
        """A session was dropped."""
        self.occupied(session, group)
        group.drop(session)
        self.count -= 1
        quota = self.quotas[group.key.principal]
        quota.count -= 1
        self._settle(group.key.principal, quota)

    def rested(self, session: S, group: Group[S], now: float) -> None:
        """A session is idle from now on, or its last joiner has left it idle."""
        group.idle.setdefault(session, now)
        if not session.shared.joiners:
            quota = self.quotas[group.key.principal]
            quota.evictable[session] = self.evictable[session] = None
            if quota.openers:
                self._settle(group.key.principal, quota)

    def occupied(self, session: S, group: Group[S]) -> None:
        """A session is not idle any more, if it was."""
        group.idle.pop(session, None)
        if session in self.evictable:
            quota = self.quotas[group.key.principal]
            del quota.evictable[session], self.evictable[session]
            if quota.openers:
                self._settle(group.key.principal, quota)

    def _set_opener(self, request: SessionRequest[S], *, is_opener: bool) -> None:
        principal = request.group.key.principal
        quota = self.quotas.get(principal) or Quota()  # a new one counts only once it is settled
        if is_opener:
            quota.openers.setdefault(request)
        else:
            quota.openers.pop(request, None)
        self._settle(principal, quota)

    def _settle(self, principal: bytes, quota: Quota[S]) -> None:
        if quota.count or quota.openers:
            self.quotas[principal] = quota
        else:
            self.quotas.pop(principal, None)
        if quota.openers and (quota.count < self._most_of_one or quota.evictable):
            _ = self.eligible.setdefault(principal, quota)
        else:
            _ = self.eligible.pop(principal, None)


def reusable(group: Group[S]) -> S | None:
    """The idle session that the next call of a group would get. One that was lost waits to be swept or evicted."""
    for newest in reversed(group.idle):
        if not newest.lost:
            # Joiners come only to the one session of an affine group, so no other can be idle.
            return newest if not newest.shared.joiners or newest.shared.can_begin else None
    return None
