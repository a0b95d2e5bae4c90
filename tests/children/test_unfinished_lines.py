"""Large lines of many children that are not complete: what is kept of them, and that each comes to its end."""

import asyncio
import sys
from functools import partial
from typing import Final, Self
from unittest.mock import Mock

import pytest

from gateway.children.child import Child
from gateway.config import Route, Upstream
from gateway.runtime.arrivals import SMALL_BYTES, Arrivals
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_child import fake_client
from tests.support.workbench import eventually

pytestmark = pytest.mark.processes

LINE_BYTES: Final = 2 << 20
BEGIN: Final = '{"jsonrpc":"2.0","method":"'
END: Final = '"}'
UNFINISHED: Final = f"""
import sys
sys.stdout.write({BEGIN!r}.ljust({LINE_BYTES}, "x"))
sys.stdout.flush()
sys.stdin.readline()
print({END!r}, flush=True)
sys.stdin.readline()
"""
"""Writes a line, but its end only when it is told to."""
EXITING: Final = f"""
import sys
sys.stdout.write({BEGIN!r}.ljust({SMALL_BYTES + 4000}, "y"))
sys.stdout.flush()
sys.stdin.readline()
print("y" * 50_000 + {END!r}, flush=True)
"""
"""Writes a large line, of which the rest fits into the pipe when it is told to exit."""
MOST_AT_ONCE: Final = 1 << 18
"""What asyncio reads from a pipe at once, at most."""


def line(size: int, filling: str) -> bytes:
    return (BEGIN.ljust(size, filling) + END).encode()


class Family:
    """Children that share a limit."""

    def __init__(self, limit: int) -> None:
        self.tasks = Tasks(Metrics("test"))
        self.client = fake_client(event_bytes=2 * LINE_BYTES)
        self.arriving = self.client.arriving = Arrivals(limit)
        self.children: list[Child] = []
        self.lines: dict[Child, list[bytes]] = {}

    async def start(self, program: str) -> Child:
        command = (sys.executable, "-I", "-S", "-c", program)
        child = Child(Route(upstream=Upstream(command=command)), self.client, self.tasks, Mock())
        child.hear_with(lambda line, _: self.lines[child].append(line))
        self.lines[child] = []
        await child.start()
        self.children.append(child)
        return child

    def kept(self, child: Child) -> int:
        return child._output._lines.unfinished_bytes

    @property
    def all_kept(self) -> int:
        return sum(map(self.kept, self.children))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            await child.gone
        await self.tasks.close()
        if kind is None:
            self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert (self.arriving.used, self.all_kept) == (0, 0)


until = partial(eventually, seconds=60)
"""Starting ten children may take seconds."""


@pytest.mark.parametrize("count", [1, 10])
def test_children_keep_no_more_of_unfinished_lines_than_the_limit_and_one_line(
    runner: asyncio.Runner, count: int
) -> None:
    async def work() -> None:
        limit = 1 << 20
        async with Family(limit) as family:
            bound = limit + LINE_BYTES + count * (SMALL_BYTES + MOST_AT_ONCE)
            for _ in range(count):
                _ = await family.start(UNFINISHED)

            def has_settled() -> bool:
                assert family.all_kept < bound
                kept = list(map(family.kept, family.children))
                return max(kept) == LINE_BYTES and min(kept) > SMALL_BYTES

            await until(has_settled, "one has all of its line, and the others wait")
            for child in family.children:
                child.write(b"go on")

            def is_complete() -> bool:
                assert family.all_kept < bound
                return all(family.lines.values())

            await until(is_complete, "each line is complete")
            assert all(lines == [line(LINE_BYTES, "x")] for lines in family.lines.values())
            assert family.arriving.used == 0

    runner.run(work())


def test_the_last_line_of_a_child_that_exits_waits_for_no_other(runner: asyncio.Runner) -> None:
    async def work() -> None:
        async with Family(1) as family:
            staying = await family.start(UNFINISHED)
            await until(lambda: family.kept(staying) == LINE_BYTES, "its line never ends")
            exiting = await family.start(EXITING)
            await until(lambda: family.kept(exiting) > SMALL_BYTES, "its line waits for the other one")
            exiting.write(b"go on")
            assert await exiting.over == "ended (exit code 0)"
            assert family.lines[exiting] == [line(SMALL_BYTES + 54_000, "y")]

    runner.run(work())


def test_a_child_that_waits_for_another_ends_when_it_is_asked_to(runner: asyncio.Runner) -> None:
    async def work() -> None:
        async with Family(1) as family:
            for _ in range(2):
                _ = await family.start(UNFINISHED)
            first, second = family.children
            await until(lambda: min(map(family.kept, (first, second))) > SMALL_BYTES, "both lines have begun")
            for child in (first, second):
                await child.close()
                assert family.kept(child) == 0

    runner.run(work())
