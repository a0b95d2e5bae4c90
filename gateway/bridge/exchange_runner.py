"""Runs one exchange: feeds it events, then carries out its commands in their order."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar, Final

from gateway import world
from gateway.bridge.call_context import ClientCall, Context
from gateway.bridge.call_report import HELD, Report
from gateway.bridge.call_timers import Timers
from gateway.bridge.input_required import input_required
from gateway.bridge.request_call import RequestCall
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.bridge.takeover import Takeover  # noqa: TC001  (one import style; it costs nothing here)
from gateway.bridge.upstream_call import BUG, UpstreamCall
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import COLD, LINGER, Timer
from gateway.exchange.machine import ASKING, ENDED, PARKED, RESTORED, RUNNING, Exchange, Policy, State
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, LocalProtocolError
from gateway.routes.held_calls import Lot
from gateway.runtime.call_bytes import Weight
from gateway.sessions.call import Listener
from gateway.telemetry import Ending, NestedOutcome, Outcome

NewCall = Callable[[Context, Report, Listener], UpstreamCall]
_ASKED: Final = Ending(Outcome.INPUT_REQUIRED)
_STATE_ONLY: Final = Ending(Outcome.STATE_ONLY)
_NEVER_ASKING: Final = Policy(may_ask=False)
_PICKING_UP: Final = (RUNNING, ASKING)
_COOLING: Final = (PARKED, RESTORED)
_NOTICES: Final[dict[type[on.Event], str]] = {on.Progressed: mcp.PROGRESS, on.Logged: mcp.LOG}
_REFUSALS: Final = (GatewayError, LocalProtocolError)
"""What an exchange raises that refuses an event, and then it has changed nothing."""
_outcome: Final = cache(NestedOutcome)


class ExchangeRunner(ABC):
    """An exchange with the parts that do its work; only this file feeds the exchange.

    The parts know each other in one direction: the takeover knows the upstream call; both of them know the report.
    """

    __slots__ = (
        "_context",
        "_exchange",
        "_later",
        "_lot",
        "_replies",
        "_report",
        "_takeover",
        "_timers",
        "_upstream_call",
        "_weight",
        "address",
        "live",
        "principal",
    )

    def __init__(
        self, asked: ClientCall, lot: Lot[Any], new_call: NewCall | None = None, weight: Weight | None = None
    ) -> None:
        """`new_call` makes the upstream call, if it is not one request. A call without a `weight` is continued."""
        live, request = asked.live, asked.request
        self.principal = asked.key.principal
        self.address = asked.address
        self.live = live
        """The route as it was when the exchange began; a reload does not change it."""
        policy = live.policies.get(request.method, _NEVER_ASKING)
        self._exchange = exchange = Exchange(request.said.declared, policy, request.input_responses)
        self._context = context = Context(
            live, request, asked.key, asked.headers, asked.address, asked.ticket, asked.body_bytes, exchange=exchange
        )
        self._lot = lot
        self._timers = Timers(live)
        self._report = Report(context)
        self._upstream_call = (new_call or RequestCall)(context, self._report, self)
        self._replies = Replies(context, self._report)
        self._takeover: Takeover | None = None
        """Made if another replica began the exchange, or this one let go of it."""
        self._weight = weight or asked.weigh(is_continued=True)
        """Released when the exchange ends."""
        self._later: list[on.Event] | None = None
        """While an event is being handled: it, and what happens meanwhile."""

    @property
    def id(self) -> str:
        """The id of the exchange; empty before it is first parked."""
        return self._context.exchange_id

    @property
    def request_id(self) -> str | None:
        """The id of the newest leg's HTTP request, for the log."""
        return self._context.request_id

    @property
    def kept_bytes(self) -> int:
        """The memory that the exchange takes after its end: its result, and the request that its caller sent."""
        return self._replies.last_bytes + self._context.request.params_size

    def forget(self) -> None:
        """Drop the kept result."""
        self._timers.disarm(LINGER)

    @abstractmethod
    def hear(self, event: on.Event) -> None:
        """Take one event of the upstream call."""

    @abstractmethod
    def fire(self, timer: Timer) -> None:
        """Take the end of a timer."""

    @abstractmethod
    def _give_back(self, error: GatewayError) -> None:
        """Forget a call that cannot be picked up now; its client comes again."""

    def _feed(self, event: on.Event) -> None:
        """Handle an event, and then, one after the other, those that obeying its commands brings about."""
        if self._later is not None:
            self._later.append(event)
            return
        self._later = events = [event]
        exchange, obey = self._exchange, self._OBEY
        settled, is_taken = exchange.state, False
        try:
            for each in events:  # it grows meanwhile
                commands = exchange.handle(each)
                is_taken = True
                for command in commands:
                    obey[type(command)](self, command)
                if (after := exchange.state) is not settled:
                    before, settled = settled, after
                    self._moved(before, after)
                if (notice := _NOTICES.get(type(each))) is not None:
                    self.live.process.metrics.notification(self.live.route.path, notice, forwarded=bool(commands))
        except Exception as exc:
            if is_taken or not isinstance(exc, _REFUSALS):
                self._crashed(settled)
            raise
        finally:
            self._later = None

    def _crashed(self, settled: State) -> None:
        """End the exchange after a bug, with one error to each leg that waits, and give back what it has.

        `settled` is the state of which pool, report and lot were told last. The bug itself is reported where it is
        caught, so another one on the way is not.
        """
        self._exchange.crash()
        self._weight.release()
        call, error = self._upstream_call, CallLost(BUG)
        steps: list[Callable[[], None]] = [
            partial(self._replies.fail_all, error),
            partial(call.drop, error.message),
            self._timers.disarm_all,
            partial(self._moved, settled, ENDED),
            partial(self._lot.remove, self),
        ]
        for step in steps[:2] if settled is ENDED else steps:
            with suppress(Exception):
                step()

    def _moved(self, before: State, after: State) -> None:
        """Keep pool, report and parking lot true to the state, and pick up a call that was continued."""
        if after in HELD:
            self._upstream_call.rest(resting=True)
            if before not in HELD:
                self._report.parked()
        elif before in HELD:
            self._upstream_call.rest(resting=False)
            self._report.unparked()
        if after in _COOLING:
            self._timers.arm(COLD, self)
        elif before in _COOLING:
            self._timers.disarm(COLD)
        if after is ENDED:
            self._ended()
            return
        self._weigh()
        if self._takeover is not None and after in _PICKING_UP:
            self._takeover.pick_up(self, self._give_back)

    def _weigh(self) -> None:
        """Weigh what the call keeps now; a parked one keeps its params, and nothing else of its request."""
        context, request = self._context, self._context.request
        came = request.params_size if request.is_held else context.body_bytes
        self._weight.change(came + self._upstream_call.message_bytes + self._exchange.kept_bytes)

    def _ended(self) -> None:
        self._weight.release()
        self._timers.disarm_all(but_linger=True)
        self._upstream_call.end()
        if LINGER in self._timers:
            self._lot.keep(self)
        elif self._exchange.round:
            self._lot.remove(self)
        self._report.finished()

    def _cancel(self, reason: str) -> None:
        call = self._upstream_call
        self._report.cancelled()
        if self._takeover is not None and call.session is None and not call.runs:
            self._takeover.give_up(reason)
        call.cancel(reason)

    def _ask(self, ask: do.Ask) -> None:
        """Seal the state, park the exchange, and hand the questions to the client."""
        self._context.exchange_id = self.id or world.random_bytes(16).hex()
        left = self._takeover.left if self._takeover is not None and self._exchange.state is RESTORED else None
        try:
            body = input_required(self._context, self.id, ask, self._upstream_call.whereabouts(), left)
            if ask.held and ask.stays:
                self._lot.park(self)
                self._context.request = self._context.request.held()
                if self._takeover is not None:
                    self._takeover.renew()
        except GatewayError as exc:
            self._replies.fail(ask.legs, exc)
            self._feed(on.Stopped(exc))
            self._feed(on.Expired())
        else:
            self._replies.ask(ask, body)

    _OBEY: ClassVar[dict[type[do.Command], Callable[["ExchangeRunner", Any], None]]] = {
        do.Arm: lambda self, it: self._timers.arm(it.timer, self),
        do.Ask: _ask,
        do.CancelCall: lambda self, it: self._cancel(it.reason),
        do.Count: lambda self, it: self.live.process.metrics.nested_request(
            self.live.route.path, it.method, _outcome(it.outcome)
        ),
        do.Disarm: lambda self, it: self._timers.disarm(it.timer),
        do.DisarmLeg: lambda self, _: self._timers.disarm_leg(),
        do.Fail: lambda self, it: self._replies.fail(it.legs, it.error),
        do.Forward: lambda self, it: self._replies.queue(it.leg).send(it.message),
        do.ReleaseSession: lambda self, it: self._upstream_call.release(clean=it.clean),
        do.Reply: lambda self, it: self._replies.end(it.legs, it.result, self._report.completed()),
        do.Respond: lambda self, it: self._upstream_call.respond(
            it.upstream_id, it.error if it.result is None else it.result
        ),
        do.RunAgain: lambda self, _: self._upstream_call.run_again(),
        do.SendAnswers: lambda self, it: self._upstream_call.send_answers(it.answers),
        do.SendCall: lambda self, _: self._upstream_call.start(),
    }
    """What carries each command out: every command has its own class."""


