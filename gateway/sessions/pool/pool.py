"""The pool of a route's sessions: opens them, adopts them, lends them to requests.

Rule 1: sessions are kept by everything that shaped them (principal, client, declared capabilities, configured
headers). Rule 2: a session whose call is still pending is never ended with DELETE, which kills some servers: it is
quarantined until its call ends. Rule 3: a session that another process opened serves the one call it was adopted for.

`sessions.assignment` decides which request gets a session; this file carries that out.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Final

from gateway import world
from gateway.config import Config, InForce, Route, RouteSettings
from gateway.exchange.handshake import Handshake
from gateway.identity.principal import ANONYMOUS
from gateway.protocol.errors import Busy, GatewayError
from gateway.protocol.tool_list import OmittedTool
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.tasks import Tasks, telling
from gateway.runtime.token_bucket import Rate, TokenBucket
from gateway.seal.request_state import Whereabouts
from gateway.sessions import assignment, pool_errors
from gateway.sessions.assignment import Capacity
from gateway.sessions.call import PoolKey, Watcher
from gateway.sessions.group import ChangeListeners, Group, SessionRequest
from gateway.sessions.pool.task_making import TaskMaking
from gateway.sessions.session import NOTHING, Session
from gateway.telemetry import Event, Metrics, SessionLimit, SessionState, get_logger
from gateway.upstream.channel import Channel, Headers

log = get_logger()

_LEFT_OUT_KEPT: Final = 1000
"""Bounds the warnings about tools of a server that keeps making up new ones."""

_BUSY: Final = SessionState.BUSY
_IDLE: Final = SessionState.IDLE
_SWEEP_SECONDS: Final = 1.0
_OF_A_SESSION: Final = 2
"""The descriptors that one takes with its call."""
_SOON_FREE: Final = 128
"""So many that end count as free already: more may have to wait for a server that hangs."""
_STARTS: Final = max(os.cpu_count() or 1, 2)
"""Children that a route may start at the same time: of sixteen at once on two cores, all took longer than
timeouts.handshake_seconds. A request that waits for a start may also get a session that comes free."""


class Pool:
    """All sessions of one route."""

    def __init__(
        self, settings: InForce[RouteSettings], connect: Callable[[], Channel], metrics: Metrics, tasks: Tasks
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        name = f"session sweeper of {self.route.path}"
        self._alarm = Alarm(self._sweep, _SWEEP_SECONDS, tasks, name)
        self._groups: dict[PoolKey, Group[Session]] = {}
        self._listeners = ChangeListeners()
        self._served = float("-inf")
        """When the upstream last served a session of a group that is forgotten."""
        starts = math.inf if self.route.upstream.command is None else _STARTS
        self._capacity: Capacity[Session] = Capacity(self.most, self.config.sessions.max_per_principal, starts)
        self._rate = TokenBucket(settings.part(_opening_rate))
        self._counts = {state: metrics.sessions[self.route.path, state] for state in SessionState}
        self.task_making = TaskMaking()
        self.closed = False
        self._closing = 0
        """Sessions whose end is on its way, and whose descriptors will be free."""
        settings.after_replace(self._change_limits)
        self.connect = connect
        """Makes the channel of a new session."""
        self._left_out: set[OmittedTool] = set()

    @property
    def route(self) -> Route:
        """The route as it is now; nothing that shapes a session ever differs."""
        return self._settings.value.route

    @property
    def config(self) -> Config:
        """The configuration as it is now."""
        return self._settings.value.config

    @property
    def most(self) -> int:
        """Sessions that there may be; each is a process where the upstream is a command."""
        return self.limit[1]

    @property
    def limit(self) -> tuple[SessionLimit, int]:
        """What bounds that number: the narrower of two limits where the upstream is a command."""
        most, upstream = self.config.sessions.max, self.route.upstream
        if upstream.command is not None and upstream.max_children <= most:
            return SessionLimit.CHILDREN, upstream.max_children
        return SessionLimit.ALL, most

    def _change_limits(self, _: RouteSettings) -> None:
        self._capacity.change_limits(self.most, self.config.sessions.max_per_principal)
        if self._groups:
            self._sweep_later()  # `sessions.idle_seconds` may be shorter now
        for group in tuple(self._groups.values()):
            self._assign(group)

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request of any session; -inf before the first."""
        return max((self._served, *(group.credentials.newest for group in self._groups.values())))

    @property
    def waiting(self) -> int:
        """How many requests wait for a session."""
        return sum(len(group.waiting) for group in self._groups.values())

    @property
    def in_use(self) -> Iterator[tuple[bytes, int]]:
        """The number of sessions of each principal, without the idle ones that make room for others."""
        quotas = self._capacity.quotas.items()
        return ((caller, count) for caller, quota in quotas if (count := quota.count - len(quota.evictable)))

    def group(self, key: PoolKey) -> Group[Session]:
        """The group of a key; made when it is new."""
        group = self._groups.get(key)
        if group is None:
            self._sweep_later()
            is_affine = bool(key.pin) or self.route.sessions.affinity == "principal"
            group = self._groups[key] = Group(key, is_affine, self._listeners, self._alarm)
        group.used = world.monotonic()
        return group

    def _session(self, group: Group[Session]) -> Session:
        return Session(group, self.connect(), self._settings, self._metrics, self._tasks)

    def take_opening(self, *, is_exempt: bool = False) -> None:
        """Count the opening of a session against the rate of the route; raises Busy, unless it `is_exempt`.

        Each session costs the upstream several requests, or a process. A request that continues a call takes its token
        too, but is never refused: its client would not come again, and the answers of a person would be lost.
        """
        seconds = 0 if is_exempt else self._rate.wait_seconds()
        if seconds > 0:
            limit = SessionLimit.RATE if self.route.upstream.command is None else SessionLimit.CHILD_RATE
            self._metrics.sessions_refused[self.route.path, limit].inc()
            raise pool_errors.too_many_at_once(self.route, limit, self._rate.per_second, seconds)
        self._rate.take()

    def leave_out(self, tools: Iterable[OmittedTool]) -> None:
        """Count tools that are hidden from clients, and warn of each once."""
        for tool in tools:
            self._metrics.tools_left_out[self.route.path,].inc()
            if tool not in self._left_out and len(self._left_out) < _LEFT_OUT_KEPT:
                self._left_out.add(tool)
                log.warning(Event.TOOL_LEFT_OUT, route=self.route.path, tool=tool.name, reason=tool.reason)

    def hearing(self, principal: bytes, listener: Watcher, uris: Collection[str] = ()) -> AbstractContextManager[None]:
        """Tell `listener` of changes that other sessions of this principal announce; it subscribed to `uris`.

        A server over HTTP announces a change on all its sessions. Where each session is a process, only the session
        whose call changed something announces it.
        """
        if self.route.upstream.command is None:
            return nullcontext()
        return self._listeners.listening(principal, listener, uris)

    async def prepare(self, session: Session, log_level: str | None, headers: Headers) -> None:
        """Set on a session what its next call depends on; raises as `Session.ask` does.

        A process announces changes only of resources to which it was subscribed itself. The subscriptions of the
        caller have a process of their own, so they are repeated in the one that runs the call.
        """
        uris = self._listeners.uris(session.group.key.principal) if session.channel.is_process else NOTHING
        await session.prepare(log_level, uris, headers)

    async def handshake(self, key: PoolKey, headers: Headers) -> Handshake:
        """What the upstream says of itself to this principal; opens a session only when it is not known yet."""
        group = self.group(key)
        if group.shaken is None:
            session = await self.acquire(key, headers, is_exempt=False)
            self.release(session, clean=True)
            return session.shaken
        return group.shaken

    # -- getting a session ------------------------------------------------------------------------------------------

    async def acquire(self, key: PoolKey, headers: Headers, *, is_exempt: bool = True) -> Session:
        """A session for exclusive use: an idle one, a new one, or the next that comes free.

        With affinity it is the one session of the group.
        Raises Busy when none came free in `timeouts.session_wait_seconds`, or when none may be opened now unless it
        `is_exempt`, and what opening one raises.
        """
        group = self.group(key)
        session = self.take(group) or await self._obtain(group, is_exempt=is_exempt)
        return session if session.opened else await self._open(session, headers)

    async def open(self, key: PoolKey, headers: Headers, *, is_exempt: bool = True) -> Session:
        """A new session, without the subscriptions, log level or lost stream of an earlier call.

        Raises as `acquire` does.
        """
        session = await self._obtain(self.group(key), is_fresh=True, is_exempt=is_exempt)
        return await self._open(session, headers)

    async def adopt(
        self, key: PoolKey, whereabouts: Whereabouts, headers: Headers, *, is_shared: bool = False
    ) -> Session:
        """A session that another process opened, to pick up its call; it counts as one opened here.

        The upstream is not asked whether it knows the session. One that is shared with that process is never ended
        from here. Raises as `acquire` does.
        """
        session = await self._obtain(self.group(key), is_fresh=True)
        return await self._begin(session, session.adopt(whereabouts, headers, is_shared=is_shared))

    def adopted_channel(self, whereabouts: Whereabouts) -> Channel:
        """Make a channel of a session that another process opened."""
        channel = self.connect()
        channel.adopt(whereabouts.session, whereabouts.version)
        return channel

    async def _open(self, session: Session, headers: Headers) -> Session:
        """Make the handshake of a new session, also if the request that needs it is cancelled meanwhile.

        The server makes a session when it reads `initialize`, and only its answer has the id with which to end that.
        """
        failures: list[GatewayError] = []

        async def opening() -> None:
            with telling(failures.append):
                _ = await self._begin(session, session.open(headers))

        task = self._tasks.start(opening(), "open session")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: self.release(session, clean=True) if session.opened else None)
            raise
        if failures:
            raise failures[0]
        return session

    async def _begin(self, session: Session, handshake: Awaitable[None]) -> Session:
        seconds = self.config.timeouts.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                await handshake
            return session  # noqa: TRY300
        except BaseException as exc:
            self._drop(session)
            explained = pool_errors.handshake_failed(exc, self.route, seconds)
            if explained is exc:
                raise
            raise explained from exc
        finally:
            self._end_start(session.group)

    # -- out --------------------------------------------------------------------------------------------------------

    def take(self, group: Group[Session]) -> Session | None:
        """An idle session, if there is one; none is idle while a request waits for it."""
        session = assignment.reusable(group)
        return None if session is None else self._occupied(session)

    def _occupied(self, session: Session) -> Session:
        """A session that was idle has a call from now on."""
        self._capacity.occupied(session, session.group)
        self._move(session, _BUSY)
        return session

    async def _obtain(self, group: Group[Session], *, is_fresh: bool = False, is_exempt: bool = True) -> Session:
        """Wait for a session, which is yet to be opened if it is new; raises Busy."""
        future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        request = SessionRequest(group, future, is_fresh=is_fresh, is_exempt=is_exempt)
        self._capacity.add(request)
        self._assign(group)
        try:
            if not future.done():
                # `wait` does not cancel the future, so a session that is assigned in the same moment is never lost.
                _ = await asyncio.wait((future,), timeout=self.config.timeouts.session_wait_seconds)
            if not future.done():
                raise self._refusal(request)
        except asyncio.CancelledError:
            if future.done() and future.exception() is None:
                if (unused := future.result()).opened:
                    self.release(unused, clean=True)
                else:
                    self._drop(unused)
                    self._end_start(group)  # `_assign` counted the start, which no `_begin` ends
            raise
        finally:
            if not future.done():
                self._capacity.remove(request)
                self._forget_if_unused(group)
                self._assign(group)  # of an affine group, the request behind it may open the session now
        if future.exception() is not None:
            self._forget_if_unused(group)
        return future.result()

    def _refusal(self, request: SessionRequest[Session]) -> Busy:
        """Return why no session came free, and count it if a limit keeps the request from a new one."""
        key = request.group.key
        quota = self._capacity.quotas.get(key.principal)
        if quota is None or request not in quota.openers:
            return pool_errors.in_use(self.route, self.config, is_pinned=bool(key.pin))
        limit, most = self.limit
        if key.principal not in self._capacity.eligible:
            limit, most = SessionLimit.OF_CALLER, self.config.sessions.max_per_principal
        self._metrics.sessions_refused[self.route.path, limit].inc()
        return pool_errors.none_free(self.route, limit, most, is_shared=key.principal == ANONYMOUS)

    def _forget_if_unused(self, group: Group[Session]) -> None:
        """Forget the group of a caller that got no session: its key holds up to 32 KiB of the caller's own data."""
        if group.knows_nothing and self._groups.get(group.key) is group:
            del self._groups[group.key]

    def _end_start(self, group: Group[Session]) -> None:
        self._forget_if_unused(group)
        self._capacity.started()
        self._assign(group)

    def _assign(self, group: Group[Session]) -> None:
        """Carry out every assignment that a change in a group makes possible."""
        while (found := self._capacity.assign(group)) is not None:
            if isinstance(found, assignment.Reuse):
                session = self._occupied(found.session)
            elif isinstance(found, assignment.Join):
                session = self._session(found.owner.group)
                session.join(found.owner)
            else:
                try:
                    going = self._idle_ones_to_close(found)
                    self.take_opening(is_exempt=found.request.is_exempt)
                except Busy as refusal:
                    self._capacity.remove(found.request)
                    found.request.outcome.set_exception(refusal)
                    continue
                for idle in going:
                    self._remove(idle)
                # Its room is taken before its handshake begins.
                session = self._session(found.request.group)
                self._capacity.opened(session, session.group, is_fresh=found.request.is_fresh)
                self._counts[_BUSY].inc()
            self._capacity.remove(found.request)
            found.request.outcome.set_result(session)

    def _idle_ones_to_close(self, found: assignment.Open[Session]) -> Collection[Session]:
        """Return what gives way to a new session, idle ones while descriptors are short too.

        Raises Busy if there is none then, but for a request that continues a call.
        """
        going = {} if found.evicted is None else {found.evicted: None}
        free = world.free_descriptors() + min(self._closing, _SOON_FREE)
        if (missing := _OF_A_SESSION * (self._capacity.starting + 1) - free) > 0:
            going |= dict.fromkeys(islice(self._capacity.evictable, missing))
            if not (going or found.request.is_exempt):
                self._metrics.sessions_refused[self.route.path, SessionLimit.DESCRIPTORS].inc()
                raise pool_errors.few_descriptors(self.route)
        return going

    def _move(self, session: Session, state: SessionState) -> None:
        counts, states = self._counts, session.group.sessions
        counts[states[session]].value -= 1
        counts[state].value += 1
        states[session] = state

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
        elif not ((clean or session.is_orderly) and self._keep(session)):
            self._drop(session)

    def _keep(self, session: Session) -> bool:
        """Keep a session without a call in flight for the next one; returns False if it is of no use for that."""
        group = session.group
        is_apart = group.is_affine and group.main is not session  # all calls go to the main one
        is_useless = is_apart or session.lost or session.adopted or self.closed
        if is_useless or self._settings.value.config.sessions.idle_seconds == 0:
            return False
        group.used = now = world.monotonic()
        self._move(session, _IDLE)
        self._capacity.rested(session, group, now)
        if group.takers or self._capacity.eligible:
            self._assign(group)
        return True

    async def _quarantine(self, session: Session) -> None:
        """Wait for the end of a call that was given up; only then may its session be ended."""
        session.channel.give_up()
        await session.settled(self.config.sessions.quarantine_seconds)
        if not session.pending and session.is_orderly and self._keep(session):
            return
        # Before `abandon`: after that, no call would keep the session from being ended.
        self._drop(session)
        session.abandon()

    async def _depart(self, joiner: Session, *, clean: bool) -> None:
        """Take a joiner out of the shared session, once its call has ended or was given up for good."""
        if joiner.pending:
            joiner.channel.give_up()
        await joiner.settled(self.config.sessions.quarantine_seconds)
        group, owner = joiner.group, joiner.shared.owner
        if joiner.pending:
            owner.lose()
        joiner.abandon()
        joiner.shared.leave(joiner, is_lost=not (clean or joiner.is_orderly))
        if owner in group.idle:
            self._capacity.rested(owner, group, group.idle[owner])
        self._assign(group)
        await joiner.channel.close(end_session=False)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _drop(self, session: Session) -> None:
        if session in session.group.sessions:
            self._remove(session)
            self._assign(session.group)

    def _remove(self, session: Session) -> None:
        self._counts[session.group.sessions[session]].inc(-1)
        self._capacity.closed(session, session.group)
        self._closing += 1
        self._tasks.spawn(self._close(session.channel, end_session=session.may_end), "close session")

    async def _close(self, channel: Channel, *, end_session: bool) -> None:
        # The end of a process waits for no task.
        is_apart = channel.is_process or not end_session or self.closed
        try:
            async with nullcontext() if is_apart else self.task_making.end_of_session():
                await channel.close(end_session=end_session)
        finally:
            self._closing -= 1

    def forget_idle(self, key: PoolKey) -> None:
        """Drop the idle sessions of a key: the upstream forgot one session of it, so it was restarted.

        It is told of their end, because some of them may have been opened since.
        """
        group = self.group(key)
        group.missed()
        for session in tuple(group.idle):
            self._drop(session)

    def _sweep_later(self) -> None:
        """Nothing of a group is stale before it was not used for `sessions.idle_seconds`."""
        self._alarm.set(world.monotonic() + self.config.sessions.idle_seconds)

    def _sweep(self, now: float) -> float | None:
        """Close sessions that were not used for `sessions.idle_seconds`, and forget empty groups."""
        seconds = self.config.sessions.idle_seconds
        for group in list(self._groups.values()):
            for session, since in tuple(group.idle.items()):
                is_unused = since <= now - seconds and not session.shared.joiners
                if session.lost or is_unused:
                    self._drop(session)
            if group.is_empty and group.used <= now - seconds:
                self._served = max(self._served, group.credentials.newest)
                del self._groups[group.key]
        # Since when at the earliest something of each group was not used.
        unused = [
            next(iter(group.idle.values()), group.used if group.is_empty else now) for group in self._groups.values()
        ]
        return min(unused) + seconds if unused else None

    def retire(self) -> None:
        """End all idle sessions, and keep none any more: those in use end with their calls, and so do new ones."""
        self.closed = True
        self._alarm.stop()
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
