"""The stderr of a stdio server in the log."""

import pytest

from gateway.children.stderr_log import StderrLog
from tests.support.logs import Lines
from tests.support.memory import left_by
from tests.support.turns import gives_way


def texts(log_lines: Lines) -> list[str]:
    return [line["text"] for line in log_lines("child.stderr") if "text" in line]


async def test_each_line_is_logged_once_however_it_is_cut(log_lines: Lines) -> None:
    log = StderrLog("/mcp", ())
    log.pid = 7
    for part in (b"one\ntw", b"o\n\n  \n", b"last"):
        log.data_received(part)
    assert texts(log_lines) == ["one", "two"]
    log.connection_lost(None)
    assert texts(log_lines) == list(log.last) == ["one", "two", "last"]
    assert {(line["route"], line["pid"]) for line in log_lines("child.stderr")} == {("/mcp", 7)}
    assert log.ended.done()
    log.connection_lost(None)


async def test_the_secrets_of_a_child_are_hidden_the_longest_first(log_lines: Lines) -> None:
    log = StderrLog("/mcp", ["hunter2", "hunter2-long", "short"])
    log.data_received(b"hunter2-long hunter2 short\n")
    assert texts(log_lines) == ["[hidden] [hidden] short"]


@pytest.mark.usefixtures("still_clock")
async def test_a_long_line_is_cut_and_takes_no_memory(log_lines: Lines) -> None:
    log = StderrLog("/mcp", ())
    assert left_by(lambda: [log.data_received(b"x" * 10_000) for _ in range(100)]) < 10_000
    log.data_received(b"\nnext\n")
    assert texts(log_lines) == ["x" * 1000 + "…", "next"]


@pytest.mark.usefixtures("still_clock")
async def test_a_flood_is_counted_beyond_its_rate(log_lines: Lines) -> None:
    log = StderrLog("/mcp", ())
    log.data_received(b"".join(b"%d\n" % number for number in range(10_000)))
    log.connection_lost(None)
    left_out = sum(line.get("lines_left_out", 0) for line in log_lines("child.stderr"))
    assert left_out > 0
    assert len(texts(log_lines)) + left_out == 10_000
    assert list(log.last) == [str(number) for number in range(9_995, 10_000)]


@pytest.mark.usefixtures("busy_clock")
async def test_a_flood_lets_others_run_and_its_last_line_is_kept() -> None:
    log = StderrLog("/mcp", ())
    log.data_received(b"x\n" * 32_768 + b"last")
    log.connection_lost(None)
    assert await gives_way(lambda: "last" in log.last)
    await log.ended
    assert log.last[-1] == "last"