class Replies:
    """Sends each leg that waits its notifications, then exactly one final message."""

    __slots__ = ("_context", "_queues", "_report", "last_bytes")

    def __init__(self, context: Context, report: Report) -> None:
        self._context = context
        self._report = report
        self._queues: tuple[ResponseQueue, ...] = ()
        """Nearly always one or none."""
        self.last_bytes = 0
        """The size of the newest reply."""

    def add(self, queue: ResponseQueue) -> None:
        """A leg waits from now on; it is the newest."""
        self._queues += (queue,)
        self._context.request_id, self._context.span = queue.request_id, queue.span

    def discard(self, leg: on.Leg) -> None:
        """A leg no longer waits, or never did."""
        if self._queues:
            self._queues = tuple([queue for queue in self._queues if queue.leg is not leg])

    def queue(self, leg: on.Leg) -> ResponseQueue:
        """The queue of a leg that waits."""
        for queue in self._queues:
            if queue.leg is leg:
                return queue
        raise LocalProtocolError("a message for a leg that does not wait")

    def ask(self, ask: do.Ask, body: bytes) -> None:
        """End legs with an InputRequiredResult."""
        self.end(ask.legs, body, _ASKED if ask.questions else _STATE_ONLY)

    def end(self, legs: tuple[on.Leg, ...], result: bytes, ending: Ending) -> None:
        """End legs with a result."""
        for leg in legs:
            self._finish(leg, FinalMessage(jsonrpc.result(leg.id, result), ending=ending))

    def fail(self, legs: tuple[on.Leg, ...], error: GatewayError | jsonrpc.Error) -> None:
        """End legs with an error of the gateway, or with the upstream's own."""
        self._report.failed(error)
        for leg in legs:
            if isinstance(error, GatewayError):
                last = FinalMessage.of_error(error, leg.id, self.queue(leg).request_id)
            else:
                ending = Ending(Outcome.ERROR, str(error.code))
                last = FinalMessage(jsonrpc.failure(leg.id, error), ending=ending)
            self._finish(leg, last)

    def fail_all(self, error: GatewayError) -> None:
        """End every leg that waits with an error of the gateway."""
        self.fail(tuple([queue.leg for queue in self._queues]), error)

    def _finish(self, leg: on.Leg, last: FinalMessage) -> None:
        queue = self.queue(leg)
        if len(self._queues) == 1:
            self._queues = ()
        else:
            self.discard(leg)
        queue.finish(last)
        self.last_bytes = len(last.body)
        if queue.dropped:
            live = self._context.live
            live.process.metrics.notifications_dropped(live.route.path, queue.dropped)
