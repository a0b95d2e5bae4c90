"""The messages of one stream, without a connection."""

import asyncio
from collections.abc import Callable
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.config import InForce
from gateway.http.outbox import FinalMessage
from gateway.legacy_front.stream import ENDED, Stream
from gateway.protocol import sse
from gateway.protocol.errors import CallLost
from gateway.runtime.budget import Budget
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.turns import work_gives_way

EVENT = 256
"""What an event costs besides its message."""


@pytest.fixture(autouse=True)
def _behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a client be behind by 100 bytes of notifications."""
    monkeypatch.setattr("gateway.http.outbox.BEHIND_BYTES", 100)


class Bench:
    """Streams that share a budget; it notes those that overflowed."""

    def __init__(self, limit: int = 10_000) -> None:
        self.budget = Budget("x", InForce(limit))
        self.overflowed: list[int] = []
        self._number = 0

    def stream(
        self,
        *,
        is_resumable: bool = True,
        principal: bytes = b"p",
        overflowed: Callable[[CallLost], None] | None = None,
    ) -> Stream:
        number, self._number = self._number, self._number + 1

        def noted(_: CallLost) -> None:
            self.overflowed.append(number)

        silence = CoarseTimer(5, Tasks(Metrics("0")), "silence")
        stream = Stream(number, b"7", self.budget, principal, silence, overflowed or noted)
        stream.is_resumable = is_resumable
        return stream


async def read(stream: Stream, position: int | None = None, *, count: int = 1000) -> list[bytes]:
    """Write what comes behind a position, or behind what was written before, as a reader that leaves after that."""
    found = []
    with stream.read_by(read, stream.delivered if position is None else position):
        while len(found) < count and stream.is_ready:
            item = await stream.next(read)
            assert isinstance(item, bytes)
            found.append(item)
        stream.written()
    return found


async def test_what_was_written_is_freed_if_the_stream_cannot_be_resumed() -> None:
    bench = Bench()
    stream = bench.stream(is_resumable=False)
    for data in (b"a", b"b"):
        stream.ask(data)
    assert bench.budget.used == 2 * (EVENT + 1)
    assert await read(stream, count=1) == [b"a"]
    assert (bench.budget.used, stream.can_resume(0), stream.can_resume(1)) == (EVENT + 1, False, True)
    assert await read(stream) == [b"b"]
    assert bench.budget.used == 0


@pytest.mark.parametrize("is_resumable", [True, False])
async def test_what_a_reader_took_and_did_not_write_comes_again(*, is_resumable: bool) -> None:
    stream = Bench().stream(is_resumable=is_resumable)
    for letter in (b"a", b"b", b"c"):
        stream.send(letter)
    with stream.read_by("first", 0):
        assert [await stream.next("first") for _ in range(2)] == [b"a", b"b"]
    assert await read(stream) == [b"b", b"c"]


async def test_what_was_read_once_makes_no_room() -> None:
    stream = Bench().stream()
    for letter in (b"1", b"2"):
        stream.send(letter * 40)
    assert len(await read(stream)) == 2
    with stream.read_by("again", 0):
        for letter in (b"3", b"4", b"5"):
            stream.send(letter * 40)
    assert await read(stream, 0) == [letter * 40 for letter in (b"1", b"2", b"4", b"5")]


async def test_what_the_client_says_that_it_has_does_not_wait() -> None:
    stream = Bench().stream()
    for letter in (b"1", b"2"):
        stream.send(letter * 40)
    with stream.read_by("reader", 2):  # it was written, and the connection broke before that was noted
        assert not stream.is_ready
    for letter in (b"3", b"4"):
        stream.send(letter * 40)
    assert await read(stream) == [b"3" * 40, b"4" * 40]
    assert await read(stream, 0) == [letter * 40 for letter in (b"1", b"2", b"3", b"4")]


async def test_a_response_that_was_read_is_forgotten_too() -> None:
    bench = Bench(limit=EVENT + 100)
    old, new = bench.stream(), bench.stream()
    old.finish(FinalMessage(b"x" * 100))
    with old.read_by("reader", 0):
        assert [await old.next("reader") for _ in range(2)] == [FinalMessage(b"x" * 100), ENDED]
    new.ask(b"y")
    assert (bench.overflowed, old.can_resume(0), old.can_resume(1)) == ([], False, True)
    assert bench.budget.used == EVENT + 1


async def test_a_stream_that_has_both_keeps_what_waits() -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    stream = bench.stream()
    stream.ask(b"x" * 100)
    assert await read(stream) == [b"x" * 100]
    stream.ask(b"y" * 100)
    stream.ask(b"z" * 100)
    assert (bench.overflowed, bench.budget.used) == ([], 2 * (EVENT + 100))
    assert await read(stream) == [b"y" * 100, b"z" * 100]


@pytest.mark.parametrize("is_resumable", [True, False])
async def test_a_stream_whose_client_has_not_got_what_was_taken_overflows(*, is_resumable: bool) -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    slow, new = bench.stream(is_resumable=is_resumable), bench.stream()
    slow.ask(b"x" * 100)
    with slow.read_by("reader", 0):
        assert await slow.next("reader") == b"x" * 100
        for _ in range(2):
            new.ask(b"y" * 100)
    assert (bench.overflowed, bench.budget.used) == ([0], 2 * (EVENT + 100))
    assert (await read(slow), slow.can_resume(0)) == ([], False)


async def test_a_response_that_was_taken_and_had_to_give_way_becomes_an_error() -> None:
    bench = Bench(limit=EVENT + 100)
    slow = bench.stream()
    slow.finish(FinalMessage(b"x" * 100))
    with slow.read_by("reader", 0):
        assert await slow.next("reader") == FinalMessage(b"x" * 100)
        bench.stream().ask(b"y")
    assert bench.overflowed == [0]
    with slow.read_by("again", 0):
        last = await slow.next("again")
    assert isinstance(last, FinalMessage)
    assert isinstance(last.cause, CallLost)


@pytest.mark.parametrize("last", [b"q" * 100, FinalMessage(b"q" * 100)])
async def test_a_stream_forgets_what_was_written_and_keeps_what_was_taken(last: bytes | FinalMessage) -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    slow = bench.stream()
    slow.ask(b"x")
    assert await read(slow) == [b"x"]
    if isinstance(last, bytes):
        slow.ask(last)
    else:
        slow.finish(last)
    with slow.read_by("reader", 1):
        assert await slow.next("reader") == last
        bench.stream().ask(b"y")
    assert (bench.overflowed, slow.can_resume(0), slow.can_resume(1)) == ([], False, True)
    with slow.read_by("again", 1):
        assert await slow.next("again") == last


async def test_a_cleared_stream_holds_nothing_and_is_over() -> None:
    bench = Bench()
    stream = bench.stream()
    stream.ask(b"x")
    stream.clear()
    with stream.read_by("reader", 0):
        assert await stream.next("reader") is ENDED
    assert bench.budget.used == 0


async def test_what_waits_moves_with_its_order_and_its_rank() -> None:
    old, new = Bench().stream(), Bench().stream()
    old.ask(b"q")
    old.send(b"1" * 60)
    old.move_to(new)
    new.send(b"2" * 60)
    assert await read(new) == [b"q", b"2" * 60]


async def test_what_moves_into_a_stream_that_has_to_give_way_is_lost_with_it() -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    new = bench.stream()
    old = bench.stream(overflowed=lambda _: new.finish(ENDED))  # their session ends
    for _ in range(2):
        old.ask(b"x" * 100)
    old.move_to(new)
    assert new.final is ENDED


async def test_a_reader_that_was_replaced_ends_neither_the_next_one_nor_its_wait() -> None:
    stream = Bench().stream()
    with stream.read_by("first", 0):
        first = asyncio.get_running_loop().create_task(stream.next("first"))
        await asyncio.sleep(0)
        later = stream.read_by("second", 0)
        later.__enter__()
        second = asyncio.get_running_loop().create_task(stream.next("second"))
        assert await first is ENDED
    stream.ask(b"x")
    assert await asyncio.wait_for(second, 5) == b"x"
    assert stream.reader == "second"
    later.__exit__(None, None, None)
    assert stream.reader is None


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_wait_let_others_run() -> None:
    stream = Bench(limit=1 << 20).stream(is_resumable=False)
    for _ in range(100):
        stream.ask(b"{}")
    stream.finish(FinalMessage(b"{}"))
    reply = Mock(started=True, write=AsyncMock(), end=AsyncMock())
    assert await work_gives_way(stream.write(reply, 0))
    assert [call.args for call in reply.write.await_args_list] == [(sse.encode(b"{}"),)] * 101
