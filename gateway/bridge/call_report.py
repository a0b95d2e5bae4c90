"""Reports how an exchange goes: to the log, the metrics, the traces, the status page."""

from typing import Final

import msgspec

from gateway import world
from gateway.bridge.call_context import Context
from gateway.exchange import events as on
from gateway.exchange.machine import BROKEN, PARKED, REFERRED, RESTORED
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, UpstreamError
from gateway.routes.deadlines import wait_seconds
from gateway.routes.live_route import LiveRoute
from gateway.seal.request_state import Envelope
from gateway.telemetry import COMPLETE, Ending, Event, Operation, Outcome, Span, Step, get_logger
from gateway.telemetry.process_status import HeldStatus
from gateway.telemetry.recent_errors import presentable

log = get_logger()

HELD: Final = frozenset({PARKED, RESTORED, REFERRED, BROKEN})
"""The states in which a call waits for its client."""
_NO_RESULT: Final = Ending(Outcome.ERROR, str(CallLost.code))
"""How an upstream call ends whose result cannot be passed on."""
_NAME_CHARACTERS: Final = 80
_TARGET_CHARACTERS: Final = 200


class Spoken(msgspec.Struct, frozen=True):
    """What the log says of a call, whichever side takes rounds."""

    live: LiveRoute
    method: str
    target: str
    request_id: str | None

    def taken_over(self, owner: str, round_: int, *, owner_is_dead: bool, is_resumable: bool = True) -> None:
        """This replica continues a call that another one began."""
        log.info(
            Event.CALL_TAKEN_OVER,
            route=self.live.route.path,
            upstream=self.live.route.upstream.name,
            target=self.target[:_TARGET_CHARACTERS],
            owner=owner,
            owner_is_dead=owner_is_dead,
            round=round_,
            resumable=is_resumable,
            request_id=self.request_id,
        )

    def finished(self, rounds: int, outcome: Outcome, began: float, error: GatewayError | None, cause: str) -> None:
        """A call of several rounds is over, or one without a result."""
        route = self.live.route
        self.live.process.metrics.rounds_per_exchange[route.path,].observe(rounds)
        to = log.bind()  # the proxy would look each method up anew
        say = to.warning if isinstance(error, UpstreamError) else to.info
        say(
            Event.EXCHANGE_FINISHED,
            route=route.path,
            upstream=route.upstream.name,
            method=self.method[:_TARGET_CHARACTERS],
            target=self.target[:_TARGET_CHARACTERS],
            rounds=rounds,
            outcome=outcome,
            seconds=round(world.monotonic() - began, 3),
            request_id=self.request_id,
            **({"cause": cause} if cause else {}),
            **({"fix": error.fix} if error is not None else {}),
        )


