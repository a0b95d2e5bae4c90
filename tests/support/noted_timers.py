"""Notes the timers that are started in the event loop of a test."""

import asyncio
from collections.abc import Callable

import pytest


class Timers:
    """Timers, with the seconds that each was started for."""

    def __init__(self) -> None:
        self.all: list[tuple[float, asyncio.TimerHandle]] = []

    def of(self, seconds: float) -> list[asyncio.TimerHandle]:
        """Those that were started for so long."""
        return [timer for delay, timer in self.all if delay == seconds]


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found, loop = Timers(), asyncio.get_running_loop()
    call_at = loop.call_at

    def noted(when: float, callback: Callable[..., object], *args: object, **options: object) -> asyncio.TimerHandle:
        timer = call_at(when, callback, *args, **options)  # type: ignore[arg-type]
        found.all.append((round(when - loop.time(), 3), timer))
        return timer

    monkeypatch.setattr(loop, "call_at", noted)
    return found
