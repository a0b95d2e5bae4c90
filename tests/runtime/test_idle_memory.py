"""Memory is given back when a burst is over, and not while there is work."""

import asyncio
import gc
from collections.abc import Sequence

import pytest

from gateway import world
from gateway.runtime.idle_memory import LOOK_SECONDS, give_back_when_quiet


class Over(Exception):
    """The test has no more periods."""


async def collections(
    monkeypatch: pytest.MonkeyPatch, used: Sequence[float], *, held: int = 0, cost: float = 0.01
) -> list[int]:
    """After which periods a FAKE process collects, if it uses so many seconds of CPU in them, and `cost` for each."""
    seconds, period, found = 0.0, -1, list[int]()

    async def sleep(length: float) -> None:
        nonlocal seconds, period
        assert length == LOOK_SECONDS
        period += 1
        if period == len(used):
            raise Over
        seconds += used[period]

    def collect() -> int:
        nonlocal seconds
        seconds += cost
        found.append(period)
        return 0

    monkeypatch.setattr(world, "cpu", lambda: seconds)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(gc, "collect", collect)
    with pytest.raises(Over):
        await give_back_when_quiet(range(held))
    return found


async def test_a_process_collects_once_it_is_quiet_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await collections(monkeypatch, [4.0, 2.0, 0.1, 0.1, 4.0, 0.1]) == [2, 5]


async def test_a_process_without_work_does_not_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await collections(monkeypatch, [0.0] * 20) == []


async def test_many_small_works_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await collections(monkeypatch, [0.3] * 6) == [1, 3, 5]


async def test_a_process_that_holds_many_calls_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await collections(monkeypatch, [4.0, 0.1], held=1000) == []


async def test_collections_take_a_share_of_the_work_whoever_makes_the_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await collections(monkeypatch, [1.0, 0.1] * 100, cost=0.9)
    assert len(found) * 0.9 == pytest.approx(110 / 5, abs=4)
