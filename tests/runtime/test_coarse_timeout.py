"""The deadline of one wait: it ends that wait alone, and a cancellation from elsewhere stays one."""

import asyncio
import time

import pytest

from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.noted_timers import Timers
from tests.support.workbench import later


@pytest.fixture
def timer() -> CoarseTimer:
    return CoarseTimer(0.02, Tasks(Metrics("0")), "test")


async def test_a_wait_that_takes_too_long_ends_with_a_timeout(timer: CoarseTimer) -> None:
    with pytest.raises(TimeoutError), CoarseTimeout(timer):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert (task.cancelling(), len(timer)) == (0, 0)
    await asyncio.sleep(0)  # nothing is left of the cancellation


async def test_a_wait_that_ends_in_time_leaves_nothing_behind(timer: CoarseTimer) -> None:
    with CoarseTimeout(timer):
        await asyncio.sleep(0)
    assert len(timer) == 0


async def test_another_exception_passes(timer: CoarseTimer) -> None:
    with pytest.raises(KeyError), CoarseTimeout(timer):
        raise KeyError
    assert len(timer) == 0


async def test_a_task_that_is_cancelled_from_elsewhere_stays_cancelled(timer: CoarseTimer) -> None:
    async def wait() -> None:
        with CoarseTimeout(timer):
            await asyncio.Event().wait()

    task = later(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(timer) == 0


async def test_a_task_that_is_cancelled_by_both_stays_cancelled(
    timer: CoarseTimer, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait() -> None:
        with CoarseTimeout(timer):
            monkeypatch.setattr("gateway.world.monotonic", lambda: time.monotonic() + 0.1)
            for seconds, _ in list(timers.all):
                timers.ring(seconds)
            assert task.cancelling() == 1, "the time is over"
            task.cancel()
            await asyncio.Event().wait()

    task = later(wait())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_inner_of_two_deadlines_does_not_end_the_outer_wait(timer: CoarseTimer) -> None:
    long = CoarseTimer(60, Tasks(Metrics("0")), "long")
    with CoarseTimeout(long):
        with pytest.raises(TimeoutError), CoarseTimeout(timer):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
    assert len(long) == 0
