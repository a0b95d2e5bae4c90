"""The deadlines that all exchanges of a route share, by the lengths that its configuration gives them."""

from gateway.config import Config
from gateway.exchange.commands import Timer
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks


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
