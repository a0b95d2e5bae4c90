"""Background tasks: each exception is counted, and none outlives the close."""

import asyncio
from contextlib import suppress

import pytest

from gateway.protocol.errors import CallLost, GatewayError, InvalidParams
from gateway.runtime import tasks as tasks_file
from gateway.runtime.tasks import Tasks, telling
from gateway.telemetry import Metrics


def failures(metrics: Metrics) -> float | None:
    return metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total")


async def test_what_a_task_raises_is_counted_and_a_cancellation_is_not() -> None:
    metrics = Metrics("0")
    tasks = Tasks(metrics)

    async def fail() -> None:
        raise RuntimeError

    tasks.spawn(fail(), "fails")
    waiting = tasks.start(asyncio.Event().wait(), "waits")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert failures(metrics) == 1
    assert len(tasks) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (failures(metrics), len(tasks)) == (1, 0)


async def test_work_is_shared_by_all_that_want_it_at_the_same_time() -> None:
    tasks, done, begun = Tasks(Metrics("0")), asyncio.Event(), list[str]()

    async def work(name: str) -> str:
        begun.append(name)
        await done.wait()
        return name

    first, second, other = (
        asyncio.create_task(tasks.share(key, work(name), "shared"))
        for key, name in (("a", "first"), ("a", "second"), ("b", "other"))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()  # who has begun it may leave
    await asyncio.gather(first, return_exceptions=True)
    done.set()
    assert [(await each).result() for each in (second, other)] == ["first", "other"]
    assert (await tasks.share("a", work("again"), "shared")).result() == "again"
    assert (begun, len(tasks)) == (["first", "other", "again"], 0)


async def test_a_timers_bug_is_counted() -> None:
    metrics = Metrics("0")

    def fail() -> None:
        raise RuntimeError

    Tasks(metrics).guard(fail, "timer")()
    assert failures(metrics) == 1


async def test_short_work_is_waited_for_and_the_rest_is_cancelled() -> None:
    tasks = Tasks(Metrics("0"))
    done: list[str] = []
    go = asyncio.Event()

    async def work(name: str) -> None:
        await go.wait()
        done.append(name)

    async def for_ever() -> None:
        await asyncio.Event().wait()

    tasks.spawn(work("short"), "send upstream")
    tasks.spawn(for_ever(), "side stream")
    asyncio.get_running_loop().call_soon(go.set)
    await tasks.settle(1)
    assert done == ["short"]
    await tasks.close()
    assert len(tasks) == 0


async def test_a_task_that_loses_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a `finally` replaces the cancellation, and the task goes on because it expects such errors."""
    monkeypatch.setattr(tasks_file, "_AGAIN_SECONDS", 0.01)
    tasks, turns = Tasks(Metrics("0")), list[int]()

    async def turn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            turns.append(len(turns))
            if len(turns) < 3:
                raise OSError

    async def for_ever() -> None:
        while True:
            with suppress(OSError):
                await turn()

    tasks.spawn(for_ever(), "prestart")
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.close()
    assert turns == [0, 1, 2]
    assert len(tasks) == 0


def test_who_waits_for_a_failed_work_is_told_why_and_a_bug_goes_on() -> None:
    told: list[GatewayError] = []
    refused = InvalidParams("no")
    with telling(told.append):
        raise refused
    with pytest.raises(ZeroDivisionError), telling(told.append):
        _ = 1 / 0
    with pytest.raises(asyncio.CancelledError), telling(told.append):
        raise asyncio.CancelledError
    assert told[0] is refused
    assert [type(each) for each in told[1:]] == [CallLost]
    assert told[1].message.startswith("Internal error of the gateway")
