"""The coarse timer: each armed key calls back once."""

import asyncio
import gc
import weakref
from itertools import pairwise

import pytest

from gateway import world
from gateway.runtime.coarse_timer import Alarm, CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics


async def test_an_alarm_rings_once_for_each_key_and_not_for_a_disarmed_one() -> None:
    metrics = Metrics("0")
    alarm = CoarseTimer(0.02, Tasks(metrics), "test")
    rung: list[str] = []
    all_rung = asyncio.Event()

    def ring(key: str) -> None:
        rung.append(key)
        if key == "first":
            alarm.disarm("victim")
            alarm.arm("again", lambda: ring("again"))
        elif key == "again":
            all_rung.set()

    for key in ("gone", "first", "victim", "last"):
        alarm.arm(key, lambda key=key: ring(key))  # type: ignore[misc]
    alarm.arm("gone", lambda: rung.append("never"))
    alarm.disarm("gone")
    alarm.disarm("unknown")
    await asyncio.wait_for(all_rung.wait(), 2)
    assert rung == ["first", "last", "again"]
    assert len(alarm) == 0


async def test_an_alarm_armed_anew_starts_anew() -> None:
    alarm = CoarseTimer(0.1, Tasks(Metrics("0")), "test")
    loop = asyncio.get_running_loop()
    rung = loop.create_future()
    alarm.arm("key", lambda: rung.set_result(loop.time()))
    moved = loop.create_future()
    loop.call_later(0.06, lambda: moved.set_result(None))  # the time under test
    await moved
    again = loop.time()
    alarm.arm("key", lambda: rung.set_result(loop.time()))
    assert await asyncio.wait_for(rung, 2) - again >= 0.1


async def test_an_alarms_bug_is_counted_and_the_others_still_ring() -> None:
    metrics = Metrics("0")
    alarm = CoarseTimer(0.01, Tasks(metrics), "test")
    rung = asyncio.Event()

    def fail() -> None:
        raise RuntimeError

    alarm.arm("bad", fail)
    alarm.arm("good", rung.set)
    await asyncio.wait_for(rung.wait(), 2)
    assert metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total") == 1


async def test_an_alarm_looks_when_the_first_thing_is_due_and_not_before() -> None:
    loop = asyncio.get_running_loop()
    looked: list[float] = []
    over = loop.create_future()

    def look(now: float) -> float | None:
        looked.append(now)
        if len(looked) < 3:
            return now + 0.01  # sooner than the tick
        over.set_result(None)
        return None

    alarm = Alarm(look, 0.05, Tasks(Metrics("0")), "test")
    began = loop.time()
    alarm.set(began + 60)
    alarm.set(began + 0.1)
    alarm.set(began + 30)
    await asyncio.wait_for(over, 2)
    assert looked[0] - began >= 0.1
    assert min(later - earlier for earlier, later in pairwise(looked)) >= 0.05
    assert alarm.due == float("inf"), "nothing is left"


async def test_an_alarm_does_not_keep_its_owner() -> None:
    alarm = CoarseTimer(60, Tasks(Metrics("0")), "test")
    alarm.arm("key", lambda: None)
    alarm.disarm("key")
    gone = weakref.ref(alarm)
    del alarm
    gc.collect()
    assert gone() is None


async def test_an_alarm_of_a_process_that_stood_still_rings_a_tick_later_and_then_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    stood_still = [0.0]
    monkeypatch.setattr(world, "monotonic", lambda: loop.time() + stood_still[0])
    looked: asyncio.Future[float] = loop.create_future()
    began = loop.time()
    alarm = Alarm(looked.set_result, 0.05, Tasks(Metrics("0")), "test")  # type: ignore[arg-type]
    alarm.set(began + 0.05)
    stood_still[0] = 1.0
    loop.call_later(0.07, stood_still.__setitem__, 0, 2.0)  # between the two
    assert await asyncio.wait_for(looked, 2) - began >= 2.1
    assert alarm.due == float("inf")
