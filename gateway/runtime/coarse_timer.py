"""A timer for waits that nearly always end early: one for all of them instead of one each.

A plain call has three deadlines (its leg, the upstream's silence, the client's keep-alive) and normally reaches none.
A coarse timer has one fixed length, so a dict keeps its keys in the order of their deadlines: arming and disarming
cost one dict operation, and the timer looks only at the oldest entries, when the first of them is due.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final
from weakref import ref

from gateway import world
from gateway.runtime.tasks import Tasks

TICK_SECONDS: Final = 0.1
"""A callback is at most this late, unless its timer has ticks of its own."""
STALLED_SECONDS: Final = 0.25
"""What is so much later than it may be shows that the event loop stood still."""


class Alarm:
    """Rings when something is due, at most `tick` seconds late; while nothing is, it costs nothing.

    In a process that stood still it rings a tick later.

    It does not keep its owner: after a reload, a route that has ended goes before the alarm that it set would ring.
    """

    __slots__ = ("__weakref__", "_is_put_off", "_look", "_self", "_tick", "_timer", "due", "ring")

    def __init__(self, look: Callable[[float], float | None], tick: float, tasks: Tasks, name: str) -> None:
        """`look` does what is due at a monotonic time, and returns when the next thing is due, if there is one."""
        self._look = look
        self._tick = tick
        self.ring = tasks.guard(self._ring, name)
        self._timer: asyncio.TimerHandle | None = None
        self._self = ref(self)
        self._is_put_off = False
        self.due = inf
        """The monotonic time at which it rings; infinite if it is not set."""

    def set(self, due: float) -> None:
        """Ring when this is due, unless something else is due before that."""
        if due >= self.due:
            return
        self.stop()
        self.due = due
        seconds = max(due - world.monotonic(), self._tick)  # however often it is set, it rings once a tick at most
        self._timer = asyncio.get_running_loop().call_later(seconds, _ring_if_kept, self._self)

    def stop(self) -> None:
        """Ring no more until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.due = inf

    def _ring(self) -> None:
        now, due, self._timer, self.due = world.monotonic(), self.due, None, inf
        self._is_put_off = not self._is_put_off and now - due > self._tick + STALLED_SECONDS
        if self._is_put_off:
            # The process stood still. What came meanwhile is read first: it may be what something due was to wait for.
            self.set(now)
            return
        following: float | None = now + self._tick  # should `look` raise
        try:
            following = self._look(now)
        finally:
            if following is not None:
                self.set(following)


def _ring_if_kept(of: ref[Alarm]) -> None:
    if (alarm := of()) is not None:
        alarm.ring()


class CoarseTimer:
    """Calls back each armed key once, `seconds` after it was armed (rounded up to the next tick)."""

    def __init__(self, seconds: float, tasks: Tasks, name: str, tick_seconds: float = TICK_SECONDS) -> None:
        self._seconds = seconds
        self._waiting: dict[object, tuple[float, Callable[..., None], tuple[object, ...]]] = {}
        self._alarm = Alarm(self._ring, min(tick_seconds, seconds), tasks, f"alarm {name}")
        self._name = name
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._waiting)

    def arm(self, key: object, callback: Callable[..., None], *args: object) -> None:
        """Start or restart the time of `key`, after which `callback` is called with `args`."""
        waiting = self._waiting
        if key in waiting:
            del waiting[key]  # the dict must stay in the order of the deadlines
        deadline = world.monotonic() + self._seconds
        waiting[key] = deadline, callback, args
        if deadline < self._alarm.due:
            self._alarm.set(deadline)

    def deadline(self, key: object) -> float | None:
        """Return the monotonic time at which `key` is called back; None if its time does not run."""
        entry = self._waiting.get(key)
        return None if entry is None else entry[0]

    def disarm(self, key: object) -> None:
        """Stop the time of `key`, if it runs."""
        self._waiting.pop(key, None)

    def _ring(self, now: float) -> float | None:
        due = []
        for key, (deadline, *_) in self._waiting.items():
            if deadline > now:
                break
            due.append(key)
        for key in due:
            # An earlier callback may have disarmed or restarted it.
            entry = self._waiting.get(key)
            if entry is not None and entry[0] <= now:
                _, callback, args = self._waiting.pop(key)
                self._tasks.guard(partial(callback, *args), f"alarm {self._name}")()
        return next((deadline for deadline, *_ in self._waiting.values()), None)
