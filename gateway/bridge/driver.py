"""The exchange of a modern client before a legacy server: rounds on one side, one upstream call on the other."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from gateway.bridge.call_context import HELD, ClientCall, Context, allows_rerun
from gateway.bridge.input_required import input_required
from gateway.bridge.modern_to_legacy import modern_event, modern_notification
from gateway.bridge.request_call import RequestCall
from gateway.bridge.response_queue import ResponseQueue
from gateway.bridge.takeover import Takeover, cooled
from gateway.bridge.upstream_call import UpstreamCall
from gateway.cluster import witness
from gateway.engine.engine import Engine
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import COLD, GRACE, LEG, LINGER, QUIET, TTL, Timer
from gateway.exchange.machine import (
    DETACHED,
    ENDED,
    FINISHED,
    IDLE,
    OWNED,
    PARKED,
    REFERRED,
    RESTORED,
    SETTLED,
    WAITING,
    Exchange,
    Policy,
    State,
)
from gateway.http.outbox import FinalMessage, ending_of
from gateway.parking.cold_calls import ColdCall
from gateway.parking.lot import Lot
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    Busy,
    DownstreamError,
    GatewayError,
    OwnerLost,
    OwnerStalled,
    Refused,
    ShuttingDown,
    UpstreamError,
    bug,
)
from gateway.protocol.request import Request, TextParams
from gateway.runtime.call_bytes import Weight
from gateway.runtime.coarse_timer import TICK_SECONDS
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, digest_answers
from gateway.sessions.call import Listener, PoolKey
from gateway.sessions.pool.authorisation import authorise
from gateway.telemetry import ASKED, OTHER, Ending, Outcome, Step
from gateway.telemetry.process_status import CallStatus, Fate
from gateway.upstream.channel import Headers

NewCall = Callable[[Context, Listener], UpstreamCall]
_STATE_ONLY: Final = Ending(Outcome.STATE_ONLY)
_NEVER_ASKING: Final = Policy(may_ask=False)
_FIRED: Final[dict[Timer, on.Event]] = {
    QUIET: on.QuietPassed(),
    GRACE: on.GracePassed(),
    TTL: on.Expired(),
    LINGER: on.Expired(),
}


class Driver(Engine):
    """One exchange with the parts that do its work."""

    __slots__ = (
        "_context",
        "_lot",
        "_reply_bytes",
        "_retries",
        "_takeover",
        "_upstream_call",
        "_weight",
        "asked",
        "principal",
    )

    def __init__(
        self, asked: ClientCall, lot: Lot["Driver"], new_call: NewCall | None = None, weight: Weight | None = None
    ) -> None:
        """`new_call` makes the upstream call, if it is not one request. A call without a `weight` is continued."""
        live, request = asked.live, asked.request
        self.principal = asked.key.principal
        policy = live.policies.get(request.method, _NEVER_ASKING)
        exchange = Exchange(request.said.declared, policy, request.input_responses)
        super().__init__(live, exchange)
        taken = live, request, asked.key, asked.headers, asked.body_bytes, asked.remote, asked.request_id
        self._context = self.asked = context = Context(
            *taken, exchange_id=asked.exchange_id, has_no_way_back=asked.has_no_way_back, exchange=exchange
        )
        self._lot = lot
        self._upstream_call = (new_call or RequestCall)(context, self)
        self._reply_bytes = 0
        """The size of the newest reply."""
        self._takeover: Takeover | None = None
        """Made if another replica began the exchange, or this one let go of it."""
        self._weight = weight or asked.weigh(is_continued=True)
        """Released when the exchange ends."""
        self._retries = 0
        """Retries that were accepted so far."""

    @property
    def id(self) -> str:
        """The id of the exchange; empty before something needs it."""
        return self._context.exchange_id

    @property
    def about(self) -> Mapping[str, str | None]:
        """See `Listener`."""
        return self._context.about

    @property
    def kept_bytes(self) -> int:
        """The memory that the exchange takes after its end: its result, and the request that its caller sent."""
        return self._reply_bytes + self._context.body_bytes

    @property
    def is_lost(self) -> bool:
        """Whether the call was lost while its client was away."""
        return self._exchange.is_lost

    @property
    def is_finished(self) -> bool:
        """Whether the call has its final result or error, or is a task that its client holds the handle of."""
        return self._exchange.state in {OWNED, SETTLED, FINISHED, ENDED}

    def has_params(self, request: Request) -> bool:
        """Whether a request repeats the params of the held call in the same spelling."""
        params = self._context.request.params
        return isinstance(params, TextParams) and params.text == jsonrpc.encode(request.params)

    def glance(self, now: float) -> CallStatus:
        """The exchange on the status page; `now` is the monotonic time."""
        return self._context.status(now, self.heard, self.at_end)

    @property
    def heard(self) -> float | None:
        """See `UpstreamCall`."""
        return self._upstream_call.heard

    def running_seconds(self, now: float) -> float | None:
        """See `Context`."""
        return self._context.running_seconds(now)

    @property
    def at_end(self) -> Fate | None:
        """What becomes of the call if this process ends before it: what `let_go`, and whoever takes it over, would do.

        None if it is lost already.
        """
        exchange, context, call = self._exchange, self._context, self._upstream_call
        if exchange.is_lost:
            return None
        # Of one that asked for visits to URLs, nobody else knows whether it was sent again.
        is_there = exchange.state is not REFERRED and call.is_resumable
        is_known = allows_rerun(self.live.route, context.request.method, context.request.target)
        # A leg gets a new state. Without one, the tools that the server lists by now are not asked for.
        may_run_twice = context.may_run_twice if exchange.legs else is_known or context.was_repeatable
        return context.fate(
            is_resumable=(is_there or call.keeps_result_readable) and self._leads_on,
            may_run_twice=context.is_state_recorded and may_run_twice,
        )

    @property
    def _leads_on(self) -> bool:
        """Whether its client has, or gets, a state that leads another replica to the call.

        A leg gets a new one. Without a leg, the client has a state that may be older than the first event id.
        """
        return bool(self._exchange.legs) or self._context.is_state_resumable

    # -- from the client's side ---------------------------------------------------------------------------------

    def begin(self, leg: ResponseQueue, seconds: float = 0.0) -> None:
        """Start with the first leg, whose call may have run for `seconds` already."""
        self._context.began_before(seconds)
        self._wait(leg)
        self._feed(on.Called(leg))
        if seconds > TICK_SECONDS and self._deadline(LEG) is not None:  # the shared timer counts from now
            self._arm(LEG, max(0.0, self.live.config.legs.limit_seconds - seconds))

    def take_over(
        self, envelope: Envelope, leg: ResponseQueue, *, is_proven: bool, cold: ColdCall | None = None
    ) -> None:
        """Restore the exchange of a retry whose owner cannot be reached, and continue it; raises Busy.

        `is_proven` if the owner is certainly dead, or the call was `cold` here. Nothing goes upstream before the
        answers are checked. The exchange takes its place in the parking lot before that; a failure in here gives it
        back, and nothing is awaited.
        """
        context = self._context
        may_run_twice = envelope.repeatable or context.may_run_twice
        begun = Takeover(envelope, cold, owner_is_dead=is_proven, may_run_twice=may_run_twice)
        self._takeover, past = begun, begun.envelope
        context.left_by_another(past, is_repeatable=past.repeatable)
        self._upstream_call.left_at(past.upstream)
        try:
            self._lot.park(self)
            self._restore(handoff.past(past))
            self.answer(leg, context.request, envelope.round, context.headers)
        except BaseException:
            self._upstream_call.abandon()
            self._moved(self._exchange.state, IDLE)
            self._disarm_all()  # last: `_moved` goes by the state of the exchange, which has timers
            self._lot.remove(self)
            self._weight.release()
            raise
        if self._exchange.state is RESTORED and not is_proven:
            # The client was only asked again, and its state leads to the owner: two replicas must not wait for it.
            self._context.cancelled("its client was asked again, and another replica may hold the call")
            self._feed(on.LetGo(cancel=False))

    def answer(self, leg: ResponseQueue, request: Request, round_: int, headers: Headers) -> None:
        """Continue with a further leg; raises a DownstreamError and then leaves the call as it was."""
        answers = request.input_responses or {}
        self._wait(leg)
        # Before the event: while it is handled, the answers go upstream with these credentials.
        before, self._context.headers = self._context.headers, headers
        try:
            self._feed(on.Answered(leg, round_, digest_answers(answers), answers))
        except GatewayError:
            self._context.headers = before
            self._waits_no_more(leg)
            raise
        self._retries += 1

    async def authorise(self, key: PoolKey, headers: Headers) -> None:
        """Have the upstream check a retry's credential where the call runs, or ran; raises as `authorise`."""
        await authorise(self.live.upstream.pool, key, headers, self._upstream_call.session)

    def leave(self, leg: ResponseQueue) -> None:
        """The client of a leg closed its connection, or the replica that relayed the leg did."""
        self._feed(on.Left(leg))
        self._waits_no_more(leg)

    def hand_over(self) -> None:
        """End the waiting legs with a state-only round, so that their clients come back through other replicas."""
        self._feed(on.HandedOver(self._may_wait))

    def end_legs(self) -> None:
        """As `hand_over`, if the legs can wait no longer: a call that is never held ends here, to be run again."""
        self.hand_over()
        policy = self.live.policies.get(self._context.request.method)
        if self._exchange.legs and not (policy is not None and policy.holds):
            self._feed(on.LetGo(cancel=True))

    @property
    def _may_wait(self) -> bool:
        """Whether the call may wait without a leg: it has a place, and its next state would say all there is to say.

        A state that was sealed before the answers went out would not ask for them again.
        """
        return not self._upstream_call.is_being_resumed and self._lot.has_place(self)

    def let_go(self) -> bool:
        """Keep nothing of an exchange that another replica can continue; returns whether one can."""
        call, begun = self._upstream_call, self._takeover
        if self.is_finished:
            call.leave_result()  # whether its client has read it is not known either
            return False
        if begun is not None and begun.envelope.round == self._exchange.round and call.is_being_resumed:
            # Its answers wait for the stream, so the state of before is still the newest.
            call.let_go()
            call.abandon()
            self._give_back(ShuttingDown("call again with the same requestState and inputResponses"))
            return True
        is_resumable = call.is_resumable and self._leads_on
        if self._context.has_no_way_back or not (is_resumable or self._context.may_run_twice):
            return False
        if is_resumable:
            call.let_go()  # before the event, whose commands release the session
        self._context.cancelled("the process ends; another one continues the call as soon as its client comes back")
        self._feed(on.LetGo(cancel=not is_resumable))
        return True

    def is_behind(self, envelope: Envelope) -> bool:
        """Whether the replica that sealed a state has the say now.

        It is of a newer round than the exchange has reached here: who still waits here has sent a copy of an earlier
        retry. Or no client waits here, and that replica asked for visits to URLs: it alone sends the call again,
        though the stream that both of them read has told this one of the URLs, too. Or only that replica was asked,
        on the side stream there: each has a round of this number.
        """
        exchange, begun = self._exchange, self._takeover
        if envelope.round != exchange.round or exchange.legs:
            return envelope.round > exchange.round
        if envelope.state == REFERRED and exchange.state in (PARKED, REFERRED):
            return True
        if not envelope.owner or (begun is not None and begun.envelope.round == envelope.round):
            return False  # the call was taken over with this very round: an answer may have had it run again
        asked = [each.upstream_id for each in envelope.open if each.upstream_id is not None]
        return not all(map(exchange.nested_requests.has_heard, asked))

    def lose(self, envelope: Envelope) -> None:
        """Keep nothing of an exchange that the replica which sealed this state has continued.

        The session of the call is left to it, unless it runs the call again in another one, or will: then nobody else
        cancels this run.
        """
        call = self._upstream_call
        may_be_same = envelope.upstream is not None or call.may_be_resumed_elsewhere  # else it can only run it again
        is_same = may_be_same and envelope.is_of_call_at(call.whereabouts())
        if is_same:
            call.let_go()
        self._context.cancelled("another replica has continued the call")
        if self._exchange.legs and envelope.owner:
            if call.is_being_resumed:
                call.abandon()
            self._feed(on.Broke(OwnerStalled(envelope.owner, "has gone on with it"), runs_on=not is_same))
        else:
            self._feed(on.LetGo(cancel=not is_same))
        self.forget()
        self.fire(LINGER)

    @property
    def _is_apart(self) -> bool:
        """Whether the call was run again here, or sent here after visits to URLs that another replica asked for.

        It is not the one of that replica, which nobody but that replica cancels.
        """
        begun, runs = self._takeover, self._upstream_call.runs
        if runs or begun is None:
            return bool(runs)
        return begun.envelope.state == REFERRED or (begun.cold is not None and begun.cold.is_apart)

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica continued the exchange after that round, in the same upstream call."""
        if self._is_apart:
            return False
        exchange, begun = self._exchange, self._takeover
        # Only while a client waits: of two replicas whose clients have left, each would leave the call to the other.
        is_answered = exchange.round == round_ and exchange.state in WAITING
        is_of_another = begun is not None and (begun.cold is None or begun.cold.is_taken_over)
        return exchange.round > round_ or is_answered or is_of_another

    def stop(self, error: GatewayError) -> None:
        """Give the exchange up, and end its waiting legs with this error."""
        self._feed(on.Stopped(error))
        self._upstream_call.end_kept()  # the process ends, and its pool ends only sessions that it has back
        if self._exchange.state is FINISHED:
            self._context.finished()  # its client may be too late

    # -- from the upstream's side -------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take one event of the upstream call."""
        match event:
            case on.Became():
                pass  # the client sees an ordinary call
            case on.Progressed() | on.Logged():
                newest: tuple[Any, ...] = self._exchange.legs[-1:]
                message = modern_notification(event, newest[0]) if newest else None
                if message is not None:  # the client wants it
                    newest[0].send(message)
                method = mcp.PROGRESS if isinstance(event, on.Progressed) else mcp.LOG
                is_wanted = message is not None
                self.live.process.metrics.notification(self.live.route.path, method, forwarded=is_wanted)
            case on.Stopped():
                self._feed_unless_resumed_elsewhere(event)
            case _:
                self._feed(modern_event(self._context, event))

    # -- the end of a wait --------------------------------------------------------------------------------------

    def fire(self, timer: Timer) -> None:
        """Take the end of a timer."""
        if timer is COLD:
            # Let go of a parked call that its state alone continues; any other one is looked at again later.
            call, due = self._upstream_call, self._deadline(TTL)
            upstream = call.whereabouts() if call.can_be_left else None
            is_taken_over = self.has_taken_over(self._exchange.round)
            record = cooled(self._context, upstream, due or 0.0, is_taken_over=is_taken_over, is_apart=self._is_apart)
            if record is None or not self._lot.cold.has_room(record):
                self._arm(COLD)
                return
            # Nothing is awaited from here on: a retry finds either the exchange or the record (decision 39).
            self._context.cooled()
            call.let_go()
            self._feed(on.LetGo(cancel=False))
            self._lot.cold.add(record)
            return
        if timer is LEG:
            self._upstream_call.watch_silence()
        if timer in (TTL, GRACE):  # the client may have gone on through a replica that did not reach this one
            self._feed_unless_resumed_elsewhere(_FIRED[timer])
            return
        self._feed(on.LegLimitPassed(self._may_wait) if timer is LEG else _FIRED[timer])
        if timer is LINGER:
            self._lot.remove(self)

    async def _pick_up(self, begun: Takeover) -> None:
        """Resume a call that was begun elsewhere, or learn that it is lost: the call's own task, as `UpstreamCall`."""
        context, call = self._context, self._upstream_call
        left, is_dead = begun.envelope, begun.owner_is_dead
        is_recorded = self._exchange.record is not None
        try:
            if begun.cold is None:
                context.spoken.taken_over(
                    left.owner, left.round, owner_is_dead=is_dead, is_resumable=left.is_resumable
                )
            await call.resume(begun.upstream(is_recorded=is_recorded), is_shared=not is_dead)
        except GatewayError as exc:
            context.end_call_span(ending_of(exc))
            if not isinstance(exc, OwnerLost):  # that is an error only if the call ends with it
                self.live.upstream.note(exc)
            replayable = context.may_run_again(exc) and self._exchange.record is not None
            if not is_dead and not replayable and self._exchange.round == left.round:
                why = "cannot be reached, and its call cannot be picked up here while it may live"
                refusal = exc if isinstance(exc, Refused) else OwnerStalled(left.owner, why)
                context.stays_elsewhere(refusal)
                self._give_back(refusal)
            elif isinstance(exc, Busy):
                self._give_back(exc)  # no session was free, so nothing has changed upstream
            else:
                why = "its gateway replica is gone" if begun.cold is None else "it cannot be picked up again"
                if call.session is None:
                    begun.end(context, why)
                elif is_dead:
                    call.cancel(why)
                if not replayable:
                    context.step(Step.LOST)
                self.hear(on.Broke(exc, replayable))
        except Exception:  # the outermost edge of the call's task
            self.hear(on.Broke(bug()))
            raise

    def _give_back(self, error: GatewayError) -> None:
        """Forget a call that cannot be picked up now; its client comes again. A silent owner may hold it."""
        cold = None if self._takeover is None else self._takeover.cold
        if cold is not None:
            self._context.stays_cold()
        self.hear(on.Broke(error))
        self.forget()
        self.fire(LINGER)
        if cold is not None:
            self._lot.cold.add(cold)

    def _feed_unless_resumed_elsewhere(self, event: on.Event) -> None:
        """Give the call up, or let it go silently if a replica that believed this one dead has resumed it."""
        is_left = self._exchange.state in (PARKED, RESTORED, REFERRED, DETACHED, FINISHED)
        if is_left and self._upstream_call.may_be_resumed_elsewhere:
            asking = self._ask_replicas(event, self._exchange.state, self._retries)
            self.live.process.tasks.spawn(asking, "ask about an expired call")
        else:
            self._feed(event)

    async def _ask_replicas(self, event: on.Event, state: State, retries: int) -> None:
        """Ask the other replicas, and ask again if one cannot be asked, for a while or until something happens.

        `state` and `retries` are those of the moment of the event: something may happen before the first step of this.
        """
        is_resumed = None
        for pause in (0.0, *witness.ASK_AGAIN_SECONDS):
            await asyncio.sleep(pause)
            if self._retries != retries or self._exchange.state not in (state, FINISHED):
                break
            is_resumed = await self.live.process.witness.is_taken(self.id, self._exchange.round)
            if is_resumed is not None:
                break
        if self._retries != retries:  # its client came meanwhile
            if isinstance(event, on.Stopped):
                self._upstream_call.watch_silence()
        elif is_resumed is not False and self._exchange.state is state is not FINISHED:
            self._context.cancelled(
                "another replica has resumed the call: it was not cancelled upstream"
                if is_resumed
                else "another replica may have resumed the call, and could not be asked: it was not cancelled upstream"
            )
            self._upstream_call.let_go()
            self._feed(on.LetGo(cancel=False))
        elif self._exchange.state in (OWNED, SETTLED):
            pass  # the call became a task meanwhile, which has a time of its own
        else:
            if is_resumed is not False:
                self._upstream_call.let_go()  # the result is here, and may still have to be read there
            if self._exchange.state is state or not isinstance(event, on.GracePassed):
                self._feed(event)  # but a result that came within the grace period is kept as usual

    # -- the exchange ---------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """See `Engine`."""
        self._weight.release()
        self._lot.remove(self)

    def _drop(self, reason: str) -> None:
        """See `Engine`."""
        self._upstream_call.drop(reason)

    def _moved(self, before: State, after: State) -> None:
        """Keep pool, metrics and parking lot true to the state, and pick up a call that was continued."""
        context, call = self._context, self._upstream_call
        if after in HELD:
            call.rest(resting=True)
            if before not in HELD:
                context.parked()
        elif before in HELD:
            call.rest(resting=False)
            context.unparked()
        super()._moved(before, after)
        if after is ENDED:
            return
        if after is FINISHED and (error := self._exchange.untold) is not None:
            context.failed(error)
            if isinstance(error, UpstreamError):
                context.unheard(error)
                # Only its error is left. That is kept as a result is, and takes no place of a call.
                self._weight.release()
                call.end()
                self._lot.keep(self)
        if before in HELD or after not in WAITING:
            # Not as soon as a question comes: those of a round are weighed together, when their quiet window ends.
            self._weight.change(context.body_bytes + call.message_bytes + self._exchange.kept_bytes)
        if self._takeover is not None and after in WAITING and not call.is_started:
            call.start_resuming(self._pick_up(self._takeover))

    def _arm_again(self, arm: do.Arm) -> None:
        """Start a timer anew; `_moved` will start it if the state is new."""
        if arm.timer in self._armed:
            self._arm(arm.timer)

    def _ended(self) -> None:
        """See `Engine`."""
        self._weight.release()
        self._upstream_call.end()
        if LINGER in self._armed:
            self._lot.keep(self)
        elif self._exchange.round:
            self._lot.remove(self)
        self._context.finished()

    def _cancel(self, cancel: do.CancelCall) -> None:
        call = self._upstream_call
        if self._exchange.state in (FINISHED, ENDED):  # else it is to run again
            self._context.cancelled(cancel.reason)
        # Not picked up here, so what is cancelled is the call that the state describes.
        if self._takeover is not None and call.session is None and not call.runs:
            self._takeover.end(self._context, cancel.reason, asks=True)
        call.cancel(cancel.reason)

    def _ask(self, ask: do.Ask) -> None:
        """Seal the state, park the exchange, and hand the questions to the client."""
        context = self._context
        _ = context.identify()
        begun = self._takeover
        left = begun.left(self.live.config) if begun is not None and self._exchange.state is RESTORED else None
        try:
            body = input_required(context, ask, self._upstream_call.whereabouts(), left)
            if ask.held and ask.stays:
                self._lot.park(self)
                context.held()
                if begun is not None:
                    begun.renew(self.live.config)
        except GatewayError as exc:
            self._fail(ask.legs, exc)
            self._feed(on.Stopped(exc))
            self._feed(on.Expired())  # the legs have the error, so it is not kept
        else:
            self._end(ask.legs, body, ASKED if ask.questions else _STATE_ONLY)

    # -- the legs -------------------------------------------------------------------------------------------------

    def _wait(self, leg: ResponseQueue) -> None:
        """A leg waits from now on; it is the newest."""
        self._legs += (leg,)
        self._context.request_id, self._context.span = leg.request_id, leg.span

    def _end(self, legs: Iterable[Any], result: bytes, ending: Ending) -> None:
        """End legs with a result."""
        for leg in legs:
            self._finish(leg, FinalMessage(jsonrpc.result(leg.id, result), ending=ending))

    def _fail(self, legs: Iterable[Any], error: GatewayError | jsonrpc.Error) -> None:
        """See `Engine`."""
        self._context.failed(error)
        for leg in legs:
            if isinstance(error, GatewayError):
                last = FinalMessage.of_error(error, leg.id, leg.request_id, self.live.sender(self.principal))
                if isinstance(error, DownstreamError):
                    self.live.process.metrics.rejections[error.rejection,].inc()
            else:
                ending = Ending(Outcome.ERROR, str(error.code))
                last = FinalMessage(jsonrpc.failure(leg.id, error), ending=ending)
            self._finish(leg, last)

    def _finish(self, leg: ResponseQueue, last: FinalMessage) -> None:
        self._waits_no_more(leg)
        leg.finish(last)
        self._reply_bytes = len(last.body)
        if leg.dropped:
            self.live.process.metrics.notifications[self.live.route.path, OTHER, "dropped"].inc(leg.dropped)

    OBEY: ClassVar[dict[type[do.Command], Callable[[Any, Any], None]]] = {
        do.Arm: _arm_again,
        do.Ask: _ask,
        do.CancelCall: _cancel,
        do.Count: lambda self, it: self.live.process.metrics.nested_requests[
            self.live.route.path, it.method, it.outcome
        ].inc(),
        do.Fail: lambda self, it: self._fail(it.legs, it.error),
        do.ReleaseSession: lambda self, it: self._upstream_call.release(clean=it.clean),
        do.Reply: lambda self, it: self._end(it.legs, it.result, self._context.completed()),
        do.Respond: lambda self, it: self._upstream_call.respond(it.upstream_id, it.answer),
        do.RunAgain: lambda self, _: self._upstream_call.run_again(),
        do.SendAnswers: lambda self, it: self._upstream_call.send_answers(it.answers),
        do.SendCall: lambda self, _: self._upstream_call.start(),
    }
