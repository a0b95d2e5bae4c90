"""The timers of one exchange."""

import asyncio
from functools import partial
from typing import Final, Protocol

from gateway.exchange.commands import GRACE, LEG, Timer
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import STALLED_SECONDS

_LOOK_SECONDS: Final = 1.0
"""How often GRACE looks for that."""
_BACK_SECONDS: Final = 2.0
"""How long a client then has at least to come back: another replica may have told it to call again in a second."""


class Owner(Protocol):
    """The exchange whose timers they are."""

    def fire(self, timer: Timer) -> None:
        """Take the end of a timer."""


class Timers:
    """Each timer runs at most once at a time.

    GRACE looks whether the event loop stood still, so it gets an event loop timer of its own. The others are shared
    with all exchanges of the route, which know whether they run.
    """

    __slots__ = ("_handles", "_live")

    def __init__(self, live: LiveRoute) -> None:
        self._live = live
        self._handles: dict[Timer, asyncio.TimerHandle] | None = None
        """The timers of the event loop; even an empty dict would take memory of its own while a call is held."""

    def arm(self, timer: Timer, owner: Owner, seconds: float | None = None) -> None:
        """Start a timer, or start it anew; `seconds` if it is shorter than usual.

        `owner` is held while the timer runs and no longer, so that a finished exchange is not part of a reference
        cycle. It is not a bound method, because that would take memory of its own while a call is held.
        """
        if timer is LEG and not self._live.config.legs.rounds:
            return
        if self._handles is not None:
            self._cancel(timer)
        shared = self._live.deadlines.shared.get(timer)
        if shared is not None:
            if seconds is None:
                shared.arm(self, _fire, owner, timer)
                return
            shared.disarm(self)
        elif timer is GRACE:
            seconds = self._live.config.hold.grace_seconds
        if seconds is not None:  # else the configuration has this timer off
            self._start(timer, owner, asyncio.get_running_loop().time() + seconds)

    def _start(self, timer: Timer, owner: Owner, until: float) -> None:
        """Start a timer of the event loop."""
        loop = asyncio.get_running_loop()
        due = min(until, loop.time() + _LOOK_SECONDS) if timer is GRACE else until
        ring = partial(self._ring, timer, owner, due, until)
        handle = loop.call_at(due, self._live.process.tasks.guard(ring, "timer " + timer))
        if self._handles is None:
            self._handles = {timer: handle}
        else:
            self._handles[timer] = handle

    def deadline(self, timer: Timer) -> float | None:
        """Return the monotonic time at which a shared timer rings; None if it does not run."""
        shared = self._live.deadlines.shared.get(timer)
        return None if shared is None else shared.deadline(self)

    def disarm(self, timer: Timer) -> None:
        """Stop a timer; nothing happens if it does not run."""
        if self._handles is not None:
            self._cancel(timer)
        if (shared := self._live.deadlines.shared.get(timer)) is not None:
            shared.disarm(self)

    def disarm_all(self) -> None:
        """Stop every timer."""
        for timer in Timer:
            self.disarm(timer)

    def _cancel(self, timer: Timer) -> None:
        handles = self._handles or {}
        if (handle := handles.pop(timer, None)) is not None:
            handle.cancel()
            self._handles = handles or None

    def _ring(self, timer: Timer, owner: Owner, due: float, until: float) -> None:
        self._cancel(timer)
        now = asyncio.get_running_loop().time()
        if timer is GRACE and now - due > STALLED_SECONDS:
            # The process stood still. Its client may have come back in time, and waits to be read or was sent away.
            until = max(until, now + _BACK_SECONDS)
        if until > due:
            self._start(timer, owner, until)
        else:
            owner.fire(timer)


def _fire(owner: Owner, timer: Timer) -> None:
    owner.fire(timer)
