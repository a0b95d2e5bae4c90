"""A timer for waits that nearly always end early: one tick for all of them instead of one timer each.

A plain call has three deadlines (its leg, the upstream's silence, the client's keep-alive) and normally reaches none.
A coarse timer has one fixed length, so a dict keeps its keys in the order of their deadlines: arming and disarming
cost one dict operation, and a tick looks only at the oldest entries.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.runtime.tasks import Tasks

TICK_SECONDS: Final = 0.1
"""A callback is at most this late."""


class CoarseTimer:
    """Calls back each armed key once, `seconds` after it was armed (rounded up to the next tick)."""

    def __init__(self, seconds: float, tasks: Tasks, name: str) -> None:
        self._seconds = seconds
        self._tick = min(TICK_SECONDS, seconds)
        self._waiting: dict[object, tuple[float, Callable[..., None], *tuple[object, ...]]] = {}
        self._guarded = tasks.guard(self._ring, f"alarm {name}")
        self._name = name
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def arm(self, key: object, callback: Callable[..., None], *args: object) -> None:
        """Start or restart the time of `key`, after which `callback` is called with `args`."""
        waiting = self._waiting
        if key in waiting:
            del waiting[key]  # the dict must stay in the order of the deadlines
        waiting[key] = time.monotonic() + self._seconds, callback, *args
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick, self._guarded)

    def deadline(self, key: object) -> float | None:
        """Return the monotonic time at which `key` is called back; None if its time does not run."""
        entry = self._waiting.get(key)
        return None if entry is None else entry[0]

    def disarm(self, key: object) -> None:
        """Stop the time of `key`, if it runs."""
        self._waiting.pop(key, None)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick, self._guarded) if self._waiting else None
        now = time.monotonic()
        due = []
        for key, (deadline, callback, *args) in self._waiting.items():
            if deadline > now:
                break
            due.append((key, partial(callback, *args)))
        for key, callback in due:
            # An earlier callback may have disarmed or restarted it.
            entry = self._waiting.get(key)
            if entry is not None and entry[0] <= now:
                del self._waiting[key]
                self._tasks.guard(callback, f"alarm {self._name}")()
