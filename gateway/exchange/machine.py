"""The state machine of an exchange: the rounds of one client call, mapped to one upstream call.

Theory of operation. A legacy call is one long request; a modern one is several short ones. The exchange connects
them: it takes one event and returns the commands that follow from it. It has no clock, no sockets, no keys.

    IDLE ──Called──▶ RUNNING ──Nested──▶ ASKING ──QuietPassed──▶ PARKED ──Answered──▶ RUNNING …
                        │                                          │
                        │ upstream answered                        │ upstream answered
                        ▼                                          ▼
                      ENDED ◀──────────────Answered──────────── FINISHED

RUNNING   a leg waits, and the call runs upstream
ASKING    a leg waits, and questions gather within the quiet window
PARKED    no leg waits: the client has the questions, or only the state after a round that sheds load
RESTORED  as PARKED, but another process parked the call, or this one let go of it: nobody reads it before the answers
REFERRED  the upstream ended the call with -32042: the client has its urls, and the session stays reserved
BROKEN    the call is lost and may be run again: the client has the questions, but nothing runs upstream
DETACHED  the client answered, then every leg left; the call continues for the grace period
OPEN      a client that takes nested requests waits on its stream, where it is asked
AWAY      the stream of such a client broke; it may open another one, or answer what it has
OWNED     the call is a task, and the client holds its handle: it asks and answers whenever it likes
SETTLED   the task is over, and its end is kept as long as its handle is valid
FINISHED  the final message is here, but no leg waits for it
ENDED     the final message was given (and is kept for a repeated retry), or the exchange was given up

Rule 1: only this file changes the state. Rule 2: a (state, event) pair that `TRANSITIONS` lacks raises
LocalProtocolError and changes nothing; a late event that can legitimately happen is a row. Rule 3: a handler that
raises a DownstreamError (a bad answer) changes nothing. Rule 4: a call is run again only if the event allows it
(`replayable`) and the ledger has every answer (`replay_ledger`). Rule 5: a timer belongs to states (`TIMERS`).
Entering them starts it, leaving them stops it, and `Arm` starts it anew within a state.

Sources: specification 2026-07-28 basic/patterns/mrtr and cancellation; SEP-2322 (ephemeral workflow), SEP-2260.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import input_requests, results
from gateway.exchange.commands import COLD, GRACE, LEG, LINGER, QUIET, TTL, Command, Timer
from gateway.exchange.input_requests import Question
from gateway.exchange.nested_requests import NestedRequests, Refusal
from gateway.exchange.replay_ledger import MAX_RECORD_BYTES, Recorded, ReplayLedger
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    CallLost,
    GatewayError,
    InvalidState,
    LocalProtocolError,
    MissingCapability,
    Stopping,
    TaskCancelled,
    UpstreamError,
)
from gateway.protocol.request_meta import Capabilities

_AGAIN: Final = "the call is run again"
Commands = list[Command]
Ending = do.Reply | do.Fail


class State(StrEnum):
    """The states of an exchange; the module's docstring describes them."""

    IDLE = "idle"
    RUNNING = "running"
    ASKING = "asking"
    PARKED = "parked"
    RESTORED = "restored"
    REFERRED = "referred"
    BROKEN = "broken"
    DETACHED = "detached"
    OPEN = "open"
    AWAY = "away"
    OWNED = "owned"
    SETTLED = "settled"
    FINISHED = "finished"
    ENDED = "ended"


IDLE, RUNNING, ASKING, PARKED, RESTORED, REFERRED, BROKEN, DETACHED, OPEN, AWAY, OWNED, SETTLED, FINISHED, ENDED = (
    State
)

# Commands that say the same each time.
_SEND_CALL: Final = do.SendCall()
_ARM_QUIET: Final = do.Arm(QUIET)
_ARM_TTL: Final = do.Arm(TTL)

TIMERS: Final[dict[State, tuple[Timer, ...]]] = {
    RUNNING: (LEG,),
    ASKING: (LEG, QUIET),
    PARKED: (TTL, COLD),
    RESTORED: (TTL, COLD),
    REFERRED: (TTL,),
    BROKEN: (TTL,),
    DETACHED: (GRACE,),
    AWAY: (TTL,),
    OWNED: (TTL,),
    SETTLED: (TTL,),
}
"""The states after the end are missing: `Exchange.timers` has all."""


