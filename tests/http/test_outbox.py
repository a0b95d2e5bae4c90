"""The messages for one client: their order, the one final message, what a slow client loses."""

import asyncio

import pytest

from gateway.config import InForce
from gateway.http import outbox
from gateway.http.error_texts import UNKNOWN
from gateway.http.outbox import FinalMessage, Outbox
from gateway.protocol.errors import Busy, CallLost, InvalidParams, LocalProtocolError
from gateway.runtime.budget import Budget
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Ending, Metrics, Outcome


def box(silence_seconds: float = 5) -> Outbox:
    return Outbox(CoarseTimer(silence_seconds, Tasks(Metrics("0")), "silence"))


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
    monkeypatch.setattr(outbox, "_MAX_BEHIND", 2)
    out = box()
    for number in range(5):
        out.send(b"%d" % number)
    assert out.dropped == 3
    assert [await out.take(), await out.take()] == [b"3", b"4"]


async def test_a_client_that_does_not_read_costs_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BEHIND_BYTES", 10)
    out = box()
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
    monkeypatch.setattr(outbox, "_MAX_BEHIND", 3)
    monkeypatch.setattr(outbox, "BEHIND_BYTES", 10)
    out = box()
    out.send(b"old")
    out.ask(b"question")
    for number in range(10):
        out.send(b"new%d" % number)
    assert [await out.take() for _ in range(3)] == [b"question", b"new8", b"new9"]
    assert out.dropped == 9
    out.ask(b"larger than all that may wait")
    assert await out.take() == b"larger than all that may wait"


def test_an_exception_becomes_its_response() -> None:
    last = FinalMessage.of_error(InvalidParams("no", data={"a": 1}), b'"x"', "r1", UNKNOWN)
    error = b'{"code":-32602,"message":"no","data":{"a":1,"requestId":"r1"}}'
    assert last.body == b'{"jsonrpc":"2.0","id":"x","error":%b}' % error
    assert (last.status, last.ending) == (400, Ending(Outcome.REJECTED, "-32602"))
    assert FinalMessage.of_error(CallLost("gone"), b"1", "r2", UNKNOWN).ending == Ending(Outcome.ERROR, "-32603")
    busy = FinalMessage.of_error(Busy("full", status=503, retry_after_seconds=5), None, "r3", UNKNOWN)
    assert b'"id"' not in busy.body
    assert (busy.status, busy.headers["Retry-After"]) == (503, "5")


class Written:
    """An outbox that is being written, with its budget."""

    def __init__(self, out: Outbox, limit: int = 1000) -> None:
        self.out = out
        self.budget = Budget("limits.sending_bytes", InForce(limit))
        self.cut = 0
        out.begin_writing(self.budget.share(self._cut))

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
    assert budget.used == 0


async def test_what_the_writer_waits_for_is_not_counted() -> None:
    written = Written(box())
    waiting = asyncio.get_running_loop().create_task(written.out.take())
    await asyncio.sleep(0)
    written.out.finish(FinalMessage(b"1234"))
    assert written.budget.used == 0
    assert await waiting == FinalMessage(b"1234")
    assert written.budget.used == 0


async def test_nothing_is_counted_before_and_after_the_writing() -> None:
    out = box()
    out.send(b"12345")
    written = Written(out)
    out.send(b"12345")
    assert written.budget.used == 10
    out.end_writing()
    out.send(b"12345")
    assert written.budget.used == 0


async def test_a_client_that_gives_way_is_told_once() -> None:
    written = Written(box(), limit=10)
    for _ in range(5):
        written.out.send(b"12345")
    assert (written.cut, written.budget.used) == (1, 0)
    written.out.end_writing()
