"""Keeps the making of tasks apart from the ends of sessions.

`mcp` 1.30 makes no task between the end of any session and the next handshake. So ends wait until no task is being
made, and a task is made after the ends that wait, so that neither starves.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Final

_APART_SECONDS: Final = 1.0
"""So long, at most, the making of tasks and the ends of sessions wait for each other."""


class _Count:
    """How many of something are under way."""

    def __init__(self) -> None:
        self._number = 0
        self._none = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """There is one more meanwhile."""
        self._number += 1
        self._none.clear()
        try:
            yield
        finally:
            self._number -= 1
            if not self._number:
                self._none.set()

    async def none(self) -> None:
        """Wait until there are none, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_APART_SECONDS):
                while self._number:
                    _ = await self._none.wait()


class TaskMaking:
    """The tasks of one route that are being made, and its sessions that end."""

    def __init__(self) -> None:
        self._makings, self._ends = _Count(), _Count()

    async def begin(self) -> ExitStack:
        """A task is made, in a new session, until the stack is closed; meanwhile no session ends."""
        await self._ends.none()
        stack = ExitStack()
        stack.enter_context(self._makings.one())
        return stack

    @asynccontextmanager
    async def end_of_session(self) -> AsyncIterator[None]:
        """A session ends, and no task is being made."""
        with self._ends.one():
            await self._makings.none()
            yield
