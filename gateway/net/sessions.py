"""Legacy sessions: opened, used by one call at a time, pooled, quarantined, closed.

Rule 1: one call in flight per session. Half of the real servers send nested requests on the session's side stream
with nothing that names their call; exclusivity is what gives each of them an owner. Rule 2: sessions are pooled by
everything that shaped them (principal, client, declared capabilities, configured headers). Rule 3: a session whose
call is still pending is never ended with DELETE (it kills some servers): it is quarantined until its call ends.
"""

import asyncio
import itertools
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from gateway.config import Config, Route
from gateway.core import events as on
from gateway.core import inputs, jsonrpc, mcp, negotiate
from gateway.core.negotiate import Handshake
from gateway.core.toolparams import Mirrored  # noqa: TC001  (one import style; it costs nothing here)
from gateway.errors import Busy, CallLost, CannotAsk, GatewayError, Refused, SessionLost, Unreachable
from gateway.net.tasks import Tasks
from gateway.net.upstream import NO_HEADERS, Channel, Headers
from gateway.telemetry import Event, Metrics, NestedOutcome, SessionState, get_logger

log = get_logger()

_PROCESS: Final = secrets.token_hex(6).encode()
_CALL_NUMBERS: Final = itertools.count(1)
_ACCEPTED_SECONDS: Final = 60.0
"""How long a credential counts as checked for what is answered from memory."""
_CREDENTIALS_KEPT: Final = 64
_SWEEP_SECONDS: Final = 1.0


class PoolKey(msgspec.Struct, frozen=True):
    """Everything that shapes a session besides its route."""

    principal: bytes
    client_info: bytes
    capabilities: bytes
    headers: tuple[tuple[str, str], ...]


class Listener(Protocol):
    """Who hears what the upstream says during a call."""

    def hear(self, event: on.Event) -> None:
        """Take one event of the call."""


class Call(msgspec.Struct, eq=False):
    """One upstream request: its id (JSON), its message, and who hears about it."""

    id: bytes
    message: bytes
    listener: Listener
    progress_token: bytes | None = None
    """JSON of the token the upstream was given, if the client wants progress."""
    sent: float = 0.0
    """Monotonic time at which it was sent."""
    heard: float = 0.0
    """Monotonic time of the last message of the call."""
    reader: asyncio.Task[object] | None = None
    """Who reads the call's own stream."""
    left: bool = False
    """Whether the reading was ended from outside."""

    def leave(self) -> None:
        """Stop reading: the answer came on the side stream, or nobody waits for it any more."""
        if self.reader is not None and not self.left:
            self.left = True
            _ = self.reader.cancel()