class Report:
    """Collects how one exchange goes, and reports it."""

    __slots__ = (
        "_call_span",
        "_cause",
        "_context",
        "_error",
        "_held_seconds",
        "_is_told",
        "_outcome",
        "_parked_at",
        "_started",
        "ending",
    )

    def __init__(self, context: Context) -> None:
        self.ending = COMPLETE
        """How the legs that get the result end."""
        self._context = context
        self._started = self._parked_at = world.monotonic()
        self._held_seconds = 0.0
        """For how long the call was parked, until it was unparked last."""
        self._outcome = COMPLETE.outcome
        self._cause = ""
        self._error: GatewayError | None = None
        self._is_told = False
        """Whether nothing more is to be said of the exchange."""
        self._call_span: Span | None = None
        """The span of the upstream call, until the call is answered or the exchange is over."""

    def began_before(self, seconds: float) -> None:
        """The call began earlier than the exchange."""
        self._started -= seconds

    def held_status(self, now: float) -> HeldStatus:
        """The exchange on the status page: nothing in it comes from a client or an upstream, except the target."""
        request, exchange = self._context.request, self._context.exchange
        patience = wait_seconds(self._context.live.config)
        return HeldStatus(
            route=self._context.live.route.path,
            method=request.method,
            name=presentable(request.target[:_NAME_CHARACTERS]) if request.method != mcp.RESOURCES_READ else "",
            state=exchange.state,
            round=exchange.round,
            asked=tuple(sorted({question.method.partition("/")[0] for question in exchange.questions.values()})),
            age_seconds=now - self._started,
            expires_in_seconds=max(self._parked_at + patience - now, 0) if exchange.state in HELD else None,
            owner="",
            caller="",
        )

    def parked(self) -> None:
        """The call waits for its client from now on."""
        self._parked_at = world.monotonic()
        live = self._context.live
        live.process.metrics.held_calls[live.route.path,].inc()
        if self._call_span is not None:
            self._call_span.happened("parked")

    def unparked(self) -> None:
        """The call no longer waits for its client."""
        live, seconds = self._context.live, world.monotonic() - self._parked_at
        self._held_seconds += seconds
        live.process.metrics.call_released(live.route.path, seconds)
        if self._call_span is not None:
            self._call_span.happened("unparked")

    def answered(self, said: on.Resulted | on.Failed | on.Became, translated: on.Event) -> None:
        """The upstream has answered the call: count how, with the time that it took for that.

        The call ends by what the upstream said, unless that has no translation.
        """
        if isinstance(said, on.Failed):
            ending = Ending(Outcome.ERROR, str(said.error.code))
        else:
            ending = self.ending if isinstance(translated, on.Resulted | on.Became) else _NO_RESULT
        now, context = world.monotonic(), self._context
        until = self._parked_at if context.exchange.state in HELD else now
        seconds = until - self._started - self._held_seconds
        context.live.process.metrics.calls[context.live.route.path, context.request.method, ending.error_type].observe(
            seconds
        )
        if self._call_span is not None:
            self._call_span.end(ending)
            self._call_span = None

    def run_again(self) -> None:
        """The call is sent once more."""
        self._call_span = None
        self.step(Step.REPLAYED)

    def became_task(self, event: on.Became) -> None:
        """The client gets the handle of a task, which has lines of its own in the log."""
        self.answered(event, event)
        self.finished()
        self.is_task()

    def is_task(self) -> None:
        """The client holds the handle of a task, also if another replica gave it: nothing is said of an exchange."""
        self._is_told = True

    def step(self, step: Step) -> None:
        """Count the step by which a retry continued."""
        live, span = self._context.live, self._context.span
        live.process.metrics.continuations[live.route.path, step].inc()
        if span is not None:
            span.note("step", step)

    def completed(self) -> Ending:
        """The legs end with a result, whatever an earlier one ended with; returns how they end."""
        self._outcome, self._cause, self._error = COMPLETE.outcome, "", None
        return self.ending

    def failed(self, error: GatewayError | jsonrpc.Error) -> None:
        """The legs end with an error, of the gateway or of the upstream."""
        self._outcome = Outcome.ERROR
        if isinstance(error, GatewayError):
            self._cause, self._error = error.message, error
            self._context.live.upstream.health.note(error)
        else:
            self._cause = f"the upstream answered with error {error.code}"

    def cancelled(self, cause: str = "") -> None:
        """The exchange was given up; `cause` if there is more to say about it."""
        self._outcome = Outcome.CANCELLED
        self._cause = cause or self._cause

    def taken_over(self, envelope: Envelope, *, owner_is_dead: bool) -> None:
        """This replica continues a call that another one sent."""
        owner, is_resumable = envelope.owner, envelope.is_resumable
        self._spoken.taken_over(owner, envelope.round, owner_is_dead=owner_is_dead, is_resumable=is_resumable)

    def cooled(self) -> None:
        """The call is let go of, and nothing more is said about it until its client comes back."""
        self._is_told = True
        live = self._context.live
        live.process.metrics.calls_cooled[live.route.path,].inc()
        route = live.route.path
        log.info(
            Event.CALL_COOLED, route=route, round=self._context.exchange.round, request_id=self._context.request_id
        )

    def unsent(self, cause: str) -> None:
        """A message to the upstream that needs no reply did not arrive."""
        route = self._context.live.route.path
        log.debug(Event.UPSTREAM_FAILED, route=route, request_id=self._context.request_id, cause=cause)

    def call_span(self, version: str) -> Span | None:
        """The span of an upstream call: it lasts as long as the call, however many rounds that takes."""
        if self._context.span is None:
            return None
        request, route = self._context.request, self._context.live.route
        operation = Operation(request.method, request.target, version, route.path)
        self._call_span = self._context.span.call(operation, route.upstream.url)
        return self._call_span

    def finished(self) -> None:
        """The exchange is over. A plain call is counted by its request, so nothing is said about it here."""
        self._call_span = None
        rounds = self._context.exchange.round + 1
        if not self._is_told and (rounds > 1 or self._outcome is not COMPLETE.outcome):
            self._spoken.finished(rounds, self._outcome, self._started, self._error, self._cause)

    @property
    def _spoken(self) -> Spoken:
        context, request = self._context, self._context.request
        return Spoken(context.live, request.method, request.target, context.request_id)
