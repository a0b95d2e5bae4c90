"""Notes the timers that are started in the event loop of a test."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest


class Timers:
    """Timers, with the seconds that each was started for."""

    def __init__(self) -> None:
        self.all: list[tuple[float, asyncio.TimerHandle]] = []
        self._callbacks: dict[asyncio.TimerHandle, Callable[[], object]] = {}

    def note(self, seconds: float, timer: asyncio.TimerHandle, callback: Callable[[], object]) -> None:
        self.all.append((seconds, timer))
        self._callbacks[timer] = callback

    def of(self, seconds: float) -> list[asyncio.TimerHandle]:
        """Those that were started for so long."""
        return [timer for delay, timer in self.all if delay == seconds]

    def ring(self, seconds: float) -> None:
        """Have the timers ring that were started for so long, as if their time had passed twice."""
        loop = asyncio.get_running_loop()
        now, found = loop.time, [each for each in self.of(seconds) if not each.cancelled()]
        loop.time = lambda: now() + 2 * seconds  # type: ignore[method-assign]
        try:
            for timer in found:
                timer.cancel()
                self._callbacks[timer]()
        finally:
            loop.time = now  # type: ignore[method-assign]


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found, loop = Timers(), asyncio.get_running_loop()
    # asyncio's own loop starts each timer with this one, uvloop with the other one.
    name = "call_at" if isinstance(loop, asyncio.BaseEventLoop) else "call_later"
    start = getattr(loop, name)

    def noted(when: float, callback: Callable[..., object], *args: object, **options: object) -> asyncio.TimerHandle:
        timer: asyncio.TimerHandle = start(when, callback, *args, **options)
        found.note(round(when - loop.time() if name == "call_at" else when, 3), timer, partial(callback, *args))
        return timer

    monkeypatch.setattr(loop, name, noted)
    return found
