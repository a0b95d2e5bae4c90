"""One session of a legacy server, from its handshake to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from msgspec import Raw

from gateway import world
from gateway.exchange import events as on
from gateway.exchange import handshake
from gateway.exchange.handshake import Handshake
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallGone, CallLost, GatewayError, Refused, SessionLost
from gateway.runtime.own_ids import new_id
from gateway.runtime.tasks import Tasks
from gateway.sessions.affinity import SharedSession  # noqa: TC001  (one import style; it costs nothing here)
from gateway.sessions.call import Call, OwnListener
from gateway.sessions.group import Group  # noqa: TC001
from gateway.sessions.hearing_session import HearingSession
from gateway.telemetry import Direction, Event, Metrics, SessionState, get_logger
from gateway.upstream.channel import Channel, Headers

log = get_logger()

_NOTHING: Final[Collection[str]] = frozenset()
"""Made once: every other empty frozenset takes memory of its own."""


class Session(HearingSession):
    """One session of a legacy server, for one call at a time."""

    group: "Group[Session]"
    shared: "SharedSession[Session]"

    __slots__ = (
        "_is_shared",
        "_log_level",
        "_subscribed",
        "adopted",
        "idle_since",
        "is_forgotten",
        "opened",
        "resting",
        "shaken",
        "state",
        "turned_away",
    )

    def __init__(self, group: "Group[Session]", channel: Channel, route: str, metrics: Metrics, tasks: Tasks) -> None:
        super().__init__(group, channel, route, metrics, tasks)
        self.shaken: Handshake
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
        self.is_forgotten = False
        """Whether the server does not know it any more."""
        self.idle_since = 0.0
        self._log_level: str | None = None
        self._subscribed = _NOTHING
        """The resources that `set_subscriptions` subscribed to, or tried to."""
        self.state: SessionState | None = None
        """As its pool counts it; None before its opening and after its end."""

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

    def works_on(self, call: Call) -> bool:
        """Whether this very call is in flight."""
        return self.in_flight is call

    def may_run(self, call: Call) -> bool:
        """Whether this call may still be at work, be it that nothing reads it any more."""
        return self.works_on(call) or self.shared.must_not_end

    def lose(self) -> None:
        """Use the session no more, and never end it: a call may still run in it, or the upstream has forgotten it."""
        self.lost = self.shared.must_not_end = True
        if self.standing is None:  # a task goes on though a request about it broke, and its questions are its own
            self.shared.has_stray = True

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

    async def set_log_level(self, level: str, headers: Headers, timeout_seconds: float) -> None:
        """Set the log level, if it differs and the upstream offers logging; a refusal costs only the logs."""
        if level == self._log_level or not self.shaken.offers("logging"):
            return
        await self.ask(mcp.SET_LEVEL, {"level": level}, headers, timeout_seconds)
        self._log_level = level

    async def set_subscriptions(self, uris: Collection[str], headers: Headers, timeout_seconds: float) -> None:
        """Be subscribed to these resources alone, if the upstream offers that; a refusal costs only their updates."""
        before = self._subscribed
        if uris == before or not self.shaken.offers("resources", "subscribe"):
            return
        for method, some, others in ((mcp.UNSUBSCRIBE, before, uris), (mcp.SUBSCRIBE, uris, before)):
            for uri in [each for each in some if each not in others]:
                await self.ask(method, {"uri": uri}, headers, timeout_seconds)
        self._subscribed = uris

    async def ask(
        self, method: str, params: Mapping[str, object], headers: Headers, timeout_seconds: float
    ) -> Raw | jsonrpc.Error:
        """Send a request on the gateway's own account, without a client; returns its result or its error.

        `timeout_seconds` is `timeouts.handshake_seconds`, which the error names.
        """
        if self.in_flight is not None:  # a request whose asker has left
            await self.settled(timeout_seconds)
        answer = OwnListener()
        call = Call(new_id(), b"", answer, is_own=True)
        call.message = jsonrpc.request(call.id, method, params)
        # A task of its own, because an asker that leaves must not keep the session from being ended: it may be ended
        # only once the server has answered.
        failures: list[GatewayError] = []
        asking = self._ask(call, method, headers, timeout_seconds, failures)
        _ = await asyncio.wait((self._tasks.start(asking, "own request"),))
        if failures:
            raise failures[0]
        if answer.outcome is None:
            raise CallLost(f"The upstream of route {self._route} did not answer {method}")
        return answer.outcome

    async def _ask(
        self, call: Call, method: str, headers: Headers, timeout_seconds: float, failures: list[GatewayError]
    ) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.run(call, headers)
        except TimeoutError:
            failures.append(
                CallLost(
                    f"The upstream of route {self._route} did not answer {method} in {timeout_seconds:g} s "
                    "(timeouts.handshake_seconds)"
                )
            )
        except GatewayError as exc:
            failures.append(exc)

    def run(self, call: Call, headers: Headers) -> Coroutine[Any, Any, None]:
        """Send a call and feed its listener until it is answered. Raises what `Channel.request` raises.

        Not a coroutine itself: while a call is held, each one that waits for another takes memory.
        """
        self._show(Direction.TO_UPSTREAM, call.message, call)
        reading = self.channel.request(call.message, headers, self.hear_call, is_repeatable=call.is_own)
        return self._follow(call, headers, reading)

    def begin(self, call: Call, headers: Headers, unusual: Callable[[], None]) -> bool:
        """Send a call whose reply is read by callback; returns False if the transport cannot.

        `unusual` is called if anything but its answer comes; it has to `follow` the call, or to have a task `read` it.
        """
        call.reply = self.channel.begin(call.message, headers, self, unusual)
        if call.reply is None:
            return False
        call.message = b""
        self._sent(call, headers)
        return True

    def follow(self, call: Call, broke: Callable[[], None]) -> bool:
        """Hear all messages of a begun call by callback; returns False if a task has to `read` it.

        `broke` is called if its stream breaks: then a task has to `read` the call.
        """
        reply = call.reply
        if reply is None:
            return False
        if not reply.follow(broke):
            reply.keep()
            return False
        return True

    async def read(self, call: Call) -> None:
        """Read a begun call by a coroutine, as `run` does: from its beginning, or where its stream broke."""
        reply, call.reply = call.reply, None
        if reply is not None and not call.left:
            call.message = reply.message
            await self._read(call, reply.read(self.hear_call))
        elif self.in_flight is call:  # its answer is not wanted any more
            self._settle()

    def leave(self, call: Call) -> None:
        """Stop reading a call that was given up."""
        call.leave()
        if call.reader is None and self.in_flight is call:  # no task notices
            self._settle()

    def give_up(self, call: Call) -> None:
        """Stop reading a call that may still run.

        No other call uses its session: what this one still asks on the side stream would be taken for its question.
        """
        if self.in_flight is call:
            self.shared.owner.lose()
        self.leave(call)

    async def resume(self, call: Call, cursor: str, headers: Headers, attached: Callable[[], None]) -> None:
        """Pick up a call that another process sent, else as `run`. Raises what `Channel.resume` raises."""
        try:
            reading = self.channel.resume(cursor, headers, self.hear_call, attached, is_shared=self._is_shared)
            await self._follow(call, headers, reading)
        except Refused:
            self.lose()  # for this process; the call still runs there
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
        call.sent = call.heard = world.monotonic()

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
            self.lose()  # the call may still run there
            raise
        except asyncio.CancelledError:
            if not call.left or call.reader is None or call.reader.uncancel() > 0:
                self.lose()
                raise
            # `Call.leave`: the answer was delivered already, or is not wanted.
        finally:
            call.reader = None
            # After the answer, the next call may use the session while this stream still drains.
            if self.in_flight is call:
                self._settle()

    def _forget(self) -> None:
        """The upstream does not know the session any more."""
        self.is_forgotten = True
        self.lose()
        self._metrics.session_lost(self._route)
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
