"""The deadlines that all exchanges of a route share, by the lengths that its configuration gives them."""

from typing import Final

from gateway.config import Config
from gateway.exchange.commands import Timer
from gateway.runtime.coarse_timer import TICK_SECONDS, CoarseTimer
from gateway.runtime.tasks import Tasks

CANCEL_AGAIN_SECONDS: Final = (2.0, 10.0, 30.0)
"""Pauses after which a cancellation that did not arrive is sent again: within a quarantine of 60 s."""
_QUIET_TICKS: Final = 8
"""The quiet window is late by this part of itself at most, and only while others end: its client waits for it."""


def wait_seconds(config: Config) -> float:
    """Return the longest time between two rounds: a call is not held longer than its state is valid."""
    return min(config.hold.ttl_seconds, config.state.ttl_seconds)


class Deadlines:
    """The deadlines that exchanges share; GRACE has timers of its own.

    A coarse timer has one length. Routes of equal lengths share their timers. After a reload with other lengths new
    exchanges use new timers, and the previous ones tick until their last exchange has ended.
    """

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self.lengths = idle, silence, leg, ttl, linger, cold, quiet = lengths(config)
        self.idle = CoarseTimer(idle, tasks, "idle")
        self.silence = CoarseTimer(silence, tasks, "keep-alive")
        self.plain = CoarseTimer(min(idle, silence, leg), tasks, "plain call")
        """The first deadline of a plain call; it takes an exchange to know what happens then."""
        self.shared = {
            Timer.QUIET: CoarseTimer(quiet, tasks, Timer.QUIET, min(TICK_SECONDS, quiet / _QUIET_TICKS)),
            Timer.LEG: CoarseTimer(leg, tasks, Timer.LEG),
            Timer.TTL: CoarseTimer(ttl, tasks, Timer.TTL),
            Timer.LINGER: CoarseTimer(linger, tasks, Timer.LINGER),
        }
        if cold:
            self.shared[Timer.COLD] = CoarseTimer(cold, tasks, Timer.COLD)


def lengths(config: Config) -> tuple[float, ...]:
    """Return the lengths in seconds; configurations with equal lengths share their timers."""
    timeouts = config.timeouts
    return (
        timeouts.idle_seconds,
        timeouts.keepalive_seconds,
        config.legs.limit_seconds,
        wait_seconds(config),
        config.hold.linger_seconds,
        config.hold.cold_seconds,
        config.hold.quiet_seconds,
    )
