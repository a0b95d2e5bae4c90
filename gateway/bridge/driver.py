"""Runs one exchange: feeds it events, obeys its commands, keeps its place in the parking lot.

The driver owns the parts that do the work, and only it feeds the exchange. The parts know each other in one direction:
the takeover knows the upstream call, which knows the timers; all of them know the report.
"""

import secrets
from collections import deque
from typing import Final, assert_never

from gateway.bridge import rerun_rules
from gateway.bridge.context import Context
from gateway.bridge.report import HELD, Report
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.bridge.sealing import Sealing, input_required
from gateway.bridge.takeover import Takeover
from gateway.bridge.timers import Timers
from gateway.bridge.translation import modern_event
from gateway.bridge.upstream_call import UpstreamCall
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import Timer
from gateway.exchange.machine import Exchange, Policy, State
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.protocol.request import Request
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, digest_answers
from gateway.sessions.call import PoolKey
from gateway.sessions.list_cache import CacheKey  # noqa: TC001  (one import style; it costs nothing here)
from gateway.telemetry import Ending, NestedOutcome, Outcome
from gateway.telemetry.status import HeldStatus
from gateway.upstream.channel import Headers

_NEVER_ASKING: Final = Policy(may_ask=False)
_PICKING_UP: Final = (State.RUNNING, State.ASKING)
_FIRED: Final[dict[Timer, on.Event]] = {
    Timer.QUIET: on.QuietPassed(),
    Timer.GRACE: on.GracePassed(),
    Timer.TTL: on.Expired(),
    Timer.LINGER: on.Expired(),
}


