"""The outboxes of the bridge: what a leg waited for before it had one, and the changes of a subscription."""

import asyncio

import pytest
from msgspec import Raw

from gateway.bridge.response_queue import ChangeQueue, ResponseQueue
from gateway.http import outbox
from gateway.http.outbox import FinalMessage
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.http.test_outbox import Written
from tests.support.workbench import later


def silence(seconds: float = 5) -> CoarseTimer:
    return CoarseTimer(seconds, Tasks(Metrics("0")), "silence")


def box(silence_seconds: float = 5) -> ResponseQueue:
    return ResponseQueue(Raw(b"1"), silence(silence_seconds))


async def test_a_subscriber_that_does_not_read_hears_later_that_things_changed_and_not_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "BEHIND_BYTES", 10)
    out = ChangeQueue(silence())
    out.tell(("a", ""), b"a" * 6)
    assert not out.has_room(("b", ""), b"b" * 6)
    out.tell(("b", ""), b"b")
    assert out.has_room(("a", ""), b"a" * 9)
    assert [await out.take(), await out.take()] == [b"a" * 6, b"b"]
    assert out.has_room(("b", ""), b"b" * 10)


async def test_the_acknowledgement_of_a_subscription_precedes_its_changes_and_its_end_follows_them() -> None:
    out = ChangeQueue(silence())
    out.send(b"acknowledged")
    out.tell(("a", ""), b"a")
    out.finish(FinalMessage(b"end"))
    assert [await out.take() for _ in range(3)] == [b"acknowledged", b"a", FinalMessage(b"end")]


async def test_changes_that_wait_are_counted() -> None:
    written = Written(ChangeQueue(silence()))
    out = written.out
    assert isinstance(out, ChangeQueue)
    out.tell(("a", ""), b"12345")
    out.tell(("a", ""), b"123")
    out.tell(("b", ""), b"1")
    assert written.budget.used == 4
    assert [await out.take(), await out.take()] == [b"123", b"1"]
    assert written.budget.used == 0


async def test_a_client_that_waited_before_gets_its_first_keep_alive_in_time() -> None:
    out, waiter = box(60), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 15, 15)
    await asyncio.wait_for(waiter, 5)
    assert await out.take() is None
    waiting = later(out.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "the next one is not due yet"
    out.send(b"x")
    assert await waiting == b"x"


async def test_a_client_that_has_hardly_waited_counts_as_new() -> None:
    out = box(0.01)
    out.awaited(asyncio.get_running_loop().create_future(), 0.05, 60)
    assert await asyncio.wait_for(out.take(), 5) is None


async def test_a_message_wakes_whoever_waited_before_there_was_a_queue_and_the_final_one_comes_last() -> None:
    timer = silence()
    out, waiter = ResponseQueue(Raw(b"1"), timer), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 0, 60)
    out.send(b"x")
    out.finish(FinalMessage(b"end"))
    await asyncio.wait_for(waiter, 5)
    assert [await out.take(), await out.take()] == [b"x", FinalMessage(b"end")]
    assert len(timer) == 0, "nobody waits for a keep-alive"


async def test_a_client_that_left_before_there_was_a_queue_gets_no_keep_alive() -> None:
    timer = silence()
    out, waiter = ResponseQueue(Raw(b"1"), timer), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 0, 60)
    waiter.cancel()
    out.waits_no_more()
    assert len(timer) == 0
    out.finish(FinalMessage(b"end"))
