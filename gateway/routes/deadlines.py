"""The deadlines that all exchanges and client sessions of a route share, as long as its configuration says."""

from typing import Final

from gateway.config import Config
from gateway.exchange.commands import Timer
from gateway.runtime.coarse_timer import TICK_SECONDS, CoarseTimer
from gateway.runtime.tasks import Tasks

CANCEL_AGAIN_SECONDS: Final = (2.0, 10.0, 30.0)
"""Pauses after which a cancellation that did not arrive is sent again: within a quarantine of 60 s."""
TASK_AGAIN_SECONDS: Final = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0)
"""The pauses after requests about a task that failed in a row; after the last one the task counts as lost."""
_QUIET_TICKS: Final = 8
"""The quiet window is late by this part of itself at most, and only while others end: its client waits for it."""


def wait_seconds(config: Config) -> float:
    """Return the longest time between two rounds: a call is not held longer than its state is valid."""
    return min(config.hold.ttl_seconds, config.state.ttl_seconds)


class Deadlines:
    """The deadlines that the exchanges and client sessions of a route share; GRACE has timers of its own.

    A coarse timer has one length. After a reload new exchanges use new timers, and the previous ones tick until their
    last exchange has ended.
    """

    def __init__(self, config: Config, tasks: Tasks) -> None:
        timeouts, hold, leg = config.timeouts, config.hold, config.legs.limit_seconds
        idle, silence, quiet = timeouts.idle_seconds, timeouts.keepalive_seconds, hold.quiet_seconds
        self.idle = CoarseTimer(idle, tasks, "idle")
        self.silence = CoarseTimer(silence, tasks, "keep-alive")
        self.cancelled = CoarseTimer(timeouts.cancel_seconds, tasks, "cancelled request")
        self.client_idle = CoarseTimer(config.sessions.client_idle_seconds, tasks, "idle session of a client")
        self.greeting = CoarseTimer(config.limits.receive_seconds, tasks, "initialize of a client")
        self.plain_seconds = min(idle, silence, leg)
        """The first deadline of a plain call; it takes an exchange to know what happens then."""
        self.shared = {
            Timer.QUIET: CoarseTimer(quiet, tasks, Timer.QUIET, min(TICK_SECONDS, quiet / _QUIET_TICKS)),
            Timer.TTL: CoarseTimer(wait_seconds(config), tasks, Timer.TTL),
            Timer.LINGER: CoarseTimer(hold.linger_seconds, tasks, Timer.LINGER),
        }
        """Without those that the configuration has off."""
        if config.legs.rounds:
            self.shared[Timer.LEG] = CoarseTimer(leg, tasks, Timer.LEG)
        if hold.cold_seconds:
            self.shared[Timer.COLD] = CoarseTimer(hold.cold_seconds, tasks, Timer.COLD)
