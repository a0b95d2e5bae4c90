"""How long a connection without a request is kept."""

from typing import Any
from unittest.mock import Mock

import pytest

from gateway.http_client.idle_connections import KEEP_ALIVE_SECONDS, UNSEEN_SECONDS, IdleConnections
from gateway.http_client.origin import Origin
from gateway.runtime.tasks import Tasks
from tests.support.noted_timers import Timers
from tests.support.workbench import eventually

HERE = Origin("127.0.0.1", 1)


class FakeConnection:
    """A connection without a socket."""

    def __init__(self, keep_alive_seconds: int | None = None, origin: Origin = HERE) -> None:
        self.keep_alive_seconds = keep_alive_seconds
        self.origin = origin
        self.is_open = True
        self.has_unread = False
        self.aborted = False

    def is_usable(self) -> bool:
        return self.is_open and not self.has_unread

    def abort(self) -> None:
        self.aborted = True


def fake(*, keep_alive_seconds: int | None = None, origin: Origin = HERE) -> Any:
    """One that passes for a `Connection`."""
    return FakeConnection(keep_alive_seconds, origin)


@pytest.fixture
async def idle() -> IdleConnections:
    return IdleConnections(Tasks(Mock()))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr("gateway.world.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("said", "kept"), [(None, 4.0), (5, 4.0), (60, 4.0), (4, 3.0), (2, 1.0)])
async def test_a_connection_is_kept_a_second_less_than_the_upstream_keeps_it_and_at_most_four(
    idle: IdleConnections, now: list[float], said: int | None, kept: float
) -> None:
    assert KEEP_ALIVE_SECONDS == 4.0
    for late in (False, True):
        connection = fake(keep_alive_seconds=said)
        idle.put(connection)
        now[0] += kept if late else kept - 0.01
        assert idle.take(HERE, is_repeatable=True) is (None if late else connection)
        assert connection.aborted is late
        assert len(idle) == 0


SAFE = [
    # (what was seen before: how long a connection was idle, and then; for how long one is safe)
    ([], UNSEEN_SECONDS),
    ([(2.0, "found open")], 1.5),
    ([(4.0, "closed by us")], 3.0),
    ([(4.0, "closed by us"), (0.1, "ended")], 0.075),  # it was restarted, or configured anew
    ([(0.1, "ended"), (4.0, "closed by us")], 3.0),  # it had been restarted
    ([(0.0, "ended")], 0.0),
    ([(0.0, "ended"), (0.5, "found open")], 0.375),
    # It may have ended long before that, if the gateway was stopped.
    ([(0.6, "ended")], UNSEEN_SECONDS),
    ([(0.4, "found open"), (0.6, "ended"), (15.0, "ended")], 0.3),
    ([(3.0, "found open"), (2.0, "ended")], 1.5),
    ([(4.0, "closed by us"), (3.5, "found open")], 3.0),
]


@pytest.mark.parametrize(("seen", "safe"), SAFE)
async def test_a_request_that_must_not_be_repeated_takes_no_connection_that_may_be_closed_soon(
    timers: Timers,
    idle: IdleConnections,
    now: list[float],
    seen: list[tuple[float, str]],
    safe: float,
) -> None:
    for seconds, how in seen:
        connection = fake()
        idle.put(connection)
        now[0] += seconds
        match how:
            case "ended":
                idle.ended(connection)
            case "found open":
                assert idle.take(HERE) is None
                assert idle.take(HERE, is_repeatable=True) is connection
            case _:
                timers.ring(KEEP_ALIVE_SECONDS)
        assert len(idle) == 0
    early, late = fake(), fake()
    idle.put(early)
    now[0] += max(safe - 0.001, 0)
    assert idle.take(HERE) is (early if safe else None)
    idle.put(late)
    now[0] += safe + 0.001
    assert idle.take(HERE) is None
    assert idle.take(HERE, is_repeatable=True) is late, "it is kept for the others"


async def test_a_connection_that_has_ended_unheard_shows_nothing(idle: IdleConnections, now: list[float]) -> None:
    ended, later = fake(), fake()
    idle.put(ended)
    now[0] += 2.0
    ended.has_unread = True
    assert idle.take(HERE) is None
    idle.ended(ended)
    idle.put(later)
    now[0] += UNSEEN_SECONDS
    assert idle.take(HERE) is None


async def test_what_an_upstream_says_counts_more_than_what_was_seen(idle: IdleConnections, now: list[float]) -> None:
    connection = fake(keep_alive_seconds=3)
    idle.put(connection)
    now[0] += 1.9
    assert idle.take(HERE) is connection


async def test_what_was_seen_of_one_origin_says_nothing_of_another(idle: IdleConnections, now: list[float]) -> None:
    closed, there = fake(), fake(origin=Origin("127.0.0.1", 2))
    idle.put(closed)
    idle.ended(closed)
    idle.ended(closed)
    idle.put(there)
    now[0] += 0.2
    assert idle.take(there.origin) is there


@pytest.mark.parametrize("said", [0, 1])
async def test_a_connection_that_the_upstream_closes_at_once_is_not_kept(idle: IdleConnections, said: int) -> None:
    connection = fake(keep_alive_seconds=said)
    idle.put(connection)
    assert connection.aborted
    assert idle.take(HERE) is None


async def test_a_connection_that_has_ended_or_holds_bytes_is_closed_and_the_next_one_taken(
    idle: IdleConnections,
) -> None:
    good, bad = fake(), fake()
    idle.put(good)
    idle.put(bad)
    bad.has_unread = True
    assert idle.take(HERE) is good
    assert bad.aborted
    assert len(idle) == 0


async def test_a_connection_is_not_looked_into_for_a_request_that_can_be_sent_again(idle: IdleConnections) -> None:
    ended, unread = fake(), fake()
    unread.has_unread, ended.is_open = True, False
    idle.put(unread)
    idle.put(ended)
    assert idle.take(HERE, looks=False) is unread
    assert ended.aborted


async def test_each_origin_has_its_own(idle: IdleConnections) -> None:
    there = Origin("127.0.0.1", 2)
    connection = fake(origin=there)
    idle.put(connection)
    assert idle.take(HERE) is None
    assert idle.take(there) is connection


async def test_a_connection_that_is_removed_twice_is_gone_once(idle: IdleConnections) -> None:
    one, other = fake(), fake()
    idle.put(one)
    idle.put(other)
    idle.remove(one)
    idle.remove(one)
    assert len(idle) == 1
    assert idle.take(HERE) is other


async def test_a_connection_that_nobody_takes_is_closed() -> None:
    idle = IdleConnections(Tasks(Mock()), 0.01)
    old, spoken_for = fake(), fake()
    idle.put(old)
    idle.put(spoken_for)
    assert idle.take(HERE) is spoken_for
    await eventually(lambda: not len(idle))
    assert old.aborted
    assert not spoken_for.aborted
    later = fake()
    idle.put(later)
    await eventually(lambda: later.aborted)
