"""The sessions of a route: opened, handed out, pooled, quarantined, closed.

Rule 1: sessions are pooled by everything that shaped them (principal, client, declared capabilities, configured
headers). Rule 2: a session whose call is still pending is never ended with DELETE (it kills some servers): it is
quarantined until its call ends. Rule 3: a session that another process opened serves the one call it was adopted for.
"""

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from msgspec import Raw

from gateway.config import Config, Route
from gateway.exchange import handshake as negotiate
from gateway.exchange.handshake import Handshake
from gateway.http.forwarded_headers import credentials_in
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallLost, Refused, SessionLost, Unreachable
from gateway.protocol.param_headers import Tool
from gateway.protocol.request import Request
from gateway.protocol.tool_filter import OmittedTool
from gateway.runtime.tasks import Tasks
from gateway.sessions import session_sharing
from gateway.sessions.capacity import Parties
from gateway.sessions.list_cache import CacheKey, ListCache, place, seconds_kept
from gateway.sessions.session import PoolKey, Session, Watcher
from gateway.telemetry import Event, Metrics, SessionState, get_logger
from gateway.upstream.channel import Channel, Headers

log = get_logger()

_ACCEPTED_SECONDS: Final = 60.0
"""How long a credential counts as checked for what is answered from memory."""
_CREDENTIALS_KEPT: Final = 64
_TOOLS_KEPT: Final = 10_000
"""Tools that a server renames without saying so are not remembered for ever."""
_SWEEP_SECONDS: Final = 1.0
_GENERATIONS: Final = itertools.count()
_LEFT_OUT_KEPT: Final = 1000
"""Tools that were warned of; a server that makes up more of them fills no log."""
_STARTS: Final = max(os.cpu_count() or 1, 2)
"""Children that a route may have at their start at the same time: sixteen at once, on two cores, all took longer than
timeouts.handshake_seconds. Who waits for leave to start one may also have a session that comes free."""


def _nothing() -> None:
    """For who does not want to know."""


