"""The queue between an exchange and its client: order, the one final message, what a slow client loses."""

import asyncio

import pytest
from msgspec import Raw

from gateway.bridge import response_queue
from gateway.bridge.response_queue import ChangeQueue, FinalMessage, ResponseQueue
from gateway.config import InForce
from gateway.protocol.errors import Busy, CallLost, InvalidParams, LocalProtocolError
from gateway.runtime.budget import Budget
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Ending, Metrics, Outcome


def box(silence_seconds: float = 5, behind_bytes: int = 1000) -> ResponseQueue:
    return ResponseQueue(Raw(b"1"), CoarseTimer(silence_seconds, Tasks(Metrics("0")), "silence"), behind_bytes)


async def test_messages_come_out_in_order_and_the_last_one_last() -> None:
    out = box()
    for number in range(3):
        out.send(b"%d" % number)
    out.finish(FinalMessage(b"end"))
    assert [await out.take() for _ in range(3)] == [b"0", b"1", b"2"]
    assert await out.take() == FinalMessage(b"end")
    assert await out.take() == FinalMessage(b"end")


async def test_there_is_one_final_message_and_nothing_after_it() -> None:
    out = box()
    out.finish(FinalMessage(b"end"))
    with pytest.raises(LocalProtocolError):
        out.finish(FinalMessage(b"again"))
    with pytest.raises(LocalProtocolError):
        out.send(b"late")


async def test_silence_is_told_as_none_and_a_message_wakes() -> None:
    assert await box(0.01).take() is None
    out = box()
    waiting = asyncio.get_running_loop().create_task(out.take())
    await asyncio.sleep(0)
    out.send(b"x")
    assert await asyncio.wait_for(waiting, 1) == b"x"


async def test_a_taker_that_is_cancelled_loses_no_message() -> None:
    out = box()
    waiting = asyncio.get_running_loop().create_task(out.take())
    await asyncio.sleep(0)
    out.send(b"x")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await out.take() == b"x"


async def test_a_client_too_far_behind_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_queue, "_MAX_BEHIND", 2)
    out = box()
    for number in range(5):
        out.send(b"%d" % number)
    assert out.dropped == 3
    assert [await out.take(), await out.take()] == [b"3", b"4"]


async def test_a_client_that_does_not_read_costs_no_more_than_its_bytes() -> None:
    out = box(behind_bytes=10)
    for message in (b"aaaa", b"bbbb", b"cccc"):
        out.send(message)
    assert out.dropped == 1
    assert [await out.take(), await out.take()] == [b"bbbb", b"cccc"]
    out.send(b"d" * 100)  # larger than all that may wait: a client that reads gets it all the same
    assert await out.take() == b"d" * 100
    for message in (b"e" * 100, b"f" * 7, b"g" * 3):
        out.send(message)
    assert out.dropped == 2
    assert [await out.take(), await out.take()] == [b"f" * 7, b"g" * 3]


async def test_a_client_too_far_behind_loses_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_queue, "_MAX_BEHIND", 3)
    out = box(behind_bytes=10)
    out.send(b"old")
    out.ask(b"question")
    for number in range(10):
        out.send(b"new%d" % number)
    assert [await out.take() for _ in range(2)] == [b"question", b"new9"]
    assert out.dropped == 10
    out.ask(b"larger than all that may wait")
    assert await out.take() == b"larger than all that may wait"


def test_an_exception_becomes_its_response() -> None:
    last = FinalMessage.of_error(InvalidParams("no", data={"a": 1}), b'"x"', "r1")
    error = b'{"code":-32602,"message":"no","data":{"a":1,"requestId":"r1"}}'
    assert last.body == b'{"jsonrpc":"2.0","id":"x","error":%b}' % error
    assert (last.status, last.ending) == (400, Ending(Outcome.REJECTED, "-32602"))
    assert FinalMessage.of_error(CallLost("gone"), b"1", "r2").ending == Ending(Outcome.ERROR, "-32603")
    busy = FinalMessage.of_error(Busy("full", status=503, retry_after_seconds=5), None, "r3")
    assert b'"id"' not in busy.body
    assert (busy.status, busy.headers["Retry-After"]) == (503, "5")


async def test_a_subscriber_that_does_not_read_hears_later_that_things_changed_and_not_how() -> None:
    out = ChangeQueue(Raw(b"1"), CoarseTimer(5, Tasks(Metrics("0")), "silence"), 10)
    out.tell(("a", ""), b"a" * 6)
    assert not out.has_room(("b", ""), b"b" * 6)
    out.tell(("b", ""), b"b")
    assert out.has_room(("a", ""), b"a" * 9)
    assert [await out.take(), await out.take()] == [b"a" * 6, b"b"]
    assert out.has_room(("b", ""), b"b" * 10)


