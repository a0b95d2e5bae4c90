"""Decides which request gets a session, at the cost of which idle one.

`assign` is pure, and takes the same time however many sessions are idle and requests wait. The pool carries its result
out, and calls it again until nothing is left to assign.
"""

from typing import Generic, NamedTuple, TypeVar

from gateway.sessions.capacity import Capacity, Pooled, Queue, Request

S = TypeVar("S", bound=Pooled)


class Discard(NamedTuple, Generic[S]):
    """An idle session was lost."""

    session: S


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


def assign(group: Queue[S], capacity: Capacity[S]) -> Discard[S] | Reuse[S] | Join[S] | Open[S] | None:
    """The next assignment after a change in `group`; None when there is none.

    The first request of the group gets a session of the group, if one can take its call. Room for new sessions goes
    to the principals in turn, and to the first request of each.
    """
    if group.takers:
        session = reusable(group)
        if session is not None:
            return Discard(session) if session.lost else Reuse(next(iter(group.takers)), session)
        if group.main is not None and group.main.has_room:
            return Join(next(iter(group.takers)), group.main)
    return _opening(capacity)


def reusable(group: Queue[S]) -> S | None:
    """The idle session that the next call of a group would get; it may turn out to be lost."""
    newest = next(reversed(group.idle), None)
    return newest if newest is not None and newest.can_begin else None


def _opening(capacity: Capacity[S]) -> Open[S] | None:
    quota, limits = capacity.next_quota(), capacity.limits
    if quota is None or capacity.starting >= limits.starting:
        return None
    request = next(iter(quota.openers))
    if quota.count >= limits.per_principal:
        return Open(request, next(iter(quota.evictable)))
    if capacity.count < limits.total:
        return Open(request, None)
    oldest = next(iter(capacity.evictable), None)
    return Open(request, oldest) if oldest is not None else None