class Group:
    """The sessions of one pool key, and what they taught."""

    def __init__(self) -> None:
        self.idle: dict[Session, None] = {}
        """Those first that were idle first."""
        self.waiting: dict[asyncio.Future[Session | None], None] = {}
        """Those first that came first."""
        self.count = 0
        self.sessions: dict[Session, None] = {}
        """All that there are, the oldest first."""
        self.main: Session | None = None
        """With affinity: the session of all calls, from when it is being opened until it is dropped."""
        self.shaken: Handshake | None = None
        self.tools: dict[str, Tool] | None = None
        """The tools by name, as complete answers to tools/list said (`learn`); None when unknown."""
        self.former: dict[str, Tool] | None = None
        """What was known of them before a change may have been missed: what a call that began then may do."""
        self.used = time.monotonic()
        self.generation = next(_GENERATIONS)
        """Another one after everything that may have changed a list; never that of another group."""
        self._accepted: OrderedDict[str | None, float] = OrderedDict()
        self._listed: set[str | None] = set()
        """Credentials with which the tools were listed since they last changed."""

    def learn(self, tools: dict[str, Tool], headers: Headers) -> None:
        """Take over a complete tools/list, which shows what this credential may see.

        What another credential was shown stays known: a list of a narrower scope must not switch the check of another
        tool's headers off.
        """
        others = self._listed - {headers.get("Authorization")}
        known = self.tools if others and self.tools is not None else {}
        self.tools = {**known, **tools} if len(known) < _TOOLS_KEPT else tools
        self._listed = {*others, headers.get("Authorization")} if len(others) < _CREDENTIALS_KEPT else set()

    def knows(self, tool: str, headers: Headers) -> bool:
        """Whether this tool is known, or known not to be among those that the credential may see."""
        return self.tools is not None and (tool in self.tools or headers.get("Authorization") in self._listed)

    def _forget_tools(self) -> None:
        self.tools = None
        self._listed.clear()

    @property
    def knows_nothing(self) -> bool:
        """Whether it has no session and nobody who waits for one, and the upstream has never served it."""
        return not (self.count or self.waiting or self.shaken or self._accepted or self.tools or self.former)

    def accept(self, headers: Headers) -> None:
        """The upstream has just served a request with this credential."""
        credential = headers.get("Authorization")
        self._accepted.pop(credential, None)
        self._accepted[credential] = time.monotonic()
        if len(self._accepted) > _CREDENTIALS_KEPT:
            _ = self._accepted.popitem(last=False)

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request; -inf before the first."""
        return next(reversed(self._accepted.values()), float("-inf"))

    def changed(self, method: str, data: bytes) -> None:  # noqa: ARG002  (a Watcher of its sessions)
        """Forget what a change made wrong."""
        if method == mcp.TOOLS_CHANGED:
            self.former = None
            self._forget_tools()
        if method != mcp.RESOURCE_UPDATED:
            self.generation = next(_GENERATIONS)

    def missed(self) -> None:
        """Forget what a change that nobody heard may have made wrong."""
        self.former = self.tools or self.former
        self._forget_tools()
        self.generation = next(_GENERATIONS)

    def deaf(self, *, heard: bool) -> None:
        """A server that was restarted may be another one; one that has no such stream is as it was."""
        if heard:
            self.missed()

    def accepts(self, headers: Headers) -> bool:
        """Whether the upstream served this credential a short while ago; forwarded ones are those of the group."""
        accepted = self._accepted.get(headers.get("Authorization"))
        return accepted is not None and time.monotonic() - accepted < _ACCEPTED_SECONDS


class _Herald:
    """Tells what changed to those who listen on other sessions."""

    def __init__(self, session: Session, hearers: Mapping[bytes, set[Watcher]]) -> None:
        self._session = session
        self._hearers = hearers

    def changed(self, method: str, data: bytes) -> None:
        """Pass it on to who does not watch this session anyway."""
        for hearer in tuple(self._hearers.get(self._session.key.principal, ())):
            if hearer not in self._session.watchers:
                hearer.changed(method, data)

    def missed(self) -> None:
        """Nothing: each listens for itself."""

    def deaf(self, *, heard: bool) -> None:
        """Nothing: each listens for itself."""


class Pool:
    """All sessions of one route."""

    def __init__(  # noqa: PLR0913  (what a pool is made of)
        self,
        config: Config,
        route: Route,
        connect: Callable[[], Channel],
        metrics: Metrics,
        tasks: Tasks,
        retired: Callable[[], None] = _nothing,
    ) -> None:
        """`retired` hears when the pool keeps no session any more, so that nobody makes any ready for it."""
        self.route = route
        self._affine = route.sessions.affinity == "principal"
        self._config = config
        self._connect = connect
        self._retired = retired
        self._metrics = metrics
        self._tasks = tasks
        self._groups: dict[PoolKey, Group] = {}
        self._parties: Parties[Group, Session] = Parties(lambda: self._config.sessions.max_per_principal)
        self._hearers: dict[bytes, set[Watcher]] = {}
        self._count = 0
        self.lists = ListCache()
        self._left_out: set[OmittedTool] = set()
        self._opening = 0
        self.closed = False
        self._served = float("-inf")
        """When the upstream last served a session of a group that is forgotten."""
        self._sweeper = tasks.start(self._sweep(), f"session sweeper of {route.path}")

    def change(self, config: Config, route: Route) -> None:
        """Go on under other caps and deadlines; of the route nothing that shapes a session may differ."""
        self._config, self.route = config, route
        self.lists.clear()
        for key, group in self._groups.items():
            while self._serve_first(key.principal, group, None):  # there may be room now
                pass

    @property
    def handshake_seconds(self) -> float:
        """The deadline of everything the gateway asks on its own account."""
        return self._config.timeouts.handshake_seconds

    @property
    def served(self) -> float:
        """Monotonic time at which the upstream last served a request of any session; -inf before the first."""
        return max((self._served, *(group.served for group in self._groups.values())))

    @property
    def most(self) -> int:
        """Sessions that there may be; each is a process where the upstream is a command."""
        most, upstream = self._config.sessions.max, self.route.upstream
        return most if upstream.command is None else min(most, upstream.max_children)

    @property
    def waiting(self) -> int:
        """How many wait for a session."""
        return sum(len(group.waiting) for group in self._groups.values())

    def leave_out(self, tool: OmittedTool) -> None:
        """Count a tool that clients do not get to see, and warn of it once."""
        self._metrics.tool_left_out(self.route.path)
        if tool not in self._left_out and len(self._left_out) < _LEFT_OUT_KEPT:
            self._left_out.add(tool)
            log.warning(Event.TOOL_LEFT_OUT, route=self.route.path, tool=tool.name, reason=tool.reason)

    def forget_idle(self, key: PoolKey) -> None:
        """The upstream forgot one session of this key (it was restarted): the idle ones are as good as lost."""
        group = self.group(key)
        group.missed()
        for session in tuple(group.idle):
            self._drop(session, end=False)

    def group(self, key: PoolKey) -> Group:
        """The group of a key; made when it is new."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
        group.used = time.monotonic()
        return group

    async def authorise(
        self,
        key: PoolKey,
        headers: Headers,
        own: Session | None = None,
        elsewhere: tuple[str, str] | None = None,
    ) -> None:
        """Have the upstream see this credential, unless it just has; raises Refused, and what a ping raises.

        It is asked in the call's `own` session, or in the one that another process opened for the call `elsewhere`
        (id and version); where that is gone, or there is none, in any session of the key. No session is taken for it:
        a ping goes beside a call.

        A principal is read from a token whose signature nobody here checks. What the gateway answers from memory (a
        handshake, a kept result, a change on somebody's session) must not go out on a forged one. Where the upstream
        sees no credential of the client's, no claim of an unverified token makes a principal (`auth.authenticator`).
        """
        group = self.group(key)
        if (
            self.route.upstream.command is not None
            or not credentials_in(self.route, headers)
            or group.accepts(headers)
        ):
            return
        try:
            if not await self._serves(group, headers, own, elsewhere):
                # None knows it: to open one is to show the credential, too.
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

    @property
    def _where(self) -> str:
        return f"The upstream {self.route.upstream.name} of route {self.route.path}"

    async def _serves(
        self,
        group: Group,
        headers: Headers,
        own: Session | None = None,
        elsewhere: tuple[str, str] | None = None,
    ) -> bool:
        """Have the credential checked in a session that is open; False where there is none any more.

        Raises what a ping raises, but for SessionLost.
        """
        if elsewhere is not None and await self._serves_elsewhere(*elsewhere, headers):
            group.accept(headers)
            return True
        mine = own.host or own if own is not None else None  # a guest speaks in its host's session
        for session in (mine, *group.sessions) if mine is not None else tuple(group.sessions):
            if not session.can_ping:
                continue
            try:
                await session.ping(headers)
            except SessionLost as exc:
                if await session.is_alive() and session is mine:
                    raise Refused(
                        f"{self._where} does not accept the credential in the call's session", status=403
                    ) from exc
                continue
            group.accept(headers)
            return True
        return False

    async def _serves_elsewhere(self, session_id: str, version: str, headers: Headers) -> bool:
        """As `_serves`, in a session that another process opened."""
        channel = self._connect()
        channel.adopt(session_id, version)
        try:
            await channel.ping(headers)
        except SessionLost:
            return False
        finally:
            await channel.close(end_session=False)
        return True

    async def handshake(self, key: PoolKey, headers: Headers) -> Handshake:
        """What the upstream says of itself to this principal; opens a session only when it is not known yet."""
        group = self.group(key)
        if group.shaken is None:
            session = await self.acquire(key, headers)
            self.release(session, clean=True)
            return session.shaken
        return group.shaken

    async def acquire(self, key: PoolKey, headers: Headers) -> Session:
        """A session for exclusive use: an idle one, a new one, or the next that comes free.

        With affinity it is the one that there is.
        Raises Busy when none came free in `timeouts.session_wait_seconds`, and what opening one raises.
        """
        deadline = 0.0
        while True:
            group = self.group(key)  # one that knew nothing may be forgotten while something is waited for
            session = self._idle(group) or self._guest(group)
            if session is not None:
                return session
            if self._lacks_main(group) and self._has_room(key):
                return await self._open(key, group, headers, main=self._affine)
            deadline = deadline or time.monotonic() + self._config.timeouts.session_wait_seconds
            session = await self._wait(key, group, deadline - time.monotonic())
            if session is not None:
                return session

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
        group = await self._make_room(key)
        shaken = negotiate.recalled(version, server_info)

        def begin(session: Session) -> Awaitable[None]:
            return session.adopt(session_id, shaken, headers, is_shared=is_shared)

        return await self._begin(key, group, begin)

    async def open(self, key: PoolKey, headers: Headers) -> Session:
        """A session that nobody had before: no subscription, log level or lost stream of another's is on it.

        Raises as `acquire` does.
        """
        return await self._open(key, await self._make_room(key), headers, main=False)

    async def _make_room(self, key: PoolKey) -> Group:
        """Wait until one more session of this key may be opened."""
        deadline = time.monotonic() + self._config.timeouts.session_wait_seconds
        while not self._has_room(key):
            session = await self._wait(key, self.group(key), deadline - time.monotonic())
            if session is not None:
                self.release(session, clean=True)  # the next in line has it, or it makes room
        return self.group(key)  # not that of before the wait: an empty group is forgotten

    async def cancel_orphan(self, session_id: str, version: str, call: Raw, reason: str, headers: Headers) -> None:
        """Cancel a call of a session that another process opened, without taking the session over."""
        channel = self._connect()
        channel.adopt(session_id, version)
        try:
            await channel.send(jsonrpc.notification(mcp.CANCELLED, {"requestId": call, "reason": reason}), headers)
        finally:
            await channel.close(end_session=False)

    def ticket(self, key: PoolKey, request: Request, headers: Headers) -> CacheKey | None:
        """With what a list may be kept or found; None when the route or the request does not allow it."""
        found = place(key, request, headers) if self.route.cache.lists_seconds else None
        return CacheKey(found, self.group(key).generation) if found is not None else None

    async def kept(self, ticket: CacheKey, headers: Headers) -> bytes | None:
        """A list from memory, for a credential that the upstream accepts; raises as `authorise` does."""
        if self.lists.find(ticket) is None:
            return None
        key = ticket.place.key
        await self.authorise(key, headers)
        # It may have changed while the upstream was asked.
        return self.lists.find(ticket._replace(generation=self.group(key).generation))

    def keep(self, ticket: CacheKey, result: Raw, body: bytes) -> None:
        """Keep the modern form of a list; under an old generation, if it changed on its way, nobody finds it."""
        self.lists.keep(ticket, body, seconds_kept(result, self.route.cache.lists_seconds))

    def take(self, key: PoolKey) -> Session | None:
        """An idle session, if there is one and nobody waits for it."""
        return self._idle(self.group(key))

    # -- affinity: see `sessions.session_sharing` -------------------------------------------------------------------

    def _lacks_main(self, group: Group) -> bool:
        """Whether another session may be opened for calls."""
        return not self._affine or group.main is None or group.main.lost

    def _guest(self, group: Group) -> Session | None:
        """A session object beside calls that are parked in the main session."""
        if group.main is None or not session_sharing.has_room(group.main):
            return None
        guest = self._join(group.main, group)
        group.main.guests.add(guest)
        return guest

    def _join(self, host: Session, group: Group) -> Session:
        guest = Session(host.key, self._connect(), self.route.path, self._metrics, self._tasks, group.accept)
        session_sharing.join(host, guest)
        return guest

    def rest(self, session: Session, *, resting: bool) -> None:
        """The call of a session was parked, or is not any more."""
        session.resting = resting
        if resting and self._affine:
            self._next(session.key)

    def _next(self, key: PoolKey) -> None:
        """Let the first one who waits try again."""
        _ = self._serve_first(key.principal, self.group(key), None)

    async def _depart(self, guest: Session) -> None:
        """See a guest off, when its call has ended or was given up for good."""
        await guest.settled(self._config.sessions.quarantine_seconds)
        guest.abandon()
        session_sharing.part(guest)
        self._next(guest.key)
        await guest.channel.close(end_session=False)

    # -- all sessions -------------------------------------------------------------------------------------------

    def _idle(self, group: Group) -> Session | None:
        while group.idle and session_sharing.may_begin(session := next(reversed(group.idle))):
            if not session.lost:
                self._unidle(session, group)
                session.move(SessionState.BUSY)
                return session
            self._drop(session, end=False)
        return None

    def _has_room(self, key: PoolKey) -> bool:
        limits = self._config.sessions
        if self._opening >= _STARTS and self.route.upstream.command is not None:
            return False
        if self._parties.of(key.principal).count >= limits.max_per_principal:
            return self._evict_idle(key.principal)
        return self._count < self.most or self._evict_idle()

    def _evict_idle(self, principal: bytes | None = None) -> bool:
        """Close the session that has been idle longest, this principal's or anybody's; whether there was one."""
        idle = self._parties.idle if principal is None else self._parties.of(principal).idle
        oldest = next((session for session in idle if not session.guests), None)
        if oldest is None:
            return False
        self._drop(oldest, end=True)
        return True

    async def _wait(self, key: PoolKey, group: Group, seconds: float) -> Session | None:
        """Wait for a session to be handed over, or (None) for room; raises Busy."""
        future: asyncio.Future[Session | None] = asyncio.get_running_loop().create_future()
        group.waiting[future] = None
        self._parties.wait(key.principal, future, group)
        try:
            # `wait` does not cancel the future, so a session handed over in the same moment is never lost.
            _ = await asyncio.wait((future,), timeout=max(seconds, 0))
        except asyncio.CancelledError:
            if future.done() and (session := future.result()) is not None:
                self.release(session, clean=True)
            elif future.done():
                self._wake()  # the room is somebody else's now
            raise
        finally:
            if not future.done():
                del group.waiting[future]
                self._parties.leave(key.principal, future)
                self._forget_stranger(key)
        if future.done():
            return future.result()
        if self._affine:
            raise Busy(
                f"Another call of the same principal has the one session of route {self.route.path} "
                "(sessions.affinity: principal), and it did not come free in timeouts.session_wait_seconds; answer or "
                "end that call, or call later",
                status=503,
            )
        raise Busy(
            f"No session to the upstream of route {self.route.path} came free in timeouts.session_wait_seconds; "
            f"raise {'sessions.max' if self.route.upstream.command is None else 'upstream.max_children'} or "
            "sessions.max_per_principal, or call later",
            status=503,
        )

    async def _open(self, key: PoolKey, group: Group, headers: Headers, *, main: bool) -> Session:
        session = await self._begin(key, group, lambda session: session.open(headers), main=main)
        group.shaken = session.shaken
        return session

    async def _begin(
        self, key: PoolKey, group: Group, begin: Callable[[Session], Awaitable[None]], *, main: bool = False
    ) -> Session:
        session = Session(key, self._connect(), self.route.path, self._metrics, self._tasks, group.accept)
        session.watchers.append(group)
        if self.route.upstream.command is not None:
            session.watchers.append(_Herald(session, self._hearers))
        if main:
            group.main = session  # before anything is awaited: whoever comes now waits for it
        self._enter(session, group)
        self._opening += 1
        try:
            async with asyncio.timeout(self._config.timeouts.handshake_seconds):
                await begin(session)
        except BaseException as exc:
            self._drop(session, end=session.may_end and session.channel.session_id is not None)
            self._forget_stranger(key)
            explained = self._explain(exc)
            if explained is exc:
                raise
            raise explained from exc
        finally:
            self._opening -= 1
            self._wake()
        return session

    def _explain(self, exc: BaseException) -> BaseException:
        upstream = self.route.upstream.name
        if isinstance(exc, TimeoutError):
            return Unreachable(
                f"The upstream {upstream} of route {self.route.path} did not finish its handshake in "
                f"{self._config.timeouts.handshake_seconds:g} s (timeouts.handshake_seconds); check that it is an "
                "MCP server"
            )
        if isinstance(exc, CallLost):
            return Unreachable(exc.message.partition(";")[0] + self._hint())
        if isinstance(exc, ValueError | RecursionError):
            return Unreachable(f"The upstream {upstream} of route {self.route.path} is no MCP server: {exc}")
        return exc

    def _hint(self) -> str:
        """A server that misses a client's certificate says so only after its handshake, or hangs up (TLS 1.3)."""
        upstream = self.route.upstream
        may_miss = (upstream.url or "").startswith("https") and upstream.tls.cert_file is None
        return "; if it asks for client certificates, give upstream.tls.cert_file" if may_miss else ""

    @contextmanager
    def hearing(self, principal: bytes, hearer: Watcher) -> Iterator[None]:
        """Have `hearer` told of changes that other sessions of this principal announce.

        A server over HTTP tells all its sessions what changed. Where each session is a process, only the one knows
        whose call changed something.
        """
        if self.route.upstream.command is None:
            yield
            return
        hearers = self._hearers.setdefault(principal, set())
        hearers.add(hearer)
        try:
            yield
        finally:
            hearers.discard(hearer)
            if not hearers:
                _ = self._hearers.pop(principal, None)

    def _enter(self, session: Session, group: Group) -> None:
        group.count += 1
        group.sessions[session] = None
        self._count += 1
        self._parties.count(session.key.principal, 1)
        session.move(SessionState.BUSY)

    def release(self, session: Session, *, clean: bool) -> None:
        """Take a session back: into the pool after a clean end, into quarantine under a pending call, else away."""
        session.resting = False
        if session.host is not None:
            self._tasks.spawn(self._depart(session), "quarantine")
        elif session.pending:
            session.move(SessionState.QUARANTINED)
            self._tasks.spawn(self._quarantine(session), "quarantine")
        elif not (clean or self._is_orderly(session)) or not self._may_pool(session):
            self._drop(session, end=session.may_end)
        else:
            self._give_back(session)

    def _is_orderly(self, session: Session) -> bool:
        """Whether a session of all calls is kept after one that did not end well: to drop it loses what it is for.

        A call that was refused never began. Questions that a call left open are nobody else's if they named it.
        """
        if self._groups[session.key].main is not session:
            return False
        return session.turned_away or not session.asked_aside

    def _may_pool(self, session: Session) -> bool:
        if self._affine and self._groups[session.key].main is not session:
            return False  # all calls go to the main one
        return not (session.lost or session.adopted or self.closed or self._config.sessions.idle_seconds == 0)

    def _give_back(self, session: Session) -> None:
        group = self._groups[session.key]
        group.used = time.monotonic()
        if session_sharing.may_begin(session) and self._serve_first(session.key.principal, group, session):
            return
        session.move(SessionState.IDLE)
        session.idle_since = time.monotonic()
        group.idle[session] = None
        self._parties.rest(session.key.principal, session)
        self._wake()

    def _serve_first(self, principal: bytes, group: Group, session: Session | None) -> bool:
        """Give the first who waits in a group a session, or leave to try again; whether anybody waits."""
        if not group.waiting:
            return False
        future = next(iter(group.waiting))
        del group.waiting[future]
        self._parties.leave(principal, future)
        future.set_result(session)
        return True

    def _unidle(self, session: Session, group: Group) -> None:
        """Take a session from among the idle ones, if it is there."""
        group.idle.pop(session, None)
        self._parties.wake(session.key.principal, session)

    def _forget_stranger(self, key: PoolKey) -> None:
        """Forget the group of a caller that got nothing: its key has up to 32 KiB that the caller said of itself."""
        group = self._groups.get(key)
        if group is not None and group.knows_nothing:
            del self._groups[key]

    async def _quarantine(self, session: Session) -> None:
        """Wait for the end of a call that was given up; only then may its session be ended."""
        await session.settled(self._config.sessions.quarantine_seconds)
        if not session.pending and self._groups[session.key].main is session and self._may_pool(session):
            session.move(SessionState.BUSY)
            self._give_back(session)
            return
        self._drop(session, end=session.may_end)
        session.abandon()

    def _drop(self, session: Session, *, end: bool) -> None:
        """Forget a session; `end` tells the upstream."""
        if session.state is None:
            return
        session.move(None)
        group = self._groups[session.key]
        self._unidle(session, group)
        if group.main is session:
            group.main = None
        end = end and not session.guests
        group.count -= 1
        _ = group.sessions.pop(session, None)
        self._count -= 1
        self._parties.count(session.key.principal, -1)
        self._tasks.spawn(session.channel.close(end_session=end), "close session")
        self._wake()

    def _wake(self) -> None:
        """There may be room for somebody who waits: let the first one who could use it try again."""
        found = self._parties.hungry()
        if found is not None:
            principal, group = found
            _ = self._serve_first(principal, group, None)

    async def _sweep(self) -> None:
        """Close sessions that nobody used for `sessions.idle_seconds`, and forget empty groups."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            idle_seconds = self._config.sessions.idle_seconds
            now = time.monotonic()
            for key, group in list(self._groups.items()):
                while group.idle and _is_stale(session := next(iter(group.idle)), now - idle_seconds):
                    self._drop(session, end=not session.lost)
                if not group.count and not group.waiting and now - group.used > idle_seconds:
                    self._served = max(self._served, group.served)
                    del self._groups[key]

    async def close(self) -> None:
        """See `retire`."""
        self.retire()

    def retire(self) -> None:
        """End all idle sessions, and keep none any more: those in use end with their calls, so do new ones."""
        self.closed = True
        _ = self._sweeper.cancel()
        self._retired()
        for group in self._groups.values():
            for session in tuple(group.idle):
                self._drop(session, end=True)


def _is_stale(session: Session, before: float) -> bool:
    """Whether an idle session is of no use any more."""
    return session.lost or (session.idle_since < before and not session.guests)