class Policy(msgspec.Struct, frozen=True):
    """What the route and the method allow.

    `may_ask`: the method may be answered with an InputRequiredResult. `is_tool`: it is tools/call, where a failure is
    a result that a model can read. `refuse_undeclared`: a question that needs an undeclared capability is refused
    upstream, instead of ending the call. `shed_rounds`: how often a long leg may end early with a state-only round.
    `holds`: the call waits for its answers; otherwise it is cancelled when it asks, and run again with the answers.
    `returns`: a client that takes nested requests comes back if its stream breaks.
    """

    may_ask: bool = True
    is_tool: bool = True
    refuse_undeclared: bool = False
    shed_rounds: int = 4  # SDK clients take 10 rounds of a call at most, and these count
    holds: bool = True
    returns: bool = False


class Snapshot(msgspec.Struct, frozen=True):
    """An exchange that another process began, as the requestState of `round` describes it.

    `record` is None if the state had no room for it; then the call cannot be run again.
    """

    state: State
    round: int
    questions: dict[str, Question]
    record: tuple[Recorded, ...] | None
    sheds: int


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One exchange; all events go through `handle`."""

    _declared: Capabilities
    _policy: Policy
    given: InitVar[Mapping[str, Raw] | None] = None
    """Answers that came without a requestState; each is used when its question is asked."""
    state: State = IDLE
    round: int = 0
    """The number of the last round that ended with an InputRequiredResult; 0 before the first."""
    nested_requests: NestedRequests = field(init=False)
    questions: dict[str, Question] = field(init=False)
    legs: tuple[on.Leg, ...] = ()
    """The legs that wait for their final message, oldest first."""
    _digests: dict[int, bytes] = field(default_factory=dict)
    """What the client answered in each round that it claimed."""
    _final: Ending | None = None
    """The final message, for legs that come later."""
    _lingers: bool = False
    """Whether the end is kept for the linger time: nothing of it was parked, or its client has it."""
    _owes_answers: bool = False
    """Whether an earlier call in the session left a nested request unanswered."""
    _ledger: ReplayLedger = field(default_factory=ReplayLedger)
    sheds: int = 0
    """State-only rounds so far."""

    def __post_init__(self, given: Mapping[str, Raw] | None) -> None:
        self.nested_requests = NestedRequests(self._declared, given)
        self.questions = self.nested_requests.open

    def restore(self, past: Snapshot) -> None:
        """Continue where another process stopped; only for a new exchange."""
        if self.state is not IDLE:
            raise LocalProtocolError(f"an exchange that is {self.state} cannot be restored")
        self.state = RESTORED if past.state is PARKED else past.state
        self.round, self.sheds = past.round, past.sheds
        self._ledger = ReplayLedger(past.record)
        self.nested_requests.restore(past.questions, [recorded.key for recorded in past.record or ()])

    @property
    def calling(self) -> bool:
        """Whether the upstream call was sent, here or elsewhere, and has neither ended nor been given up."""
        return self.state in _CALLING or self.state in (RESTORED, *_STREAMED, OWNED)

    @property
    def timers(self) -> tuple[Timer, ...]:
        """The timers of the present state. A parked client that has the end still to get has all of its time."""
        if self.state in _OVER:
            return (LINGER,) if self._lingers else (TTL,) if self.state is FINISHED else ()
        return TIMERS.get(self.state, ()) if self._policy.may_ask else ()

    @property
    def keeps_end(self) -> bool:
        """Whether the call is over, and its final message waits for its client, or for a repeated retry."""
        return self._final is not None and bool(self.timers)

    @property
    def requests(self) -> int:
        """How many rounds the client has begun. A call that waits for its first answers had one request."""
        return self.round + (self.round in self._digests) or 1

    @property
    def untold(self) -> GatewayError | jsonrpc.Error | None:
        """The error with which the call ended while its client was away, and which the next request will be told."""
        return self._final.error if self.state is FINISHED and isinstance(self._final, do.Fail) else None

    @property
    def is_lost(self) -> bool:
        """Whether the call was lost while its client was away."""
        return isinstance(self.untold, UpstreamError)

    @property
    def kept_bytes(self) -> int:
        """The size of the open questions, of the answers on record, and of a final message that is kept."""
        match self._final:
            case do.Reply(result=result):
                size = len(result)
            case do.Fail(error=jsonrpc.Error(message=message, data=data)):
                size = len(message) + len(data or b"")
            case _:
                size = 0
        size += sum([len(question.params or b"") for question in self.questions.values()])
        return size + sum([len(recorded.answer) for recorded in self._ledger.record or ()])

    @property
    def record(self) -> tuple[Recorded, ...] | None:
        """The answers that another run would get, in their order; None if the call cannot be run again."""
        return self._ledger.record

    def handle(self, event: on.Event) -> Commands:
        """Take one event; raises LocalProtocolError or a DownstreamError, and then changes nothing."""
        handler = TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise LocalProtocolError(f"{type(event).__name__} is not allowed in {self.state}")
        return handler(self, event)

    def crash(self) -> None:
        """End after a bug: whoever feeds the exchange ends its legs, its call and its timers."""
        self.state, self.legs, self._lingers = ENDED, (), False
        self.questions.clear()
        self._ledger.forget_withdrawn()

    # -- downstream ---------------------------------------------------------------------------------------------

    def _call(self, event: on.Called) -> Commands:
        self.legs, self.state = (event.leg,), RUNNING
        return [_SEND_CALL]

    def _answer(self, event: on.Answered) -> Commands:
        """PARKED, RESTORED or BROKEN: the expected retry, or a late repeat of an earlier round."""
        if event.round != self.round:
            self._repeated(event)
            return self._ask_again(event.leg)
        is_broken = self.state is BROKEN
        if is_broken and event.round in self._digests:
            self._repeated(event)  # the next run gets the answers on record, which no other ones replace
        # Both check the answers, and may raise, so they come before anything is changed (rule 3).
        matched, late = self.nested_requests.answered(event.answers), self._ledger.match(event.answers)
        if self.questions and not matched and not late:
            return self._ask_again(event.leg)
        if not is_broken:
            self.nested_requests.check_askable(event.answers)
        self._claim(event)
        self._ledger.note(matched, self.round)
        self._ledger.note(late, self.round, sent=is_broken)
        out: Commands = [do.Count(question.method, "answered") for question, _ in matched]
        if is_broken:  # the call runs again with all answers
            out += [do.Count(question.method, "answered") for question, _ in late]
            if self.record is None:
                return [*out, *self._end(do.Fail((), _unrecorded()), completed=False)]
            return [*out, *self._run_again(completed=False)]
        for question, _ in matched:
            del self.questions[question.key]
        self.state = ASKING if self.questions else RUNNING
        return [do.SendAnswers(matched), *out] if matched else []  # the late ones wait for the end of this run

    def _answer_referred(self, event: on.Answered) -> Commands:
        """REFERRED: if every url is accepted, send the call again in its session; if one is declined, end it."""
        if event.round != self.round:
            self._repeated(event)
            return self._ask_again(event.leg)
        if not self.nested_requests.shown:
            # No leg waited when the urls came. They are a round of their own for this client, as for the client of
            # another replica that has read the same stream.
            if event.round in self._digests:
                self._repeated(event)
            self._digests[event.round] = event.digest
            self.round += 1
            return self._ask_again(event.leg)
        matched = self.nested_requests.answered(event.answers)
        declined = [question.key for question, answer in matched if not input_requests.accepted(answer)]
        if not declined:
            self.nested_requests.check_askable(event.answers)
        out: Commands = []
        for question, _ in matched:
            del self.questions[question.key]
            out.append(do.Count(question.method, "answered"))
        if self.questions and not declined:
            return [*out, *self._ask_again(event.leg)]
        self._claim(event)
        if declined:
            return [*out, *self._end(self._declined_urls(declined), completed=True)]
        self.state = RUNNING
        return [*out, _SEND_CALL]

    def _ask_again(self, leg: on.Leg) -> Commands:
        """Ask the open questions again in the same round; the client is active, so its time to live restarts."""
        self.nested_requests.check_askable({})
        self.nested_requests.show()
        state = PARKED if self.state is RESTORED else self.state  # for the next process, one is as the other
        held = self._policy.holds or state is PARKED
        ask = do.Ask((leg,), dict(self.questions), self.round, state, held)
        return [ask, _ARM_TTL] if held else [ask, *self._part(None)]

    def _claim(self, event: on.Answered) -> None:
        self._digests[event.round] = event.digest
        self.legs = (event.leg,)

    def _repeated(self, event: on.Answered) -> None:
        """Accept only a repetition of this round's answers; raises InvalidState for others."""
        if self._digests.get(event.round) != event.digest:
            raise InvalidState("answered")

    def _join(self, event: on.Answered) -> Commands:
        """A retry came twice, or again within the grace period: its answers go upstream once.

        All legs that wait get the final message.
        """
        self._repeated(event)
        self.legs += (event.leg,)
        self.state = ASKING if self.questions else RUNNING  # questions may have come while no leg waited
        return []

    def _collect(self, event: on.Answered) -> Commands:
        """FINISHED or ENDED: give the final message to the first leg that comes for it, and to a repeated retry."""
        if event.round in self._digests or event.round != self.round:
            # An error is the truth for all answers, and all rounds: another process may have asked them, after a late
            # copy of an earlier retry had this one take the call over.
            if not isinstance(self._final, do.Fail):
                self._repeated(event)
        elif self.state is FINISHED and (late := self._ledger.match(event.answers)):
            # The server did not wait for its user. Run the call once more: this time the answer is at hand.
            self._ledger.note(late, self.round)
            if self.record is not None:
                self._claim(event)
                return self._run_again(completed=True)
        if self._final is None:
            raise InvalidState("ended")
        self._digests[event.round] = event.digest  # from now on, other answers do not collect it
        out: Commands = [replace(self._final, legs=(event.leg,))]
        if self.state is FINISHED:
            self.state, self._lingers = ENDED, True
            out.append(do.Arm(LINGER))  # it runs already if the legs had left before the end came
        return out

    def _leave(self, event: on.Left) -> Commands:
        if event.leg not in self.legs:
            return []
        self.legs = tuple(leg for leg in self.legs if leg is not event.leg)
        if self.legs:
            return []
        if self.round == 0:
            # The client has no requestState to come back with (basic/patterns/cancellation).
            return self._part("the client closed its request")
        self.state = DETACHED
        return []

    # -- upstream -----------------------------------------------------------------------------------------------

    def _nested(self, event: on.Nested) -> Commands:
        if self.nested_requests.is_repeated(event):
            return [do.Count(event.method, "duplicate")]
        try:
            question = self.nested_requests.read(event, may_ask=self._policy.may_ask)
        except Refusal as exc:
            # The id of an open question is used up by an error for another one.
            is_used = self.nested_requests.asked(bytes(event.id)) is not None
            closed = self._withdraw(on.Withdrawn(event.id)) if is_used else []
            out = [*closed, *_refuse(event, exc.error, exc.outcome)]
            if exc.lacks is None or self._policy.refuse_undeclared or self.state is OWNED:
                return out
            return out + self._abort(MissingCapability(exc.lacks, event.method))
        self._ledger.ask(bytes(event.id))
        recorded = self._ledger.next_answer(question)
        if recorded is not None:
            return [do.SendAnswers(((question, recorded),)), do.Count(event.method, "replayed")]
        early = self.nested_requests.given_answer(question)
        if early is not None:
            # The answer belongs to the round that it saves the client; while parked, to the current one.
            self._ledger.note(((question, early),), self.round + (self.state is not PARKED))
            return [do.SendAnswers(((question, early),)), do.Count(event.method, "given")]
        self.questions[question.key] = question
        out = [do.Count(event.method, "asked")]
        if self.state in (RUNNING, ASKING):  # else no leg waits, and questions gather
            self.state = ASKING
            out.append(_ARM_QUIET)  # anew with each question, so that several share a round
        return out

    def _withdraw(self, event: on.Withdrawn) -> Commands:
        """The upstream withdrew its question."""
        id_ = bytes(event.id)
        question = self.nested_requests.withdraw(id_)
        if question is None:
            if self.nested_requests.has_heard(id_):
                self._ledger.withdraw_sent(id_, replayable=event.replayable)
            return []
        if event.replayable and self.state is PARKED and question.key in self.nested_requests.shown:
            self._ledger.withdraw(question)
        out: Commands = [do.Count(question.method, "withdrawn")]
        if self.state is ASKING and not self.questions:
            self.state = RUNNING
        return out

    def _complete(self, event: on.Resulted | on.Failed) -> Commands:
        final: Ending
        if isinstance(event, on.Resulted):
            final = do.Reply((), event.result)
        elif event.error.code == mcp.LEGACY_URL_REQUIRED and self.state not in _STREAMED:
            try:
                return self._refer(event.error)
            except input_requests.MalformedQuestion as exc:
                text = f"The server requires the user to visit a url first, but sent {exc}"
                return self._end(do.Fail((), results.internal_error(text, event.error)), completed=True)
        else:
            final = do.Fail((), event.error)
        if self._ledger.owes_run:
            return self._run_again(completed=True)
        return self._end(final, completed=True)

    def _refer(self, error: jsonrpc.Error) -> Commands:
        """Error -32042 is a round of url elicitations in 2026-07-28; raises MalformedQuestion."""
        if not self._policy.may_ask:
            raise input_requests.MalformedQuestion("error -32042 to a request that cannot ask")
        if self.state is OWNED:
            raise input_requests.MalformedQuestion("error -32042 as the end of a task")
        questions = input_requests.url_questions(error.data, self.nested_requests.keys)
        if not self._declared.url:
            missing = MissingCapability({"elicitation": {"url": {}}}, "error -32042")
            return self._end(do.Fail((), missing), completed=True)
        # The call is over; after the urls another call follows, perhaps in another session.
        self._ledger.start_call()
        self._owes_answers |= bool(self.questions)
        self.nested_requests.refer(questions)
        out: Commands = [do.Count(mcp.ELICIT, "asked") for _ in questions]
        if self.legs:
            return out + self._ask(REFERRED)
        self.state = REFERRED
        return [*out, _ARM_TTL]

    def _break(self, event: on.Broke) -> Commands:
        if event.not_begun and self.round and self.record is not None:
            # A run could not begin: the client keeps its state, and may come again with the same answers.
            out: Commands = [do.Fail(self.legs, event.error)] if self.legs else []
            self.legs = ()
            if not self._policy.holds:
                return [*out, *self._part(None)]
            self.state = BROKEN
            return [*out, self._release(completed=False), _ARM_TTL]
        if not event.replayable or not self._ledger.can_run_again:
            self._ledger.drop_record()
            out = self._cancel("the gateway cannot read the result any more") if event.runs_on else []
            return [*out, *self._end(do.Fail((), event.error), completed=False)]
        return self._run_again(completed=False, runs_on=event.runs_on)

    def _run_again(self, *, completed: bool, runs_on: bool = False) -> Commands:
        """Begin another run with the answers so far; if the client has questions, once it has answered them.

        `completed` if the upstream ended the earlier run itself; `runs_on` if it may still work on it.
        """
        out: Commands = self._cancel(_AGAIN) if runs_on else []
        out.append(self._release(completed=completed))
        if self.state is PARKED:
            self.state = BROKEN
            return out
        self._ledger.start_run()
        self.nested_requests.start_run()
        self._final, self._owes_answers, self._lingers = None, False, False
        self.state = RUNNING if self.legs else DETACHED
        return [*out, do.RunAgain()]

    def _release(self, *, completed: bool) -> Command:
        """The session is clean once its call completed with every nested request answered."""
        asks = any(question.upstream_id is not None for question in self.questions.values())
        return do.ReleaseSession(clean=completed and not asks and not self._owes_answers)

    def _undelivered(self, event: on.Undelivered) -> Commands:
        if not any(self.nested_requests.has_heard(question.upstream_id) for question in event.questions):
            return []  # these answers were for an earlier call of this exchange, which has ended
        if not (event.retryable or self._ledger.awaits(event.questions)):
            return []  # the upstream withdrew these questions meanwhile: its call goes on without the answers
        if event.replayable and self._ledger.can_run_again:
            return self._run_again(completed=False, runs_on=event.runs_on)
        if not event.retryable or self.round == 0:  # an answer given in advance: the client has no state
            return self._abort(event.error)
        # The upstream took no answer of this retry: the call waits as before.
        out: Commands = [do.Fail(self.legs, event.error)] if self.legs else []
        self.legs = ()
        if not self._policy.holds:
            return [*out, *self._part("the client's answers were not delivered; the call will be run again")]
        self._ledger.strike(event.questions)
        # Those that the upstream withdrew while their answers were in flight stay closed.
        self.nested_requests.put_back(self._ledger.still_open(event.questions, self.nested_requests.shown))
        # Unclaimed: a result that comes without these answers is for the next retry, whatever that answers.
        self._digests.pop(self.round, None)
        self.state = PARKED
        return [*out, _ARM_TTL]

    # -- a client that takes nested requests -----------------------------------------------------------------------

    def _open(self, event: on.Opened) -> Commands:
        if self.state is IDLE:
            self.legs, self.state = (event.leg,), OPEN
            return [_SEND_CALL]
        former, self.legs, self.state = self.legs, (event.leg,), OPEN
        return [do.Close(former)] if former else []

    def _open_late(self, event: on.Opened) -> Commands:
        if self._final is None:
            raise InvalidState("ended")
        return [replace(self._final, legs=(event.leg,))]

    def _put(self, event: on.Asked) -> Commands:
        """Ask at once: the upstream waits until all questions of its round are answered."""
        if self.state is AWAY and not self._policy.returns:
            return self._part("the client has left, and nobody else could answer")
        self.questions.update({question.key: question for question in event.questions})
        return [do.Put(event.questions), *(do.Count(each.method, "asked") for each in event.questions)]

    def _respond(self, event: on.Responded) -> Commands:
        """A response to a question that is not open any more is dropped."""
        question = self.questions.pop(event.key, None)
        if question is None:
            return []
        return [do.SendAnswers(((question, event.answer),)), do.Count(question.method, "answered")]

    def _lose_stream(self, event: on.Left) -> Commands:
        """A broken connection is no cancellation (2025-11-25 basic/transports); a tool may have effects."""
        if event.leg not in self.legs:
            return []
        self.legs = ()
        if self._policy.returns or (self._policy.may_ask and not self.questions):
            self.state = AWAY
            return []
        return self._part("the client closed its stream, and nobody else could answer")

    def _hang_up(self, _: on.Cancelled) -> Commands:
        legs, self.legs = self.legs, ()
        return [*self._part("the client cancelled the call"), do.Close(legs)]

    # -- a task of the client -----------------------------------------------------------------------------------

    def _become(self, _: on.Became) -> Commands:
        """The client gets the handle of a task, which leads to this run: there is no other one."""
        self.state = OWNED
        self._ledger.drop_record()
        legs, self.legs = self.legs, ()
        return [do.Give(legs)] if legs else []

    def _give_handle(self, event: on.Answered) -> Commands:
        """A retry from before the call became a task."""
        if event.round in self._digests or event.round != self.round:
            self._repeated(event)
        self._digests[event.round] = event.digest
        return [do.Give((event.leg,))]

    def _update(self, event: on.Updated) -> Commands:
        matched = self.nested_requests.take(event.answers)
        if not matched:
            return []
        return [do.SendAnswers(matched), *(do.Count(question.method, "answered") for question, _ in matched)]

    def _put_back(self, event: on.Undelivered) -> Commands:
        """Those that the upstream withdrew while their answers were in flight stay closed."""
        self.nested_requests.put_back_taken(self._ledger.still_open(event.questions, ()))
        return []

    def _cancel_task(self, _: on.Cancelled) -> Commands:
        """The task is cancelled for its client, whatever its server makes of that."""
        withdrawn = [_withdraw(question) for question in self.questions.values()]
        # First, because it decides whether the server may still be answered (`TaskCall.cancel`).
        cancel = do.CancelCall("the client cancelled its task")
        return [cancel, *withdrawn, *self._end(do.Fail((), TaskCancelled()), completed=False)]

    def _drop(self, _: on.Stopped) -> Commands:
        """Follow the task no longer. It is not cancelled: its time is over, or another replica goes on with it."""
        return self._part(None)

    # -- time ---------------------------------------------------------------------------------------------------

    def _quiet(self, _: on.QuietPassed | on.LegLimitPassed) -> Commands:
        """Ask the gathered questions; a leg at its limit does not wait for the quiet window."""
        return self._ask(PARKED)

    def _shed(self, event: on.LegLimitPassed) -> Commands:
        """End the leg early and let the client come back at once (SEP-2322, Load Shedding).

        Without a parking place the leg continues: ending it would lose a running call.
        """
        if not self._policy.may_ask or self.sheds >= self._policy.shed_rounds:
            return []
        if not event.has_place:
            return [do.Arm(LEG)]
        self.sheds += 1
        return self._ask(PARKED)

    def _ask(self, state: State, *, stays: bool = True) -> Commands:
        holds = self._policy.holds
        if not holds and self.record is None:
            return self._abort(_unrecorded())
        self.round += 1
        self.state = state
        self.nested_requests.show()
        self._ledger.forget_withdrawn()  # an answer belongs to the questions that its round showed
        legs, self.legs = self.legs, ()
        resting = state if holds or state is REFERRED else BROKEN
        ask = do.Ask(legs, dict(self.questions), self.round, resting, held=holds, stays=stays)
        return [ask] if holds else [ask, *self._part("the call will be run again with the answers")]

    def _part(self, reason: str | None) -> Commands:
        """End the exchange and keep nothing of it; with a reason, cancel the call, to which no client comes back."""
        out = self._cancel(reason) if reason is not None else []
        out.append(self._release(completed=self.state is REFERRED))  # then its call has ended, with -32042
        self.questions.clear()
        self.state = ENDED
        return out

    def _hand_over(self, event: on.HandedOver) -> Commands:
        """End the legs early if there is a parking place; the retries come back through another replica."""
        return self._ask(PARKED) if self._policy.may_ask and self._policy.holds and event.has_place else []

    def _let_go(self, event: on.LetGo) -> Commands:
        """Keep nothing of the exchange here: legs that still wait get a requestState, which holds everything."""
        out: Commands = []
        if self.legs:
            if not self._policy.may_ask:
                return self._abort(Stopping("The gateway shut down before the call ended; it was cancelled"))
            out = self._ask(PARKED, stays=False)
            if not self._policy.holds:
                return out
        reason = "the gateway shuts down; the call will be run again" if event.cancel else None
        return [*out, *self._part(reason)]

    def _grace(self, _: on.GracePassed) -> Commands:
        """Keep the end for a while: without it, the state of a dead replica's call would have it resumed once more.

        A call that no replica holds may have gone on at another one.
        """
        ending = self._part("the client closed its request")
        self._lingers = self._policy.holds
        return ending

    def _expire(self, _: on.Expired) -> Commands:
        return self._part("the client did not answer in time")

    def _forget(self, _: on.Expired) -> Commands:
        """Nothing runs upstream: drop the questions, or the final message."""
        self.state, self._final = ENDED, None
        self._lingers = False
        self.questions.clear()
        return []

    def _stop(self, event: on.Stopped) -> Commands:
        return self._abort(event.error)

    # -- the end ------------------------------------------------------------------------------------------------

    def _end(self, final: Ending, *, completed: bool) -> Commands:
        """The call is over: give the final message to the legs that wait, or keep it."""
        release = self._release(completed=completed)  # before the questions go: an open one spoils the session
        self.questions.clear()
        if self.state is OWNED:
            self.state = SETTLED
            return [do.Keep(final), release]
        self._final = final
        legs, self.legs = self.legs, ()
        # A parked client has until its state expires; one that got the end, or lost its leg, has the linger time.
        is_parked = not legs and self.state in (PARKED, RESTORED, REFERRED, BROKEN)
        is_nested = self.state in _STREAMED
        self._lingers = self._policy.returns if is_nested else bool(self.round) and not is_parked
        self.state = ENDED if legs or is_nested else FINISHED
        return [replace(final, legs=legs), release] if self.state is ENDED else [release]

    def _abort(self, error: GatewayError) -> Commands:
        """End the exchange while its call runs: settle the open questions, cancel the call, fail the waiting legs."""
        self._ledger.drop_record()  # a late answer must not run the call again
        return [*self._cancel(error.message), *self._end(do.Fail((), error), completed=False)]

    def _cancel(self, reason: str) -> Commands:
        if not self.calling:
            return []
        out: Commands = []
        for question in self.questions.values():
            if question.upstream_id is not None:  # else nobody waits for its answer alone
                out.append(_withdraw(question))
                out.append(do.Count(question.method, "expired"))
        return [*out, do.CancelCall(reason)]

    def _declined_urls(self, keys: list[str]) -> Ending:
        declined = ", ".join(keys)
        text = f"The server requires the user to visit a url before it continues, but the user declined ({declined})"
        if not self._policy.is_tool:
            return do.Fail((), jsonrpc.Error(mcp.INTERNAL_ERROR, text))
        result = {"resultType": "complete", "content": [{"type": "text", "text": text}], "isError": True}
        return do.Reply((), jsonrpc.encode(result))

    # -- late events --------------------------------------------------------------------------------------------

    def _late(self, _: on.Event) -> Commands:
        return []

    def _late_question(self, event: on.Nested) -> Commands:
        error = jsonrpc.Error(mcp.INVALID_PARAMS, "No call is in flight that could ask (SEP-2260)")
        return _refuse(event, error, "refused_unsolicited")


