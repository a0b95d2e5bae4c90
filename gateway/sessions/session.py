"""One session of a legacy server, from its handshake to its end.

Rule: one call in flight per session. Half of the real servers send nested requests on the session's side stream, where
nothing names their call; because the session serves one call at a time, each request has an owner.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Raw, UnsetType

from gateway.config import InForce, RouteSettings
from gateway.exchange import events as on
from gateway.exchange import handshake, input_requests
from gateway.exchange.handshake import Handshake
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallGone, CallLost, GatewayError, Refused, SessionLost, bug
from gateway.runtime.own_ids import new_id
from gateway.runtime.tasks import Tasks, telling
from gateway.seal.request_state import Whereabouts
from gateway.sessions import inbound, pool_errors
from gateway.sessions.affinity import SharedSession
from gateway.sessions.call import COROUTINE, OF_NO_REQUEST, Call, Listener, OwnListener, Runner, Watcher
from gateway.sessions.group import Group  # noqa: TC001  (one import style; it costs nothing here)
from gateway.telemetry import Direction, Event, Metrics, NestedOutcome, bodies, get_logger
from gateway.upstream.channel import NO_HEADERS, BegunReply, Channel, Headers, Hearer, SideListener

log = get_logger()

_ANSWERS: Final = (on.Resulted, on.Failed)
_AMBIGUOUS: Final = "Several calls are in flight, and the request names none of them"
_NO_CALL: Final = "No call is in flight that could ask (SEP-2260)"
_FLOODED: Final = (
    "the server sends the gateway requests (pings, requests outside of calls) faster than it takes the answers"
)
_FLOODED_FIX: Final = "find out why the server asks so often; the gateway leaves further requests unanswered"
_MAX_UNSENT: Final = 64
"""The gateway's own answers that may be queued for a slow server; its further requests stay unanswered."""
_MAX_ID_BYTES: Final = 1024  # real servers count from 0; the ids in a full queue take 64 KiB
NOTHING: Final[Collection[str]] = frozenset()
"""Made once: every other empty frozenset takes memory of its own."""