class Session:
    """One session of a legacy server, for one call at a time."""

    def __init__(  # noqa: PLR0913  (what a session is made of)
        self,
        key: PoolKey,
        channel: Channel,
        route: str,
        metrics: Metrics,
        tasks: Tasks,
        accept: Callable[[Headers], None],
    ) -> None:
        """`accept` hears of every request that the upstream served, by its headers."""
        self._accept = accept
        self.key = key
        self.channel = channel
        self.shaken: Handshake
        self.lost = False
        """The upstream forgot the session, or its side stream ended for good."""
        self.idle_since = 0.0
        self.on_change: Callable[[str, bytes], None] | None = None
        """Hears list_changed and resource updates: method and message."""
        self.on_deaf: Callable[[], None] | None = None
        """Hears that the side stream ended for good."""
        self._route = route
        self._metrics = metrics
        self._tasks = tasks
        self._call: Call | None = None
        self._settlers: list[asyncio.Future[None]] = []
        self._log_level: str | None = None
        self._headers = NO_HEADERS
        """Those of the last request: what the gateway answers by itself needs a credential too."""
        self.state: SessionState | None = None

    @property
    def pending(self) -> bool:
        """Whether a call is in flight."""
        return self._call is not None

    def works_on(self, call: Call) -> bool:
        """Whether this very call is in flight."""
        return self._call is call

    def move(self, state: SessionState | None) -> None:
        """Note where the session is, for the metrics."""
        self._metrics.session_moved(self._route, self.state, state)
        self.state = state

    async def open(self, headers: Headers) -> None:
        """The handshake: initialize, side stream, initialized, in this order.

        The side stream comes before `initialized`: requests that belong to no POST are lost for ever without it.
        """
        self._headers = headers
        params = negotiate.initialize_params(Raw(self.key.client_info), Raw(self.key.capabilities))
        result = await self.channel.initialize(jsonrpc.request(b'"init"', mcp.INITIALIZE, params), headers)
        self.shaken = negotiate.handshake(result)
        await self.channel.listen(self.shaken.version, headers, self._hear_side, self._side_lost)
        await self.channel.send(jsonrpc.notification(mcp.INITIALIZED), headers)
        self._accept(headers)
        self._metrics.session_opened(self._route)

    async def set_log_level(self, level: str, headers: Headers, idle_seconds: float) -> None:
        """Set the session's log level, if it differs and the upstream logs at all; a refusal costs only the logs."""
        if level == self._log_level or not self.shaken.offers("logging"):
            return
        await self.ask(mcp.SET_LEVEL, {"level": level}, headers, idle_seconds)
        self._log_level = level

    async def ask(
        self, method: str, params: Mapping[str, object], headers: Headers, timeout_seconds: float
    ) -> Raw | jsonrpc.Error:
        """One request of the gateway's own, with no client behind it; its result or its error."""
        answer = _Answer()
        call = Call(self.next_id(), b"", answer)
        call.message = jsonrpc.request(call.id, method, params)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.run(call, headers)
        except TimeoutError as exc:
            self.lost = True
            raise CallLost(f"The upstream of route {self._route} did not answer {method} in time") from exc
        if answer.outcome is None:
            raise CallLost(f"The upstream of route {self._route} did not answer {method}")
        return answer.outcome

    def next_id(self) -> bytes:
        """JSON of an id that no other session uses: some servers key streams by it across sessions."""
        return b'"gw-%b-%x"' % (_PROCESS, next(_CALL_NUMBERS))

    async def run(self, call: Call, headers: Headers) -> None:
        """Send a call and feed its listener until it is answered. Raises what `Channel.request` raises."""
        assert self._call is None, "one call in flight per session"
        self._call, self._headers = call, headers
        call.sent = call.heard = time.monotonic()
        try:
            call.reader = asyncio.current_task()
            refusal = await self.channel.request(call.message, headers, self._hear_call)
            if refusal is not None:
                self._settle()
                call.listener.hear(on.Failed(refusal))
        except SessionLost:
            self.lost = True
            self._metrics.session_lost(self._route)
            log.info(
                Event.SESSION_LOST, route=self._route, note="the upstream does not know it any more; was it restarted?"
            )
            raise
        except CallLost:
            self.lost = True  # the call may still run there: no DELETE
            raise
        except asyncio.CancelledError:
            if not call.left or call.reader is None or call.reader.uncancel() > 0:
                self.lost = True
                raise
            # `Call.leave`: whoever wanted the answer has it.
        finally:
            call.reader = None
            # Answered, the session may be in the next call's hands already while this stream still drains.
            if self._call is call:
                self._settle()

    def _settle(self) -> None:
        """The call is no longer in flight."""
        self._call = None
        for waiter in self._settlers:
            if not waiter.done():
                waiter.set_result(None)
        self._settlers.clear()

    def abandon(self) -> None:
        """Stop waiting for a call that was given up; some servers leave its stream open for ever."""
        if self._call is not None:
            self._call.leave()

    async def settled(self, seconds: float) -> None:
        """Wait at most this long for the call in flight to end."""
        if self.pending:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settlers.append(waiter)
            _ = await asyncio.wait((waiter,), timeout=seconds)

    async def answer(self, upstream_id: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Answer one nested request."""
        if isinstance(body, jsonrpc.Error):
            await self.channel.send(jsonrpc.failure(upstream_id, body), headers)
        else:
            await self.channel.send(jsonrpc.result(upstream_id, body), headers)

    async def cancel(self, call: Call, reason: str, headers: Headers) -> None:
        """Tell the upstream that the call is not wanted any more; best effort."""
        params = {"requestId": Raw(call.id), "reason": reason}
        await self.channel.send(jsonrpc.notification(mcp.CANCELLED, params), headers)

    # -- what the upstream says ---------------------------------------------------------------------------------

    def _hear_call(self, data: bytes) -> bool:
        call = self._call
        if call is None:
            return True
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError) as exc:
            self._metrics.upstream_failed(self._route, "malformed")
            raise CallLost(
                f"The upstream of route {self._route} sent a message that is no JSON-RPC ({exc}); the call may have "
                "had effects"
            ) from exc
        return self._hear(call, message, data)

    def _hear_side(self, data: bytes) -> bool:
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError):
            self._metrics.upstream_failed(self._route, "malformed")
            return False
        call = self._call
        answered = self._hear(call, message, data)
        if answered and call is not None:
            call.leave()
        return answered

    def _hear(self, call: Call | None, message: jsonrpc.Message, data: bytes) -> bool:
        """Sort one message; whether it answers the call."""
        if call is not None:
            call.heard = time.monotonic()
        if message.method is None:
            return self._hear_response(call, message)
        if isinstance(message.id, Raw):
            self._hear_request(call, message, message.id)
        else:
            self._hear_notification(call, message, data)
        return False

    def _hear_response(self, call: Call | None, message: jsonrpc.Message) -> bool:
        event = _outcome(message)
        if call is None or event is None or not isinstance(message.id, Raw) or bytes(message.id) != call.id:
            self._metrics.upstream_failed(self._route, "unknown_id")
            return False
        self._settle()
        self._accept(self._headers)
        call.listener.hear(event)
        return True

    def _hear_request(self, call: Call | None, message: jsonrpc.Message, id_: Raw) -> None:
        method = message.method or ""
        if method == mcp.PING:
            self._answer_later(id_, Raw(b"{}"))
        elif call is None or isinstance(call.listener, _Answer):
            # SEP-2260: a request that belongs to no call of a client never reaches one.
            self._metrics.nested_request(self._route, method, NestedOutcome.UNSOLICITED)
            error = jsonrpc.Error(mcp.INVALID_PARAMS, "No call is in flight that could ask (SEP-2260)")
            self._answer_later(id_, error)
        elif method in inputs.KINDS and not self.channel.can_ask:
            call.listener.hear(on.Stopped(_cannot_ask(self._route)))
        else:
            self._accept(self._headers)
            call.listener.hear(on.Nested(id_, method, message.params))

    def _answer_later(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        async def answer() -> None:
            try:
                await self.answer(id_, body, self._headers)
            except GatewayError as exc:
                log.debug(Event.UPSTREAM_FAILED, route=self._route, cause=exc.message)

        self._tasks.spawn(answer(), "answer without a client")

    def _hear_notification(self, call: Call | None, message: jsonrpc.Message, data: bytes) -> None:
        method = message.method
        if method in _CHANGES:
            if self.on_change is not None:
                self.on_change(method, data)
            return
        event = _notified(call, method, message.params) if call is not None else None
        if call is None or event is None:
            self._metrics.notification(self._route, method or "", forwarded=False)
        else:
            call.listener.hear(event)

    def _side_lost(self) -> None:
        """The side stream ended for good: what the server says on it from now on would be lost."""
        self.lost = True
        if self.on_deaf is not None:
            self.on_deaf()


_CHANGES: Final = frozenset({mcp.TOOLS_CHANGED, mcp.PROMPTS_CHANGED, mcp.RESOURCES_CHANGED, mcp.RESOURCE_UPDATED})


class _Answer:
    """The listener of the gateway's own requests."""

    def __init__(self) -> None:
        self.outcome: Raw | jsonrpc.Error | None = None

    def hear(self, event: on.Event) -> None:
        match event:
            case on.Resulted(result=result):
                self.outcome = Raw(result)
            case on.Failed(error=error):
                self.outcome = error
            case on.Stopped(error=broken):
                raise broken
            case _:
                pass  # a question during a question of our own: nobody could answer it


def _outcome(message: jsonrpc.Message) -> on.Event | None:
    if isinstance(message.result, Raw):
        return on.Resulted(message.result)
    if isinstance(message.error, Raw):
        return on.Failed(jsonrpc.error(message.error))
    return None


def _notified(call: Call, method: str | None, params: Raw | msgspec.UnsetType) -> on.Event | None:
    """The event a notification means for this call; None when it is not about the call."""
    try:
        opened = jsonrpc.fields(params) if isinstance(params, Raw) else {}
    except ValueError:
        return None
    if method == mcp.PROGRESS:
        token = opened.get("progressToken")
        ours = token is not None and call.progress_token is not None and bytes(token) == call.progress_token
        return on.Progressed(opened) if ours else None
    if method == mcp.LOG and isinstance(params, Raw):
        return on.Logged(jsonrpc.text(opened.get("level")) or "", params)
    if method == mcp.CANCELLED and "requestId" in opened:
        return on.Withdrawn(opened["requestId"])
    return None


def _cannot_ask(route: str) -> CannotAsk:
    return CannotAsk(
        f"The upstream of route {route} gives no Mcp-Session-Id (stateless mode): it asked the user, but an answer "
        "can never reach it. Run the server with sessions"
    )


class Group:
    """The sessions of one pool key, and what they taught."""

    def __init__(self) -> None:
        self.idle: deque[Session] = deque()
        self.waiting: deque[asyncio.Future[Session | None]] = deque()
        self.count = 0
        self.shaken: Handshake | None = None
        self.mirrored: dict[str, tuple[Mirrored, ...]] | None = None
        """`x-mcp-header` parameters by tool, as the last complete tools/list said; None when unknown."""
        self.used = time.monotonic()
        self._accepted: OrderedDict[str | None, float] = OrderedDict()

    def accept(self, headers: Headers) -> None:
        """The upstream has just served a request with this credential."""
        credential = headers.get("Authorization")
        self._accepted.pop(credential, None)
        self._accepted[credential] = time.monotonic()
        if len(self._accepted) > _CREDENTIALS_KEPT:
            _ = self._accepted.popitem(last=False)

    def accepts(self, headers: Headers) -> bool:
        """Whether the upstream served this credential a short while ago."""
        accepted = self._accepted.get(headers.get("Authorization"))
        return accepted is not None and time.monotonic() - accepted < _ACCEPTED_SECONDS


class Pool:
    """All sessions of one route."""

    def __init__(
        self,
        config: Config,
        route: Route,
        connect: Callable[[], Channel],
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self.route = route
        self._config = config
        self._connect = connect
        self._metrics = metrics
        self._tasks = tasks
        self._groups: dict[PoolKey, Group] = {}
        self._principals: dict[bytes, int] = {}
        self._count = 0
        self._closed = False
        tasks.spawn(self._sweep(), f"session sweeper of {route.path}")

    @property
    def handshake_seconds(self) -> float:
        """The deadline of everything the gateway asks on its own account."""
        return self._config.timeouts.handshake_seconds

    def forget_idle(self, key: PoolKey) -> None:
        """The upstream forgot one session of this key (it was restarted): the idle ones are as good as lost."""
        group = self.group(key)
        while group.idle:
            self._drop(group.idle.popleft(), end=False)

    def group(self, key: PoolKey) -> Group:
        """The group of a key; made when it is new."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
        group.used = time.monotonic()
        return group

    async def authorise(self, key: PoolKey, headers: Headers) -> None:
        """Have the upstream see this credential, unless it just has; raises Refused.

        A principal is read from a token whose signature nobody here checks. What the gateway answers from memory (a
        handshake, a kept result, a change on somebody's session) must not go out on a forged one.
        """
        if "Authorization" not in headers or self.group(key).accepts(headers):
            return
        session = await self.acquire(key, headers)
        clean = False
        try:
            if not self.group(key).accepts(headers):
                _ = await session.ask(mcp.PING, {}, headers, self.handshake_seconds)
            clean = True
        except Refused:
            clean = True  # it was not taken: the session is as it was
            raise
        finally:
            self.release(session, clean=clean)

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

        Raises Busy when none came free in `timeouts.session_wait_seconds`, and what opening one raises.
        """
        group = self.group(key)
        deadline = 0.0
        while True:
            session = self._idle(group)
            if session is not None:
                return session
            if self._has_room(key):
                return await self._open(key, group, headers)
            deadline = deadline or time.monotonic() + self._config.timeouts.session_wait_seconds
            session = await self._wait(group, deadline - time.monotonic())
            if session is not None:
                return session

    def take(self, key: PoolKey) -> Session | None:
        """An idle session, if there is one and nobody waits for it."""
        return self._idle(self.group(key))

    def _idle(self, group: Group) -> Session | None:
        while group.idle:
            session = group.idle.pop()
            if not session.lost:
                session.move(SessionState.BUSY)
                return session
            self._drop(session, end=False)
        return None

    def _has_room(self, key: PoolKey) -> bool:
        limits = self._config.sessions
        if self._principals.get(key.principal, 0) >= limits.max_per_principal:
            return self._evict_idle(key.principal)
        return self._count < limits.max or self._evict_idle()

    def _evict_idle(self, principal: bytes | None = None) -> bool:
        """Close the session that has been idle longest, this principal's or anybody's; whether there was one."""
        candidates = [
            group.idle[0]
            for key, group in self._groups.items()
            if group.idle and (principal is None or key.principal == principal)
        ]
        if not candidates:
            return False
        oldest = min(candidates, key=lambda session: session.idle_since)
        self._groups[oldest.key].idle.popleft()
        self._drop(oldest, end=True)
        return True

    async def _wait(self, group: Group, seconds: float) -> Session | None:
        """Wait for a session to be handed over, or (None) for room; raises Busy."""
        future: asyncio.Future[Session | None] = asyncio.get_running_loop().create_future()
        group.waiting.append(future)
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
                group.waiting.remove(future)
        if future.done():
            return future.result()
        raise Busy(
            f"No session to the upstream of route {self.route.path} came free in timeouts.session_wait_seconds; "
            "raise sessions.max or sessions.max_per_principal, or call later",
            status=503,
        )

    async def _open(self, key: PoolKey, group: Group, headers: Headers) -> Session:
        session = Session(key, self._connect(), self.route.path, self._metrics, self._tasks, group.accept)
        self._enter(session, group)
        try:
            async with asyncio.timeout(self._config.timeouts.handshake_seconds):
                await session.open(headers)
        except BaseException as exc:
            self._drop(session, end=session.channel.session_id is not None)
            explained = self._explain(exc)
            if explained is exc:
                raise
            raise explained from exc
        session.on_change = self._changed(group)
        group.shaken = session.shaken
        return session

    def _explain(self, exc: BaseException) -> BaseException:
        upstream = self.route.upstream.url
        if isinstance(exc, TimeoutError):
            return Unreachable(
                f"The upstream {upstream} of route {self.route.path} did not finish its handshake in "
                f"{self._config.timeouts.handshake_seconds:g} s (timeouts.handshake_seconds); check that it is an "
                "MCP server"
            )
        if isinstance(exc, CallLost):
            return Unreachable(exc.message.partition(";")[0])
        if isinstance(exc, ValueError | RecursionError):
            return Unreachable(f"The upstream {upstream} of route {self.route.path} is no MCP server: {exc}")
        return exc

    def _changed(self, group: Group) -> Callable[[str, bytes], None]:
        def forget(method: str, _: bytes) -> None:
            if method == mcp.TOOLS_CHANGED:
                group.mirrored = None

        return forget

    def _enter(self, session: Session, group: Group) -> None:
        group.count += 1
        self._count += 1
        self._principals[session.key.principal] = self._principals.get(session.key.principal, 0) + 1
        session.move(SessionState.BUSY)

    def release(self, session: Session, *, clean: bool) -> None:
        """Take a session back: into the pool after a clean end, into quarantine under a pending call, else away."""
        if session.pending:
            session.move(SessionState.QUARANTINED)
            self._tasks.spawn(self._quarantine(session), "quarantine")
        elif not clean or session.lost or self._closed or self._config.sessions.idle_seconds == 0:
            self._drop(session, end=not session.lost)
        else:
            self._give_back(session)

    def _give_back(self, session: Session) -> None:
        group = self._groups[session.key]
        group.used = time.monotonic()
        while group.waiting:
            future = group.waiting.popleft()
            if not future.done():
                future.set_result(session)
                return
        session.move(SessionState.IDLE)
        session.idle_since = time.monotonic()
        group.idle.append(session)
        self._wake()

    async def _quarantine(self, session: Session) -> None:
        """Wait for the end of a call that was given up; only then may its session be ended."""
        await session.settled(self._config.sessions.quarantine_seconds)
        self._drop(session, end=not session.pending and not session.lost)
        session.abandon()

    def _drop(self, session: Session, *, end: bool) -> None:
        """Forget a session; `end` tells the upstream."""
        if session.state is None:
            return
        session.move(None)
        group = self._groups[session.key]
        group.count -= 1
        self._count -= 1
        left = self._principals[session.key.principal] - 1
        if left:
            self._principals[session.key.principal] = left
        else:
            del self._principals[session.key.principal]
        self._tasks.spawn(session.channel.close(end_session=end), "close session")
        self._wake()

    def _wake(self) -> None:
        """There may be room for somebody who waits: let the first one who could use it try again."""
        for key, group in self._groups.items():
            while group.waiting and self._may_open(key.principal):
                future = group.waiting.popleft()
                if not future.done():
                    future.set_result(None)
                    return

    def _may_open(self, principal: bytes) -> bool:
        """Whether a principal's own cap leaves it room, or a session of its own that may make room."""
        if self._principals.get(principal, 0) < self._config.sessions.max_per_principal:
            return True
        return any(group.idle for key, group in self._groups.items() if key.principal == principal)

    async def _sweep(self) -> None:
        """Close sessions that nobody used for `sessions.idle_seconds`, and forget empty groups."""
        idle_seconds = self._config.sessions.idle_seconds
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for key, group in list(self._groups.items()):
                while group.idle and (group.idle[0].lost or now - group.idle[0].idle_since > idle_seconds):
                    session = group.idle.popleft()
                    self._drop(session, end=not session.lost)
                if not group.count and not group.waiting and now - group.used > idle_seconds:
                    del self._groups[key]

    async def close(self) -> None:
        """End all idle sessions; those in use end with their calls."""
        self._closed = True
        for group in self._groups.values():
            while group.idle:
                self._drop(group.idle.popleft(), end=True)
