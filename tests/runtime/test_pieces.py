"""Packets that take several turns of the event loop."""

import asyncio

import pytest

from gateway import world
from gateway.runtime import pieces
from gateway.runtime.pieces import PIECE_BYTES, Pieces, Turn
from tests.support.turns import gives_way
from tests.support.workbench import later

FLOOD = bytes(range(256)) * 64
"""Four pieces."""


class Reader:
    """A FAKE connection, which notes what it parses and what happens to its transport."""

    def __init__(self) -> None:
        self.parsed = b""
        self.events: list[str] = []
        self.pieces = Pieces(self.parse, lambda: self.events.append("pause"), lambda: self.events.append("resume"))

    def parse(self, data: bytes) -> None:
        assert 0 < len(data) <= PIECE_BYTES
        self.parsed += data
        self.events.append("piece")

    async def over(self) -> None:
        while self.pieces.is_waiting:
            await asyncio.sleep(0)


@pytest.mark.usefixtures("still_clock")
async def test_what_takes_no_time_is_parsed_at_once() -> None:
    reader = Reader()
    reader.pieces.take(FLOOD)
    assert reader.parsed == FLOOD
    assert set(reader.events) == {"piece"}
    assert not reader.pieces.is_waiting


@pytest.mark.usefixtures("busy_clock")
async def test_what_takes_long_lets_others_run_and_reads_nothing_meanwhile() -> None:
    reader = Reader()
    reader.pieces.take(FLOOD)
    assert reader.events == ["piece", "pause"]
    assert await gives_way(lambda: reader.parsed == FLOOD)
    await reader.over()
    assert reader.events == ["piece", "pause", "piece", "piece", "piece", "resume"]
    assert reader.parsed == FLOOD


@pytest.mark.usefixtures("busy_clock")
async def test_what_comes_in_a_pause_is_parsed_behind_the_rest() -> None:
    reader = Reader()
    reader.pieces.take(FLOOD)
    reader.pieces.take(b"behind")
    await reader.over()
    assert reader.parsed == FLOOD + b"behind"


@pytest.mark.usefixtures("busy_clock")
async def test_the_end_of_a_connection_comes_after_everything_that_was_received() -> None:
    reader = Reader()
    reader.pieces.then(lambda: reader.events.append("at once"))
    reader.pieces.take(FLOOD)
    for word in ("eof", "lost"):
        reader.pieces.then(lambda word=word: reader.events.append(word))  # type: ignore[misc]
    await reader.over()
    assert reader.events == ["at once", "piece", "pause", "piece", "piece", "piece", "resume", "eof", "lost"]


@pytest.mark.usefixtures("busy_clock")
async def test_what_is_dropped_is_never_parsed_and_the_end_comes_at_once() -> None:
    reader = Reader()
    reader.pieces.take(FLOOD)
    reader.pieces.then(lambda: reader.events.append("lost"))
    reader.pieces.drop()
    assert reader.events == ["piece", "pause", "resume", "lost"]
    assert not await gives_way(lambda: reader.parsed == FLOOD[:PIECE_BYTES])
    reader.pieces.take(b"next")
    assert reader.parsed == FLOOD[:PIECE_BYTES] + b"next"


@pytest.mark.usefixtures("busy_clock")
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_parser_may_drop_the_rest(turn: int) -> None:
    reader = Reader()

    def parse(data: bytes) -> None:
        reader.parse(data)
        if len(reader.parsed) == turn * PIECE_BYTES:
            reader.pieces.drop()

    reader.pieces = Pieces(parse, lambda: reader.events.append("pause"), lambda: reader.events.append("resume"))
    reader.pieces.take(FLOOD)
    await reader.over()
    assert reader.parsed == FLOOD[: turn * PIECE_BYTES]
    assert reader.events.count("pause") == reader.events.count("resume") == turn - 1


@pytest.mark.usefixtures("busy_clock")
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_parser_that_raises_loses_the_rest_alone(turn: int) -> None:
    reader, caught = Reader(), []

    def parse(data: bytes) -> None:
        reader.parse(data)
        if len(reader.parsed) == turn * PIECE_BYTES:
            raise RuntimeError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))
    reader.pieces = Pieces(parse, lambda: reader.events.append("pause"), lambda: reader.events.append("resume"))
    if turn == 1:
        with pytest.raises(RuntimeError):
            reader.pieces.take(FLOOD)
    else:
        reader.pieces.take(FLOOD)
        await reader.over()
        assert [type(each) for each in caught] == [RuntimeError]
    assert reader.parsed == FLOOD[: turn * PIECE_BYTES]
    assert reader.events.count("pause") == reader.events.count("resume") == turn - 1
    reader.pieces.take(b"next")
    assert reader.parsed.endswith(b"next")


def test_a_packet_is_cut_into_pieces_without_loss() -> None:
    assert b"".join(pieces.cut(FLOOD + b"x")) == FLOOD + b"x"
    assert list(map(len, pieces.cut(FLOOD + b"x"))) == [PIECE_BYTES] * 4 + [1]


@pytest.mark.usefixtures("busy_clock")
async def test_a_coroutine_gives_way_when_its_time_is_used_up() -> None:
    steps: list[int] = []

    async def work() -> None:
        turn = Turn()
        for number in range(3):
            steps.append(number)
            await turn.give_way()

    task = later(work())
    assert await gives_way(lambda: len(steps) == 3)
    await task
    assert steps == [0, 1, 2]


async def test_a_coroutine_goes_on_while_it_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0009, 0.0011, 5.0, 5.0009])
    monkeypatch.setattr(world, "stopwatch", lambda: next(now))
    turn = Turn()
    assert [len([*turn.give_way().__await__()]) for _ in range(3)] == [0, 1, 0], "waits, and then has time again"