@dataclass(slots=True, eq=False)
class Session(SideListener, Hearer):
    """One session of a legacy server, for one call at a time."""

    group: "Group[Session]"
    channel: Channel
    _settings: InForce[RouteSettings]
    _metrics: Metrics
    _tasks: Tasks
    lost: bool = False
    """Whether the upstream forgot the session, or its side stream ended for good."""
    shared: "SharedSession[Session]" = field(init=False)
    """Its own, unless it joins that of another one."""
    watchers: tuple[Watcher, ...] = ()
    """Those beside its group."""
    in_flight: Call | None = None
    """The call that was sent and not answered yet."""
    standing: Call | None = None
    """A task, as the call that questions belong to while no request of the task is in flight (SEP-2260)."""
    _owes: bool = False
    """Whether the call of the process that opened the session may still run."""
    _settled: asyncio.Event | None = None
    """Made for those that wait for the call's end."""
    _unsent: deque[tuple[Raw, Raw | jsonrpc.Error, Headers]] | None = None
    """The gateway's own answers, while they are sent: an empty queue would take more memory than all else here."""
    _is_flooded: bool = False
    """Whether the server was warned of for asking faster than it takes the answers."""
    _headers: Headers = field(init=False)
    """The newest headers that the upstream served; the gateway's own answers need a credential too."""
    shaken: Handshake = field(init=False)
    """Once its handshake is done."""
    adopted: bool = False
    """Whether another process opened it for a call of its own."""
    _is_shared: bool = False
    """Whether that process may still be alive and use it."""
    opened: bool = False
    """Whether its handshake is done."""
    resting: bool = False
    """Whether its call is parked."""
    turned_away: bool = False
    """Whether the server refused the credential of the last call, and so did not run it."""
    is_forgotten: bool = False
    """Whether the server does not know it any more."""
    _log_level: str | None = None
    _subscribed: Collection[str] = NOTHING
    """The resources that `prepare` subscribed to, or tried to."""

    def __post_init__(self) -> None:
        self.shared, self._headers = SharedSession(self), NO_HEADERS

    @property
    def _route(self) -> str:
        return self._settings.value.route.path

    def watch(self, watcher: Watcher) -> None:
        """Tell one more watcher of changes."""
        self.watchers += (watcher,)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher no more."""
        self.watchers = tuple([each for each in self.watchers if each is not watcher])

    @property
    def can_be_joined(self) -> bool:
        """Whether others can speak in the session: it is open, and has an id."""
        return not self.lost and self.opened and self.channel.session_id is not None

    @property
    def can_be_resumed(self) -> bool:
        """Whether another process could read on in the session, from the newest event of its newest call."""
        return self.channel.session_id is not None and self.channel.cursor is not None

    @property
    def can_be_left(self) -> bool:
        """Whether its call alone speaks in it, and every question of the server came on the stream of that call.

        Only then may its streams be closed while the call waits: a question on the side stream would be lost.
        """
        shared = self.shared
        is_alone = shared.owner is self and not (self._is_shared or self.group.is_affine or shared.joiners)
        return is_alone and not shared.asked_aside

    @property
    def pending(self) -> bool:
        """Whether a call is in flight."""
        return self.in_flight is not None

    @property
    def may_end(self) -> bool:
        """Whether nothing runs in the session any more, so that the upstream can be told of its end."""
        shared = self.shared
        # An adopted one that went deaf may have been adopted by another process, too; and where calls share a session,
        # each of them adopts it for itself.
        is_others = self.adopted and (self.lost or self.group.is_affine)
        is_ours = not (self._owes or self._is_shared or is_others)
        return is_ours and not (shared.must_not_end or shared.joiners or self.pending)

    @property
    def is_orderly(self) -> bool:
        """Whether the session of all calls is kept after a call that did not end well, for dropping it is costly.

        A call that was refused never began. Questions that a call left open reach no other call if they named it; on
        the side stream they may arrive after its end.
        """
        return self.group.is_affine and (self.turned_away or not self.shared.asked_aside)

    def lose(self) -> None:
        """Use the session no more, and never end it: a call may still run in it, or the upstream has forgotten it."""
        self.lost = True
        # A task goes on though a request about it broke, and its questions are its own.
        self.shared.stray(may_ask=self.standing is None)

    def follow_task(self, listener: Listener | None) -> None:
        """The session has a task, whose questions are for this listener; None if nothing follows it any more."""
        self.standing = None if listener is None else Call(b"", b"", listener)  # without an id, nothing answers it

    def settle_task(self) -> None:
        """The task that had the session for itself is over, and with it every request about it whose stream broke."""
        if not self.is_forgotten:
            self.shared.must_not_end = False

    async def open(self, headers: Headers) -> None:
        """Make the handshake: initialize, side stream, initialized, in this order.

        The side stream must be open before `initialized`: without it, requests outside of a POST are lost for ever.
        """
        self._headers = headers
        key = self.group.key
        client_info, capabilities = Raw(key.client_info), Raw(key.capabilities)
        params = handshake.initialize_params(client_info, capabilities, keeps_state=bool(key.pin))
        message = jsonrpc.request(new_id(), mcp.INITIALIZE, params)
        self._show(Direction.TO_UPSTREAM, message)
        self.channel, result = await self.channel.open(message, headers)
        self._show(Direction.FROM_UPSTREAM, bytes(result))
        self.shaken = handshake.handshake(bytes(result))
        await self.channel.listen(self.shaken.version, headers, self)
        ready = jsonrpc.notification(mcp.INITIALIZED)
        self._show(Direction.TO_UPSTREAM, ready)
        await self.channel.send(ready, headers)
        self._prove(headers)
        self.group.shaken = self.shaken
        self.opened = True
        self._metrics.sessions_opened[self._route,].inc()

    async def adopt(self, left_at: Whereabouts, headers: Headers, *, is_shared: bool = False) -> None:
        """Take over a session that another process opened, and whose call may still run at the upstream.

        The upstream already had its handshake. A new side stream is opened before anything is answered.
        """
        self.adopted = self._owes = True  # first: the call may run, so a session that fails to open is not ended
        self._is_shared, self._headers = is_shared, headers
        self.shared = SharedSession(self, has_stray=left_at.may_have_others)
        self.shaken = Handshake(left_at.version, {}, left_at.server_info, None)  # its capabilities are unknown
        self.channel.adopt(left_at.session, left_at.version)
        await self.channel.listen(left_at.version, headers, self)

    def join(self, owner: "Session") -> None:
        """Join the upstream session of an owner that `can_be_joined` (`sessions.affinity`)."""
        assert owner.channel.session_id is not None
        self.channel.adopt(owner.channel.session_id, owner.shaken.version)
        self.shaken, self.shared = owner.shaken, owner.shared
        self.opened = True
        self.shared.join(self)

    async def prepare(self, log_level: str | None, uris: Collection[str], headers: Headers) -> None:
        """Set the log level, and be subscribed to these resources alone, as far as the upstream offers that.

        A refusal costs only logs, or updates. Raises as `ask` does.
        """
        if log_level not in (None, self._log_level) and self.shaken.offers("logging"):
            await self.ask(mcp.SET_LEVEL, {"level": log_level}, headers)
            self._log_level = log_level  # also after a refusal, or every call would ask again
        before = self._subscribed
        if uris != before and self.shaken.offers("resources", "subscribe"):
            for method, some, others in ((mcp.UNSUBSCRIBE, before, uris), (mcp.SUBSCRIBE, uris, before)):
                for uri in [each for each in some if each not in others]:
                    await self.ask(method, {"uri": uri}, headers)
            self._subscribed = uris

    async def ask(self, method: str, params: Mapping[str, object], headers: Headers) -> Raw | jsonrpc.Error:
        """Send a request on the gateway's own account, without a client; returns its result or its error."""
        seconds = self._settings.value.config.timeouts.handshake_seconds
        if self.in_flight is not None:  # a request whose asker has left
            await self.settled(seconds)
        answer = OwnListener()
        call = Call(new_id(), b"", answer, is_own=True)
        call.message = jsonrpc.request(call.id, method, params)
        silent = f"The upstream of route {self._route} did not answer {method}"
        failures: list[GatewayError] = []

        async def asking() -> None:
            with telling(failures.append):
                try:
                    async with asyncio.timeout(seconds):
                        await self.run(call, headers)
                except TimeoutError as exc:
                    raise CallLost(f"{silent} in {seconds:g} s (timeouts.handshake_seconds)") from exc

        # A task of its own, because an asker that leaves must not keep the session from being ended: it may be ended
        # only once the server has answered.
        _ = await asyncio.wait((self._tasks.start(asking(), "own request"),))
        if failures:
            raise failures[0]
        if answer.outcome is None:
            raise CallLost(silent)
        return answer.outcome

    def run(self, call: Call, headers: Headers) -> Coroutine[Any, Any, None]:
        """Send a call and feed its listener until it is answered. Raises what `Channel.request` raises.

        Not a coroutine itself: while a call is held, each one that waits for another takes memory.
        """
        self._show(Direction.TO_UPSTREAM, call.message, call)
        self._sent(call, headers)
        return self._read(call, self.channel.request(call.message, headers, self, is_repeatable=call.is_own))

    def begin(self, call: Call, headers: Headers, runner: Runner) -> bool:
        """Send a call for whose reply no coroutine waits; returns False if the transport cannot.

        `runner` is told if the reply breaks.
        """
        reply = self.channel.begin(call.message, headers, self)
        if reply is None:
            return False
        self._sent(call, headers, runner, reply)  # in time, as no listener is called in the stack that begins
        return True

    async def read(self, call: Call) -> None:
        """Decide by a coroutine what becomes of a begun call whose reply broke, as `run` does."""
        if call.reading is not None and not call.left:
            await self._read(call, self.channel.conclude(self))
        elif self.in_flight is call:  # its answer is not wanted any more
            self._settle()

    def leave(self, call: Call) -> None:
        """Stop reading a call that was given up."""
        call.leave()
        if self.in_flight is call and not call.is_read_by_task:
            self._settle()

    def give_up(self, call: Call) -> None:
        """Stop reading a call that may still run.

        No other call uses its session: what this one still asks on the side stream would be taken for its question.
        """
        if self.in_flight is call:
            self.shared.owner.lose()
        self.leave(call)

    async def resume(self, call: Call, cursor: str, headers: Headers, runner: Runner) -> None:
        """Pick up a call that another process sent, else as `run`; `runner` hears once its stream is here.

        Raises what `Channel.resume` raises.
        """
        self._sent(call, headers, runner)
        try:
            await self._read(call, self.channel.resume(cursor, headers, self, is_shared=self._is_shared))
        except Refused:
            self.lose()  # for this process; the call still runs there
            raise

    def _sent(self, call: Call, headers: Headers, runner: Runner = COROUTINE, reply: BegunReply | None = None) -> None:
        """The call is in flight from now on."""
        assert self.in_flight is None, "one call in flight per session"
        self.in_flight, self.turned_away = call, False
        call.starts(headers, runner, reply)

    async def _read(self, call: Call, reading: Awaitable[jsonrpc.Error | Raw | None]) -> None:
        """Read the stream of the call in flight."""
        try:
            call.reading = asyncio.current_task()
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
            self.lose()  # the call may still run there
            raise
        except asyncio.CancelledError:
            reader = asyncio.current_task()
            if not call.left or reader is None or reader.uncancel() > 0:  # cancelled not by `leave`, or not alone
                self.lose()
                raise
            # `Call.leave`: the answer was delivered already, or is not wanted.
        finally:
            call.reading = None
            # After the answer, the next call may use the session while this stream still drains.
            if self.in_flight is call:
                self._settle()

    def _forget(self) -> None:
        """The upstream does not know the session any more."""
        self.is_forgotten = True
        self.lose()
        self._metrics.sessions_lost[self._route,].inc()
        log.info(
            Event.SESSION_LOST, route=self._route, note="the upstream does not know it any more; was it restarted?"
        )

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

    def detach(self) -> None:
        """Leave the session and its call to another process: read and answer nothing more, and do not end it."""
        self.lose()
        self.abandon()
        self._settle()

    def abandon(self) -> None:
        """Stop waiting for a call that was given up; some servers leave its stream open for ever."""
        if self.in_flight is not None:
            self.leave(self.in_flight)

    async def cancel(self, call: Call, reason: str, headers: Headers) -> None:
        """Tell the upstream that the call is not wanted any more; best effort."""
        message = jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(call.id), "reason": reason})
        self._show(Direction.TO_UPSTREAM, message, call)
        await self.channel.send(message, headers)

    # -- what it hears ------------------------------------------------------------------------------------------------

    def hear(self, data: bytes, /) -> bool:
        """Take a message on the stream of the call; returns whether it is the answer."""
        call = self.in_flight
        if bodies.on:
            self._show(Direction.FROM_UPSTREAM, data, call)
        if call is None:
            return True  # its call is over, and nothing more of the reply is wanted
        try:
            found = inbound.plain_answer(data, call) or jsonrpc.message(data)
        except ValueError as exc:
            self._metrics.upstream_failures[self._route, "malformed"].inc()
            where = f"The upstream of route {self._route}"
            raise CallLost.by(where, f"sent a message that is not JSON-RPC ({exc})") from exc
        if isinstance(found, jsonrpc.Message):
            return self._take(found, data, call, aside=False)
        return self._take_for_call(call, found, aside=False)

    def accepted(self) -> None:
        """The server has the call, so it is not sent again, and a held call should not keep it."""
        if self.in_flight is not None:
            self.in_flight.message, self.in_flight.is_accepted = b"", True

    def attached(self) -> None:
        """The stream of the call is here."""
        if self.in_flight is not None:
            self.in_flight.runner.attached()

    def over(self, reply: object, failure: Exception | None, /) -> None:
        """The reply of a begun call is over without the answer."""
        call = self.in_flight
        if call is None or call.reading is not reply:
            if failure is None or isinstance(failure, RequestFailed):
                return  # its call was given up, or was answered on the side stream
            raise failure  # the call was answered, and whoever heard that raised
        call.runner.broke(call)

    def hear_side(self, data: bytes) -> None:
        """Take a message of the side stream."""
        self._show(Direction.FROM_UPSTREAM, data, self.in_flight)
        try:
            message = jsonrpc.message(data)
        except ValueError:
            self._metrics.upstream_failures[self._route, "malformed"].inc()
            return
        speaker, is_ambiguous = self.shared.speaker(message)
        speaker.hear_aside(message, data, is_ambiguous=is_ambiguous)

    def is_answered_by(self, message: jsonrpc.Message) -> bool:
        """Whether a message answers the call in flight."""
        return inbound.answers(message, self.in_flight)

    def hear_aside(self, message: jsonrpc.Message, data: bytes, *, is_ambiguous: bool) -> None:
        """Take one message of the side stream; several calls may own it if it `is_ambiguous`."""
        call = self.in_flight or self.standing
        # The Python SDK 1.8 and 1.10 send an answer here if its own stream has broken.
        if self._take(message, data, call, aside=True, is_ambiguous=is_ambiguous) and call is not None:
            call.leave()

    def _take(
        self, message: jsonrpc.Message, data: bytes, call: Call | None, *, aside: bool, is_ambiguous: bool = False
    ) -> bool:
        """Act on one message; returns whether it answers the call."""
        method = message.method
        event: on.Event | None = None
        if method is None:
            event = inbound.answer(message, call)
            if event is None:
                self._metrics.upstream_failures[self._route, "unknown_id"].inc()
        elif isinstance(message.id, Raw):
            if is_ambiguous and method != mcp.PING:
                self.shared.asked(aside=True)
                call = None  # the request may be any call's, so it does not show that this one is alive
            event = self._asked(message.id, method, message.params, call, is_ambiguous=is_ambiguous)
        elif method in inbound.CHANGES:
            # A watcher of this session may also listen to all of its caller.
            for watcher in dict.fromkeys((self.group, *self.watchers, *self.group.listeners)):
                watcher.changed(method, data)
        else:
            event = inbound.told(method, message.params, call)
            if event is None:
                self._metrics.notification(self._route, method, forwarded=False)
        if call is None:
            return False
        call.stirs()
        return event is not None and self._take_for_call(call, event, aside=aside)

    def _asked(
        self, id_: Raw, method: str, params: Raw | UnsetType, call: Call | None, *, is_ambiguous: bool
    ) -> on.Nested | on.Stopped | None:
        """Return what a request of the server is for a call; one of no client's call is answered here (SEP-2260)."""
        if method == mcp.PING:
            self.answer_later(id_, jsonrpc.EMPTY)
        elif call is None or call.is_own:
            self._metrics.nested_requests[self._route, method, NestedOutcome.UNSOLICITED].inc()
            self.answer_later(id_, jsonrpc.Error(mcp.INVALID_PARAMS, _AMBIGUOUS if is_ambiguous else _NO_CALL))
        elif method in input_requests.KINDS and not self.channel.can_ask:
            return on.Stopped(pool_errors.cannot_ask(self._route))
        else:
            return on.Nested(id_, method, params)
        return None

    def _take_for_call(self, call: Call, event: on.Event, *, aside: bool) -> bool:
        """Hand a message to the listener of the call; returns whether it is the answer."""
        if not aside and call.message:
            call.message = b""  # the server has it, so it is not sent again, and a held call should not keep it
        is_answer = isinstance(event, _ANSWERS)
        if is_answer:
            self._owes = False
            self._settle()  # before the listener, which may release the session
        elif not isinstance(event, on.Nested):
            call.listener.hear(event)
            return False
        else:
            self.shared.asked(aside=aside)
        if not aside and call.is_accepted:
            # The call's own response proves that its credential was accepted. A message that comes while the POST is
            # pending, or on the side stream, may be about anything.
            self._prove(call.headers)
        try:
            call.listener.hear(event)
        except Exception:
            if is_answer and not (call.reading is None or call.is_read_by_task):  # its task would say so
                call.listener.hear(on.Broke(bug()))
            raise
        return is_answer

    def answer_later(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer a request of the server that reaches no client; a flood of them stays unanswered."""
        if len(self._unsent or ()) >= _MAX_UNSENT or len(bytes(id_)) > _MAX_ID_BYTES:
            if not self._is_flooded:
                self._is_flooded = True
                log.warning(Event.UPSTREAM_FAILED, route=self._route, cause=_FLOODED, fix=_FLOODED_FIX)
            return
        # A joiner has none of its own until the upstream has served its call.
        headers = self._headers or (self.in_flight.headers if self.in_flight is not None else NO_HEADERS)
        answer = Raw(bytes(id_)), body, headers  # a copy: the id would keep the whole message
        if self._unsent is None:
            self._unsent = deque((answer,))
            self._tasks.spawn(self._send_unsent(self._unsent), "answer without a client")
        else:
            self._unsent.append(answer)

    async def _send_unsent(self, unsent: deque[tuple[Raw, Raw | jsonrpc.Error, Headers]]) -> None:
        """Send the gateway's own answers one after the other, so that a flood of requests costs one connection."""
        try:
            while unsent:
                id_, body, headers = unsent.popleft()
                if self.lost and self.in_flight is None:
                    continue  # a call at work would wait for it, though no other will follow
                try:
                    await self.answer(id_, body, headers)
                except GatewayError as exc:
                    log.debug(Event.UPSTREAM_FAILED, route=self._route, cause=exc.message)
        finally:
            self._unsent = None  # nothing is awaited between the last look into the queue and this

    def side_reopened(self) -> None:
        """Tell the watchers what they may have missed."""
        for watcher in (self.group, *self.watchers):
            watcher.missed()

    def side_closed(self, *, was_open: bool) -> None:
        """Tell the watchers that they hear no more; further messages of the server would be lost."""
        self.lost |= was_open
        for watcher in (self.group, *self.watchers):
            watcher.deaf(heard=self.lost)

    async def answer(self, upstream_id: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Answer one nested request."""
        message = jsonrpc.answer(upstream_id, body)
        if bodies.on:
            self._show(Direction.TO_UPSTREAM, message, self.in_flight)
        await self.channel.send(message, headers)
        self._headers = headers

    def _show(self, direction: Direction, data: bytes, call: Call | None = None) -> None:
        """Log a message if the configuration asks for bodies."""
        if bodies.on:
            about = OF_NO_REQUEST if call is None else call.listener.about
            bodies.show(direction, data, route=self._route, about=about)

    def _prove(self, headers: Headers) -> None:
        """Note that the upstream has served a message with these headers."""
        self._headers = headers
        self.group.credentials.note(headers)

    def _settle(self) -> None:
        """The call is no longer in flight."""
        self.in_flight = None
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    async def settled(self, seconds: float) -> None:
        """Wait at most this long for the call in flight to end."""
        if self.in_flight is not None:
            settled = self._settled = self._settled or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    _ = await settled.wait()