def _refuse(event: on.Nested, error: jsonrpc.Error, outcome: str) -> Commands:
    return [do.Respond(event.id, error), do.Count(event.method, outcome)]


def _withdraw(question: Question) -> do.Respond:
    """Answer a question in place of its client."""
    assert question.upstream_id is not None, "urls are asked for only after the call"
    return do.Respond(Raw(question.upstream_id), input_requests.withdrawn(question.method))


def _unrecorded() -> CallLost:
    return CallLost(
        "The call can continue only by running it again, but its answers are too large for that "
        f"({MAX_RECORD_BYTES} bytes at most); it may have had effects"
    )


Handler = Callable[[Exchange, Any], Commands]

WAITING: Final = (RUNNING, ASKING)
_LEFT: Final = (PARKED, DETACHED)
_CALLING: Final = (*WAITING, *_LEFT)
_STREAMED: Final = (OPEN, AWAY)
_BETWEEN: Final = (REFERRED, BROKEN)
_TASK: Final = (OWNED, SETTLED)
_OVER: Final = (FINISHED, ENDED)
_AFTER: Final = (*_BETWEEN, *_OVER)

_X = Exchange
_ROWS: Final[tuple[tuple[type[on.Event], Iterable[State], Handler], ...]] = (
    (on.Called, (IDLE,), _X._call),
    # the client
    (on.Answered, (*WAITING, DETACHED), _X._join),
    (on.Answered, (PARKED, RESTORED, BROKEN), _X._answer),
    (on.Answered, (REFERRED,), _X._answer_referred),
    (on.Answered, _OVER, _X._collect),
    (on.Answered, _TASK, _X._give_handle),
    (on.Updated, (OWNED,), _X._update),
    (on.Cancelled, (OWNED,), _X._cancel_task),
    (on.Left, (*_CALLING, RESTORED, *_AFTER), _X._leave),
    # a client that takes nested requests
    (on.Opened, (IDLE, *_STREAMED), _X._open),
    (on.Opened, (ENDED,), _X._open_late),
    (on.Responded, _STREAMED, _X._respond),
    (on.Cancelled, _STREAMED, _X._hang_up),
    (on.Left, _STREAMED, _X._lose_stream),
    (on.Asked, _STREAMED, _X._put),
    (on.Cancelled, (ENDED,), _X._late),
    # the upstream
    (on.Became, _CALLING, _X._become),
    (on.Nested, (*_CALLING, OWNED), _X._nested),
    (on.Withdrawn, (*_CALLING, OWNED), _X._withdraw),
    (on.Resulted, (*_CALLING, *_STREAMED, OWNED), _X._complete),
    (on.Failed, (*_CALLING, *_STREAMED, OWNED), _X._complete),
    (on.Broke, (*_CALLING, *_STREAMED, OWNED), _X._break),
    (on.Undelivered, _CALLING, _X._undelivered),
    (on.Undelivered, (OWNED,), _X._put_back),
    # time
    (on.QuietPassed, (ASKING,), _X._quiet),
    (on.LegLimitPassed, (RUNNING,), _X._shed),
    (on.LegLimitPassed, (ASKING,), _X._quiet),
    (on.GracePassed, (DETACHED,), _X._grace),
    (on.Expired, (PARKED, RESTORED, REFERRED, AWAY), _X._expire),
    (on.Expired, (BROKEN, FINISHED), _X._forget),
    (on.Expired, (ENDED,), _X._late),
    (on.Stopped, (*_CALLING, *_STREAMED, RESTORED, *_BETWEEN), _X._stop),
    (on.Stopped, _TASK, _X._drop),
    (on.Stopped, _OVER, _X._late),
    # the end of this process
    (on.HandedOver, WAITING, _X._hand_over),
    (on.LetGo, (*_CALLING, RESTORED, *_BETWEEN), _X._let_go),
    # late but harmless: a timer that fired while its cause was handled, or a message after the end
    (on.Nested, (SETTLED, *_AFTER), _X._late_question),
    (on.Withdrawn, (SETTLED, *_AFTER), _X._late),
    (on.Updated, (SETTLED,), _X._late),
    (on.Cancelled, (SETTLED,), _X._late),
    (on.Undelivered, (SETTLED, *_BETWEEN, FINISHED), _X._late),
    (on.HandedOver, (*_LEFT, RESTORED, *_TASK, *_AFTER), _X._late),
    (on.Left, _TASK, _X._late),  # the leg that got the handle
    (on.LetGo, _OVER, _X._late),
    # a call that was given up may still end, or break, as a cancelled task may; one that ended with urls has ended
    *((event, (BROKEN, SETTLED, *_OVER), _X._late) for event in (on.Resulted, on.Failed, on.Broke)),
)

TRANSITIONS: Final[dict[tuple[State, type[on.Event]], Handler]] = {
    (state, event): handler for event, states, handler in _ROWS for state in states
}
"""Every allowed pair of state and event, with its handler."""