class Driver:
    """One exchange at work."""

    def __init__(self, live: LiveRoute, lot: Lot["Driver"], request: Request, key: PoolKey, headers: Headers) -> None:
        self.id = ""
        """Drawn when the exchange is first parked; most exchanges never are."""
        self.principal = key.principal
        self.ticket: CacheKey | None = None
        """Where the result may be kept, if it is a list."""
        policy = live.policies.get(request.method, _NEVER_ASKING)
        self._exchange = Exchange(request.declared, policy, request.input_responses)
        self._context = Context(live, request, key, self._exchange, headers)
        self._lot = lot
        self._timers = Timers(live)
        self._report = Report(self._context)
        self._upstream_call = UpstreamCall(self._context, self._timers, self._report, self)
        self._sealing: Sealing | None = None
        """Made when the exchange first asks."""
        self._takeover: Takeover | None = None
        """Made if another replica began the exchange."""
        self._queues: dict[on.Leg, ResponseQueue] = {}
        self._events: deque[on.Event] | None = None
        """What happened while another event was being handled."""
        self._is_handling = False
        self._forwarded = 0
        self._retries = 0
        """Retries that were accepted so far."""
        self._was_relayed = False
        """Whether another replica had relayed the leg that left last."""

    @property
    def live(self) -> LiveRoute:
        """The route as it was when the exchange began; a reload does not change it."""
        return self._context.live

    @property
    def request_id(self) -> str | None:
        """The id of the newest leg's HTTP request, for the log."""
        return self._context.request_id

    def glance(self, now: float) -> HeldStatus:
        """The exchange on the status page; `now` is the monotonic time."""
        return self._report.held_status(now)

    # -- from the client's side ---------------------------------------------------------------------------------

    def begin(self, queue: ResponseQueue) -> None:
        """Start with the first leg."""
        self._add(queue)
        self._feed(on.Called(queue.leg))

    @classmethod
    def take_over(  # noqa: PLR0913  (what a retry brings, and what is known of its owner)
        cls,
        live: LiveRoute,
        lot: Lot["Driver"],
        request: Request,
        key: PoolKey,
        headers: Headers,
        envelope: Envelope,
        queue: ResponseQueue,
        *,
        is_proven: bool,
    ) -> "Driver":
        """Restore the exchange of a retry whose owner cannot be reached, and continue it; raises Busy.

        `is_proven` if the owner is certainly dead. Nothing goes upstream before the answers are checked. The exchange
        takes its place in the parking lot before that; a failure in here gives it back, and nothing is awaited.
        """
        driver = cls(live, lot, request, key, headers)
        try:
            driver._restore(envelope, is_proven=is_proven)
            driver.answer(queue, request, envelope.round, headers)
        except BaseException:
            driver._discard()
            raise
        return driver

    def _restore(self, envelope: Envelope, *, is_proven: bool) -> None:
        call = self._upstream_call
        self.id = envelope.exchange
        self._takeover = Takeover(self._context, self._report, call, envelope, owner_is_dead=is_proven)
        call.restore(envelope.upstream)
        self._lot.park(self)
        before = self._exchange.state
        self._exchange.restore(handoff.past(envelope))
        self._moved(before, self._exchange.state)

    def _discard(self) -> None:
        """Forget an exchange whose retry was refused after it had been restored for it."""
        self._timers.disarm_all()
        self._upstream_call.abandon()
        self._moved(self._exchange.state, State.IDLE)
        self._lot.remove(self)

    def answer(self, queue: ResponseQueue, request: Request, round_: int, headers: Headers) -> None:
        """Continue with a further leg; raises a DownstreamError and then leaves the call as it was."""
        answers = request.input_responses or {}
        answered = on.Answered(queue.leg, round_, digest_answers(answers), answers)
        self._add(queue)
        before, self._context.headers = self._context.headers, headers
        try:
            self._feed(answered)
        except GatewayError:
            self._context.headers = before
            del self._queues[queue.leg]
            raise
        self._retries += 1

    def _add(self, queue: ResponseQueue) -> None:
        self._queues[queue.leg] = queue
        self._context.request_id, self._context.span = queue.request_id, queue.span

    async def authorise(self, key: PoolKey, headers: Headers) -> None:
        """Have the upstream check a retry's credential where the call runs, or ran; raises as `Pool.authorise`."""
        await self.live.upstream.pool.authorise(key, headers, self._upstream_call.session)

    def leave(self, leg: on.Leg, *, is_relayed: bool = False) -> None:
        """The client of a leg closed its connection, or the replica that relayed the leg did (`is_relayed`)."""
        self._was_relayed = is_relayed
        self._feed(on.Left(leg))
        self._queues.pop(leg, None)

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
        is_ours = self._exchange.round > round_ or self._takeover is not None
        return is_ours and self._upstream_call.runs == 0

    def stop(self, error: GatewayError) -> None:
        """Give the exchange up, and end its waiting legs with this error."""
        self._feed(on.Stopped(error))

    def forget(self) -> None:
        """Drop the kept result."""
        self._timers.disarm(Timer.LINGER)

    # -- from the upstream's side -------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take one event of the upstream call."""
        match event:
            case on.Progressed():
                self._forward(event, mcp.PROGRESS)
            case on.Logged():
                self._forward(event, mcp.LOG)
            case on.Stopped():
                self._feed_unless_resumed_elsewhere(event)
            case _:
                call, report = self._upstream_call, self._report
                translated = modern_event(self._context, report, call.server_info, self.ticket, event)
                if isinstance(event, on.Resulted | on.Failed):
                    call.end_span(report.call_ending(event, translated))
                self._feed(translated)

    def _forward(self, event: on.Event, method: str) -> None:
        """Let the exchange decide whether a leg wants a notification, and count what it decides."""
        before = self._forwarded
        self._feed(event)
        self.live.process.metrics.notification(self.live.route.path, method, forwarded=self._forwarded > before)

    # -- the machine --------------------------------------------------------------------------------------------

    def _feed(self, event: on.Event) -> None:
        """Handle one event, and then, one after the other, those that obeying its commands brings about."""
        if self._is_handling:
            self._later(event)
            return
        self._is_handling = True
        try:
            self._handle(event)
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._is_handling = False

    def _later(self, *events: on.Event) -> None:
        if self._events is None:
            self._events = deque()
        self._events += events

    def _handle(self, event: on.Event) -> None:
        before = self._exchange.state
        for command in self._exchange.handle(event):
            self._obey(command)
        after = self._exchange.state
        if after is not before:
            self._moved(before, after)
            if self._takeover is not None and after in _PICKING_UP:
                self._takeover.pick_up(self, self._give_back)

    def _moved(self, before: State, after: State) -> None:
        """Keep pool, report and parking lot true to the state."""
        was_held, is_held = before in HELD, after in HELD
        if was_held or is_held:
            self._upstream_call.rest(resting=is_held)
        if is_held and not was_held:
            self._upstream_call.note("parked")
            self._report.parked()
        elif was_held and not is_held:
            self._upstream_call.note("unparked")
            self._report.unparked()
        if after is State.ENDED:
            self._ended()

    def _ended(self) -> None:
        self._timers.disarm_all(but_linger=True)
        self._upstream_call.end()
        if Timer.LINGER in self._timers:
            self._lot.keep(self)
        elif self._exchange.round:
            self._lot.remove(self)
        self._report.finished()

    def _obey(self, command: do.Command) -> None:  # noqa: C901, PLR0912  (one match over all commands)
        match command:  # what a plain call needs stands first
            case do.SendCall():
                self._upstream_call.start()
            case do.RunAgain():
                self._upstream_call.run_again()
            case do.Arm(timer=timer):
                self._timers.arm(timer, self._fire)
            case do.Disarm(timer=timer):
                self._timers.disarm(timer)
            case do.DisarmLeg():
                self._timers.disarm_leg()
            case do.Reply(legs=legs, result=result):
                for leg in legs:
                    self._finish(leg, FinalMessage(jsonrpc.result(leg.id, result), ending=self._report.ending))
            case do.ReleaseSession(clean=clean):
                self._upstream_call.release(clean=clean)
            case do.SendAnswers(answers=answers):
                self._upstream_call.send_answers(answers)
            case do.Respond(upstream_id=id_, result=result, error=error):
                self._upstream_call.respond(id_, result if result is not None else error)
            case do.CancelCall(reason=reason):
                self._report.cancelled()
                self._upstream_call.cancel(reason)
            case do.Forward(leg=leg, message=message):
                self._forwarded += 1
                self._queues[leg].send(message)
            case do.Ask():
                self._ask(command)
            case do.Fail(legs=legs, error=failed):
                self._fail(legs, failed)
            case do.FailWith(legs=legs, error=error):
                ending = self._report.failed_with(error)
                for leg in legs:
                    self._finish(leg, FinalMessage(jsonrpc.failure(leg.id, error), ending=ending))
            case do.Count(method=method, outcome=outcome):
                self.live.process.metrics.nested_request(self.live.route.path, method, NestedOutcome(outcome))
            case _:
                assert_never(command)

    # -- downstream ---------------------------------------------------------------------------------------------

    def _finish(self, leg: on.Leg, last: FinalMessage) -> None:
        queue = self._queues.pop(leg)
        queue.finish(last)
        if queue.dropped:
            self.live.process.metrics.notifications_dropped(self.live.route.path, queue.dropped)

    def _fail(self, legs: tuple[on.Leg, ...], error: GatewayError) -> None:
        self._report.failed(error)
        for leg in legs:
            self._finish(leg, FinalMessage.of_error(error, leg.id, self._queues[leg].request_id))

    def _ask(self, ask: do.Ask) -> None:
        """Seal the state, park the exchange, and hand the questions to the client."""
        self.id = self.id or secrets.token_urlsafe(16)
        self._sealing = self._sealing or Sealing(self._context)
        call = self._upstream_call
        try:
            state = self._sealing.seal(self.id, ask, call.whereabouts() if ask.held else None)
            if ask.held and ask.stays:
                self._lot.park(self)
        except GatewayError as exc:
            self._fail(ask.legs, exc)
            self._later(on.Stopped(exc), on.Expired())
            return
        body = input_required(ask.questions, state, call.server_info)
        ending = Ending(Outcome.INPUT_REQUIRED if ask.questions else Outcome.STATE_ONLY)
        for leg in ask.legs:
            self._finish(leg, FinalMessage(jsonrpc.result(leg.id, body), ending=ending))

    # -- the end of a wait --------------------------------------------------------------------------------------

    def _fire(self, timer: Timer) -> None:
        if timer is Timer.LEG:
            self._upstream_call.watch_silence()
        if timer is Timer.TTL or (timer is Timer.GRACE and self._was_relayed):
            self._feed_unless_resumed_elsewhere(_FIRED[timer])
            return
        self._feed(on.LegLimitPassed(self._lot.has_place(self)) if timer is Timer.LEG else _FIRED[timer])
        if timer is Timer.LINGER:
            self._lot.remove(self)

    def _give_back(self, error: GatewayError) -> None:
        """Forget a call that cannot be picked up while its silent owner may hold it; its client comes again."""
        self.hear(on.Broke(error))
        self._timers.disarm(Timer.LINGER)
        self._feed(on.Expired())
        self._lot.remove(self)

    def _feed_unless_resumed_elsewhere(self, event: on.Event) -> None:
        """Give the call up, or let it go silently if a replica that believed this one dead has resumed it."""
        is_left = self._exchange.state in (State.PARKED, State.DETACHED) and self._exchange.calling
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
