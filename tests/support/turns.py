"""Shows whether a reader lets other callbacks run while it works through a flood."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

import pytest

SIZE: Final = 65_536
FLOODS: Final = {
    "event ids": b"id: 1\n" * (SIZE // 6),
    "comments": b":\n" * (SIZE // 2),
    "empty lines": b"\n" * SIZE,
    "log messages": (
        b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}\n\n'
        * (SIZE // 96)
    ),
}
"""What an upstream may write into an event stream, by what it consists of."""
TINY_CHUNKS: Final = b"1\r\nx\r\n" * (SIZE // 6)


@pytest.fixture
def busy_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAKE clock of the readers, by which each piece takes a millisecond: they give way after every one."""
    times = count()
    monkeypatch.setattr("gateway.world.stopwatch", lambda: next(times) * 0.001)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAKE clock of the readers, by which nothing takes any time."""
    monkeypatch.setattr("gateway.world.stopwatch", lambda: 0.0)


async def gives_way(is_done: Callable[[], bool]) -> bool:
    """Whether a callback that is scheduled now runs before the work is done that has begun."""
    ran = asyncio.get_running_loop().create_future()
    was_done: list[bool] = []

    def run() -> None:
        was_done.append(is_done())
        ran.set_result(None)

    asyncio.get_running_loop().call_soon(run)
    async with asyncio.timeout(20):
        await ran
    return not was_done[0]


async def work_gives_way(work: Coroutine[Any, Any, object]) -> bool:
    """Whether a callback runs before a coroutine ends that never has to wait; the coroutine runs to its end."""
    task = asyncio.get_running_loop().create_task(work)
    found = await gives_way(task.done)
    async with asyncio.timeout(20):
        await task
    return found


class Turns:
    """A callback that runs in every turn of the event loop, and counts the turns in which something is noted."""

    def __init__(self) -> None:
        self.noted: set[int] = set()
        self.now = 0
        """How many turns have begun."""
        self._next: asyncio.Handle

    def __enter__(self) -> Self:
        self._turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._next.cancel()

    def note(self, *_: object) -> None:
        """Something happens in this turn."""
        self.noted.add(self.now)

    def _turn(self) -> None:
        self.now += 1
        self._next = asyncio.get_running_loop().call_soon(self._turn)
