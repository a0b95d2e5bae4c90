"""Children that end, flood or are given up at any turn of any event loop."""

import asyncio
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final
from unittest.mock import Mock

import pytest

from gateway.children.child import Child
from gateway.config import Route, Upstream
from gateway.runtime.pieces import PIECE_BYTES
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_child import fake_client
from tests.support.turns import Turns
from tests.support.workbench import eventually, later

pytestmark = pytest.mark.processes

FLOOD_LINES: Final = 32_000
"""Of two bytes each: less than a pipe holds."""
SECONDS: Final = 20


def child_of(*command: str, folder: Path | None = None, problems: Mock | None = None) -> tuple[Child, Tasks]:
    tasks = Tasks(Metrics("test"))
    upstream = Upstream(command=command, cwd=folder and str(folder))
    return Child(Route(upstream=upstream), fake_client(), tasks, problems or Mock()), tasks


async def begun(child: Child, turns: int) -> asyncio.Task[None]:
    """Start a child, and let its start have so many turns of the event loop."""
    starting = later(child.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    return starting


def test_a_child_that_closes_its_input_and_ends_is_gone(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def run() -> None:
        os.mkfifo(fifo := tmp_path / "fifo")
        child, _ = child_of("sh", "-c", "exec <&-; read -r _ < fifo", folder=tmp_path)
        await child.start()
        await eventually(lambda: child.pipe not in child._transports, seconds=SECONDS)
        async with asyncio.timeout(SECONDS):
            await asyncio.to_thread(fifo.write_text, "end\n")
            await child.gone
        assert child.over.result() == "ended (exit code 0)"

    runner.run(run())


def test_a_start_that_is_cancelled_at_any_turn_ends_as_cancelled_and_leaves_nothing(runner: asyncio.Runner) -> None:
    """A file that is closed twice would be another's by then, and its error would replace the cancellation."""

    async def start(turns: int) -> str:
        child, tasks = child_of("cat")
        starting = await begun(child, turns)
        _ = starting.cancel()
        _ = await asyncio.wait((starting,))
        if not starting.cancelled() and starting.exception() is None:
            child.kill()
        async with asyncio.timeout(SECONDS):
            if turns:  # else it was not even begun
                await child.gone
        assert tasks.failures == 0
        return "cancelled" if starting.cancelled() else str(starting.exception() or "started")

    before, outcomes = open_files(), list[str]()
    while not outcomes or (outcomes[-1] == "cancelled" and len(outcomes) < 100):
        outcomes.append(runner.run(start(len(outcomes))))
    _ = gc.collect()
    assert set(outcomes[:-1]) == {"cancelled"}
    assert outcomes[-1] == "started"
    assert len(outcomes) > 3, "a start takes several turns"
    assert [file for file in open_files() if file not in before] == []


def open_files() -> list[str]:
    """The pipes and sockets that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(f"{link.name} {link.readlink()}")
    return [file for file in found if "pipe:" in file or "socket:" in file]


def test_a_child_may_end_at_any_turn_of_its_start(runner: asyncio.Runner) -> None:
    async def start(turns: int) -> bool:
        child, tasks = child_of("false")
        starting = await begun(child, turns)
        was_started = starting.done()
        _ = child._process.wait(SECONDS)  # meanwhile the event loop stands still
        await starting
        async with asyncio.timeout(SECONDS):
            await child.gone
        assert (tasks.failures, child.over.result()) == (0, "ended (exit code 1)")
        return was_started

    turns = 1
    while not runner.run(start(turns)):
        turns += 1
    assert turns > 3, "a start takes several turns"


@pytest.mark.usefixtures("busy_clock")
def test_a_child_that_floods_lets_others_run_and_is_heard_to_its_end(runner: asyncio.Runner) -> None:
    async def run() -> None:
        program = f"import os; os.write(1, b'x\\n' * {FLOOD_LINES}); os._exit(3)"
        heard = []
        with Turns() as turns:

            def malformed() -> None:
                heard.append(None)
                turns.note()

            child, _ = child_of(sys.executable, "-S", "-c", program, problems=Mock(malformed=malformed))
            child.hear_with(Mock())
            await child.start()
            async with asyncio.timeout(SECONDS):
                assert await child.over == "ended (exit code 3)"
                await child.gone
        assert len(heard) == FLOOD_LINES
        assert len(turns.noted) > FLOOD_LINES * 2 // PIECE_BYTES // 2

    runner.run(run())
