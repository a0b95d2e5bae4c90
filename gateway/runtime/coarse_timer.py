"""Coarse alarms for waits that nearly always end early: one tick for all instead of one timer each.

A plain call has three deadlines (its leg, the upstream's silence, the client's keep-alive) and reaches none. An
alarm of one fixed length is an ordered dict: arming and disarming cost a dict operation, and the tick looks only at
the oldest entries.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.config import Config
from gateway.exchange.commands import Timer
from gateway.runtime.tasks import Tasks

TICK_SECONDS: Final = 0.1
"""How late an alarm may be."""


class CoarseTimer:
    """Calls back each armed key once, `seconds` after it was armed (rounded up to the next tick)."""

    def __init__(self, seconds: float, tasks: Tasks, name: str) -> None:
        self._seconds = seconds
        self._tick = min(TICK_SECONDS, seconds)
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}
        self._guarded = tasks.guard(self._ring, f"alarm {name}")
        self._name = name
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def arm(self, key: object, callback: Callable[[], None]) -> None:
        """Start, or start anew, the alarm of `key`."""
        if key in self._waiting:
            del self._waiting[key]  # the dict must stay in the order of the deadlines
        self._waiting[key] = (time.monotonic() + self._seconds, callback)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick, self._guarded)

    def disarm(self, key: object) -> None:
        """Stop the alarm of `key`; nothing happens when it does not run."""
        self._waiting.pop(key, None)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick, self._guarded) if self._waiting else None
        now = time.monotonic()
        due = []
        for key, (deadline, callback) in self._waiting.items():
            if deadline > now:
                break
            due.append((key, callback))
        for key, callback in due:
            # One that was disarmed, or armed anew, by a callback before it does not ring.
            entry = self._waiting.get(key)
            if entry is not None and entry[0] <= now:
                del self._waiting[key]
                self._tasks.guard(callback, f"alarm {self._name}")()


def wait_seconds(config: Config) -> float:
    """How long a client may take between two rounds: a call whose state no longer opens is not held either."""
    return min(config.hold.ttl_seconds, config.state.ttl_seconds)


class Deadlines:
    """The deadlines that all exchanges of a process share; QUIET and GRACE are short and have timers of their own.

    An alarm has one length for its life. Routes of other lengths have alarms of their own; where a reload brings
    others, new bridges get new alarms, and the old ones tick until the last exchange has left them.
    """

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self.lengths = idle, silence, leg, ttl, linger = lengths(config)
        self.idle = CoarseTimer(idle, tasks, "idle")
        self.silence = CoarseTimer(silence, tasks, "keep-alive")
        self.shared = {
            Timer.LEG: CoarseTimer(leg, tasks, Timer.LEG),
            Timer.TTL: CoarseTimer(ttl, tasks, Timer.TTL),
            Timer.LINGER: CoarseTimer(linger, tasks, Timer.LINGER),
        }


def lengths(config: Config) -> tuple[float, float, float, float, float]:
    """What the alarms of two configurations must have in common to be the same: seconds."""
    timeouts = config.timeouts
    return (
        timeouts.idle_seconds,
        timeouts.keepalive_seconds,
        config.legs.limit_seconds,
        wait_seconds(config),
        config.hold.linger_seconds,
    )
