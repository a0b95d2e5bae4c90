"""How the sessions of one pool and the requests that wait for them are counted."""

from gateway.sessions.capacity import Capacity, Limits, PrincipalQuota, Queue, Request


class FakeSession:
    """A session that only counts."""

    lost = has_room = has_joiners = False
    can_begin = True


Group = Queue[FakeSession]


def capacity(per_principal: int = 9) -> Capacity[FakeSession]:
    return Capacity(Limits(9, per_principal))


def request(group: Group, *, is_fresh: bool = False) -> Request[FakeSession]:
    return Request(group, FakeSession, lambda _: None, is_fresh=is_fresh)


def opener(quota: PrincipalQuota[FakeSession] | None) -> Request[FakeSession] | None:
    return next(iter(quota.openers)) if quota is not None else None


def test_a_principal_at_its_limit_has_no_turn_until_it_can_give_a_session() -> None:
    counted, group, session = capacity(1), Group(b"a"), FakeSession()
    counted.opened(group)
    counted.add(waiting := request(Group(b"a")))
    assert counted.next_quota() is None
    counted.rested(session, group)
    assert opener(counted.next_quota()) is waiting
    counted.occupied(session, group)
    assert counted.next_quota() is None
    counted.closed(session, group)
    assert opener(counted.next_quota()) is waiting


def test_the_turn_passes_on_when_a_principal_opens_a_session() -> None:
    counted, group = capacity(), Group(b"a")
    counted.add(first := request(group))
    counted.add(second := request(group))
    counted.add(other := request(Group(b"b")))
    assert opener(counted.next_quota()) is first
    counted.opened(group)
    counted.remove(first)
    assert opener(counted.next_quota()) is other
    counted.remove(other)
    assert opener(counted.next_quota()) is second


def test_new_limits_decide_anew_who_is_eligible() -> None:
    counted, group = capacity(1), Group(b"a")
    counted.opened(group)
    counted.add(waiting := request(group))
    assert counted.next_quota() is None
    counted.limits = Limits(9, 2)
    assert opener(counted.next_quota()) is waiting
    counted.limits = Limits(9, 1)
    assert counted.next_quota() is None


def test_with_affinity_only_the_first_call_may_open_a_session_and_only_while_there_is_none() -> None:
    counted, group, session = capacity(), Group(b"a", is_affine=True), FakeSession()
    for each in (first := request(group), request(group)):
        counted.add(each)
    assert counted.next_quota() is None
    counted.review(group)
    assert list(counted._quotas[b"a"].openers) == [first]
    group.main = session
    counted.opened(group)
    counted.review(group)
    assert counted.next_quota() is None
    counted.closed(session, group)
    assert group.main is None
    assert list(counted._quotas[b"a"].openers) == [first]


def test_a_session_with_joiners_is_idle_and_cannot_be_evicted() -> None:
    counted, group, session = capacity(), Group(b"a"), FakeSession()
    counted.opened(group)
    session.has_joiners = True
    counted.rested(session, group)
    assert (list(group.idle), list(counted.evictable)) == ([session], [])
    session.has_joiners = False
    counted.rested(session, group)
    assert (list(group.idle), list(counted.evictable)) == ([session], [session])
    assert list(counted._quotas[b"a"].evictable) == [session]


def test_nothing_is_kept_of_a_principal_without_sessions_and_requests() -> None:
    counted, here, there = capacity(1), Group(b"a"), Group(b"b")
    waiting, session = request(here), FakeSession()
    counted.add(waiting)
    counted.opened(there)
    counted.rested(session, there)
    counted.occupied(session, there)
    counted.occupied(session, there)
    counted.remove(waiting)
    counted.remove(waiting)
    counted.closed(session, there)
    assert len(counted) == counted.count == len(counted.evictable) == len(here.waiting) == len(here.takers) == 0
    assert counted.next_quota() is None
