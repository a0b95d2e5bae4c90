"""One session of a legacy server, from its handshake to its end.

Rule: one call in flight per session. Half of the real servers send nested requests on the session's side stream, where
nothing names their call; because the session serves one call at a time, each request has an owner.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import handshake
from gateway.exchange.handshake import Handshake
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallGone, CallLost, GatewayError, Refused, SessionLost
from gateway.runtime.tasks import Tasks
from gateway.sessions import inbound, pool_errors
from gateway.sessions.affinity import SharedSession
from gateway.sessions.call import Call, OwnListener, Watcher
from gateway.sessions.group import Group  # noqa: TC001  (one import style; it costs nothing here)
from gateway.sessions.own_answers import OwnAnswers
from gateway.telemetry import Direction, Event, Metrics, NestedOutcome, SessionState, bodies, get_logger
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Sending

log = get_logger()

_PROCESS: Final = secrets.token_hex(6).encode()
_CALL_NUMBERS: Final = itertools.count(1)
_NOTHING: Final[frozenset[str]] = frozenset()
"""Made once: every other empty frozenset takes memory of its own."""


class Session:
    """One session of a legacy server, for one call at a time."""

    __slots__ = (
        "__weakref__",
        "_headers",
        "_is_shared",
        "_log_level",
        "_metrics",
        "_odd",
        "_owes",
        "_own_answers",
        "_route",
        "_settled",
        "_subscribed",
        "_tasks",
        "adopted",
        "channel",
        "group",
        "idle_since",
        "in_flight",
        "lost",
        "opened",
        "resting",
        "shaken",
        "shared",
        "standing",
        "state",
        "turned_away",
        "watchers",
    )

    def __init__(self, group: "Group[Session]", channel: Channel, route: str, metrics: Metrics, tasks: Tasks) -> None:
        self.group = group
        self.channel = channel
        self.shaken: Handshake
        self.lost = False
        """Whether the upstream forgot the session, or its side stream ended for good."""
        self.adopted = False
        """Whether another process opened it for a call of its own."""
        self._is_shared = False
        """Whether that process may still be alive and use it."""
        self.opened = False
        """Whether its handshake is done."""
        self.resting = False
        """Whether its call is parked."""
        self.turned_away = False
        """Whether the server refused the credential of the last call, and so did not run it."""
        self.shared: SharedSession[Session] = SharedSession(self)
        self.idle_since = 0.0
        self.watchers: tuple[Watcher, ...] = ()
        """Those beside its group."""
        self._route = route
        self._metrics = metrics
        self.in_flight: Call | None = None
        """The call that was sent and not answered yet."""
        self.standing: Call | None = None
        """A task, as the call that questions belong to while no request of the task is in flight (SEP-2260)."""
        self._owes = False
        """Whether the call of the process that opened the session may still run."""
        self._settled: asyncio.Event | None = None
        """Made for those that wait for the call's end."""
        self._log_level: str | None = None
        self._subscribed = _NOTHING
        """The resources that `set_subscriptions` subscribed to, or tried to."""
        self._tasks = tasks
        self._own_answers: OwnAnswers | None = None
        """Made when the server first asks something that reaches no client."""
        self._odd: tuple[bytes, jsonrpc.Message] | None = None
        """A message that was not the answer, until it is heard as what it is."""
        self._headers = NO_HEADERS
        """The newest headers that the upstream served; the gateway's own answers need a credential too."""
        self.state: SessionState | None = None

    @property
    def is_joiner(self) -> bool:
        """Whether another session object owns the upstream session."""
        return self.shared.owner is not self

    @property
    def can_be_joined(self) -> bool:
        """Whether others can speak in the session: it is open, and has an id."""
        return not self.lost and self.opened and self.channel.session_id is not None

    @property
    def can_be_left(self) -> bool:
        """Whether its call alone speaks in it, and every question of the server came on the stream of that call.

        Only then may its streams be closed while the call waits: a question on the side stream would be lost.
        """
        shared = self.shared
        is_exclusive = not (self._is_shared or self.group.is_affine or self.is_joiner or shared.joiners)
        return is_exclusive and not shared.asked_aside

    @property
    def pending(self) -> bool:
        """Whether a call is in flight."""
        return self.in_flight is not None

    @property
    def may_end(self) -> bool:
        """Whether nothing runs in the session any more, so that the upstream can be told of its end."""
        return not (self.lost or self.pending or self._owes or self._is_shared)

    def watch(self, watcher: Watcher) -> None:
        """Tell one more watcher of changes."""
        self.watchers += (watcher,)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher no more."""
        self.watchers = tuple([each for each in self.watchers if each is not watcher])

    def works_on(self, call: Call) -> bool:
        """Whether this very call is in flight."""
        return self.in_flight is call

    def move(self, state: SessionState | None) -> None:
        """Change the state, and count it in the metrics."""
        self._metrics.session_moved(self._route, self.state, state)
        self.state = state

    async def open(self, headers: Headers) -> None:
        """Make the handshake: initialize, side stream, initialized, in this order.

        The side stream must be open before `initialized`: without it, requests outside of a POST are lost for ever.
        """
        self._headers = headers
        key = self.group.key
        client_info, capabilities = Raw(key.client_info), Raw(key.capabilities)
        params = handshake.initialize_params(client_info, capabilities, keeps_state=bool(key.pin))
        message = jsonrpc.request(b'"init"', mcp.INITIALIZE, params)
        self._show(Direction.TO_UPSTREAM, message)
        self.channel, result = await self.channel.open(message, headers)
        self._show(Direction.FROM_UPSTREAM, bytes(result))
        shaken, known = handshake.handshake(result), self.group.shaken
        self.shaken = known if known is not None and known == shaken else shaken  # all sessions share one
        await self._listen(headers)
        ready = jsonrpc.notification(mcp.INITIALIZED)
        self._show(Direction.TO_UPSTREAM, ready)
        await self.channel.send(ready, headers)
        self._prove(headers)
        self.opened = True
        self._metrics.session_opened(self._route)

    async def adopt(self, session_id: str, shaken: Handshake, headers: Headers, *, is_shared: bool = False) -> None:
        """Take over a session that another process opened, and whose call may still run at the upstream.

        The upstream already had its handshake. A new side stream is opened before anything is answered.
        """
        self.adopted = self._owes = True
        self._is_shared = is_shared
        self._headers = headers
        self.shaken = shaken
        self.channel.adopt(session_id, shaken.version)
        await self._listen(headers)

    async def _listen(self, headers: Headers) -> None:
        await self.channel.listen(self.shaken.version, headers, self)

    def join(self, owner: "Session") -> None:
        """Join the upstream session of an owner that `can_be_joined` (`sessions.affinity`)."""
        assert owner.channel.session_id is not None
        self.channel.adopt(owner.channel.session_id, owner.shaken.version)
        self.shaken, self.shared = owner.shaken, owner.shared
        self.opened = True
        self.shared.join(self)

    async def set_log_level(self, level: str, headers: Headers, idle_seconds: float) -> None:
        """Set the log level, if it differs and the upstream offers logging; a refusal costs only the logs."""
        if level == self._log_level or not self.shaken.offers("logging"):
            return
        await self.ask(mcp.SET_LEVEL, {"level": level}, headers, idle_seconds)
        self._log_level = level

    async def set_subscriptions(self, uris: frozenset[str], headers: Headers, idle_seconds: float) -> None:
        """Be subscribed to these resources alone, if the upstream offers that; a refusal costs only their updates."""
        if uris == self._subscribed or not self.shaken.offers("resources", "subscribe"):
            return
        for method, changed in ((mcp.UNSUBSCRIBE, self._subscribed - uris), (mcp.SUBSCRIBE, uris - self._subscribed)):
            for uri in changed:
                await self.ask(method, {"uri": uri}, headers, idle_seconds)
        self._subscribed = uris

    async def ask(
        self, method: str, params: Mapping[str, object], headers: Headers, timeout_seconds: float
    ) -> Raw | jsonrpc.Error:
        """Send a request on the gateway's own account, without a client; returns its result or its error."""
        answer = OwnListener()
        call = Call(self.next_id(), b"", answer, is_own=True)
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
        """JSON of an id that is unique across sessions: some servers key streams of all sessions by it."""
        return b'"gw-%b-%x"' % (_PROCESS, next(_CALL_NUMBERS))

    def run(self, call: Call, headers: Headers) -> Coroutine[Any, Any, None]:
        """Send a call and feed its listener until it is answered. Raises what `Channel.request` raises.

        Not a coroutine itself: while a call is held, each one that waits for another takes memory.
        """
        self._show(Direction.TO_UPSTREAM, call.message, call)
        return self._follow(call, headers, self.channel.request(call.message, headers, self._hear_call))

    def begin(self, call: Call, headers: Headers, unusual: Callable[[], None]) -> bool:
        """Send a call whose reply is read by callback; returns False if the transport cannot.

        `unusual` is called if anything but its answer comes; it has to `follow` the call, or to have a task `read` it.
        """
        reply = call.reply = self.channel.begin(call.message, headers)
        if reply is None:
            return False
        reply.start(self._hear_answer, unusual)
        self._sent(call, headers)
        return True

    def follow(self, call: Call, broke: Callable[[], None]) -> bool:
        """Hear all messages of a begun call by callback; returns False if a task has to `read` it.

        `broke` is called if its stream breaks: then a task has to `read` the call.
        """
        reply = call.reply
        if reply is None:
            return False
        if not reply.follow(self._hear_call, broke):
            reply.keep()
            return False
        call.message = b""  # it is not sent again, and a held call should not keep it
        return True

    async def read(self, call: Call) -> None:
        """Read a begun call by a coroutine, as `run` does: from its beginning, or where its stream broke."""
        reply, call.reply = call.reply, None
        if reply is not None and not call.left:
            await self._read(call, reply.read(self._hear_call))
        elif self.in_flight is call:  # its answer is not wanted any more
            self._settle()

    def leave(self, call: Call) -> None:
        """Stop reading a call that was given up."""
        call.leave()
        if call.reader is None and self.in_flight is call:  # no task notices
            self._settle()

    async def resume(self, call: Call, cursor: str, headers: Headers, attached: Callable[[], None]) -> None:
        """Pick up a call that another process sent, else as `run`. Raises what `Channel.resume` raises."""
        try:
            reading = self.channel.resume(cursor, headers, self._hear_call, attached, is_shared=self._is_shared)
            await self._follow(call, headers, reading)
        except Refused:
            self.lost = True  # for this process; the call still runs there, so the session must not be deleted
            raise

    def _follow(
        self, call: Call, headers: Headers, reading: Awaitable[jsonrpc.Error | Raw | None]
    ) -> Coroutine[Any, Any, None]:
        """Track a call while its stream is read."""
        self._sent(call, headers)
        return self._read(call, reading)

    def _sent(self, call: Call, headers: Headers) -> None:
        """The call is in flight from now on."""
        assert self.in_flight is None, "one call in flight per session"
        self.in_flight, call.headers = call, headers
        self.turned_away = False
        call.sent = call.heard = time.monotonic()

    async def _read(self, call: Call, reading: Awaitable[jsonrpc.Error | Raw | None]) -> None:
        """Read the stream of the call in flight."""
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
            self.lost = True  # the call may still run there, so the session must not be deleted
            raise
        except asyncio.CancelledError:
            if not call.left or call.reader is None or call.reader.uncancel() > 0:
                self.lost = True
                raise
            # `Call.leave`: the answer was delivered already, or is not wanted.
        finally:
            call.reader = None
            # After the answer, the next call may use the session while this stream still drains.
            if self.in_flight is call:
                self._settle()

    def _forget(self) -> None:
        """The upstream does not know the session any more."""
        self.lost = True
        self._metrics.session_lost(self._route)
        log.info(
            Event.SESSION_LOST, route=self._route, note="the upstream does not know it any more; was it restarted?"
        )

    def _prove(self, headers: Headers) -> None:
        """Note that the upstream has served a message with these headers."""
        self._headers = headers
        self.group.accept(headers)

    async def ping(self, headers: Headers) -> None:
        """Have the upstream see a credential, beside the call that may be in flight; raises as `Channel.ping`."""
        await self.channel.ping(headers)
        self._headers = headers

    async def is_alive(self) -> bool:
        """Whether the upstream answers a ping with the headers that it served last; notes a lost session."""
        try:
            await self.channel.ping(self._headers)
        except SessionLost:
            self._forget()
            return False
        except GatewayError:
            return False  # which says nothing about the session
        return True

    def _settle(self) -> None:
        """The call is no longer in flight."""
        self.in_flight = self._odd = None
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    def detach(self) -> None:
        """Leave the session and its call to another process: read and answer nothing more, and do not end it."""
        self.lost = True
        self.abandon()
        self._settle()

    def abandon(self) -> None:
        """Stop waiting for a call that was given up; some servers leave its stream open for ever."""
        if self.in_flight is not None:
            self.leave(self.in_flight)

    async def settled(self, seconds: float) -> None:
        """Wait at most this long for the call in flight to end."""
        if self.pending:
            settled = self._settled = self._settled or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    _ = await settled.wait()

    async def answer(self, upstream_id: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Answer one nested request."""
        message = jsonrpc.answer(upstream_id, body)
        self._show(Direction.TO_UPSTREAM, message, self.in_flight)
        await self.channel.send(message, headers)
        self._headers = headers

    def begin_answer(
        self,
        upstream_id: Raw,
        body: Raw | jsonrpc.Error,
        headers: Headers,
        accepted: Callable[[], None],
        unusual: Callable[[Sending], None],
    ) -> bool:
        """Answer one nested request by callback, as `Channel.begin_send` sends; the rest is as in `answer`."""
        message = jsonrpc.answer(upstream_id, body)

        def note() -> None:
            self._headers = headers
            accepted()

        is_begun = self.channel.begin_send(message, headers, note, unusual)
        if is_begun and bodies.on:
            self._show(Direction.TO_UPSTREAM, message, self.in_flight)
        return is_begun

    async def cancel(self, call: Call, reason: str, headers: Headers) -> None:
        """Tell the upstream that the call is not wanted any more; best effort."""
        message = jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(call.id), "reason": reason})
        self._show(Direction.TO_UPSTREAM, message, call)
        await self.channel.send(message, headers)

    def _show(self, direction: Direction, data: bytes, call: Call | None = None) -> None:
        """Log a message if the configuration asks for bodies."""
        if bodies.on:
            asked_by = call.listener.request_id if call is not None else None
            bodies.show(direction, data, route=self._route, request_id=asked_by)

    # -- what the upstream says ---------------------------------------------------------------------------------

    def _hear_call(self, data: bytes) -> bool:
        call, (odd, self._odd) = self.in_flight, (self._odd, None)
        if bodies.on:
            self._show(Direction.FROM_UPSTREAM, data, call)
        if call is None:
            return True
        try:
            message = odd[1] if odd is not None and odd[0] is data else jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError) as exc:
            self._metrics.upstream_failed(self._route, "malformed")
            raise CallLost(
                f"The upstream of route {self._route} sent a message that is not JSON-RPC ({exc}); the call may have "
                "had effects"
            ) from exc
        return self._take(call, inbound.meaning(message, call, can_ask=self.channel.can_ask), data, aside=False)

    def _hear_answer(self, data: bytes) -> bool:
        """Take a message of a begun call if it is the answer; else return False, for the task that reads the rest."""
        call = self.in_flight
        try:
            answer = inbound.plain_answer(data, call)
            if answer is None:
                message = jsonrpc.message(data)
                answer = inbound.answer(message, call)
                self._odd = (data, message) if answer is None else None
        except (ValueError, msgspec.MsgspecError):
            return False
        return call is not None and answer is not None and self._take_for_call(call, answer, aside=False)

    def hear_side(self, data: bytes) -> bool:
        """Take a message of the side stream."""
        self._show(Direction.FROM_UPSTREAM, data, self.in_flight)
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError):
            self._metrics.upstream_failed(self._route, "malformed")
            return False
        speaker, is_ambiguous = self.shared.speaker(lambda each: inbound.answers(message, each.in_flight))
        return speaker.hear_aside(message, data, is_ambiguous=is_ambiguous)

    def hear_aside(self, message: jsonrpc.Message, data: bytes, *, is_ambiguous: bool) -> bool:
        """Take one message of the side stream; returns whether it answers the call in flight."""
        call = self.in_flight or self.standing
        means = inbound.meaning(message, call, can_ask=self.channel.can_ask, is_ambiguous=is_ambiguous)
        if is_ambiguous and isinstance(means, inbound.Unsolicited):
            self.shared.asked_aside = True
            call = None  # the request may be any call's, so it does not show that this one is alive
        answered = self._take(call, means, data, aside=True)
        if answered and call is not None:
            call.leave()
        return answered

    def _take(self, call: Call | None, means: inbound.Meaning, data: bytes, *, aside: bool) -> bool:
        """Act on one message; returns whether it answers the call."""
        if call is not None:
            call.heard = time.monotonic()
        match means:
            case inbound.Answer() | inbound.Question() | inbound.Notice() | inbound.Unanswerable() if call is not None:
                return self._take_for_call(call, means, aside=aside)
            case inbound.Ping(id=id_):
                self.answer_later(id_, Raw(b"{}"))
            case inbound.Unsolicited(id=id_, method=method, error=error):
                self._metrics.nested_request(self._route, method, NestedOutcome.UNSOLICITED)
                self.answer_later(id_, error)
            case inbound.Change(method=method):
                for watcher in (self.group, *self.watchers):
                    watcher.changed(method, data)
            case inbound.Unrelated(method=method):
                self._metrics.notification(self._route, method, forwarded=False)
            case _:
                self._metrics.upstream_failed(self._route, "unknown_id")
        return False

    def _take_for_call(
        self,
        call: Call,
        means: inbound.Answer | inbound.Question | inbound.Notice | inbound.Unanswerable,
        *,
        aside: bool,
    ) -> bool:
        """Hand a message to the listener of the call; returns whether it is the answer."""
        if isinstance(means, inbound.Unanswerable):
            call.listener.hear(on.Stopped(pool_errors.cannot_ask(self._route)))
            return False
        is_answer, event = isinstance(means, inbound.Answer), means.event
        if is_answer:
            self._owes = False
            self._settle()
        elif isinstance(means, inbound.Notice):
            call.listener.hear(event)
            return False
        elif aside:
            self.shared.asked_aside = True
        else:
            self.shared.asked_in_call = True
        if not aside and self.channel.taken:
            # The call's own response proves that its credential was accepted. A message that comes while the POST is
            # pending, or on the side stream, may be about anything.
            self._prove(call.headers)
        if not isinstance(event, on.Failed):
            self.group.prove(self.group.principal)
        call.listener.hear(event)
        return is_answer

    def answer_later(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer a request of the server that reaches no client; a flood of them stays unanswered."""
        headers = self._headers or (self.in_flight.headers if self.in_flight is not None else NO_HEADERS)
        if self._own_answers is None:
            self._own_answers = OwnAnswers(self._route, self._tasks, self._answer_now)
        self._own_answers.add(id_, body, headers)

    async def _answer_now(self, id_: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        if not self.lost:
            await self.answer(id_, body, headers)

    def side_lost(self) -> None:
        """The side stream ended for good, so further messages of the server would be lost."""
        self.lost = True
        self.side_changed(opened=False)

    def side_changed(self, opened: bool) -> None:  # noqa: FBT001  (a callback)
        """Tell the watchers that the side stream was opened again, or will not be."""
        for watcher in (self.group, *self.watchers):
            if opened:
                watcher.missed()
            else:
                watcher.deaf(heard=self.lost)
