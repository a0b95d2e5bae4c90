"""One exchange as its parts share it: what is known of its call, whether that may run again, and what is told of it.

It is told to the log, the metrics, the traces and the status page.
"""

import asyncio
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.bridge.response_queue import ResponseQueue
from gateway.config import Route
from gateway.exchange.commands import TTL
from gateway.exchange.machine import BROKEN, PARKED, REFERRED, RESTORED, RUNNING, Exchange
from gateway.http.outbox import ending_of
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, OwnerStalled, SessionLost, Unreachable, UpstreamError
from gateway.protocol.request import Request
from gateway.routes.deadlines import wait_seconds
from gateway.routes.live_route import LiveRoute
from gateway.runtime.call_bytes import Weight
from gateway.seal.request_state import Envelope
from gateway.seal.task_handle import TaskHandle
from gateway.sessions.call import PoolKey
from gateway.sessions.session import Session
from gateway.telemetry import COMPLETE, Ending, Event, Operation, Outcome, Span, Step, get_logger
from gateway.telemetry.process_status import CallStatus, Fate
from gateway.telemetry.recent_errors import presentable
from gateway.telemetry.upstream_health import log_failure
from gateway.upstream.channel import Headers

log = get_logger()

HELD: Final = frozenset({PARKED, RESTORED, REFERRED, BROKEN})
"""The states in which a call waits for its client."""
_NO_RESULT_WILL_COME: Final = (CallLost, SessionLost, Unreachable)
_NAME_CHARACTERS: Final = 80
_TARGET_CHARACTERS: Final = 200
_TOGETHER_SECONDS: Final = 1.0
"""Calls that break within this time, without their clients, share a line in the log."""


def _tell_unheard(live: LiveRoute) -> None:
    """Log that calls broke without their clients."""
    errors, route = live.upstream.unheard, live.route
    about = {"upstream": route.upstream.name, "cause": errors[0].message, "fix": errors[0].fix, "calls": len(errors)}
    log.warning(Event.UPSTREAM_FAILED, route=route.path, **about)
    errors.clear()


def shown_name(method: str, target: str) -> str:
    """Return what the status page shows of a target: no URI, because that may hold private data."""
    return "" if method == mcp.RESOURCES_READ else presentable(target[:_NAME_CHARACTERS])


class ClientCall(msgspec.Struct, eq=False):
    """A call as a client's request makes it."""

    live: LiveRoute
    """The route as it was when the request came; a reload does not change it."""
    request: Request
    key: PoolKey
    headers: Headers
    """The headers that go upstream."""
    body_bytes: int = 0
    """The size of the client's request, of which `request` is a view; of its params, which a held call keeps."""
    remote: str | None = None
    """The address from which its first leg came to this process."""
    request_id: str | None = None
    """The id of the newest leg's HTTP request, for the log."""
    span: Span | None = None
    """The span of the newest leg, if it is traced."""
    exchange_id: str = ""
    """The id of its exchange, once something needs one: most exchanges neither park nor are in the log."""
    has_no_way_back: bool = False
    """Whether its client could not come back to another process: its rounds are requests of this very one."""
    was_repeatable: bool = False
    """Whether the server said of the tool that it may run twice: when the call was parked, to whoever held it then."""

    def queue(self) -> ResponseQueue:
        """Return a queue for the messages of an exchange to the client."""
        said = self.request.said
        token = said.progress_token
        return ResponseQueue(
            self.request.id.copy(),  # a copy, since the leg may outlive the body
            self.live.deadlines.silence,
            self.request_id or "",
            self.span,
            progress_token=token and token.copy(),
            log_level=said.log_level,
        )

    def step(self, step: Step) -> None:
        """Count how a retry found its call, or how that goes on."""
        self.live.process.metrics.continuations[self.live.route.path, step].inc()
        if self.span is not None:
            self.span.note("step", step)

    @property
    def is_repeatable(self) -> bool:
        """Whether the server says of the tool of this call that it may run twice, as far as is known."""
        known = self.live.upstream.pool.group(self.key).tools
        return self.was_repeatable or known.latest(self.request.target).ephemeral

    @property
    def may_run_twice(self) -> bool:
        """Whether the call is known to be repeatable: by its method, its route, or its tool's own annotation."""
        return allows_rerun(self.live.route, self.request.method, self.request.target) or self.is_repeatable

    def fate(self, *, is_resumable: bool, may_run_twice: bool) -> Fate:
        """What becomes of the call if this process ends, by what another one could do with its state."""
        may_ask = self.request.method in self.live.policies  # else its client gets no state
        if self.has_no_way_back or not (may_ask and self.live.process.draining.is_resumable):
            return "lost"
        if is_resumable:
            return "resumed"
        return "run again" if may_run_twice else "lost"

    def running_status(self, seconds: float | None, silent: float | None, at_end: Fate | None) -> CallStatus:
        """The call on the status page: target, request id and client are all that comes from outside."""
        request = self.request
        return CallStatus(
            route=self.live.route.path,
            method=request.method,
            name=shown_name(request.method, request.target),
            state=RUNNING,
            age_seconds=seconds or 0.0,
            running_seconds=seconds,
            silent_seconds=silent,
            request_id=self.request_id or "",
            exchange_id=self.exchange_id,
            at_end=at_end,
            owner=self.live.process.owner,
            caller=self.live.process.tags.of(self.key.principal),
            client=client_shown(self.remote, self.key.client_info),
        )

    def weigh(self, *, is_continued: bool = False) -> Weight:
        """Weigh the call: as it came, and as it goes upstream. Raises Busy, unless it `is_continued`."""
        return self.live.process.calls.take(self.key.principal, 2 * self.body_bytes, is_continued=is_continued)


