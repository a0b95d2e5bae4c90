"""One session of a legacy server: its handshake, the one call in flight, and what the server says meanwhile.

Rule: one call in flight per session. Half of the real servers send nested requests on the session's side stream with
nothing that names their call; exclusivity is what gives each of them an owner.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import handshake, questions
from gateway.exchange.handshake import Handshake
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallGone, CallLost, CannotAsk, GatewayError, Refused, SessionLost
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Direction, Event, Metrics, NestedOutcome, SessionState, Span, bodies, get_logger
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, SideListener

log = get_logger()

_PROCESS: Final = secrets.token_hex(6).encode()
_CALL_NUMBERS: Final = itertools.count(1)
_MAX_OWED: Final = 64
"""Answers of the gateway's own that may wait until the server takes them; it gets no answer to what it asks beyond."""
_MAX_OWED_ID_BYTES: Final = 1024


class PoolKey(msgspec.Struct, frozen=True):
    """Everything that shapes a session besides its route."""

    principal: bytes
    client_info: bytes
    capabilities: bytes
    headers: tuple[tuple[str, str], ...]


class Listener(Protocol):
    """Who hears what the upstream says during a call."""

    @property
    def request_id(self) -> str | None:
        """Of the HTTP request that the call is for; None for one of the gateway's own."""

    def hear(self, event: on.Event) -> None:
        """Take one event of the call."""


