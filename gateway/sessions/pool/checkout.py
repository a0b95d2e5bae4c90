"""Checks the sessions of one route out to requests, then in again.

Rule 1: sessions are kept by everything that shaped them (principal, client, declared capabilities, configured
headers). Rule 2: a session whose call is still pending is never ended with DELETE, which kills some servers: it is
quarantined until its call ends. Rule 3: a session that another process opened serves the one call it was adopted for.

`sessions.assignment` decides which request gets a session; this file carries that out.
"""

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from gateway import world
from gateway.config import Config, InForce, Route, RouteSettings
from gateway.protocol.errors import Busy
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.rate_limit import Rate, TokenBucket
from gateway.runtime.tasks import Tasks
from gateway.sessions import assignment, pool_errors
from gateway.sessions.assignment import Capacity, Limits, Request
from gateway.sessions.call import PoolKey
from gateway.sessions.group import Group, Groups
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, SessionState

_BUSY: Final = SessionState.BUSY
_IDLE: Final = SessionState.IDLE
_SWEEP_SECONDS: Final = 1.0
_STARTS: Final = max(os.cpu_count() or 1, 2)
"""Children that a route may start at the same time: of sixteen at once on two cores, all took longer than
timeouts.handshake_seconds. A request that waits for a start may also get a session that comes free."""