def client_shown(remote: str | None, client_info: bytes) -> str:
    """A client on the status page: its address, and the name that it gives itself."""
    name = jsonrpc.text(jsonrpc.fields(Raw(client_info)).get("name")) or ""
    return f"{remote or '-'} {presentable(name[:_NAME_CHARACTERS])}".rstrip()


class Spoken(msgspec.Struct, frozen=True):
    """What the log says of a call, whichever side takes rounds."""

    live: LiveRoute
    method: str
    target: str
    principal: bytes
    about: Mapping[str, str | None]
    """What each of its lines has: the ids of its exchange, and of the newest HTTP request."""

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
            **self.about,
        )

    def finished(self, rounds: int, outcome: Outcome, began: float, error: GatewayError | None, cause: str) -> None:
        """A call of several rounds is over, or one without a result."""
        route = self.live.route
        self.live.process.metrics.rounds_per_exchange[route.path,].observe(rounds)
        to = log.bind()  # the proxy would look each method up anew
        say = to.warning if isinstance(error, UpstreamError | OwnerStalled) else to.info
        say(
            Event.EXCHANGE_FINISHED,
            route=route.path,
            upstream=route.upstream.name,
            method=self.method[:_TARGET_CHARACTERS],
            target=self.target[:_TARGET_CHARACTERS],
            rounds=rounds,
            outcome=outcome,
            seconds=round(world.monotonic() - began, 3),
            caller=self.live.process.tags.of(self.principal),
            **self.about,
            **({"cause": cause} if cause else {}),
            **({"reason": error.label, "fix": error.fix} if error is not None else {}),
        )