class Watcher(Protocol):
    """Who hears what changes at the upstream, and whether all of it is heard."""

    def changed(self, method: str, data: bytes) -> None:
        """Take a list_changed or resources/updated: method and message."""

    def missed(self) -> None:
        """The side stream is open again after it was not: a change may not have been heard."""

    def deaf(self, *, heard: bool) -> None:
        """The side stream will not be opened again; whether it ever was open. May be said twice."""


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
    span: Span | None = None
    """Where calls are traced."""
    headers: Headers = NO_HEADERS
    """What it was sent with."""

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
        self.adopted = False
        """Whether another process opened it, for a call that it sent."""
        self._is_shared = False
        """Whether that process may live and use it still."""
        self.opened = False
        """Whether its handshake is done."""
        self.resting = False
        """Whether its call is parked."""
        self.asked_in_call = self.asked_aside = False
        """Where the server has asked: on the stream of the call, which names it, or on the side stream."""
        self.turned_away = False
        """Whether the server refused the credential of the last call, and so did not take it."""
        self.guests: set[Session] = set()
        """Others that speak in this session too (`sessions.session_sharing`), each with a call of its own."""
        self.host: Session | None = None
        """Whose guest it is."""
        self.idle_since = 0.0
        self.watchers: list[Watcher] = []
        self._route = route
        self._metrics = metrics
        self._tasks = tasks
        self._call: Call | None = None
        self._owes = False
        """Whether the call of the process that opened the session may still run."""
        self._settlers: list[asyncio.Future[None]] = []
        self._log_level: str | None = None
        self._owed: deque[tuple[Raw, Raw | jsonrpc.Error, Headers]] = deque()
        self._answering = self._is_flooded = False
        self._headers = NO_HEADERS
        """The newest that the upstream served: what the gateway answers by itself needs a credential too."""
        self.state: SessionState | None = None

    @property
    def pending(self) -> bool:
        """Whether a call is in flight."""
        return self._call is not None

    @property
    def may_end(self) -> bool:
        """Whether nothing runs in the session any more, so that the upstream can be told of its end."""
        return not (self.lost or self.pending or self._owes or self._is_shared)

    @property
    def can_ping(self) -> bool:
        """Whether the session is open: its handshake is done, and it was neither closed nor lost."""
        return self.state is not None and (self.opened or self.adopted) and not self.lost

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
        params = handshake.initialize_params(Raw(self.key.client_info), Raw(self.key.capabilities))
        message = jsonrpc.request(b'"init"', mcp.INITIALIZE, params)
        self._show(Direction.TO_UPSTREAM, message)
        self.channel, result = await self.channel.open(message, headers)
        self._show(Direction.FROM_UPSTREAM, bytes(result))
        self.shaken = handshake.handshake(result)
        await self.channel.listen(self.shaken.version, headers, self._side_listener())
        ready = jsonrpc.notification(mcp.INITIALIZED)
        self._show(Direction.TO_UPSTREAM, ready)
        await self.channel.send(ready, headers)
        self._prove(headers)
        self.opened = True
        self._metrics.session_opened(self._route)

    async def adopt(self, session_id: str, shaken: Handshake, headers: Headers, *, is_shared: bool = False) -> None:
        """Take over a session that another process opened, and whose call may still run there.

        No handshake: the upstream had one. The side stream is a fresh one, and comes before anything is answered.
        """
        self.adopted = self._owes = True
        self._is_shared = is_shared
        self._headers = headers
        self.shaken = shaken
        self.channel.adopt(session_id, shaken.version)
        await self.channel.listen(shaken.version, headers, self._side_listener())

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
        if bodies.on:
            self._show(Direction.TO_UPSTREAM, call.message, call)
        await self._follow(call, headers, self.channel.request(call.message, headers, self._hear_call))

    async def resume(self, call: Call, cursor: str, headers: Headers, attached: Callable[[], None]) -> None:
        """Pick up a call that another process sent, as `run` does else. Raises what `Channel.resume` raises."""
        try:
            await self._follow(call, headers, self.channel.resume(cursor, headers, self._hear_call, attached))
        except Refused:
            self.lost = True  # for this process: the call runs there, so no DELETE
            raise

    async def _follow(self, call: Call, headers: Headers, reading: Awaitable[jsonrpc.Error | Raw | None]) -> None:
        """Keep account of a call while its stream is read."""
        assert self._call is None, "one call in flight per session"
        self._call, call.headers = call, headers
        self.turned_away = False
        call.sent = call.heard = time.monotonic()
        try:
            call.reader = asyncio.current_task()
            refusal = await reading
            if refusal is not None:
                if self.channel.forgotten:
                    self._forget()
                self._settle()
                call.listener.hear(on.Failed(refusal) if isinstance(refusal, jsonrpc.Error) else on.Resulted(refusal))
        except Refused:
            self.turned_away = True
            raise
        except (SessionLost, CallGone):
            self._forget()
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

    def _forget(self) -> None:
        """The upstream does not know the session any more."""
        self.lost = True
        self._metrics.session_lost(self._route)
        log.info(
            Event.SESSION_LOST, route=self._route, note="the upstream does not know it any more; was it restarted?"
        )

    def _prove(self, headers: Headers) -> None:
        """The upstream has served a message that was sent with these headers."""
        self._headers = headers
        self._accept(headers)

    async def ping(self, headers: Headers) -> None:
        """Have the upstream see a credential, beside the call that may be in flight; raises as `Channel.ping`."""
        await self.channel.ping(headers)
        self._headers = headers

    async def is_alive(self) -> bool:
        """Whether the upstream takes a ping with the headers that it served last; a session that is gone is noted."""
        try:
            await self.channel.ping(self._headers)
        except SessionLost:
            self._forget()
            return False
        except GatewayError:
            return False  # that tells nothing of the session
        return True

    def _settle(self) -> None:
        """The call is no longer in flight."""
        self._call = None
        for waiter in self._settlers:
            if not waiter.done():
                waiter.set_result(None)
        self._settlers.clear()

    def detach(self) -> None:
        """Leave the session and its call to another process: hear and answer nothing more, and do not end it."""
        self.lost = True
        self.abandon()
        self._settle()

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
            message = jsonrpc.failure(upstream_id, body)
        else:
            message = jsonrpc.result(upstream_id, body)
        self._show(Direction.TO_UPSTREAM, message, self._call)
        await self.channel.send(message, headers)
        self._headers = headers

    async def cancel(self, call: Call, reason: str, headers: Headers) -> None:
        """Tell the upstream that the call is not wanted any more; best effort."""
        params = {"requestId": Raw(call.id), "reason": reason}
        message = jsonrpc.notification(mcp.CANCELLED, params)
        self._show(Direction.TO_UPSTREAM, message, call)
        await self.channel.send(message, headers)

    def _show(self, direction: Direction, data: bytes, call: Call | None = None) -> None:
        """Log a message where the configuration wants to see them."""
        if bodies.on:
            asked_by = call.listener.request_id if call is not None else None
            bodies.show(direction, data, route=self._route, request_id=asked_by)

    # -- what the upstream says ---------------------------------------------------------------------------------

    def _hear_call(self, data: bytes) -> bool:
        call = self._call
        if bodies.on:
            self._show(Direction.FROM_UPSTREAM, data, call)
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
        if bodies.on:
            self._show(Direction.FROM_UPSTREAM, data, self._call)
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError):
            self._metrics.upstream_failed(self._route, "malformed")
            return False
        speaker, alone = self._speaker(message)
        return speaker.hear_aside(message, data, alone=alone)

    def _speaker(self, message: jsonrpc.Message) -> "tuple[Session, bool]":
        """Whose call a message of the side stream is about, and whether it can be nobody else's."""
        if not self.guests:
            return self, True
        speaking = [each for each in (self, *self.guests) if each.pending]
        for each in speaking:
            if each.awaits(message):
                return each, True
        return (speaking[0], True) if len(speaking) == 1 else (self, not speaking)

    def awaits(self, message: jsonrpc.Message) -> bool:
        """Whether a message answers the call in flight."""
        call = self._call
        return call is not None and message.method is None and message.id == Raw(call.id)

    def hear_aside(self, message: jsonrpc.Message, data: bytes, *, alone: bool) -> bool:
        """Take one message of the side stream; whether it answers the call. A request needs a call that is `alone`."""
        call = self._call
        if not alone and isinstance(message.id, Raw) and message.method not in {None, mcp.PING}:
            self._refuse_nameless(message.method or "", message.id)
            return False
        answered = self._hear(call, message, data, aside=True)
        if answered and call is not None:
            call.leave()
        return answered

    def _hear(self, call: Call | None, message: jsonrpc.Message, data: bytes, *, aside: bool = False) -> bool:
        """Sort one message; whether it answers the call."""
        if call is not None:
            call.heard = time.monotonic()
        if message.method is None:
            return self._hear_response(call, message, aside=aside)
        if isinstance(message.id, Raw):
            self._hear_request(call, message, message.id, aside=aside)
        else:
            self._hear_notification(call, message, data)
        return False

    def _hear_response(self, call: Call | None, message: jsonrpc.Message, *, aside: bool) -> bool:
        event = _outcome(message)
        if call is None or event is None or not isinstance(message.id, Raw) or bytes(message.id) != call.id:
            self._metrics.upstream_failed(self._route, "unknown_id")
            return False
        self._owes = False
        self._settle()
        self._hear_served(call, aside=aside)
        call.listener.hear(event)
        return True

    def _hear_request(self, call: Call | None, message: jsonrpc.Message, id_: Raw, *, aside: bool) -> None:
        method = message.method or ""
        if method == mcp.PING:
            self._answer_later(id_, Raw(b"{}"))
        elif call is None or isinstance(call.listener, _Answer):
            # SEP-2260: a request that belongs to no call of a client never reaches one.
            self._metrics.nested_request(self._route, method, NestedOutcome.UNSOLICITED)
            error = jsonrpc.Error(mcp.INVALID_PARAMS, "No call is in flight that could ask (SEP-2260)")
            self._answer_later(id_, error)
        elif method in questions.KINDS and not self.channel.can_ask:
            call.listener.hear(on.Stopped(_cannot_ask(self._route)))
        else:
            self.asked_aside |= aside
            self.asked_in_call |= not aside
            self._hear_served(call, aside=aside)
            call.listener.hear(on.Nested(id_, method, message.params))

    def _hear_served(self, call: Call, *, aside: bool) -> None:
        """Note what the call's own response proves of its credential.

        What comes while its POST is pending, or on the side stream, may be about anything.
        """
        if self.channel.taken and not aside:
            self._prove(call.headers)

    def _refuse_nameless(self, method: str, id_: Raw) -> None:
        """Answer a question that may be any call's: it is nobody's."""
        self.asked_aside = True
        self._metrics.nested_request(self._route, method, NestedOutcome.UNSOLICITED)
        error = jsonrpc.Error(mcp.INVALID_PARAMS, "Several calls are in flight, and the request names none of them")
        self._answer_later(id_, error)

    def _answer_later(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer what is no client's business: one after the other, so that a flood costs one connection."""
        if len(self._owed) >= _MAX_OWED or len(bytes(id_)) > _MAX_OWED_ID_BYTES:
            if not self._is_flooded:
                self._is_flooded = True
                log.warning(Event.UPSTREAM_FAILED, route=self._route, cause=_FLOODED, fix=_FLOODED_FIX)
            return
        headers = self._headers or (self._call.headers if self._call is not None else NO_HEADERS)
        self._owed.append((Raw(bytes(id_)), body, headers))  # a copy: the id would keep the whole message
        if not self._answering:
            self._answering = True
            self._tasks.spawn(self._answer_owed(), "answer without a client")

    async def _answer_owed(self) -> None:
        try:
            while self._owed and not self.lost:
                id_, body, headers = self._owed.popleft()
                try:
                    await self.answer(id_, body, headers)
                except GatewayError as exc:
                    log.debug(Event.UPSTREAM_FAILED, route=self._route, cause=exc.message)
        finally:
            self._answering = False

    def _hear_notification(self, call: Call | None, message: jsonrpc.Message, data: bytes) -> None:
        method = message.method
        if method in _CHANGES:
            for watcher in self.watchers:
                watcher.changed(method, data)
            return
        event = _notified(call, method, message.params) if call is not None else None
        if call is None or event is None:
            self._metrics.notification(self._route, method or "", forwarded=False)
        else:
            call.listener.hear(event)

    def _side_listener(self) -> SideListener:
        return SideListener(self._hear_side, self._side_lost, self._side_changed)

    def _side_lost(self) -> None:
        """The side stream ended for good: what the server says on it from now on would be lost."""
        self.lost = True
        self._side_changed(opened=False)

    def _side_changed(self, opened: bool) -> None:  # noqa: FBT001  (the channel's callback)
        for watcher in list(self.watchers):
            if opened:
                watcher.missed()
            else:
                watcher.deaf(heard=self.lost)


_FLOODED: Final = (
    "the server asks the gateway (pings, requests that belong to no call) faster than it takes the answers"
)
_FLOODED_FIX: Final = "find out why the server asks so often; the gateway leaves the rest unanswered"
_CHANGES: Final = frozenset({mcp.TOOLS_CHANGED, mcp.PROMPTS_CHANGED, mcp.RESOURCES_CHANGED, mcp.RESOURCE_UPDATED})


class _Answer:
    """The listener of the gateway's own requests."""

    request_id: str | None = None

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