async def test_the_acknowledgement_of_a_subscription_precedes_its_changes_and_its_end_follows_them() -> None:
    out = ChangeQueue(Raw(b"1"), CoarseTimer(5, Tasks(Metrics("0")), "silence"), 10)
    out.send(b"acknowledged")
    out.tell(("a", ""), b"a")
    out.finish(FinalMessage(b"end"))
    assert [await out.take() for _ in range(3)] == [b"acknowledged", b"a", FinalMessage(b"end")]


class Written:
    """A queue that is being written, with its budget."""

    def __init__(self, out: ResponseQueue, limit: int = 1000) -> None:
        self.out = out
        self.budget = Budget("limits.sending_bytes", InForce(limit))
        self.cut = 0
        out.begin_writing(lambda: self.budget.share(self._cut))

    def _cut(self) -> None:
        self.cut += 1


async def test_what_waits_for_a_client_that_is_behind_is_counted_until_it_is_taken() -> None:
    written = Written(box())
    out, budget = written.out, written.budget
    out.send(b"12345")
    out.send(b"123")
    out.finish(FinalMessage(b"1234"))
    assert budget.used == 12
    assert await out.take() == b"12345"
    assert budget.used == 7
    assert await out.take() == b"123"
    assert budget.used == 4
    assert await out.take() == FinalMessage(b"1234")
    assert (budget.used, len(budget)) == (0, 0)


async def test_what_the_writer_waits_for_is_not_counted() -> None:
    written = Written(box())
    waiting = asyncio.get_running_loop().create_task(written.out.take())
    await asyncio.sleep(0)
    written.out.finish(FinalMessage(b"1234"))
    assert len(written.budget) == 0
    assert await waiting == FinalMessage(b"1234")
    assert len(written.budget) == 0


async def test_nothing_is_counted_before_and_after_the_writing() -> None:
    out = box()
    out.send(b"12345")
    written = Written(out)
    out.send(b"12345")
    assert written.budget.used == 10
    out.end_writing()
    out.send(b"12345")
    assert (written.budget.used, len(written.budget)) == (0, 0)


async def test_a_client_that_gives_way_is_told_once() -> None:
    written = Written(box(), limit=10)
    for _ in range(5):
        written.out.send(b"12345")
    assert (written.cut, len(written.budget)) == (1, 0)
    written.out.end_writing()


async def test_changes_that_wait_are_counted() -> None:
    written = Written(ChangeQueue(Raw(b"1"), CoarseTimer(5, Tasks(Metrics("0")), "silence"), 1000))
    out = written.out
    assert isinstance(out, ChangeQueue)
    out.tell(("a", ""), b"12345")
    out.tell(("a", ""), b"123")
    out.tell(("b", ""), b"1")
    assert written.budget.used == 4
    assert [await out.take(), await out.take()] == [b"123", b"1"]
    assert len(written.budget) == 0


async def test_a_client_that_waited_before_gets_its_first_keep_alive_in_time() -> None:
    out, waiter = box(60), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 15, 15)
    await asyncio.wait_for(waiter, 5)
    assert await out.take() is None
    waiting = asyncio.get_running_loop().create_task(out.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "the next one is not due yet"
    out.send(b"x")
    assert await waiting == b"x"


async def test_a_client_that_has_hardly_waited_counts_as_new() -> None:
    out = box(0.01)
    out.awaited(asyncio.get_running_loop().create_future(), 0.05, 60)
    assert await asyncio.wait_for(out.take(), 5) is None


async def test_a_message_wakes_whoever_waited_before_there_was_a_queue() -> None:
    out, waiter = box(), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 0, 60)
    out.send(b"x")
    out.finish(FinalMessage(b"end"))
    await asyncio.wait_for(waiter, 5)
    assert [await out.take(), await out.take()] == [b"x", FinalMessage(b"end")]


async def test_a_client_that_left_before_there_was_a_queue_gets_no_keep_alive() -> None:
    silence = CoarseTimer(5, Tasks(Metrics("0")), "silence")
    out, waiter = ResponseQueue(Raw(b"1"), silence, 1000), asyncio.get_running_loop().create_future()
    out.awaited(waiter, 0, 60)
    waiter.cancel()
    out.waits_no_more()
    assert len(silence) == 0
    out.finish(FinalMessage(b"end"))


async def test_a_client_that_waited_before_gets_the_final_message_last() -> None:
    silence = CoarseTimer(5, Tasks(Metrics("0")), "silence")
    out = ResponseQueue(Raw(b"1"), silence, 1000)
    out.awaited(asyncio.get_running_loop().create_future())
    out.send(b"x")
    out.finish(FinalMessage(b"end"))
    assert await out.take() == b"x"
    assert await out.take() == FinalMessage(b"end")
    assert len(silence) == 0, "nobody waits for a keep-alive"