class Context(ClientCall, eq=False, kw_only=True):
    """One exchange: the call of its first leg, with the headers of its newest. Only the driver feeds the exchange."""

    exchange: Exchange
    former: tuple[str, str] | None = None
    """The replica and the epoch of the process that left the call to this one, if one did."""
    server_info: bytes = b""
    """Known as soon as there was a session."""
    lacking_round: int = 0
    """The newest round with a requestState that lacks something of what continues the call."""
    is_state_resumable: bool = True
    """Whether another process can resume the call from that state, if this one has sealed any."""
    is_state_recorded: bool = True
    """Whether another process can run the call again from that state, if it may."""
    _first_request_id: str = ""
    """The id of its first leg's HTTP request, unless that came to another process."""
    _began: float = 0.0
    _parked_at: float = 0.0
    _held_seconds: float = 0.0
    """For how long the call was parked, until it was unparked last."""
    _answered: Ending = COMPLETE
    """How the legs that get the result end."""
    _outcome: Outcome = Outcome.CANCELLED
    _cause: str = ""
    _error: GatewayError | None = None
    _told_by: Literal["exchange", "task", "nobody"] = "exchange"
    """Whose line in the log says how the call ends."""
    call_span: Span | None = None
    """The span of the upstream call, until the call is answered, or broken, or its session is given back."""

    def __post_init__(self) -> None:
        self._began, self._first_request_id = world.monotonic(), self.request_id or ""

    @property
    def is_task(self) -> bool:
        """Whether the client holds the handle of a task."""
        return self._told_by == "task"

    # -- what is known of the call --------------------------------------------------------------------------------

    def runs_in(self, session: Session) -> None:
        """The call runs in this session, whose pool key is an equal one."""
        self.key = session.group.key
        self.server_info = session.shaken.server_info

    def left_by_another(self, left: Envelope | TaskHandle, *, is_repeatable: bool = False) -> None:
        """Another process began the call, and left it as this says."""
        self.exchange_id, self.was_repeatable = left.exchange, is_repeatable
        self.former, self._first_request_id = (left.owner, left.epoch), ""
        if left.upstream is not None:
            self.server_info = left.upstream.server_info

    def sealed(self, state: Envelope, *, is_whole: bool) -> None:
        """This is the newest state; `is_whole` if nothing was left out of it for its size."""
        self.was_repeatable = state.repeatable  # a call that is lost later is judged by what was true then
        self.is_state_resumable, self.is_state_recorded = state.is_resumable, state.record is not None
        if not (is_whole and self.is_state_resumable):
            self.lacking_round = state.round

    def held(self) -> None:
        """The call waits for its client, and keeps no more of the request than it needs."""
        self.request = self.request.held()
        self.body_bytes = self.request.params_size

    def may_run_again(self, error: GatewayError) -> bool:
        """Whether the call that this error ended may be run again. A call that never asked is left to its client."""
        has_asked = bool(self.exchange.round) and self.exchange.calling
        return has_asked and isinstance(error, _NO_RESULT_WILL_COME) and self.may_run_twice

    # -- what is told of it -----------------------------------------------------------------------------------------

    def identify(self) -> str:
        """Return the id of the exchange, drawn at the first need: its state's, or that of a line in the log."""
        self.exchange_id = self.exchange_id or world.random_bytes(16).hex()
        return self.exchange_id

    def began_before(self, seconds: float) -> None:
        """The call began so much earlier than the exchange."""
        self._began -= seconds

    def running_seconds(self, now: float) -> float | None:
        """For how long the call has run, without the time that it waited for its client; None if it does not run."""
        is_running = self.exchange.calling and not self.exchange.questions
        return now - self._began - self._held_seconds if is_running else None

    def status(self, now: float, heard: float | None, at_end: Fate | None) -> CallStatus:
        """The exchange on the status page; `heard` is when its server last said something, if it has the call."""
        exchange = self.exchange
        patience = wait_seconds(self.live.config)
        return replace(
            self.running_status(self.running_seconds(now), None if heard is None else now - heard, at_end),
            first_request_id=self._first_request_id if self._first_request_id != self.request_id else "",
            state=exchange.state,
            round=exchange.round,
            asked=tuple(sorted({question.method.partition("/")[0] for question in exchange.questions.values()})),
            age_seconds=now - self._began,
            expires_in_seconds=max(self._parked_at + patience - now, 0) if TTL in exchange.timers else None,
            is_lost=exchange.is_lost,
        )

    def parked(self) -> None:
        """The call waits for its client from now on."""
        self._parked_at = world.monotonic()
        self.live.process.metrics.held_calls[self.live.route.path,].inc()
        if self.call_span is not None:
            self.call_span.happened("parked")

    def unparked(self) -> None:
        """The call no longer waits for its client."""
        seconds = world.monotonic() - self._parked_at
        self._held_seconds += seconds
        self.live.process.metrics.held_calls[self.live.route.path,].inc(-1)
        self.live.process.metrics.hold_times[self.live.route.path,].observe(seconds)
        if self.call_span is not None:
            self.call_span.happened("unparked")

    def resulted(self, ending: Ending) -> None:
        """The call has a result, whatever an earlier run ended with."""
        self._answered = ending
        self.answered(ending)

    def answered(self, ending: Ending) -> None:
        """Count how the upstream answered the call, with the time that it took for that."""
        now = world.monotonic()
        until = self._parked_at if self.exchange.state in HELD else now  # its user's time is not the upstream's
        seconds = until - self._began - self._held_seconds
        self.live.process.metrics.calls[self.live.route.path, self.request.method, ending.error_type].observe(seconds)
        if self.call_span is not None:  # as in `UpstreamCall.release`
            self.end_call_span(ending)

    def run_again(self) -> None:
        """The call is sent once more, whatever a leg was told of a run that could not begin."""
        self._outcome, self._cause, self._error = Outcome.CANCELLED, "", None
        self.step(Step.REPLAYED)

    def becomes_task(self) -> None:
        """The client gets the handle of a task."""
        self._told_by = "task"

    def completed(self) -> Ending:
        """The legs end with a result, whatever an earlier one ended with; returns how they end."""
        self._outcome, self._cause, self._error = COMPLETE.outcome, "", None
        return self._answered

    def failed(self, error: GatewayError | jsonrpc.Error) -> None:
        """The legs end with an error, of the gateway or of the upstream."""
        self._outcome = Outcome.ERROR
        if isinstance(error, GatewayError):
            self._outcome = ending_of(error).outcome
            self._cause, self._error = error.message, error
            self.live.upstream.note(error)
            self.live.upstream.health.count(error)
            if isinstance(error, UpstreamError) and self.exchange.state in HELD:  # its end may tell of another error
                self._round_failed(error)
        else:
            self._cause = f"the upstream answered with error {error.code}"

    def _round_failed(self, error: UpstreamError | OwnerStalled) -> None:
        event = Event.UPSTREAM_FAILED if isinstance(error, UpstreamError) else Event.PEER_FAILED
        log_failure(event, error, self.live.route.path, self.live.route.upstream.name, self.about)

    def stays_elsewhere(self, error: UpstreamError | OwnerStalled) -> None:
        """This round is refused, and the call does not end with it: its owner may hold it."""
        self._told_by = "nobody"
        self.live.upstream.note(error)
        self._round_failed(error)

    def cancelled(self, cause: str) -> None:
        """The exchange was given up, unless it was refused; the first cause that is known is told."""
        if self._outcome is not Outcome.REJECTED:
            self._outcome = Outcome.CANCELLED
        self._cause = self._cause or cause

    def stays_cold(self) -> None:
        """Nothing more is said about the call until its client comes back."""
        self._told_by = "nobody"

    def cooled(self) -> None:
        """The call is let go of."""
        self.stays_cold()
        route = self.live.route.path
        self.live.process.metrics.calls_cooled[route,].inc()
        log.info(Event.CALL_COOLED, route=route, round=self.exchange.round, **self.about)

    def unsent(self, cause: str) -> None:
        """A message to the upstream that needs no reply did not arrive."""
        route = self.live.route.path
        log.debug(Event.UPSTREAM_FAILED, route=route, cause=cause, **self.about)

    def unheard(self, error: GatewayError) -> None:
        """The call broke, and its client may come back much later: one line tells of all that break meanwhile."""
        errors = self.live.upstream.unheard
        errors.append(error)
        if len(errors) == 1:
            _ = asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, _tell_unheard, self.live)

    def begin_call_span(self, version: str) -> Span | None:
        """The span of an upstream call: it lasts as long as the call, however many rounds that takes."""
        if self.span is None:
            return None
        request, route = self.request, self.live.route
        operation = Operation(request.method, request.target, version, route.path)
        self.call_span = self.span.call(operation, route.upstream.url)
        return self.call_span

    def end_call_span(self, ending: Ending) -> None:
        """Nothing more is heard of the upstream call."""
        if self.call_span is not None:
            self.call_span.end(ending)
            self.call_span = None

    def finished(self) -> None:
        """Nothing more will happen in the exchange. A plain call is counted by its request, and not told here."""
        if self._outcome is Outcome.CANCELLED:
            self.cancelled("the client did not come back")
        if self._told_by == "exchange" and (self.exchange.round or self._outcome is not COMPLETE.outcome):
            self.spoken.finished(self.exchange.requests, self._outcome, self._began, self._error, self._cause)
            self._told_by = "nobody"

    @property
    def spoken(self) -> Spoken:
        """The call, as the log speaks of it."""
        return Spoken(self.live, self.request.method, self.request.target, self.key.principal, self.about)

    @property
    def about(self) -> dict[str, str | None]:
        """See `Spoken`."""
        return {"request_id": self.request_id, "exchange_id": self.identify()}


def allows_rerun(route: Route, method: str, target: str) -> bool:
    """Whether the method or the route says that a call may run twice."""
    if method != mcp.TOOLS_CALL or route.continuation == "replay":
        return True
    return any(fnmatchcase(target, pattern) for pattern in route.ephemeral)
