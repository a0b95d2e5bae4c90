"""One exchange as its clients, its upstream call, its timers or a drain drive it."""

import asyncio
from typing import Final

from gateway.bridge.call_context import ClientCall, may_run_twice
from gateway.bridge.exchange_runner import ExchangeRunner, NewCall
from gateway.bridge.modern_to_legacy import modern_event
from gateway.bridge.response_queue import ResponseQueue
from gateway.bridge.takeover import Takeover, cooled
from gateway.cluster import witness
from gateway.exchange import events as on
from gateway.exchange.commands import COLD, GRACE, LEG, LINGER, QUIET, TTL, Timer
from gateway.exchange.machine import (
    ASKING,
    DETACHED,
    ENDED,
    FINISHED,
    IDLE,
    PARKED,
    REFERRED,
    RESTORED,
    RUNNING,
    State,
)
from gateway.protocol.errors import GatewayError, ShuttingDown
from gateway.protocol.request import Request
from gateway.routes.cold_calls import ColdCall
from gateway.routes.held_calls import Lot
from gateway.runtime.call_bytes import Weight
from gateway.runtime.coarse_timer import TICK_SECONDS
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, Upstream, digest_answers
from gateway.sessions.call import PoolKey
from gateway.telemetry.process_status import HeldStatus
from gateway.upstream.channel import Headers

_ENDINGS: Final = (on.Resulted, on.Failed)
_FIRED: Final[dict[Timer, on.Event]] = {
    QUIET: on.QuietPassed(),
    GRACE: on.GracePassed(),
    TTL: on.Expired(),
    LINGER: on.Expired(),
}


