"""What one session of a legacy server hears: each message goes where its meaning (`sessions.inbound`) says.

Rule: one call in flight per session. Half of the real servers send nested requests on the session's side stream, where
nothing names their call; because the session serves one call at a time, each request has an owner.
"""

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway import world
from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallLost
from gateway.runtime.tasks import Tasks
from gateway.sessions import inbound, pool_errors
from gateway.sessions.affinity import SharedSession
from gateway.sessions.call import Call, Watcher
from gateway.sessions.group import Group  # noqa: TC001  (one import style; it costs nothing here)
from gateway.sessions.own_answers import OwnAnswers
from gateway.telemetry import Direction, Metrics, NestedOutcome, bodies
from gateway.upstream.channel import NO_HEADERS, Channel, Headers

_ANSWERS: Final = (on.Resulted, on.Failed)


class HearingSession:
    """A session as far as it hears its upstream."""

    __slots__ = (
        "_headers",
        "_metrics",
        "_odd",
        "_owes",
        "_own_answers",
        "_route",
        "_settled",
        "_tasks",
        "channel",
        "group",
        "in_flight",
        "lost",
        "shared",
        "standing",
        "watchers",
    )

    def __init__(self, group: "Group[Any]", channel: Channel, route: str, metrics: Metrics, tasks: Tasks) -> None:
        self.group = group
        self.channel = channel
        self.lost = False
        """Whether the upstream forgot the session, or its side stream ended for good."""
        self.shared: SharedSession[Any] = SharedSession(self)
        self.watchers: tuple[Watcher, ...] = ()
        """Those beside its group."""
        self._route = route
        self._metrics = metrics
        self._tasks = tasks
        self.in_flight: Call | None = None
        """The call that was sent and not answered yet."""
        self.standing: Call | None = None
        """A task, as the call that questions belong to while no request of the task is in flight (SEP-2260)."""
        self._owes = False
        """Whether the call of the process that opened the session may still run."""
        self._settled: asyncio.Event | None = None
        """Made for those that wait for the call's end."""
        self._own_answers: OwnAnswers | None = None
        """Made when the server first asks something that reaches no client."""
        self._odd: tuple[bytes, jsonrpc.Message] | None = None
        """A message that was not the answer, until it is heard as what it is."""
        self._headers = NO_HEADERS
        """The newest headers that the upstream served; the gateway's own answers need a credential too."""

    def watch(self, watcher: Watcher) -> None:
        """Tell one more watcher of changes."""
        self.watchers += (watcher,)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell a watcher no more."""
        self.watchers = tuple([each for each in self.watchers if each is not watcher])

    # -- messages -----------------------------------------------------------------------------------------------------

    def hear_call(self, data: bytes) -> bool:
        """Take a message on the stream of the call; returns whether it is the answer."""
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

    def hear_answer(self, data: bytes) -> bool:
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
        answered: bool = speaker.hear_aside(message, data, is_ambiguous=is_ambiguous)
        return answered

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
            call.heard = world.monotonic()
        match means:
            case on.Event() if call is not None:
                return self._take_for_call(call, means, aside=aside)
            case inbound.Unanswerable() if call is not None:
                call.listener.hear(on.Stopped(pool_errors.cannot_ask(self._route)))
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

    def _take_for_call(self, call: Call, event: inbound.ForCall, *, aside: bool) -> bool:
        """Hand a message to the listener of the call; returns whether it is the answer."""
        if not aside and call.message:
            call.message = b""  # the server has it, so it is not sent again, and a held call should not keep it
        is_answer = isinstance(event, _ANSWERS)
        if is_answer:
            self._owes = False
            self._settle()
        elif not isinstance(event, on.Nested):
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
        call.listener.hear(event)
        return is_answer

    def answer_later(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer a request of the server that reaches no client; a flood of them stays unanswered."""
        headers = self._headers or (self.in_flight.headers if self.in_flight is not None else NO_HEADERS)
        if self._own_answers is None:
            self._own_answers = OwnAnswers(self._route, self._tasks, self._answer_now)
        self._own_answers.add(id_, body, headers)

    async def _answer_now(self, id_: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        if self.in_flight is not None or not self.lost:  # a call at work waits for it, though no other will follow
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

    # -----------------------------------------------------------------------------------------------------------------

    def _prove(self, headers: Headers) -> None:
        """Note that the upstream has served a message with these headers."""
        self._headers = headers
        self.group.accept(headers)

    def _settle(self) -> None:
        """The call is no longer in flight."""
        self.in_flight = self._odd = None
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

    async def answer(self, upstream_id: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Answer one nested request."""
        message = jsonrpc.answer(upstream_id, body)
        self._show(Direction.TO_UPSTREAM, message, self.in_flight)
        await self.channel.send(message, headers)
        self._headers = headers

    def _show(self, direction: Direction, data: bytes, call: Call | None = None) -> None:
        """Log a message if the configuration asks for bodies."""
        if bodies.on:
            asked_by = call.listener.request_id if call is not None else None
            bodies.show(direction, data, route=self._route, request_id=asked_by)
