"""Whose turn it is when there is room for a session."""

import asyncio

from gateway.sessions.capacity import Parties


def parties(cap: int) -> Parties[str, str]:
    return Parties(lambda: cap)


def waiter() -> "asyncio.Future[str | None]":
    return asyncio.get_running_loop().create_future()


async def test_principals_take_turns_and_each_serves_its_first() -> None:
    found = parties(9)
    first = waiter()
    found.wait(b"a", first, "a1")
    found.wait(b"a", waiter(), "a2")
    found.wait(b"b", waiter(), "b1")
    assert [found.hungry() for _ in range(3)] == [(b"a", "a1"), (b"b", "b1"), (b"a", "a1")]
    found.leave(b"a", first)
    assert [found.hungry() for _ in range(2)] == [(b"b", "b1"), (b"a", "a2")]


async def test_a_principal_at_its_cap_has_no_turn_until_it_has_something_to_give() -> None:
    found = parties(1)
    found.count(b"a", 1)
    found.wait(b"a", waiter(), "a1")
    assert found.hungry() is None
    found.rest(b"a", "session")
    assert found.hungry() == (b"a", "a1")
    found.wake(b"a", "session")
    assert found.hungry() is None
    found.count(b"a", -1)
    assert found.hungry() == (b"a", "a1")


async def test_nothing_is_left_of_who_has_nothing_and_waits_for_nothing() -> None:
    found = parties(1)
    here = waiter()
    found.wait(b"a", here, "a1")
    found.count(b"b", 1)
    found.rest(b"b", "session")
    found.wake(b"b", "session")
    found.wake(b"b", "session")
    found.leave(b"a", here)
    found.leave(b"a", here)
    found.count(b"b", -1)
    assert len(found) == len(found.idle) == len(found.of(b"a").waiting) == 0
    assert found.hungry() is None
