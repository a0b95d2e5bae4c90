"""The sessions of a route: opened, handed out, pooled, quarantined, closed.

Rule 1: sessions are pooled by everything that shaped them (principal, client, declared capabilities, configured
headers). Rule 2: a session whose call is still pending is never ended with DELETE, which kills some servers: it is
quarantined until its call ends. Rule 3: a session that another process opened serves the one call it was adopted for.

`sessions.assignment` decides which request gets a session; the pool carries that out.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from msgspec import Raw

from gateway.config import Config, InForce, Route, RouteSettings
from gateway.exchange import handshake as negotiate
from gateway.exchange.handshake import Handshake
from gateway.http.forwarded_headers import credentials_in
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, Unreachable
from gateway.protocol.request import Request
from gateway.protocol.tool_filter import OmittedTool
from gateway.runtime.tasks import Tasks
from gateway.sessions import assignment, capacity, pool_errors
from gateway.sessions.authorisation import is_served
from gateway.sessions.call import PoolKey, Watcher
from gateway.sessions.capacity import Capacity, Limits
from gateway.sessions.group import ChangeForwarder, ChangeListeners, Group, Groups
from gateway.sessions.list_cache import CacheKey, ListCache, place, seconds_kept
from gateway.sessions.session import Session
from gateway.telemetry import Event, Metrics, SessionState, get_logger
from gateway.upstream.channel import Channel, Headers

log = get_logger()

_SWEEP_SECONDS: Final = 1.0
_LEFT_OUT_KEPT: Final = 1000
"""Bounds the warnings about tools of a server that keeps making up new ones."""
_STARTS: Final = max(os.cpu_count() or 1, 2)
"""Children that a route may start at the same time: of sixteen at once on two cores, all took longer than
timeouts.handshake_seconds. A request that waits for a start may also get a session that comes free."""


def _no_op() -> None:
    """The default callback."""


class Pool:
    """All sessions of one route."""

    def __init__(
        self,
        settings: InForce[RouteSettings],
        connect: Callable[[], Channel],
        metrics: Metrics,
        tasks: Tasks,
        retired: Callable[[], None] = _no_op,
    ) -> None:
        """`retired` is called once the pool keeps sessions no longer, so that none need be prepared for it."""
        self._settings = settings
        self._connect = connect
        self._retired = retired
        self._metrics = metrics
        self._tasks = tasks
        self._groups = Groups(is_affine=self.route.sessions.affinity == "principal")
        self._capacity: Capacity[Session] = Capacity(self._limits)
        self._listeners = ChangeListeners()
        self.lists = ListCache()
        self._left_out: set[OmittedTool] = set()
        self.closed = False
        self._sweeper = tasks.start(self._sweep(), f"session sweeper of {self.route.path}")
        settings.after_replace(self._use)

    @property
    def route(self) -> Route:
        """The route as it is now; nothing that shapes a session ever differs."""
        return self._settings.value.route

    @property
    def _config(self) -> Config:
        return self._settings.value.config

    @property
    def _limits(self) -> Limits:
        starting = float("inf") if self.route.upstream.command is None else _STARTS
        return Limits(self.most, self._config.sessions.max_per_principal, starting)

    def _use(self, _: RouteSettings) -> None:
        """Go on under other limits."""
        self.lists.clear()
        self._capacity.limits = self._limits
        for group in tuple(self._groups.values()):
            self._assign(group)

    @property
    def handshake_seconds(self) -> float:
        """The deadline of every request that the gateway makes on its own account."""
        return self._config.timeouts.handshake_seconds

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request of any session; -inf before the first."""
        return self._groups.served

    @property
    def most(self) -> int:
        """Sessions that there may be; each is a process where the upstream is a command."""
        most, upstream = self._config.sessions.max, self.route.upstream
        return most if upstream.command is None else min(most, upstream.max_children)

    @property
    def waiting(self) -> int:
        """How many requests wait for a session."""
        return self._groups.waiting

    def leave_out(self, tool: OmittedTool) -> None:
        """Count a tool that is hidden from clients, and warn of it once."""
        self._metrics.tool_left_out(self.route.path)
        if tool not in self._left_out and len(self._left_out) < _LEFT_OUT_KEPT:
            self._left_out.add(tool)
            log.warning(Event.TOOL_LEFT_OUT, route=self.route.path, tool=tool.name, reason=tool.reason)

    def group(self, key: PoolKey) -> Group:
        """The group of a key; made when it is new."""
        return self._groups.of(key)

    def forget_idle(self, key: PoolKey) -> None:
        """Drop the idle sessions of a key: the upstream forgot one session of it, so it was restarted."""
        group = self.group(key)
        group.missed()
        for session in tuple(group.idle):
            self._drop(session, end=False)

    # -- what the upstream says to a credential ---------------------------------------------------------------------

    async def authorise(
        self,
        key: PoolKey,
        headers: Headers,
        own: Session | None = None,
        elsewhere: tuple[str, str] | None = None,
    ) -> None:
        """Have the upstream see this credential, unless it just has; raises Refused, and what a ping raises.

        The ping goes out in the call's `own` session, or in the one that another process opened for the call
        `elsewhere` (id and version); if that is gone, or there is none, in any session of the key. No session is
        occupied for it: a ping goes beside a call.

        A principal may come from a token whose signature the gateway does not check. Nothing that the gateway answers
        from memory (a handshake, a kept result, a change on another session) may go out on a forged one. Where the
        upstream sees no credential of the client's, no claim of an unverified token makes a principal
        (`auth.authenticator`).
        """
        group = self.group(key)
        if self.route.upstream.command is not None or not credentials_in(self.route, headers):
            return
        if group.accepts(headers):
            return
        where = f"The upstream {self.route.upstream.name} of route {self.route.path}"
        adopted = None if elsewhere is None else lambda: self._adopted_channel(*elsewhere)
        try:
            if not await is_served(group, headers, own, adopted, where):
                # No session is left: opening one shows the credential, too.
                session = await (self.open(key, headers) if group.sessions else self.acquire(key, headers))
                try:
                    if not group.accepts(headers):
                        await session.ping(headers)
                        group.accept(headers)
                finally:
                    self.release(session, clean=True)
        except CallLost as exc:
            raise Unreachable(
                f"{exc.message.partition(';')[0]}, so it is not known whether it accepts this credential; call again"
            ) from exc

    def _adopted_channel(self, session_id: str, version: str) -> Channel:
        channel = self._connect()
        channel.adopt(session_id, version)
        return channel

    async def handshake(self, key: PoolKey, headers: Headers) -> Handshake:
        """What the upstream says of itself to this principal; opens a session only when it is not known yet."""
        group = self.group(key)
        if group.shaken is None:
            session = await self.acquire(key, headers)
            self.release(session, clean=True)
            return session.shaken
        return group.shaken

    # -- cached lists -----------------------------------------------------------------------------------------------

    def ticket(self, key: PoolKey, request: Request, headers: Headers) -> CacheKey | None:
        """The key of a list in the cache; None when the route or the request does not allow caching."""
        found = place(key, request, headers) if self.route.cache.lists_seconds else None
        return CacheKey(found, self.group(key).generation) if found is not None else None

    async def kept(self, cache_key: CacheKey, headers: Headers) -> bytes | None:
        """A list from the cache, for a credential that the upstream accepts; raises as `authorise` does."""
        if self.lists.find(cache_key) is None:
            return None
        key = cache_key.place.key
        await self.authorise(key, headers)
        # The list may have changed while the upstream was asked.
        return self.lists.find(cache_key._replace(generation=self.group(key).generation))

    def keep(self, cache_key: CacheKey, result: Raw, body: bytes) -> None:
        """Keep the modern form of a list; a list that changed on its way has an old generation, and is not found."""
        self.lists.keep(cache_key, body, seconds_kept(result, self.route.cache.lists_seconds))

    # -- getting a session ------------------------------------------------------------------------------------------

    async def acquire(self, key: PoolKey, headers: Headers) -> Session:
        """A session for exclusive use: an idle one, a new one, or the next that comes free.

        With affinity it is the one session of the group.
        Raises Busy when none came free in `timeouts.session_wait_seconds`, and what opening one raises.
        """
        session = self.take(key) or await self._obtain(key)
        return session if session.opened else await self._open(session, headers)

    def take(self, key: PoolKey) -> Session | None:
        """An idle session, if there is one; none is idle while a request waits for it."""
        group = self.group(key)
        while (session := assignment.reusable(group)) is not None:
            if not session.lost:
                self._occupy(session, group)
                return session
            self._drop(session, end=False)
        return None

    async def open(self, key: PoolKey, headers: Headers) -> Session:
        """A new session, without the subscriptions, log level or lost stream of an earlier call.

        Raises as `acquire` does.
        """
        return await self._open(await self._obtain(key, is_fresh=True), headers)

    async def adopt(  # noqa: PLR0913  (what is known of the session)
        self,
        key: PoolKey,
        session_id: str,
        version: str,
        server_info: Raw,
        headers: Headers,
        *,
        is_shared: bool = False,
    ) -> Session:
        """A session that another process opened, to pick up its call; it counts as one opened here.

        The upstream is not asked whether it knows the session. One that is shared with that process is never ended
        from here. Raises as `acquire` does.
        """
        shaken = negotiate.recalled(version, server_info)
        session = await self._obtain(key, is_fresh=True)
        await self._begin(session, session.adopt(session_id, shaken, headers, is_shared=is_shared))
        return session

    async def cancel_orphan(self, session_id: str, version: str, call: Raw, reason: str, headers: Headers) -> None:
        """Cancel a call of a session that another process opened, without taking the session over."""
        channel = self._adopted_channel(session_id, version)
        try:
            await channel.send(jsonrpc.notification(mcp.CANCELLED, {"requestId": call, "reason": reason}), headers)
        finally:
            await channel.close(end_session=False)

    async def _obtain(self, key: PoolKey, *, is_fresh: bool = False) -> Session:
        """Wait for a session, which is yet to be opened if it is new; raises Busy."""
        group = self.group(key)
        future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        request = capacity.Request(
            group, lambda: self._new(key, group, is_fresh=is_fresh), future.set_result, is_fresh=is_fresh
        )
        self._capacity.add(request)
        self._assign(group)
        try:
            if not future.done():
                # `wait` does not cancel the future, so a session that is assigned in the same moment is never lost.
                _ = await asyncio.wait((future,), timeout=max(self._config.timeouts.session_wait_seconds, 0))
        except asyncio.CancelledError:
            if future.done():
                self._return_unused(future.result())
            raise
        finally:
            if not future.done():
                self._capacity.remove(request)
                self._groups.forget_if_unused(key)
                self._assign(group)
        if not future.done():
            raise pool_errors.busy(self.route)
        return future.result()

    def _return_unused(self, session: Session) -> None:
        if session.opened:
            self.release(session, clean=True)
        else:
            self._capacity.starting -= 1
            self._drop(session, end=False)
            self._groups.forget_if_unused(session.key)

    def _assign(self, group: Group) -> None:
        """Carry out every assignment that a change in a group makes possible."""
        self._capacity.review(group)
        while (found := assignment.assign(group, self._capacity)) is not None:
            if isinstance(found, assignment.Discard):
                self._remove(found.session, end=False)
                continue
            if isinstance(found, assignment.Reuse):
                session = found.session
                self._occupy(session, group)
            elif isinstance(found, assignment.Join):
                session = self._session(found.owner.key, group, found.owner)
            else:
                if found.evicted is not None:
                    self._remove(found.evicted, end=True)
                session = found.request.create()
            self._capacity.remove(found.request)
            self._capacity.review(group)
            found.request.deliver(session)

    # -- opening ----------------------------------------------------------------------------------------------------

    def _session(self, key: PoolKey, group: Group, owner: Session | None = None) -> Session:
        return Session(key, self._connect(), self.route.path, self._metrics, self._tasks, group.accept, owner)

    def _new(self, key: PoolKey, group: Group, *, is_fresh: bool) -> Session:
        """A session that counts from now on, so that its room is taken before its handshake begins."""
        session = self._session(key, group)
        session.watchers.append(group)
        if self.route.upstream.command is not None:
            session.watchers.append(ChangeForwarder(session, self._listeners))
        if group.is_affine and not is_fresh:
            group.main = session
        group.sessions[session] = None
        self._capacity.opened(group)
        self._capacity.starting += 1
        session.move(SessionState.BUSY)
        return session

    async def _open(self, session: Session, headers: Headers) -> Session:
        await self._begin(session, session.open(headers))
        self._groups[session.key].shaken = session.shaken
        return session

    async def _begin(self, session: Session, handshake: Awaitable[None]) -> None:
        group = self._groups[session.key]
        try:
            async with asyncio.timeout(self.handshake_seconds):
                await handshake
        except BaseException as exc:
            self._drop(session, end=session.may_end and session.channel.session_id is not None)
            self._groups.forget_if_unused(session.key)
            explained = pool_errors.handshake_failed(exc, self.route, self.handshake_seconds)
            if explained is exc:
                raise
            raise explained from exc
        finally:
            self._capacity.starting -= 1
            self._assign(group)

    def hearing(self, principal: bytes, listener: Watcher) -> AbstractContextManager[None]:
        """Tell `listener` of changes that other sessions of this principal announce.

        A server over HTTP announces a change on all its sessions. Where each session is a process, only the session
        whose call changed something announces it.
        """
        if self.route.upstream.command is None:
            return nullcontext()
        return self._listeners.listening(principal, listener)

    # -- releasing --------------------------------------------------------------------------------------------------

    def rest(self, session: Session, *, resting: bool) -> None:
        """The call of a session was parked, or continues."""
        session.resting = resting
        if resting:
            self._assign(self.group(session.key))

    def release(self, session: Session, *, clean: bool) -> None:
        """Take a session back: pool it after a clean end, quarantine it under a pending call, else drop it."""
        session.resting = False
        if session.is_joiner:
            self._tasks.spawn(self._depart(session), "quarantine")
        elif session.pending:
            session.move(SessionState.QUARANTINED)
            self._tasks.spawn(self._quarantine(session), "quarantine")
        elif (clean or self._is_orderly(session)) and self._may_pool(session):
            self._give_back(session)
        else:
            self._drop(session, end=session.may_end)

    def _is_orderly(self, session: Session) -> bool:
        """Whether the session of all calls is kept after a call that did not end well, for dropping it is costly.

        A call that was refused never began. Questions that a call left open reach no other call if they named it.
        """
        if self._groups[session.key].main is not session:
            return False
        return session.turned_away or not session.shared.asked_aside

    def _may_pool(self, session: Session) -> bool:
        group = self._groups[session.key]
        if group.is_affine and group.main is not session:
            return False  # all calls go to the main one
        return not (session.lost or session.adopted or self.closed or self._config.sessions.idle_seconds == 0)

    def _give_back(self, session: Session) -> None:
        group = self._groups[session.key]
        group.used = session.idle_since = time.monotonic()
        session.move(SessionState.IDLE)
        self._capacity.rested(session, group)
        self._assign(group)

    def _occupy(self, session: Session, group: Group) -> None:
        self._capacity.occupied(session, group)
        session.move(SessionState.BUSY)

    async def _quarantine(self, session: Session) -> None:
        """Wait for the end of a call that was given up; only then may its session be ended."""
        await session.settled(self._config.sessions.quarantine_seconds)
        if not session.pending and self._groups[session.key].main is session and self._may_pool(session):
            self._give_back(session)
            return
        self._drop(session, end=session.may_end)
        session.abandon()

    async def _depart(self, joiner: Session) -> None:
        """Take a joiner out of the shared session, once its call has ended or was given up for good."""
        await joiner.settled(self._config.sessions.quarantine_seconds)
        joiner.abandon()
        joiner.shared.leave(joiner)
        group, owner = self.group(joiner.key), joiner.shared.owner
        if owner in group.idle:
            self._capacity.rested(owner, group)
        self._assign(group)
        await joiner.channel.close(end_session=False)

    # -- closing ----------------------------------------------------------------------------------------------------

    def _drop(self, session: Session, *, end: bool) -> None:
        """Forget a session, and give its room away; `end` tells the upstream."""
        if session.state is not None:
            self._remove(session, end=end)
            self._assign(self._groups[session.key])

    def _remove(self, session: Session, *, end: bool) -> None:
        session.move(None)
        group = self._groups[session.key]
        del group.sessions[session]
        self._capacity.closed(session, group)
        end = end and not session.has_joiners
        self._tasks.spawn(session.channel.close(end_session=end), "close session")

    async def _sweep(self) -> None:
        """Close sessions that were not used for `sessions.idle_seconds`, and forget empty groups."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            before = time.monotonic() - self._config.sessions.idle_seconds
            for key, group in list(self._groups.items()):
                while group.idle and _is_stale(session := next(iter(group.idle)), before):
                    self._drop(session, end=not session.lost)
                self._groups.forget_if_empty(key, before)

    async def close(self) -> None:
        """See `retire`."""
        self.retire()

    def retire(self) -> None:
        """End all idle sessions, and keep none any more: those in use end with their calls, and so do new ones."""
        self.closed = True
        _ = self._sweeper.cancel()
        self._retired()
        for group in tuple(self._groups.values()):
            for session in tuple(group.idle):
                self._drop(session, end=True)


def _is_stale(session: Session, before: float) -> bool:
    """Whether an idle session is useless, or has not been used since `before`."""
    return session.lost or (session.idle_since < before and not session.has_joiners)