class Checkout(ABC):
    """The sessions of one route, with the requests that wait for one."""

    def __init__(
        self, settings: InForce[RouteSettings], metrics: Metrics, tasks: Tasks, retired: Callable[[], None]
    ) -> None:
        """`retired` is called once sessions are kept no longer, so that none need be prepared."""
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        self._retired = retired
        name = f"session sweeper of {self.route.path}"
        self._alarm = Alarm(self._sweep, _SWEEP_SECONDS, tasks, name)
        is_affine = self.route.sessions.affinity == "principal"
        self._groups: Groups[Session] = Groups(
            is_affine=is_affine, may_be_stale=self._sweep_soon, made=self._sweep_later
        )
        self.group = self._groups.of
        """Returns the group of a key; makes it when it is new."""
        self._capacity: Capacity[Session] = Capacity(self._limits)
        self._rate = TokenBucket(settings.part(_opening_rate))
        self._counts = metrics.sessions_by_state(self.route.path)
        self.closed = False
        settings.after_replace(self._change_limits)

    @abstractmethod
    def _session(self, group: Group[Session]) -> Session:
        """Make a session that is not open yet."""

    @property
    def route(self) -> Route:
        """The route as it is now; nothing that shapes a session ever differs."""
        return self._settings.value.route

    @property
    def _config(self) -> Config:
        return self._settings.value.config

    @property
    def most(self) -> int:
        """Sessions that there may be; each is a process where the upstream is a command."""
        most, upstream = self._config.sessions.max, self.route.upstream
        return most if upstream.command is None else min(most, upstream.max_children)

    @property
    def _limits(self) -> Limits:
        starting = float("inf") if self.route.upstream.command is None else _STARTS
        return Limits(self.most, self._config.sessions.max_per_principal, starting)

    def _change_limits(self, _: RouteSettings) -> None:
        self._capacity.change_limits(self._limits)
        if self._groups:
            self._sweep_later()
        for group in tuple(self._groups.values()):
            self._assign(group)

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request of any session; -inf before the first."""
        return self._groups.served

    @property
    def waiting(self) -> int:
        """How many requests wait for a session."""
        return sum(len(group.waiting) for group in self._groups.values())

    # -- out --------------------------------------------------------------------------------------------------------

    def take(self, group: Group[Session]) -> Session | None:
        """An idle session, if there is one; none is idle while a request waits for it."""
        while (session := assignment.reusable(group)) is not None:
            if not session.lost:
                self._capacity.occupied(session, group)
                self._move(session, _BUSY)
                return session
            self._drop(session)
        return None

    async def _obtain(self, group: Group[Session], *, is_fresh: bool = False, is_exempt: bool = True) -> Session:
        """Wait for a session, which is yet to be opened if it is new; raises Busy."""
        future: asyncio.Future[Session | Busy] = asyncio.get_running_loop().create_future()
        request = Request(group, future, is_fresh=is_fresh, is_exempt=is_exempt)
        self._capacity.add(request)
        self._assign(group)
        try:
            if not future.done():
                # `wait` does not cancel the future, so a session that is assigned in the same moment is never lost.
                _ = await asyncio.wait((future,), timeout=max(self._config.timeouts.session_wait_seconds, 0))
        except asyncio.CancelledError:
            if future.done() and isinstance(unused := future.result(), Session):
                self._return_unused(unused)
            raise
        finally:
            if not future.done():
                self._capacity.remove(request)
                self._groups.forget_if_unused(group)
                self._assign(group)
        if not future.done():
            raise pool_errors.busy(self.route, is_pinned=bool(group.key.pin))
        obtained = future.result()
        if isinstance(obtained, Busy):
            self._groups.forget_if_unused(group)
            raise obtained
        return obtained

    def _return_unused(self, session: Session) -> None:
        if session.opened:
            self.release(session, clean=True)
        else:
            self._drop(session)
            self._end_start(session.group)

    def _end_start(self, group: Group[Session]) -> None:
        """The handshake of a session has ended, well or not."""
        self._groups.forget_if_unused(group)
        self._capacity.starting -= 1
        self._assign(group)

    def _assign(self, group: Group[Session] | None) -> None:
        """Carry out every assignment that a change in a group, or elsewhere, makes possible."""
        if (group is None or not group.takers) and not self._capacity.is_asked_for_room():
            return
        while (found := assignment.assign(group, self._capacity)) is not None:
            if isinstance(found, assignment.Drop):
                self._remove(found.session)
                continue
            if isinstance(found, assignment.Reuse):
                session = found.session
                self._capacity.occupied(session, session.group)
                self._move(session, _BUSY)
            elif isinstance(found, assignment.Join):
                session = self._session(found.owner.group)
                session.join(found.owner)
            elif (refusal := self._take_token(is_exempt=found.request.is_exempt)) is not None:
                self._capacity.remove(found.request)
                found.request.outcome.set_result(refusal)
                continue
            else:
                if found.evicted is not None:
                    self._remove(found.evicted)
                session = self._new(found.request)
            self._capacity.remove(found.request)
            found.request.outcome.set_result(session)

    def _take_token(self, *, is_exempt: bool) -> Busy | None:
        """Take a token for a new session; return the error if there is none.

        Each session costs the upstream several requests, or a process. A request that continues a call takes its token
        too, but is never refused: its client would not come again, and the answers of a person would be lost.
        """
        seconds = 0 if is_exempt else self._rate.wait_seconds()
        if seconds > 0:
            refusal = pool_errors.too_many_at_once(self.route, seconds)
            self._metrics.session_refused(self.route.path, refusal.limit)
            return refusal
        self._rate.take()
        return None

    def _new(self, request: Request[Session]) -> Session:
        """A session that counts from now on, so that its room is taken before its handshake begins."""
        assert isinstance(request.group, Group)
        session = self._session(request.group)
        self._capacity.opened(session, session.group, is_fresh=request.is_fresh)
        self._move(session, _BUSY)
        return session

    def _move(self, session: Session, state: SessionState | None) -> None:
        """Change the state of a session, and count it in the metrics."""
        counts = self._counts
        counts[session.state].value -= 1
        counts[state].value += 1
        session.state = state

    # -- in ---------------------------------------------------------------------------------------------------------

    def rest(self, session: Session, *, resting: bool) -> None:
        """The call of a session was parked, or continues."""
        session.resting = resting
        if resting:
            self._assign(session.group)

    def release(self, session: Session, *, clean: bool) -> None:
        """Take a session back: keep it after a clean end, quarantine it under a pending call, else drop it."""
        session.resting = False
        if session.shared.owner is not session:  # without the properties: every call comes here
            self._tasks.spawn(self._depart(session, clean=clean), "quarantine")
        elif session.in_flight is not None:
            self._move(session, SessionState.QUARANTINED)
            self._tasks.spawn(self._quarantine(session), "quarantine")
        elif (clean or _is_orderly(session)) and self._may_keep(session):
            self._keep(session)
        else:
            self._drop(session)

    def _may_keep(self, session: Session) -> bool:
        if session.group.is_affine and session.group.main is not session:
            return False  # all calls go to the main one
        is_useless = session.lost or session.adopted or self.closed
        return not (is_useless or self._settings.value.config.sessions.idle_seconds == 0)

    def _keep(self, session: Session) -> None:
        group = session.group
        group.used = session.idle_since = world.monotonic()
        self._move(session, _IDLE)
        self._capacity.rested(session, group)
        self._assign(group)

    async def _quarantine(self, session: Session) -> None:
        """Wait for the end of a call that was given up; only then may its session be ended."""
        session.channel.give_up()
        await session.settled(self._config.sessions.quarantine_seconds)
        if not session.pending and _is_orderly(session) and self._may_keep(session):
            self._keep(session)
            return
        self._drop(session)
        session.abandon()

    async def _depart(self, joiner: Session, *, clean: bool) -> None:
        """Take a joiner out of the shared session, once its call has ended or was given up for good."""
        if joiner.pending:
            joiner.channel.give_up()
        await joiner.settled(self._config.sessions.quarantine_seconds)
        group, owner = joiner.group, joiner.shared.owner
        if joiner.pending:
            owner.lose()
        elif not (clean or joiner.turned_away) and joiner.shared.asked_aside:
            owner.lost = True  # as in `_is_orderly`
        joiner.abandon()
        joiner.shared.leave(joiner)
        if owner in group.idle:
            self._capacity.rested(owner, group)
        self._assign(group)
        await joiner.channel.close(end_session=False)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _drop(self, session: Session) -> None:
        """Forget a session, and give its room away."""
        if session.state is not None:
            self._remove(session)
            self._assign(session.group)

    def _remove(self, session: Session) -> None:
        self._move(session, None)
        self._capacity.closed(session, session.group)
        self._tasks.spawn(session.channel.close(end_session=session.may_end), "close session")

    def forget_idle(self, key: PoolKey) -> None:
        """Drop the idle sessions of a key: the upstream forgot one session of it, so it was restarted."""
        group = self.group(key)
        group.missed()
        for session in tuple(group.idle):
            session.lose()
            self._drop(session)

    def _sweep_later(self) -> None:
        """Nothing of a group is stale before it was not used for `sessions.idle_seconds`."""
        self._alarm.set(world.monotonic() + self._config.sessions.idle_seconds)

    def _sweep_soon(self) -> None:
        self._alarm.set(world.monotonic())

    def _sweep(self, now: float) -> float | None:
        """Close sessions that were not used for `sessions.idle_seconds`, and forget empty groups."""
        seconds = self._config.sessions.idle_seconds
        for group in list(self._groups.values()):
            while group.idle and _is_stale(session := next(iter(group.idle)), now - seconds):
                self._drop(session)
            self._groups.forget_if_empty(group, now - seconds)
        return min((_unused_since(group, now) + seconds for group in self._groups.values()), default=None)

    def retire(self) -> None:
        """End all idle sessions, and keep none any more: those in use end with their calls, and so do new ones."""
        self.closed = True
        self._alarm.stop()
        self._retired()
        for group in tuple(self._groups.values()):
            for session in tuple(group.idle):
                self._drop(session)


def _opening_rate(settings: RouteSettings) -> Rate:
    """A bucket that lets all permitted sessions be opened at once, and never less than those of a second."""
    sessions, upstream = settings.config.sessions, settings.route.upstream
    if upstream.command is not None:
        per_second, most = upstream.new_children_per_second, upstream.max_children
    else:
        per_second, most = sessions.new_per_second, sessions.max
    return Rate(per_second, max(most, math.ceil(per_second)))


def _is_orderly(session: Session) -> bool:
    """Whether the session of all calls is kept after a call that did not end well, for dropping it is costly.

    A call that was refused never began. Questions that a call left open reach no other call if they named it; on the
    side stream they may arrive after its end.
    """
    return session.group.main is session and (session.turned_away or not session.shared.asked_aside)


def _is_stale(session: Session, before: float) -> bool:
    """Whether an idle session is useless, or has not been used since `before`."""
    return session.lost or (session.idle_since <= before and not session.shared.joiners)


def _unused_since(group: Group[Session], now: float) -> float:
    """Since when at the earliest something of a group was not used."""
    if group.idle:
        return next(iter(group.idle)).idle_since
    return now if group.sessions or group.waiting else group.used
