"""Runs one exchange: feeds it events, then carries out its commands in their order."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import GRACE, LINGER, Timer
from gateway.exchange.machine import ENDED, IDLE, Exchange, Snapshot, State
from gateway.protocol import jsonrpc
from gateway.protocol.errors import GatewayError, LocalProtocolError, bug
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import STALLED_SECONDS

_REFUSALS: Final = (GatewayError, LocalProtocolError)
"""What an exchange raises that refuses an event, and then it has changed nothing."""
_LOOK_SECONDS: Final = 1.0
"""How often GRACE looks whether the event loop stood still."""
_BACK_SECONDS: Final = 2.0
"""How long a client then has at least to come back: another replica may have told it to call again in a second."""


class Engine(ABC):
    """One exchange with its timers; only this file feeds the exchange.

    Each timer runs at most once at a time. GRACE looks whether the event loop stood still, so it gets an event loop
    timer of its own. The others are shared with all exchanges of the route, which know whether they run. A subclass
    has the client's side of the call, and the server's.
    """

    __slots__ = ("_armed", "_exchange", "_handles", "_later", "_legs", "live")

    OBEY: ClassVar[dict[type[do.Command], Callable[[Any, Any], None]]]
    """What carries each command out: every command has its own class."""

    def __init__(self, live: LiveRoute, exchange: Exchange) -> None:
        self.live = live
        """The route as it was when the exchange began; a reload does not change it."""
        self._exchange = exchange
        self._handles: dict[Timer, asyncio.TimerHandle] | None = None
        """The timers of the event loop; even an empty dict would take memory of its own while a call is held."""
        self._armed: tuple[Timer, ...] = ()
        """The timers of the state that was settled last."""
        self._legs: tuple[Any, ...] = ()
        """The legs that wait for their final message, nearly always one or none."""
        self._later: list[on.Event] | None = None
        """While an event is being handled: it, and what happens meanwhile."""

    @abstractmethod
    def fire(self, timer: Timer) -> None:
        """Take the end of a timer."""

    def forget(self) -> None:
        """Drop the kept result, or error."""
        self._feed(on.Expired())
        self._disarm(LINGER)

    def _restore(self, past: Snapshot) -> None:
        """Continue where another process stopped."""
        self._exchange.restore(past)
        self._moved(IDLE, self._exchange.state)

    def _feed(self, event: on.Event) -> None:
        """Handle an event, and then, one after the other, those that obeying its commands brings about."""
        if self._later is not None:
            self._later.append(event)
            return
        self._later = events = [event]
        exchange, obey = self._exchange, self.OBEY
        settled, is_taken = exchange.state, False
        try:
            for each in events:  # it grows meanwhile
                commands = exchange.handle(each)
                is_taken = True
                for command in commands:
                    obey[type(command)](self, command)
                if (after := exchange.state) is not settled:
                    before, settled = settled, after
                    self._moved(before, after)
        except Exception as exc:
            # The refusal of a later event would reach only the caller that fed the first one.
            if is_taken or not isinstance(exc, _REFUSALS):
                self._crashed(settled)
            raise
        finally:
            self._later = None

    def _crashed(self, settled: State) -> None:
        """End the exchange after a bug, with one error to each leg that waits, and give back what it has.

        `settled` is the state that was settled last. The bug itself is reported where it is caught, so another one on
        the way is not.
        """
        self._exchange.crash()
        error = bug()
        steps: list[Callable[[], None]] = [
            partial(self._fail, self._legs, error),
            partial(self._drop, error.message),
            self._disarm_all,
            partial(self._moved, settled, ENDED),
            self._forget,
        ]
        # One that had ended has given back all but its kept result, which goes when LINGER rings.
        for step in steps[:2] if settled is ENDED else steps:
            with suppress(Exception):
                step()

    def _moved(self, _before: State, after: State) -> None:
        """Keep the timers true to the state, and all else in a subclass."""
        before = self._armed
        self._armed = now = self._exchange.timers
        for timer in before:
            if timer not in now:
                self._disarm(timer)
        for timer in now:
            if timer not in before:
                self._arm(timer)
        if after is ENDED:
            self._ended()

    # -- timers ---------------------------------------------------------------------------------------------------

    def _arm(self, timer: Timer, seconds: float | None = None) -> None:
        """Start a timer, or start it anew; `seconds` if it is shorter than usual."""
        if self._handles is not None or seconds is not None:  # a shared timer starts anew by itself
            self._disarm(timer)
        shared = self.live.deadlines.shared.get(timer)
        if shared is not None and seconds is None:
            shared.arm(self, _fire, self, timer)
            return
        if timer is GRACE:
            seconds = self.live.config.hold.grace_seconds
        if seconds is not None:  # else the configuration has this timer off
            self._start(timer, asyncio.get_running_loop().time() + seconds)

    def _start(self, timer: Timer, until: float) -> None:
        """Start a timer of the event loop."""
        loop = asyncio.get_running_loop()
        due = min(until, loop.time() + _LOOK_SECONDS) if timer is GRACE else until
        ring = partial(self._ring, timer, due, until)
        handle = loop.call_at(due, self.live.process.tasks.guard(ring, "timer " + timer))
        if self._handles is None:
            self._handles = {timer: handle}
        else:
            self._handles[timer] = handle

    def _deadline(self, timer: Timer) -> float | None:
        """Return the monotonic time at which a shared timer rings; None if it does not run."""
        shared = self.live.deadlines.shared.get(timer)
        return None if shared is None else shared.deadline(self)

    def _disarm(self, timer: Timer) -> None:
        """Stop a timer; nothing happens if it does not run."""
        if self._handles is not None and (handle := self._handles.pop(timer, None)) is not None:
            handle.cancel()
            self._handles = self._handles or None
        if (shared := self.live.deadlines.shared.get(timer)) is not None:
            shared.disarm(self)

    def _disarm_all(self) -> None:
        """Stop every timer."""
        for timer in Timer:
            self._disarm(timer)

    def _ring(self, timer: Timer, due: float, until: float) -> None:
        self._disarm(timer)
        now = asyncio.get_running_loop().time()
        if timer is GRACE and now - due > STALLED_SECONDS:
            # The process stood still. Its client may have come back in time, and waits to be read or was sent away.
            until = max(until, now + _BACK_SECONDS)
        if until > due:
            self._start(timer, until)
        else:
            self.fire(timer)

    # -- what a subclass does -------------------------------------------------------------------------------------

    @abstractmethod
    def _ended(self) -> None:
        """The exchange is over, but may be kept for the linger time."""

    @abstractmethod
    def _forget(self) -> None:
        """Keep nothing of the exchange."""

    @abstractmethod
    def _drop(self, reason: str) -> None:
        """Cancel the call unless its answer has come, and hear no more of it."""

    @abstractmethod
    def _fail(self, legs: Iterable[Any], error: GatewayError | jsonrpc.Error) -> None:
        """End legs with an error of the gateway, or with the upstream's own."""

    def _waits_no_more(self, leg: on.Leg) -> None:
        self._legs = tuple([each for each in self._legs if each is not leg])


def _fire(engine: Engine, timer: Timer) -> None:
    """No bound method, which would take memory of its own while a call is held."""
    engine.fire(timer)