class Driver(ExchangeRunner):
    """One exchange at work."""

    __slots__ = ("_retries",)

    def __init__(
        self, asked: ClientCall, lot: Lot["Driver"], new_call: NewCall | None = None, weight: Weight | None = None
    ) -> None:
        super().__init__(asked, lot, new_call, weight)
        self._retries = 0
        """Retries that were accepted so far."""

    @property
    def is_finished(self) -> bool:
        """Whether the call has its final result or error."""
        return self._exchange.state in {FINISHED, ENDED}

    def glance(self, now: float) -> HeldStatus:
        """The exchange on the status page; `now` is the monotonic time."""
        return self._report.held_status(now)

    # -- from the client's side ---------------------------------------------------------------------------------

    def begin(self, queue: ResponseQueue, seconds: float = 0.0) -> None:
        """Start with the first leg, whose call may have run for `seconds` already."""
        self._report.began_before(seconds)
        self._replies.add(queue)
        self._feed(on.Called(queue.leg))
        if seconds > TICK_SECONDS and LEG in self._timers:
            self._timers.arm(LEG, self, max(0.0, self.live.config.legs.limit_seconds - seconds))

    def take_over(
        self, envelope: Envelope, queue: ResponseQueue, *, is_proven: bool, cold: ColdCall | None = None
    ) -> None:
        """Restore the exchange of a retry whose owner cannot be reached, and continue it; raises Busy.

        `is_proven` if the owner is certainly dead, or the call was `cold` here. Nothing goes upstream before the
        answers are checked. The exchange takes its place in the parking lot before that; a failure in here gives it
        back, and nothing is awaited.
        """
        context = self._context
        context.exchange_id = envelope.exchange
        self._takeover = Takeover(
            context, self._report, self._upstream_call, envelope, owner_is_dead=is_proven, cold=cold
        )
        try:
            self._lot.park(self, is_continued=True)
            self._exchange.restore(handoff.past(self._takeover.envelope))
            self._moved(IDLE, self._exchange.state)
            self.answer(queue, context.request, envelope.round, context.headers)
        except BaseException:
            self._timers.disarm_all()
            self._upstream_call.abandon()
            self._moved(self._exchange.state, IDLE)
            self._lot.remove(self)
            self._weight.release()
            raise
        if self._exchange.state is RESTORED and not is_proven:
            # The client was only asked again, and its state leads to the owner: two replicas must not wait for it.
            self._feed(on.LetGo(cancel=False))

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

    def leave(self, leg: on.Leg) -> None:
        """The client of a leg closed its connection, or the replica that relayed the leg did."""
        self._feed(on.Left(leg))
        self._replies.discard(leg)

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
        if self.is_finished:
            self._upstream_call.leave_result()  # whether its client has read it is not known either
            return False
        is_resumable = self._upstream_call.is_resumable
        begun = self._takeover
        if begun is not None and begun.round == self._exchange.round and self._upstream_call.is_being_resumed:
            # Its answers wait for the stream, so the state of before is still the newest.
            self._upstream_call.let_go()
            self._upstream_call.abandon()
            self._give_back(ShuttingDown("call again with the same requestState and inputResponses"))
            return True
        if not is_resumable and not may_run_twice(self._context):
            return False
        if is_resumable:
            self._upstream_call.let_go()
        self._feed(on.LetGo(cancel=not is_resumable))
        return True

    def is_behind(self, envelope: Envelope) -> bool:
        """Whether the replica that sealed a state has the say now, and no client waits here.

        It is of a newer round than the exchange has reached here. Or that replica asked for visits to URLs: it alone
        sends the call again, though the stream that both of them read has told this one of the URLs, too. Who waits
        for a call that no replica holds has sent a copy of an earlier retry: another run led to this state.
        """
        exchange = self._exchange
        is_referred = envelope.state == REFERRED and exchange.state in (PARKED, REFERRED)
        is_free = not (exchange.legs and envelope.owner)
        return is_free and envelope.round >= exchange.round + (not is_referred)

    def lose(self, envelope: Envelope) -> None:
        """Keep nothing of an exchange that the replica which sealed this state has continued.

        The session of the call is left to it, unless it runs the call again in another one, or will: then nobody else
        cancels this run. Each round of a call that no replica holds is a run of its own.
        """
        call, theirs = self._upstream_call, envelope.upstream
        may_be_same = theirs is not None or call.may_be_resumed_elsewhere  # else it can only run it again
        is_same = bool(envelope.owner) and may_be_same and _is_same_session(call.whereabouts(), theirs)
        if is_same:
            self._upstream_call.let_go()
        self._report.cancelled("another replica has continued the call")
        self._feed(on.LetGo(cancel=not is_same))
        self._timers.disarm(LINGER)
        self._feed(on.Expired())
        self._lot.remove(self)

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica continued the exchange after that round, in the same upstream call."""
        exchange = self._exchange
        # Only while a client waits: of two replicas whose clients have left, each would leave the call to the other.
        is_answered = exchange.round == round_ and exchange.state in (RUNNING, ASKING)
        is_ours = exchange.round > round_ or is_answered or self._is_of_another_replica
        return is_ours and self._upstream_call.runs == 0

    @property
    def _is_of_another_replica(self) -> bool:
        begun = self._takeover
        return begun is not None and (begun.cold is None or begun.cold.is_taken_over)

    def stop(self, error: GatewayError) -> None:
        """Give the exchange up, and end its waiting legs with this error."""
        self._feed(on.Stopped(error))
        self._upstream_call.end_kept()  # the process ends, and its pool ends only sessions that it has back

    def expire(self) -> None:
        """End a held exchange as if its time was over, because its client cannot come back."""
        self.fire(TTL)

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
            self._report.answered(event, translated)
        self._feed(translated)

    # -- the end of a wait --------------------------------------------------------------------------------------

    def _cool(self) -> None:
        """Let go of a parked call that its state alone continues; any other one is looked at again later."""
        call, due = self._upstream_call, self._timers.deadline(TTL)
        upstream = call.whereabouts() if call.can_be_left else None
        is_taken_over = self._is_of_another_replica and call.runs == 0
        record = cooled(self.id, self._context, upstream, due or 0.0, is_taken_over=is_taken_over)
        if record is None or not self._lot.cold.has_room(record):
            self._timers.arm(COLD, self)
            return
        self._report.cooled()
        call.let_go()
        self._feed(on.LetGo(cancel=False))
        self._lot.cold.add(record)

    def fire(self, timer: Timer) -> None:
        """Take the end of a timer."""
        if timer is COLD:
            self._cool()
            return
        if timer is LEG:
            self._upstream_call.watch_silence()
        if timer in (TTL, GRACE):  # the client may have gone on through a replica that did not reach this one
            self._feed_unless_resumed_elsewhere(_FIRED[timer])
            return
        self._feed(on.LegLimitPassed(self._may_wait) if timer is LEG else _FIRED[timer])
        if timer is LINGER:
            self._lot.remove(self)

    def _give_back(self, error: GatewayError) -> None:
        """Forget a call that cannot be picked up now; its client comes again. A silent owner may hold it."""
        self.hear(on.Broke(error))
        self._timers.disarm(LINGER)
        self._feed(on.Expired())
        self._lot.remove(self)
        if self._takeover is not None and self._takeover.cold is not None:
            self._lot.cold.add(self._takeover.cold)

    def _feed_unless_resumed_elsewhere(self, event: on.Event) -> None:
        """Give the call up, or let it go silently if a replica that believed this one dead has resumed it."""
        is_left = self._exchange.state in (PARKED, RESTORED, REFERRED, DETACHED)
        if is_left and self._upstream_call.may_be_resumed_elsewhere:
            self.live.process.tasks.spawn(self._ask_replicas(event), "ask about an expired call")
        else:
            self._feed(event)

    async def _ask_replicas(self, event: on.Event) -> None:
        retries, state = self._retries, self._exchange.state
        is_resumed = await self._is_resumed_elsewhere(retries, state)
        if self._retries != retries:  # its client came meanwhile
            if isinstance(event, on.Stopped):
                self._upstream_call.watch_silence()
        elif is_resumed is not False and self._exchange.state is state:
            self._report.cancelled(
                "another replica has resumed the call: it was not cancelled upstream"
                if is_resumed
                else "another replica may have resumed the call, and could not be asked: it was not cancelled upstream"
            )
            self._upstream_call.let_go()
            self._feed(on.LetGo(cancel=False))
        elif self._exchange.state is state or not isinstance(event, on.GracePassed):
            self._feed(event)  # but a result that came within the grace period is kept as usual

    async def _is_resumed_elsewhere(self, retries: int, state: State) -> bool | None:
        """Ask the other replicas, and ask again if one cannot be asked, for a while or until something happens."""
        for pause in (*witness.ASK_AGAIN_SECONDS, None):
            found = await self.live.process.witness.is_taken(self.id, self._exchange.round)
            if found is not None or pause is None:
                return found
            await asyncio.sleep(pause)
            if self._retries != retries or self._exchange.state is not state:
                break
        return None


def _is_same_session(one: Upstream | None, other: Upstream | None) -> bool:
    """Whether two states lead to the same session of the upstream; one that leads nowhere was sealed for the same.

    After visits to URLs the call is sent again in its session.
    """
    return one is None or other is None or one.session == other.session
