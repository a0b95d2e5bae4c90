"""Runs one exchange: feeds it events, obeys its commands, keeps its place in the parking lot.

The driver owns the parts that do the work, and only it feeds the exchange. The parts know each other in one direction:
the takeover knows the upstream call, which knows the timers; all of them know the report.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar, Final

from msgspec import Raw

from gateway.bridge import rerun_rules
from gateway.bridge.exchange_context import Context
from gateway.bridge.exchange_report import HELD, Report
from gateway.bridge.exchange_timers import Timers
from gateway.bridge.replies import Replies
from gateway.bridge.response_queue import ResponseQueue
from gateway.bridge.sealing import input_required
from gateway.bridge.takeover import Takeover, cooled
from gateway.bridge.translation import modern_event
from gateway.bridge.upstream_call import BUG, UpstreamCall
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import COLD, GRACE, LEG, LINGER, QUIET, TTL, Timer
from gateway.exchange.machine import ASKING, DETACHED, ENDED, FINISHED, IDLE, PARKED, RUNNING, Exchange, Policy, State
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, LocalProtocolError
from gateway.protocol.request import Request
from gateway.routes.cold_calls import ColdCall
from gateway.routes.held_calls import Lot
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import TICK_SECONDS
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, digest_answers
from gateway.sessions.call import Call, Listener, PoolKey
from gateway.sessions.list_cache import CacheKey
from gateway.sessions.session import Session
from gateway.telemetry import NestedOutcome
from gateway.telemetry.process_status import HeldStatus
from gateway.upstream.channel import Headers

NewCall = Callable[[Context, Timers, Report, Listener], UpstreamCall]
_NEVER_ASKING: Final = Policy(may_ask=False)
_PICKING_UP: Final = (RUNNING, ASKING)
_NOTICES: Final[dict[type[on.Event], str]] = {on.Progressed: mcp.PROGRESS, on.Logged: mcp.LOG}
_ENDINGS: Final = (on.Resulted, on.Failed)
_REFUSALS: Final = (GatewayError, LocalProtocolError)
"""What an exchange raises that refuses an event, and then it has changed nothing."""
_outcome: Final = cache(NestedOutcome)
_FIRED: Final[dict[Timer, on.Event]] = {
    QUIET: on.QuietPassed(),
    GRACE: on.GracePassed(),
    TTL: on.Expired(),
    LINGER: on.Expired(),
}


class Driver:
    """One exchange at work."""

    __slots__ = (
        "_cold",
        "_context",
        "_exchange",
        "_later",
        "_lot",
        "_replies",
        "_report",
        "_retries",
        "_takeover",
        "_timers",
        "_upstream_call",
        "_was_relayed",
        "address",
        "id",
        "live",
        "principal",
    )

    def __init__(  # noqa: PLR0913  (everything that a first round knows)
        self,
        live: LiveRoute,
        lot: Lot["Driver"],
        request: Request,
        key: PoolKey,
        headers: Headers,
        address: str = "",
        new_call: NewCall = UpstreamCall,
    ) -> None:
        """`new_call` makes the upstream call, which may be a task."""
        self.id = ""
        """Drawn when the exchange is first parked; most exchanges never are."""
        self.principal = key.principal
        self.address = address
        self.live = live
        """The route as it was when the exchange began; a reload does not change it."""
        policy = live.policies.get(request.method, _NEVER_ASKING)
        self._exchange = Exchange(request.declared, policy, request.input_responses)
        self._context = Context(live, request, key, self._exchange, headers, address)
        self._lot = lot
        self._timers = Timers(live)
        self._report = Report(self._context)
        self._upstream_call = new_call(self._context, self._timers, self._report, self)
        self._replies = Replies(self._context, self._report)
        self._takeover: Takeover | None = None
        """Made if another replica began the exchange, or this one let go of it."""
        self._cold: ColdCall | None = None
        """What was kept of the exchange while it was cold."""
        self._later: list[on.Event] | None = None
        """While an event is being handled: it, and what happens meanwhile."""
        self._retries = 0
        """Retries that were accepted so far."""
        self._was_relayed = False
        """Whether another replica had relayed the leg that left last."""

    @property
    def request_id(self) -> str | None:
        """The id of the newest leg's HTTP request, for the log."""
        return self._context.request_id

    @property
    def is_finished(self) -> bool:
        """Whether the call has its final result or error."""
        return self._exchange.state in {FINISHED, ENDED}

    @property
    def kept_bytes(self) -> int:
        """The memory that the exchange takes after its end: its result, and the request that its caller sent."""
        return self._replies.last_bytes + sum(map(len, self._context.request.params.values()))

    def glance(self, now: float) -> HeldStatus:
        """The exchange on the status page; `now` is the monotonic time."""
        return self._report.held_status(now)

    # -- from the client's side ---------------------------------------------------------------------------------

    def begin(self, queue: ResponseQueue, ticket: CacheKey | None = None) -> None:
        """Start with the first leg; `ticket` says where the result may be kept, if it is a list."""
        self._context.ticket = ticket
        self._replies.add(queue)
        self._feed(on.Called(queue.leg))

    def carry_on(
        self, queue: ResponseQueue, ticket: CacheKey | None, session: Session, call: Call, seconds: float
    ) -> None:
        """Start with the first leg, whose call has run in this session for `seconds` already."""
        self._upstream_call.carry_on(session, call)
        self._report.began_before(seconds)
        self.begin(queue, ticket)
        if seconds > TICK_SECONDS and LEG in self._timers:
            self._timers.arm(LEG, self._fire, max(0.0, self.live.config.legs.limit_seconds - seconds))
        self._upstream_call.read_on(session, call)

    def take_over(
        self, envelope: Envelope, queue: ResponseQueue, *, is_proven: bool, cold: ColdCall | None = None
    ) -> None:
        """Restore the exchange of a retry whose owner cannot be reached, and continue it; raises Busy.

        `is_proven` if the owner is certainly dead, or the call was `cold` here. Nothing goes upstream before the
        answers are checked. The exchange takes its place in the parking lot before that; a failure in here gives it
        back, and nothing is awaited.
        """
        context = self._context
        self.id = envelope.exchange
        if envelope.upstream is not None:
            context.server_info = Raw(envelope.upstream.server_info)
        self._cold = cold
        self._takeover = Takeover(
            context, self._report, self._upstream_call, envelope, owner_is_dead=is_proven, was_cold=cold is not None
        )
        try:
            self._lot.park(self, is_continued=True)
            self._exchange.restore(handoff.past(envelope))
            self._moved(IDLE, self._exchange.state)
            self.answer(queue, context.request, envelope.round, context.headers)
        except BaseException:
            self._timers.disarm_all()
            self._upstream_call.abandon()
            self._moved(self._exchange.state, IDLE)
            self._lot.remove(self)
            raise

    def answer(self, queue: ResponseQueue, request: Request, round_: int, headers: Headers) -> None:
        """Continue with a further leg; raises a DownstreamError and then leaves the call as it was."""
        answers = request.input_responses or {}
        answered = on.Answered(queue.leg, round_, digest_answers(answers), answers)
        self._replies.add(queue)
        before, self._context.headers = self._context.headers, headers
        try:
            self._feed(answered)
        except GatewayError:
            self._context.headers = before
            self._replies.discard(queue.leg)
            raise
        self._retries += 1

    async def authorise(self, key: PoolKey, headers: Headers) -> None:
        """Have the upstream check a retry's credential where the call runs, or ran; raises as `Pool.authorise`."""
        await self.live.upstream.pool.authorise(key, headers, self._upstream_call.session)

    def leave(self, leg: on.Leg, *, is_relayed: bool = False) -> None:
        """The client of a leg closed its connection, or the replica that relayed the leg did (`is_relayed`)."""
        self._was_relayed = is_relayed
        self._feed(on.Left(leg))
        self._replies.discard(leg)

    def hand_over(self) -> None:
        """End the waiting legs with a state-only round, so that their clients come back through other replicas."""
        self._feed(on.HandedOver(self._lot.has_place(self)))

    def let_go(self) -> bool:
        """Keep nothing of an exchange that another replica can continue; returns whether one can."""
        is_resumable = self._upstream_call.is_resumable
        if not is_resumable and not rerun_rules.may_run_twice(self._context):
            return False
        if is_resumable:
            self._upstream_call.let_go()
        self._feed(on.LetGo(cancel=not is_resumable))
        return True

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica continued the exchange after that round, in the same upstream call."""
        is_ours = self._exchange.round > round_ or self._is_of_another_replica
        return is_ours and self._upstream_call.runs == 0

    @property
    def _is_of_another_replica(self) -> bool:
        return self._takeover is not None if self._cold is None else self._cold.is_taken_over

    def stop(self, error: GatewayError) -> None:
        """Give the exchange up, and end its waiting legs with this error."""
        self._feed(on.Stopped(error))

    def expire(self) -> None:
        """End a held exchange as if its time was over, because its client cannot come back."""
        self._fire(TTL)

    def forget(self) -> None:
        """Drop the kept result."""
        self._timers.disarm(LINGER)

    # -- from the upstream's side -------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take one event of the upstream call."""
        if isinstance(event, on.Nested):
            self._feed(event)
            return
        if isinstance(event, on.Stopped):
            self._feed_unless_resumed_elsewhere(event)
            return
        translated = modern_event(self._context, self._report, event)
        if isinstance(event, _ENDINGS):
            ending = self._report.call_ending(event, translated)
            self._report.answered(ending)
            if self.live.process.traces is not None:
                self._upstream_call.end_span(ending)
        self._feed(translated)

    # -- the machine --------------------------------------------------------------------------------------------

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
                    if self._takeover is not None and after in _PICKING_UP:
                        self._takeover.pick_up(self, self._give_back)
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
        """Keep pool, report and parking lot true to the state."""
        if after in HELD:
            self._upstream_call.rest(resting=True)
            if before not in HELD:
                if self.live.process.traces is not None:
                    self._upstream_call.note("parked")
                self._report.parked()
        elif before in HELD:
            self._upstream_call.rest(resting=False)
            if self.live.process.traces is not None:
                self._upstream_call.note("unparked")
            self._report.unparked()
        if after is PARKED:
            self._timers.arm(COLD, self._fire)
        elif before is PARKED:
            self._timers.disarm(COLD)
        if after is ENDED:
            self._ended()

    def _ended(self) -> None:
        self._timers.disarm_all(but_linger=True)
        self._upstream_call.end()
        if LINGER in self._timers:
            self._lot.keep(self)
        elif self._exchange.round:
            self._lot.remove(self)
        self._report.finished()

    def _cancel(self, reason: str) -> None:
        self._report.cancelled()
        if self._takeover is not None and not self._upstream_call.is_started:
            self._takeover.give_up(reason)
        self._upstream_call.cancel(reason)

    def _ask(self, ask: do.Ask) -> None:
        """Seal the state, park the exchange, and hand the questions to the client."""
        self.id = self.id or secrets.token_urlsafe(16)
        try:
            body = input_required(self._context, self.id, ask, self._upstream_call.whereabouts())
            if ask.held and ask.stays:
                self._lot.park(self)
                self._context.request = self._context.request.held()
        except GatewayError as exc:
            self._replies.fail(ask.legs, exc)
            self._feed(on.Stopped(exc))
            self._feed(on.Expired())
        else:
            self._replies.ask(ask, body)

    _OBEY: ClassVar[dict[type[do.Command], Callable[["Driver", Any], None]]] = {
        do.Arm: lambda self, it: self._timers.arm(it.timer, self._fire),
        do.Ask: lambda self, it: self._ask(it),
        do.CancelCall: lambda self, it: self._cancel(it.reason),
        do.Count: lambda self, it: self.live.process.metrics.nested_request(
            self.live.route.path, it.method, _outcome(it.outcome)
        ),
        do.Disarm: lambda self, it: self._timers.disarm(it.timer),
        do.DisarmLeg: lambda self, _: self._timers.disarm_leg(),
        do.Fail: lambda self, it: self._replies.fail(it.legs, it.error),
        do.FailWith: lambda self, it: self._replies.end(it),
        do.Forward: lambda self, it: self._replies.forward(it.leg, it.message),
        do.ReleaseSession: lambda self, it: self._upstream_call.release(clean=it.clean),
        do.Reply: lambda self, it: self._replies.end(it),
        do.Respond: lambda self, it: self._upstream_call.respond(
            it.upstream_id, it.error if it.result is None else it.result
        ),
        do.RunAgain: lambda self, _: self._upstream_call.run_again(),
        do.SendAnswers: lambda self, it: self._upstream_call.send_answers(it.answers),
        do.SendCall: lambda self, _: self._upstream_call.start(),
    }
    """What carries each command out: every command has its own class."""

    # -- the end of a wait --------------------------------------------------------------------------------------

    def _cool(self) -> None:
        """Let go of a parked call that its state alone continues; any other one is looked at again later."""
        call, due = self._upstream_call, self._timers.deadline(TTL)
        upstream = call.whereabouts() if call.can_be_left else None
        is_taken_over = self._is_of_another_replica and call.runs == 0
        record = cooled(self.id, self._context, upstream, due or 0.0, is_taken_over=is_taken_over)
        if record is None or not self._lot.cold.has_room(record):
            self._timers.arm(COLD, self._fire)
            return
        self._report.cooled()
        call.let_go()
        self._feed(on.LetGo(cancel=False))
        self._lot.cold.add(record)

    def _fire(self, timer: Timer) -> None:
        if timer is COLD:
            self._cool()
            return
        if timer is LEG:
            self._upstream_call.watch_silence()
        if timer is TTL or (timer is GRACE and self._was_relayed):
            self._feed_unless_resumed_elsewhere(_FIRED[timer])
            return
        self._feed(on.LegLimitPassed(self._lot.has_place(self)) if timer is LEG else _FIRED[timer])
        if timer is LINGER:
            self._lot.remove(self)

    def _give_back(self, error: GatewayError) -> None:
        """Forget a call that cannot be picked up now; its client comes again. A silent owner may hold it."""
        self.hear(on.Broke(error))
        self._timers.disarm(LINGER)
        self._feed(on.Expired())
        self._lot.remove(self)
        if self._cold is not None:
            self._lot.cold.add(self._cold)

    def _feed_unless_resumed_elsewhere(self, event: on.Event) -> None:
        """Give the call up, or let it go silently if a replica that believed this one dead has resumed it."""
        is_left = self._exchange.state in (PARKED, DETACHED)
        if is_left and self._upstream_call.may_be_resumed_elsewhere:
            self.live.process.tasks.spawn(self._ask_replicas(event), "ask about an expired call")
        else:
            self._feed(event)

    async def _ask_replicas(self, event: on.Event) -> None:
        retries, state = self._retries, self._exchange.state
        is_resumed = await self.live.process.witness.may_be_taken(self.id, self._exchange.round)
        if self._retries != retries:  # its client came meanwhile
            if isinstance(event, on.Stopped):
                self._upstream_call.watch_silence()
        elif is_resumed and self._exchange.state is state:
            self._report.cancelled(
                "another replica has resumed the call, or could not be asked: it was not cancelled upstream"
            )
            self._upstream_call.let_go()
            self._feed(on.LetGo(cancel=False))
        elif self._exchange.state is state or not isinstance(event, on.GracePassed):
            self._feed(event)  # but a result that came within the grace period is kept as usual
