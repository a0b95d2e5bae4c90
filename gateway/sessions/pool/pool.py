"""The pool of a route's sessions: opens them, adopts them, answers from what they taught.

Which request gets which session is the matter of `sessions.pool.checkout`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

import msgspec
from msgspec import Raw

from gateway.config import InForce, RouteSettings
from gateway.exchange import handshake as negotiate
from gateway.exchange.handshake import Handshake
from gateway.http.upstream_headers import credentials_in
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, Refused, SessionLost, Unreachable, UpstreamError
from gateway.protocol.request import Request
from gateway.protocol.tool_filter import OmittedTool
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Upstream
from gateway.sessions import pool_errors
from gateway.sessions.call import PoolKey, Watcher
from gateway.sessions.group import ChangeForwarder, ChangeListeners, Group
from gateway.sessions.list_cache import CacheKey, ListCache, place, seconds_kept
from gateway.sessions.pool.checkout import Checkout
from gateway.sessions.session import Session
from gateway.telemetry import Event, Metrics, get_logger
from gateway.upstream.channel import Channel, Headers

log = get_logger()

_LEFT_OUT_KEPT: Final = 1000
"""Bounds the warnings about tools of a server that keeps making up new ones."""


class Pool(Checkout):
    """All sessions of one route."""

    def __init__(
        self,
        settings: InForce[RouteSettings],
        connect: Callable[[], Channel],
        metrics: Metrics,
        tasks: Tasks,
        retired: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` makes the channel of a new session. `retired` is called once the pool keeps no sessions."""
        super().__init__(settings, metrics, tasks, retired)
        self._connect = connect
        self._listeners = ChangeListeners()
        self.lists = ListCache()
        self._left_out: set[OmittedTool] = set()
        settings.after_replace(lambda _: self.lists.clear())

    def _session(self, group: Group[Session]) -> Session:
        session = Session(group, self._connect(), self.route.path, self._metrics, self._tasks)
        if self.route.upstream.command is not None:
            session.watch(ChangeForwarder(group.principal, session, self._listeners))
        return session

    def new_channel(self) -> Channel:
        """Make a channel for a session that is not the pool's."""
        return self._connect()

    def take_opening(self) -> None:
        """Count the opening of such a session against the rate of the route; raises Busy."""
        refusal = self._take_token(is_exempt=False)
        if refusal is not None:
            raise refusal

    @property
    def handshake_seconds(self) -> float:
        """The deadline of every request that the gateway makes on its own account."""
        return self._config.timeouts.handshake_seconds

    def leave_out(self, tool: OmittedTool) -> None:
        """Count a tool that is hidden from clients, and warn of it once."""
        self._metrics.tool_left_out(self.route.path)
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

    def is_ready(self, principal: bytes, log_level: str | None) -> bool:
        """Whether any idle session of a principal can take a call with this log level without `prepare`."""
        return log_level is None and not self._listeners.hears(principal)

    async def prepare(self, session: Session, log_level: str | None, headers: Headers) -> None:
        """Set on a session what its next call depends on; raises as `Session.ask` does.

        A process announces changes only of resources to which it was subscribed itself. The subscriptions of the
        caller have a process of their own, so they are repeated in the one that runs the call.
        """
        if log_level is not None:
            await session.set_log_level(log_level, headers, self.handshake_seconds)
        if session.channel.is_process:
            uris = self._listeners.uris(session.group.principal)
            await session.set_subscriptions(uris, headers, self.handshake_seconds)

    # -- what the upstream says to a credential ---------------------------------------------------------------------

    def has_authorised(self, key: PoolKey, headers: Headers) -> bool:
        """Whether the upstream need not see this credential now, as `authorise` has it."""
        if self.route.upstream.command is not None or not credentials_in(self.route, headers):
            return True
        return self.group(key).accepts(headers)

    async def authorise(
        self,
        key: PoolKey,
        headers: Headers,
        own: Session | None = None,
        elsewhere: Upstream | None = None,
        *,
        is_exempt: bool = True,
    ) -> None:
        """Have the upstream see this credential, unless it just has; raises Refused, and what a ping raises.

        The ping goes out in the call's `own` session, or in the one that another process opened for the call
        `elsewhere`; if that is gone, or there is none, in any session of the key. No session is occupied for it: a
        ping goes beside a call.

        A principal may come from a token whose signature the gateway does not check. Nothing that the gateway answers
        from memory (a handshake, a kept result, a change on another session) may go out on a forged one. Where the
        upstream sees no credential of the client's, no claim of an unverified token makes a principal
        (`auth.authenticator`).
        """
        group = self.group(key)
        if self.has_authorised(key, headers):
            return
        where = f"The upstream {self.route.upstream.name} of route {self.route.path}"
        adopted = None if elsewhere is None else self._adopted_channel(elsewhere)
        try:
            if not await _is_served(group, headers, own, adopted, where):
                # No session is left: opening one shows the credential, too.
                obtain = self.open if group.sessions else self.acquire
                session = await obtain(key, headers, is_exempt=is_exempt)
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

    async def handshake(self, key: PoolKey, headers: Headers, *, is_exempt: bool = True) -> Handshake:
        """What the upstream says of itself to this principal; opens a session only when it is not known yet."""
        group = self.group(key)
        if group.shaken is None:
            session = await self.acquire(key, headers, is_exempt=is_exempt)
            self.release(session, clean=True)
            return session.shaken
        return group.shaken

    # -- cached lists -----------------------------------------------------------------------------------------------

    def ticket(self, key: PoolKey, request: Request, headers: Headers) -> CacheKey | None:
        """The key of a list in the cache; None when the route or the request does not allow caching."""
        found = place(key, request, headers) if self.route.cache.lists_seconds else None
        return CacheKey(found, self.group(key).generation) if found is not None else None

    async def kept(self, cache_key: CacheKey, headers: Headers, *, is_exempt: bool = True) -> bytes | None:
        """A list from the cache, for a credential that the upstream accepts; raises as `authorise` does."""
        if self.lists.find(cache_key) is None:
            return None
        key = cache_key.place.key
        await self.authorise(key, headers, is_exempt=is_exempt)
        # The list may have changed while the upstream was asked.
        return self.lists.find(cache_key._replace(generation=self.group(key).generation))

    def keep(self, cache_key: CacheKey, result: Raw, body: bytes) -> None:
        """Keep the modern form of a list; a list that changed on its way has an old generation, and is not found."""
        self.lists.keep(cache_key, body, seconds_kept(result, self.route.cache.lists_seconds))

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
        return await self._open(await self._obtain(self.group(key), is_fresh=True, is_exempt=is_exempt), headers)

    async def adopt(
        self, key: PoolKey, whereabouts: Upstream, headers: Headers, *, is_shared: bool = False
    ) -> Session:
        """A session that another process opened, to pick up its call; it counts as one opened here.

        The upstream is not asked whether it knows the session. One that is shared with that process is never ended
        from here. Raises as `acquire` does.
        """
        shaken = negotiate.recalled(whereabouts.version, Raw(whereabouts.server_info))
        session = await self._obtain(self.group(key), is_fresh=True)
        await self._begin(session, session.adopt(whereabouts.session, shaken, headers, is_shared=is_shared))
        return session

    async def tell_orphan(self, whereabouts: Upstream, message: bytes, headers: Headers) -> None:
        """Send a message in a session that another process opened, without taking the session over."""
        channel = self._adopted_channel(whereabouts)
        try:
            await channel.send(message, headers)
        finally:
            await channel.close(end_session=False)

    async def end_orphan(
        self, whereabouts: Upstream, answers: Iterable[tuple[Raw, Raw | jsonrpc.Error]], reason: str, headers: Headers
    ) -> None:
        """Give up a call that no process reads: answer its questions, cancel it, and end its session if it ended.

        Raises an UpstreamError or TimeoutError if the cancellation does not arrive.
        """
        seconds = self._config.timeouts.cancel_seconds
        cancelled = jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(whereabouts.call), "reason": reason})
        channel, has_ended = self._adopted_channel(whereabouts), False
        try:
            with suppress(UpstreamError, TimeoutError):  # an answer that is not taken must not keep the call running
                async with asyncio.timeout(seconds):
                    for id_, body in answers:
                        await channel.send(jsonrpc.answer(id_, body), headers)
            async with asyncio.timeout(seconds):
                await channel.send(cancelled, headers)
            # Only an answer on its stream shows that the call has ended: some servers crash if its session ends first.
            with suppress(UpstreamError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await _until_answered(channel, whereabouts, headers)
                    has_ended = True
        finally:
            await channel.close(end_session=has_ended)

    def _adopted_channel(self, whereabouts: Upstream) -> Channel:
        channel = self._connect()
        channel.adopt(whereabouts.session, whereabouts.version)
        return channel

    async def _open(self, session: Session, headers: Headers) -> Session:
        await self._begin(session, session.open(headers))
        session.group.shaken = session.shaken
        return session

    async def _begin(self, session: Session, handshake: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.handshake_seconds):
                await handshake
        except BaseException as exc:
            self._drop(session)
            explained = pool_errors.handshake_failed(exc, self.route, self.handshake_seconds)
            if explained is exc:
                raise
            raise explained from exc
        finally:
            self._end_start(session.group)


async def _until_answered(channel: Channel, whereabouts: Upstream, headers: Headers) -> None:
    """Read the stream of a call until its answer. Raises what `Channel.resume` raises."""

    def is_answer(data: bytes) -> bool:
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError):
            return False
        return message.method is None and message.id == Raw(whereabouts.call)

    await channel.resume(whereabouts.cursor or "", headers, is_answer, lambda: None, is_shared=False)


async def _is_served(
    group: Group[Session], headers: Headers, own: Session | None, elsewhere: Channel | None, where: str
) -> bool:
    """Have the credential checked in an open session; returns False if none is left.

    `own` is the session of the call, `elsewhere` a channel of the session that another process opened for it. `where`
    names the upstream in errors. Raises what a ping raises, except SessionLost.
    """
    if elsewhere is not None and await _is_served_elsewhere(elsewhere, headers):
        group.accept(headers)
        return True
    mine = own.shared.owner if own is not None else None  # a joiner speaks in the session of its owner
    for session in (mine, *group.sessions) if mine is not None else tuple(group.sessions):
        if session.lost or session.state is None or not (session.opened or session.adopted):
            continue  # it is in its handshake, or has ended
        try:
            await session.ping(headers)
        except SessionLost as exc:
            if await session.is_alive() and session is mine:
                raise Refused(f"{where} does not accept the credential in the call's session", status=403) from exc
            continue
        group.accept(headers)
        return True
    return False


async def _is_served_elsewhere(channel: Channel, headers: Headers) -> bool:
    try:
        await channel.ping(headers)
    except SessionLost:
        return False
    finally:
        await channel.close(end_session=False)
    return True
