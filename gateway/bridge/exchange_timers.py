"""The timers of one exchange."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.exchange.commands import Timer
from gateway.routes.live_route import LiveRoute

_OF_A_LEG: Final = (Timer.QUIET, Timer.LEG, Timer.GRACE)


class Timers:
    """Each timer runs at most once at a time.

    LEG, TTL and LINGER are shared with all exchanges of the route. QUIET and GRACE are short, so each gets an event
    loop timer of its own.
    """

    def __init__(self, live: LiveRoute) -> None:
        self._live = live
        self._armed: dict[Timer, asyncio.TimerHandle | None] = {}
        """The running timers; None stands for a shared one."""

    def __contains__(self, timer: Timer) -> bool:
        return timer in self._armed

    def arm(self, timer: Timer, fire: Callable[[Timer], None], seconds: float | None = None) -> None:
        """Start a timer, or start it anew; `seconds` if it is shorter than usual.

        `fire` is held while the timer runs and no longer, so that a finished exchange is not part of a reference
        cycle.
        """
        live = self._live
        self.disarm(timer)
        if timer is Timer.LEG and not live.config.legs.rounds:
            return
        shared = live.deadlines.shared.get(timer) if seconds is None else None
        if timer is Timer.COLD and shared is None:
            return
        ring = partial(self._ring, timer, fire)
        if shared is not None:
            self._armed[timer] = None
            shared.arm(self, ring)
            return
        if seconds is None:
            seconds = live.config.hold.quiet_seconds if timer is Timer.QUIET else live.config.hold.grace_seconds
        guarded = live.process.tasks.guard(ring, f"timer {timer}")
        self._armed[timer] = asyncio.get_running_loop().call_later(seconds, guarded)

    def deadline(self, timer: Timer) -> float | None:
        """Return the monotonic time at which a shared timer rings; None if it does not run."""
        return self._live.deadlines.shared[timer].deadline(self)

    def disarm(self, timer: Timer) -> None:
        """Stop a timer; nothing happens if it does not run."""
        if timer not in self._armed:
            return
        handle = self._armed.pop(timer)
        if handle is not None:
            handle.cancel()
        else:
            self._live.deadlines.shared[timer].disarm(self)

    def disarm_leg(self) -> None:
        """Stop the timers of a waiting leg."""
        for timer in _OF_A_LEG:
            if timer in self._armed:
                self.disarm(timer)

    def disarm_all(self, *, but_linger: bool = False) -> None:
        """Stop every timer, or every one except LINGER."""
        for timer in tuple(self._armed):
            if not (but_linger and timer is Timer.LINGER):
                self.disarm(timer)

    def _ring(self, timer: Timer, fire: Callable[[Timer], None]) -> None:
        self._armed.pop(timer, None)
        fire(timer)
