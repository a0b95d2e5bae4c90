"""Runs one exchange: feeds it events, obeys its commands, owns its timers and its place in the parking lot."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import Final, assert_never

from msgspec import Raw

from gateway.bridge.response_queue import FinalMessage, ResponseQueue, ending_of
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import questions, results
from gateway.exchange.commands import Timer
from gateway.exchange.machine import Exchange, Policy, State
from gateway.http.forwarded_headers import own_headers
from gateway.identity.principal import of_headers
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    CallLost,
    GatewayError,
    OwnerStalled,
    Refused,
    SessionLost,
    Unreachable,
    UpstreamError,
)
from gateway.protocol.request import Request
from gateway.routes.deadlines import wait_seconds
from gateway.routes.live_route import LiveRoute
from gateway.routes.parking import Lot
from gateway.seal import handoff
from gateway.seal.request_state import Binding, Envelope, Upstream, bind, digest_answers, pack_record
from gateway.sessions import tool_schemas
from gateway.sessions.list_cache import CacheKey  # noqa: TC001  (one import style; it costs nothing here)
from gateway.sessions.session import Call, PoolKey, Session
from gateway.telemetry import (
    COMPLETE,
    TOOL_ERROR,
    Ending,
    Event,
    NestedOutcome,
    Operation,
    Outcome,
    Span,
    Step,
    get_logger,
)
from gateway.telemetry.recent_errors import presentable
from gateway.telemetry.status import HeldStatus
from gateway.upstream.channel import Headers

log = get_logger()

_BUG: Final = "Internal error of the gateway; its log says more. The call may have had effects"
_GIVEN_UP: Final = Ending(Outcome.CANCELLED)
_NO_RESULT: Final = Ending(Outcome.ERROR, str(CallLost.code))
_TRACESTATE: Final = "tracestate"
_TOOL_FAILED: Final = Ending(Outcome.COMPLETE, TOOL_ERROR)
_NEVER_ASKING: Final = Policy(may_ask=False)
_CANCEL_PAUSES: Final = (0.0, 0.2, 1.0)
_YOUNG_SECONDS: Final = 0.5
_HELD: Final = (State.PARKED, State.REFERRED, State.BROKEN)
_REPLAYABLE: Final = (CallLost, SessionLost, Unreachable)
"""Errors after which a call's result can never come."""
_LEARN_SECONDS: Final = 1.0
"""How long a client that waits for a lost call is kept while its tool is looked up."""
_NAME_CHARACTERS: Final = 80
_MAX_REFUSALS: Final = 256
"""Of the upstream's questions, that may wait until it takes them; it gets no answer to what it asks beyond."""
_LEG_TIMERS: Final = frozenset({Timer.QUIET, Timer.LEG, Timer.GRACE})


class Driver:
    """One exchange at work."""

    def __init__(  # noqa: PLR0915  (one attribute a line)
        self, live: LiveRoute, lot: Lot["Driver"], request: Request, key: PoolKey, headers: Headers
    ) -> None:
        self.id = ""
        """Drawn when the exchange is first parked; most never are."""
        self.principal = key.principal
        self.ticket: CacheKey | None = None
        """Set for a list that may be kept."""
        self._live = live
        self._lot = lot
        self._request = request
        self._key = key
        self._headers = headers
        self._exchange = Exchange(
            request.declared,
            live.policies.get(request.method, _NEVER_ASKING),
            request.input_responses,
        )
        self._outboxes: dict[on.Leg, ResponseQueue] = {}
        self.request_id: str | None = None
        """Of the newest leg, for the log."""
        self._span: Span | None = None
        """The same, where it is traced."""
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._armed: set[Timer] = set()
        self._events: deque[on.Event] = deque()
        self._handling = False
        self._session: Session | None = None
        self._released: Session | None = None
        """Where late questions of a call that was given up are answered."""
        self._call: Call | None = None
        self._call_sent = False
        self._forwarded = 0
        self._server_info: Raw | None = None
        self._task: asyncio.Task[None] | None = None
        self._to_send: deque[Callable[[], Awaitable[None]]] = deque()
        self._sending = False
        self._refusals = 0
        """How many of what is to be sent are answers that no client gave."""
        self._binding: Binding | None = None
        self._taken: Envelope | None = None
        """The state with which another replica's call was taken over, until it is picked up."""
        self._inherited = False
        """Whether another replica began it."""
        self._is_proven = True
        """Whether the replica that held the taken call is proven dead; a silent one may hold it still."""
        self._run = 0
        """How often the call was run again; what was to be sent to an earlier run is not."""
        self._joined: asyncio.Future[bool] | None = None
        """Done when the taken call's stream is open (True), or will not be."""
        self._visits = 0
        """Retries that were accepted so far."""
        self._was_relayed = False
        """Whether the leg that left last was another replica's."""
        self._is_let_go = False
        """Whether another replica goes on with the upstream call: nothing more is said about it from here."""
        self._started = self._parked_at = time.monotonic()
        self._outcome = Outcome.COMPLETE
        self._cause = ""
        self._error: GatewayError | None = None
        self._ending = COMPLETE
        """How the legs that get the result end."""

    @property
    def live(self) -> LiveRoute:
        """What it began with: a reload leaves it that."""
        return self._live

    def glance(self, now: float) -> HeldStatus:
        """What may be told of it, `now` being the monotonic time; nothing that a client or an upstream said."""
        request, exchange = self._request, self._exchange
        is_parked = exchange.state in _HELD
        patience = wait_seconds(self._live.config)
        return HeldStatus(
            route=self._live.route.path,
            method=request.method,
            name=presentable(request.target[:_NAME_CHARACTERS]) if request.method != mcp.RESOURCES_READ else "",
            state=exchange.state,
            round=exchange.round,
            asked=tuple(sorted({question.method.partition("/")[0] for question in exchange.questions.values()})),
            age_seconds=now - self._started,
            expires_in_seconds=max(self._parked_at + patience - now, 0) if is_parked else None,
            owner="",
            caller="",
        )

    # -- from the client's side ---------------------------------------------------------------------------------

    def begin(self, outbox: ResponseQueue) -> None:
        """Start with the first leg."""
        self._outboxes[outbox.leg] = outbox
        self.request_id, self._span = outbox.request_id, outbox.span
        self._feed(on.Called(outbox.leg))

    @classmethod
    def take_over(  # noqa: PLR0913  (what a retry brings, and what is known of its owner)
        cls,
        live: LiveRoute,
        lot: Lot["Driver"],
        request: Request,
        key: PoolKey,
        headers: Headers,
        envelope: Envelope,
        outbox: ResponseQueue,
        *,
        is_proven: bool,
    ) -> "Driver":
        """Restore the exchange of a retry that no replica within reach has, and continue it; raises Busy.

        Nothing goes upstream before its answers are found to be right. A place for it is taken only if they are:
        whatever fails in here gives it back, and nothing is awaited meanwhile. Where the owner's death is not proven,
        the call is neither cancelled nor declared lost.
        """
        driver = cls(live, lot, request, key, headers)
        driver.id = envelope.exchange
        driver._taken = envelope
        driver._inherited, driver._is_proven = True, is_proven
        try:
            driver._restore(envelope)
            driver.answer(outbox, request, envelope.round, headers)
        except BaseException:
            driver._discard()
            raise
        return driver

    def _restore(self, envelope: Envelope) -> None:
        if envelope.upstream is not None:
            self._server_info = Raw(envelope.upstream.server_info)
        self._lot.park(self)
        before = self._exchange.state
        self._exchange.restore(handoff.past(envelope))
        self._moved(before, self._exchange.state)

    def _discard(self) -> None:
        """Forget an exchange that was restored for nothing: its retry was refused."""
        for timer in tuple(self._armed):
            self._disarm(timer)
        if self._task is not None:
            _ = self._task.cancel()
        self._moved(self._exchange.state, State.IDLE)
        self._lot.remove(self)

    def answer(self, outbox: ResponseQueue, request: Request, round_: int, headers: Headers) -> None:
        """Continue with a further leg; raises a DownstreamError with the call unharmed."""
        answers = request.input_responses or {}
        answered = on.Answered(outbox.leg, round_, digest_answers(answers), answers)
        self._outboxes[outbox.leg] = outbox
        self.request_id, self._span = outbox.request_id, outbox.span
        before = self._headers
        self._headers = headers
        try:
            self._feed(answered)
        except GatewayError:
            self._headers = before
            del self._outboxes[outbox.leg]
            raise
        self._visits += 1

    async def authorise(self, key: PoolKey, headers: Headers) -> None:
        """Have the upstream check a retry's credential where the call runs, or ran; raises as `Pool.authorise`."""
        await self._live.upstream.pool.authorise(key, headers, self._session or self._released)

    def leave(self, leg: on.Leg, *, is_relayed: bool = False) -> None:
        """A leg's client is gone, or the way to the replica that relayed it."""
        self._was_relayed = is_relayed
        self._feed(on.Left(leg))
        self._outboxes.pop(leg, None)

    def hand_over(self) -> None:
        """End the legs that wait with a state-only round: their clients shall reach this replica through others."""
        self._feed(on.HandedOver(self._lot.has_place(self)))

    def let_go(self) -> bool:
        """Keep nothing of an exchange that another replica can go on with; whether there is one that can."""
        channel = self._session.channel if self._session is not None else None
        resumable = channel is not None and channel.session_id is not None and channel.cursor is not None
        if not resumable and not self._known_ephemeral():
            return False
        self._is_let_go = resumable
        self._feed(on.LetGo(cancel=not resumable))
        return True

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica went on with the exchange after that round, in the same upstream call."""
        return self._run == 0 and (self._exchange.round > round_ or self._inherited)

    def stop(self, error: GatewayError) -> None:
        """Give the exchange up and tell who waits."""
        self._feed(on.Stopped(error))

    def forget(self) -> None:
        """Drop the kept result."""
        self._disarm(Timer.LINGER)

    # -- from the upstream's side -------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take one event of the call, as the session heard it."""
        if isinstance(event, on.Progressed | on.Logged):
            self._pass_on(event, mcp.PROGRESS if isinstance(event, on.Progressed) else mcp.LOG)
        else:
            self._feed(self._translated(event))

    def _pass_on(self, event: on.Event, method: str) -> None:
        """A notification: the exchange decides whether a leg wants it."""
        before = self._forwarded
        self._feed(event)
        self._live.process.metrics.notification(self._live.route.path, method, forwarded=self._forwarded > before)

    def _translated(self, event: on.Event) -> on.Event:
        request = self._request
        if isinstance(event, on.Resulted):
            translated = self._modern_result(Raw(event.result))
            self._end_span(self._ending if isinstance(translated, on.Resulted) else _NO_RESULT)
            return translated
        if isinstance(event, on.Failed):
            self._end_span(Ending(Outcome.ERROR, str(event.error.code)))
        if isinstance(event, on.Failed) and event.error.code != mcp.LEGACY_URL_REQUIRED:
            return on.Failed(results.modern_error(request.method, request.target, event.error))
        if isinstance(event, on.Withdrawn):
            return on.Withdrawn(event.id, replayable=self._known_ephemeral())
        return event

    def _modern_result(self, result: Raw) -> on.Event:
        request = self._request
        ttl_ms, scope = self._live.route.cache.of(request.method)
        assert self._server_info is not None, "a result comes from a session"
        try:
            if request.method == mcp.TOOLS_LIST:
                result = tool_schemas.usable(self._live.upstream.pool, result)
            body, is_tool_error = results.modern(
                request.method,
                result,
                self._server_info,
                ttl_ms,
                scope,
                retried=self._exchange.round > 0 or request.input_responses is not None,
            )
        except ValueError:
            return on.Broke(
                CallLost(
                    f"The upstream {self._live.route.upstream.name} of route {self._live.route.path} answered "
                    f"{request.method} with a result that is no object; the call may have had effects"
                )
            )
        if is_tool_error:
            self._ending = _TOOL_FAILED
        if request.method == mcp.TOOLS_LIST:
            tool_schemas.learn(self._live.upstream.pool.group(self._key), request.params, result, self._headers)
        if self.ticket is not None:
            self._live.upstream.pool.keep(self.ticket, result, body)
        return on.Resulted(body)

    # -- the machine --------------------------------------------------------------------------------------------

    def _feed(self, event: on.Event) -> None:
        """Handle one event, and those that obeying its commands brings about, one after the other."""
        if self._handling:
            self._events.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._handling = False

    def _handle(self, event: on.Event) -> None:
        before = self._exchange.state
        for command in self._exchange.handle(event):
            self._obey(command)
        after = self._exchange.state
        if after is not before:
            self._moved(before, after)
            if self._taken is not None and after in _PICKING_UP:
                self._pick_up(self._taken)

    def _moved(self, before: State, after: State) -> None:
        """Keep gauge and parking lot true to the state."""
        live = self._live
        if self._session is not None and (before in _HELD or after in _HELD):
            live.upstream.pool.rest(self._session, resting=after in _HELD)
        if after in _HELD and before not in _HELD:
            self._happened("parked")
            self._parked_at = time.monotonic()
            live.process.metrics.call_parked(live.route.path)
        elif before in _HELD and after not in _HELD:
            self._happened("unparked")
            live.process.metrics.call_released(live.route.path, time.monotonic() - self._parked_at)
        if after is State.ENDED:
            self._ended()

    def _ended(self) -> None:
        lot = self._lot
        if self._armed:
            for timer in self._armed - {Timer.LINGER}:
                self._disarm(timer)
        self._live.deadlines.idle.disarm(self)
        # The call names its listener, this one: without the circle no collector has to find what a plain call leaves.
        self._call = self._task = None
        if Timer.LINGER in self._armed:
            lot.keep(self)
        elif self._exchange.round:
            lot.remove(self)
        self._report()

    def _report(self) -> None:
        rounds = self._exchange.round + 1
        if rounds == 1 and self._outcome is Outcome.COMPLETE:
            return  # a plain call is counted by its request
        self._live.process.metrics.exchange_finished(self._live.route.path, rounds)
        error = self._error
        say = log.warning if isinstance(error, UpstreamError) else log.info
        say(
            Event.EXCHANGE_FINISHED,
            route=self._live.route.path,
            upstream=self._live.route.upstream.name,
            method=self._request.method,
            target=self._request.target[:200],
            rounds=rounds,
            outcome=self._outcome,
            seconds=round(time.monotonic() - self._started, 3),
            request_id=self.request_id,
            **({"cause": self._cause} if self._cause else {}),
            **({"fix": error.fix} if error is not None else {}),
        )

    def _obey(self, command: do.Command) -> None:  # noqa: C901, PLR0912  (one match over all commands)
        match command:  # what a plain call needs stands first
            case do.SendCall():
                self._task = self._live.process.tasks.start(self._run_call(), "call")
            case do.RunAgain():
                self._run_again()
            case do.Arm(timer=timer):
                self._arm(timer)
            case do.Disarm(timer=timer):
                self._disarm(timer)
            case do.DisarmLeg():
                for timer in self._armed & _LEG_TIMERS:
                    self._disarm(timer)
            case do.Reply(legs=legs, result=result):
                for leg in legs:
                    self._finish(leg, FinalMessage(jsonrpc.result(leg.id, result), ending=self._ending))
            case do.ReleaseSession(clean=clean):
                self._release(clean=clean)
            case do.SendAnswers(answers=answers):
                if self._call is not None:
                    self._call.heard = time.monotonic()  # until now it was the client who was silent
                run = self._run
                self._send_later(lambda: self._deliver(answers, run))
            case do.Respond(upstream_id=id_, result=result, error=error):
                self._respond(id_, result if result is not None else error)
            case do.CancelCall(reason=reason):
                self._cancel(reason)
            case do.Forward(leg=leg, message=message):
                self._forwarded += 1
                self._outboxes[leg].send(message)
            case do.Ask():
                self._ask(command)
            case do.Fail(legs=legs, error=failed):
                self._fail(legs, failed)
            case do.FailWith(legs=legs, error=error):
                self._outcome = Outcome.ERROR
                self._cause = f"the upstream answered with error {error.code}"
                for leg in legs:
                    self._finish(
                        leg,
                        FinalMessage(jsonrpc.failure(leg.id, error), ending=Ending(Outcome.ERROR, str(error.code))),
                    )
            case do.Count(method=method, outcome=outcome):
                self._live.process.metrics.nested_request(self._live.route.path, method, NestedOutcome(outcome))
            case _:
                assert_never(command)

    # -- downstream ---------------------------------------------------------------------------------------------

    def _finish(self, leg: on.Leg, last: FinalMessage) -> None:
        outbox = self._outboxes.pop(leg)
        outbox.finish(last)
        if outbox.dropped:
            self._live.process.metrics.notifications_dropped(self._live.route.path, outbox.dropped)

    def _fail(self, legs: tuple[on.Leg, ...], error: GatewayError) -> None:
        self._outcome = Outcome.ERROR
        self._cause, self._error = error.message, error
        self._live.upstream.health.note(error)
        for leg in legs:
            self._finish(leg, FinalMessage.of_error(error, leg.id, self._outboxes[leg].request_id))

    def _ask(self, ask: do.Ask) -> None:
        """Seal, park, and hand the questions to the client."""
        self.id = self.id or secrets.token_urlsafe(16)
        try:
            state = self._seal(ask)
            if ask.held and ask.stays:
                self._lot.park(self)
        except GatewayError as exc:
            self._fail(ask.legs, exc)
            self._events += (on.Stopped(exc), on.Expired())
            return
        parts: list[tuple[str, bytes | Raw]] = [("resultType", b'"input_required"')]
        if ask.questions:
            parts.append(("inputRequests", questions.input_requests(ask.questions)))
        parts.append(("requestState", jsonrpc.encode(state)))
        if self._server_info is not None:
            parts.append(("_meta", jsonrpc.merge([(mcp.META_SERVER_INFO, self._server_info)])))
        body = jsonrpc.merge(parts)
        ending = Ending(Outcome.INPUT_REQUIRED if ask.questions else Outcome.STATE_ONLY)
        for leg in ask.legs:
            self._finish(leg, FinalMessage(jsonrpc.result(leg.id, body), ending=ending))

    def _seal(self, ask: do.Ask) -> str:
        live = self._live
        if self._binding is None:
            names = live.route.bound_headers
            self._binding = bind(live.route.path, self._request, self.principal, names, self._digest)
        now = time.time()
        exchange = self._exchange
        envelope = Envelope(
            issued=now,
            expires=now + wait_seconds(live.config),
            binding=self._binding,
            exchange=self.id,
            round=ask.round,
            owner=live.process.owner if ask.held else "",
            epoch=live.process.epoch,
            state=ask.state,
            sheds=exchange.sheds,
            open=tuple(handoff.opened(question) for question in ask.questions.values()),
            upstream=self._whereabouts() if ask.held else None,
            record=pack_record(exchange.record) if exchange.record is not None else None,
            trace=self._span.token if self._span is not None else None,
        )
        live.process.metrics.sealed()
        for smaller in handoff.ever_smaller(envelope, held=ask.held):
            try:
                return live.process.sealer.seal(smaller)
            except ValueError:
                continue
        raise CallLost(
            "The answers of this call do not fit into its requestState (limits.state_bytes), and the route keeps them "
            "nowhere else (continuation: replay)"
        )

    def _digest(self, names: Sequence[str]) -> bytes:
        """Of the credentials among the headers of the newest leg; bound headers always go upstream."""
        return of_headers(names, self._headers.get)

    def _whereabouts(self) -> Upstream | None:
        """Where another replica would find the call."""
        session, call = self._session, self._call
        if session is None or call is None or (session_id := session.channel.session_id) is None:
            return None
        shaken = session.shaken
        return Upstream(session_id, shaken.version, call.id, bytes(shaken.server_info), session.channel.cursor)

    # -- upstream -----------------------------------------------------------------------------------------------

    async def _run_call(self) -> None:
        """The call's own task: it outlives the leg that started it."""
        call = None
        try:
            session = self._idle_session() or await self._ready_session()
            if not self._exchange.calling:
                self._release(clean=True)  # given up in the moment the session came
                return
            call = self._new_call(session)
            try:
                self._send(call)
                await session.run(call, self._call_headers(call))
            except SessionLost:
                session = await self._another_session(session)
                self._send(call)
                await session.run(call, self._call_headers(call))
        except GatewayError as exc:
            self._live.upstream.health.note(exc)
            if call is not None and call.span is not None:
                call.span.end(ending_of(exc))
            if isinstance(exc, UpstreamError):
                self._live.process.metrics.upstream_failed(self._live.route.path, exc.reason)
                exc.is_counted = True
            replayable = await self._may_replay(exc)
            # The stream of an answered call may break while the call that a referral re-issued runs already.
            if call is None or call is self._call:
                self.hear(on.Broke(exc, replayable))
        except Exception:  # the outermost edge of the call's task: counted there, and nobody is left waiting
            self.hear(on.Broke(CallLost(_BUG)))
            raise
        finally:
            if call is not None and call.span is not None:
                call.span.end(_GIVEN_UP)

    def _run_again(self) -> None:
        """Send the call once more; what the one before still says is nobody's business."""
        if self._call is not None:
            self._call.listener = _DEAF
            self._call.leave()
        self._call, self._call_sent, self._taken, self._joined = None, False, None, None
        self._run += 1
        self._step(Step.REPLAYED)
        self._task = self._live.process.tasks.start(self._run_call(), "call")

    async def _may_replay(self, error: GatewayError) -> bool:
        """Whether the call, lost by this error, may be run again. One that never asked is its client's to repeat."""
        if not isinstance(error, _REPLAYABLE) or not (self._exchange.round and self._exchange.calling):
            return False
        if self._request.method == mcp.TOOLS_CALL and not tool_schemas.is_listed(self._live.upstream.pool, self._key):
            try:
                async with asyncio.timeout(_LEARN_SECONDS):
                    await tool_schemas.know(self._live.upstream.pool, self._key, self._headers, self._request.target)
            except (GatewayError, TimeoutError):
                pass
        return self._known_ephemeral()

    def _known_ephemeral(self) -> bool:
        """Whether the call may be run twice, as far as is known: by its method, its route, or its own words."""
        request, route = self._request, self._live.route
        if request.method != mcp.TOOLS_CALL or route.continuation == "replay":
            return True
        if any(fnmatchcase(request.target, pattern) for pattern in route.ephemeral):
            return True
        return tool_schemas.is_ephemeral(self._live.upstream.pool, self._key, request.target)

    def _pick_up(self, envelope: Envelope) -> None:
        """The call of a dead replica is wanted: find its stream, or learn that it is lost."""
        self._taken = None
        if self._exchange.calling and self._task is None:
            self._joined = asyncio.get_running_loop().create_future()
            self._task = self._live.process.tasks.start(self._resume_call(envelope), "call")

    async def _resume_call(self, envelope: Envelope) -> None:
        """As `_run_call`, for a call that another replica sent."""
        joined, run = self._joined, self._run
        assert joined is not None
        try:
            try:
                await self._resume(envelope, joined)
            finally:
                if not joined.done():
                    joined.set_result(False)
        except GatewayError as exc:
            self._live.upstream.health.note(exc)
            replayable = await self._may_replay(exc)
            if run != self._run:
                return  # an answer that was not delivered had the call run again meanwhile
            if not self._is_proven and not replayable and self._exchange.round == envelope.round:
                self._give_back(envelope.owner, exc)
                return
            if self._is_proven:
                self._cancel_orphan(envelope)
            if not replayable:
                self._step(Step.LOST)
            self.hear(on.Broke(exc, replayable))
        except Exception:  # the outermost edge of the call's task, as in `_run_call`
            if run == self._run:
                self.hear(on.Broke(CallLost(_BUG)))
            raise

    def _give_back(self, owner: str, error: GatewayError) -> None:
        """Forget a call that cannot be picked up and that its silent owner may hold; its client comes again."""
        why = "cannot be reached, and its call cannot be picked up here while it may live"
        self.hear(on.Broke(error if isinstance(error, Refused) else OwnerStalled(owner, why)))
        self._disarm(Timer.LINGER)
        self._feed(on.Expired())
        self._lot.remove(self)

    async def _resume(self, envelope: Envelope, joined: asyncio.Future[bool]) -> None:
        live, upstream = self._live, envelope.upstream
        log.info(
            Event.CALL_TAKEN_OVER,
            route=live.route.path,
            upstream=live.route.upstream.name,
            target=self._request.target[:200],
            owner=envelope.owner,
            owner_is_dead=self._is_proven,
            round=envelope.round,
            resumable=upstream is not None and upstream.cursor is not None,
            request_id=self.request_id,
        )
        if upstream is None or upstream.cursor is None:
            raise _owner_lost(envelope.owner)
        session = await live.upstream.pool.adopt(
            self._key,
            upstream.session,
            upstream.version,
            Raw(upstream.server_info),
            self._headers,
            is_shared=not self._is_proven,
        )
        self._session = session
        if not self._exchange.calling:
            self._release(clean=False)
            return
        call = Call(upstream.call, b"", self, upstream.call)
        call.span = self._begin_span(session)
        self._send(call)
        self._call_sent = self._is_proven  # the stream of a silent owner's call is not ours before it is attached

        def attached() -> None:
            self._call_sent = True
            self._step(Step.RESUMED)
            if not joined.done():
                joined.set_result(True)

        try:
            await session.resume(call, upstream.cursor, self._call_headers(call), attached)
        except GatewayError as exc:
            if call.span is not None:
                call.span.end(ending_of(exc))
            raise
        finally:
            if call.span is not None:
                call.span.end(_GIVEN_UP)

    def _step(self, step: Step) -> None:
        """Count by which step a retry went on."""
        self._live.process.metrics.continued(self._live.route.path, step)
        if self._span is not None:
            self._span.note("step", step)

    def _begin_span(self, session: Session) -> Span | None:
        """The span of an upstream call; it lasts as long as the call, whatever number of rounds that takes."""
        if self._span is None:
            return None
        request, route = self._request, self._live.route
        return self._span.call(
            Operation(request.method, request.target, session.shaken.version, route.path), route.upstream.url
        )

    def _end_span(self, ending: Ending) -> None:
        if self._call is not None and self._call.span is not None:
            self._call.span.end(ending)

    def _happened(self, name: str) -> None:
        if self._call is not None and self._call.span is not None:
            self._call.span.happened(name)

    def _call_headers(self, call: Call) -> Headers:
        """This request's headers, with the call's own span in them where it has one."""
        if call.span is None:
            return self._headers
        return {**self._headers, **call.span.headers(), **own_headers(self._live.route)}

    def _cancel_orphan(self, envelope: Envelope) -> None:
        """Nobody will ever hear the call's result: tell the upstream, so that it does not wait for an answer."""
        upstream, headers = envelope.upstream, self._headers
        if upstream is None:
            return

        async def cancel() -> None:
            try:
                async with asyncio.timeout(self._live.config.timeouts.cancel_seconds):
                    await self._live.upstream.pool.cancel_orphan(
                        upstream.session, upstream.version, Raw(upstream.call), "its gateway replica is gone", headers
                    )
            except (UpstreamError, TimeoutError) as exc:
                log.debug(
                    Event.UPSTREAM_FAILED, route=self._live.route.path, request_id=self.request_id, cause=str(exc)
                )

        self._live.process.tasks.spawn(cancel(), "send upstream")

    def _idle_session(self) -> Session | None:
        """The usual case: a session is idle and nothing has to be set on it."""
        if self._session is not None or self._request.log_level is not None:
            return None
        session = self._session = self._live.upstream.pool.take(self._key)
        if session is not None:
            self._server_info = session.shaken.server_info
        return session

    async def _ready_session(self, *, again: bool = False) -> Session:
        session = self._session
        if session is not None and session.lost:
            self._release(clean=False)  # reserved for a referral, and lost while its urls were visited
            session = None
        if session is None:
            self._session = session = await self._live.upstream.pool.acquire(self._key, self._headers)
            self._server_info = session.shaken.server_info
        if self._request.log_level is not None:
            timeout = self._live.config.timeouts.handshake_seconds
            try:
                await session.set_log_level(self._request.log_level, self._headers, timeout)
            except SessionLost:
                if again:
                    raise
                session = await self._another_session(session)
        return session

    async def _another_session(self, lost: Session) -> Session:
        """The upstream refused the session before it took the call: open one anew, once."""
        pool = self._live.upstream.pool
        self._call_sent = False
        self._session = None
        pool.forget_idle(self._key)
        pool.release(lost, clean=False)
        return await self._ready_session(again=True)

    def _new_call(self, session: Session) -> Call:
        request = self._request
        call_id = session.next_id()
        meta: dict[str, Raw] = dict(request.user_meta)
        token = call_id if request.progress_token is not None else None
        if token is not None:
            meta[mcp.META_PROGRESS_TOKEN] = Raw(token)
        params: dict[str, object] = dict(request.params)
        span = self._begin_span(session)
        if span is not None:
            _ = meta.pop(_TRACESTATE, None)  # the span has it, if it belongs to a trace at all
            meta.update({name: Raw(jsonrpc.encode(value)) for name, value in span.headers().items()})
        if meta:
            params["_meta"] = meta
        return Call(call_id, jsonrpc.request(call_id, request.method, params), self, token, span=span)

    def _send(self, call: Call) -> None:
        """Note that from here on the call may have effects, and that its upstream must not be silent for ever."""
        self._call = call
        self._call_sent = True
        config = self._live.config
        if Timer.LEG not in self._armed or config.timeouts.idle_seconds < config.legs.limit_seconds:
            self._watch_silence()

    def _watch_silence(self) -> None:
        """From the first leg's limit on, which few calls reach; from the start where silence is the shorter time."""
        self._live.deadlines.idle.arm(self, self._check_idle)

    def _check_idle(self) -> None:
        """End a call whose upstream says nothing; a call that waits for its client is not idle."""
        limit = self._live.config.timeouts.idle_seconds
        if self._call is None or not self._exchange.calling:
            return
        if self._exchange.questions or time.monotonic() - self._call.heard < limit:
            # A whole length more: silence is noticed after one to two times the limit.
            self._watch_silence()
            return
        self._feed_unless_taken(on.Stopped(self._silent_upstream(limit)))

    def _silent_upstream(self, limit: float) -> CallLost:
        where = f"The upstream {self._live.route.upstream.name} of route {self._live.route.path}"
        suspect = self._session.channel.suspect() if self._session is not None else ""
        return CallLost(
            f"{where} was silent for {limit:g} s in a call (timeouts.idle_seconds); the call was cancelled and may "
            f"have had effects{'. ' if suspect else ''}{suspect}"
        )

    def _send_later(self, send: Callable[[], Awaitable[None]]) -> None:
        """Queue a message to the upstream; they go out one after the other, in the order of the commands."""
        self._to_send.append(send)
        if not self._sending:
            self._sending = True
            self._live.process.tasks.spawn(self._send_queued(), "send upstream")

    async def _send_queued(self) -> None:
        try:
            while self._to_send:
                await self._to_send.popleft()()
        finally:
            self._sending = False

    async def _deliver(self, answers: tuple[tuple[questions.Question, Raw], ...], run: int) -> None:
        if self._joined is not None and not await asyncio.shield(self._joined):
            return  # answered without an open stream, a call would have its effects and lose its result
        session = self._session
        if session is None or run != self._run:
            return
        for number, (question, answer) in enumerate(answers):
            assert question.upstream_id is not None
            try:
                await session.answer(question.upstream_id, answer, self._headers)
            except UpstreamError as exc:
                left = tuple(question for question, _ in answers[number:])
                replayable = await self._may_replay(exc)
                if run == self._run:
                    self._feed(on.Undelivered(left, _lost(exc), isinstance(exc, Refused), replayable))
                return

    def _respond(self, id_: Raw, body: Raw | jsonrpc.Error | None) -> None:
        session, headers = self._session or self._released, self._headers
        if session is None or body is None or self._refusals >= _MAX_REFUSALS:
            return
        self._refusals += 1
        id_ = Raw(bytes(id_))  # a copy: it would keep the whole message

        async def respond() -> None:
            self._refusals -= 1
            try:
                await session.answer(id_, body, headers)
            except UpstreamError as exc:
                log.debug(
                    Event.UPSTREAM_FAILED,
                    route=self._live.route.path,
                    request_id=self.request_id,
                    cause=exc.message,
                )

        self._send_later(respond)

    def _cancel(self, reason: str) -> None:
        self._outcome = Outcome.CANCELLED
        session, call, headers = self._session, self._call, self._headers
        if session is None or call is None or not self._call_sent:
            if self._task is not None:
                self._task.cancel()
            return

        async def cancel() -> None:
            # The call has a connection of its own, and a cancellation that overtakes it is ignored. A young call's is
            # said again while the upstream still works on it.
            young = time.monotonic() - call.sent < _YOUNG_SECONDS
            for pause in _CANCEL_PAUSES if young else _CANCEL_PAUSES[:1]:
                await asyncio.sleep(pause)
                if pause and not session.works_on(call):
                    return
                try:
                    async with asyncio.timeout(self._live.config.timeouts.cancel_seconds):
                        await session.cancel(call, reason, headers)
                except (UpstreamError, TimeoutError) as exc:
                    log.debug(
                        Event.UPSTREAM_FAILED,
                        route=self._live.route.path,
                        request_id=self.request_id,
                        cause=str(exc),
                    )

        self._send_later(cancel)

    def _release(self, *, clean: bool) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if self._is_let_go:
            # Whatever the upstream asks from here on is asked of the replica that goes on with the call.
            if self._call is not None:
                self._call.listener = _DEAF
            session.detach()
        elif not clean and not session.pending and self._may_be_taken(session):
            session.detach()  # the result came to an open question: the replica that answered it may read it still
        else:
            self._released = session
        self._live.upstream.pool.release(session, clean=clean)

    # -- time ---------------------------------------------------------------------------------------------------

    def _arm(self, timer: Timer) -> None:
        if timer in self._armed:
            self._disarm(timer)
        if timer is Timer.LEG and not self._live.config.legs.rounds:
            return
        self._armed.add(timer)
        shared = self._live.deadlines.shared.get(timer)
        if shared is not None:
            shared.arm(self, lambda: self._fire(timer))
            return
        hold = self._live.config.hold
        seconds = hold.quiet_seconds if timer is Timer.QUIET else hold.grace_seconds
        fire = self._live.process.tasks.guard(lambda: self._fire(timer), f"timer {timer}")
        self._timers[timer] = asyncio.get_running_loop().call_later(seconds, fire)

    def _fire(self, timer: Timer) -> None:
        self._armed.discard(timer)
        self._timers.pop(timer, None)
        if timer is Timer.LEG:
            self._watch_silence()
        if timer is Timer.TTL or (timer is Timer.GRACE and self._was_relayed):
            self._feed_unless_taken(_FIRED[timer])
            return
        self._feed(on.LegLimitPassed(self._lot.has_place(self)) if timer is Timer.LEG else _FIRED[timer])
        if timer is Timer.LINGER:
            self._lot.remove(self)

    def _feed_unless_taken(self, event: on.Event) -> None:
        """Give a call up, but let it go without a word if a replica that took this one for dead has resumed it."""
        is_left = self._exchange.state in (State.PARKED, State.DETACHED) and self._exchange.calling
        if is_left and self._session is not None and self._may_be_taken(self._session):
            self._live.process.tasks.spawn(self._ask_who_has_it(event), "ask about an expired call")
        else:
            self._feed(event)

    def _may_be_taken(self, session: Session) -> bool:
        """Whether another replica could have resumed the call."""
        return session.channel.cursor is not None and self._live.process.witness.is_needed

    async def _ask_who_has_it(self, event: on.Event) -> None:
        visits, state = self._visits, self._exchange.state
        may_be_taken = await self._live.process.witness.may_be_taken(self.id, self._exchange.round)
        if self._visits != visits:
            if isinstance(event, on.Stopped):
                self._watch_silence()
            return  # its client came meanwhile
        if not may_be_taken or self._exchange.state is not state:
            if not isinstance(event, on.GracePassed) or self._exchange.state is state:
                self._feed(event)
            return  # a result that came meanwhile is kept as ever
        self._outcome, self._is_let_go = Outcome.CANCELLED, True
        self._cause = "another replica has resumed the call, or could not be asked: it was not cancelled upstream"
        self._feed(on.LetGo(cancel=False))

    def _disarm(self, timer: Timer) -> None:
        if timer not in self._armed:
            return
        self._armed.discard(timer)
        handle = self._timers.pop(timer, None)
        if handle is not None:
            handle.cancel()
        else:
            self._live.deadlines.shared[timer].disarm(self)


_FIRED: Final[dict[Timer, on.Event]] = {
    Timer.QUIET: on.QuietPassed(),
    Timer.GRACE: on.GracePassed(),
    Timer.TTL: on.Expired(),
    Timer.LINGER: on.Expired(),
}


class _Deaf:
    """The listener of a call that is over for its exchange."""

    request_id: str | None = None

    def hear(self, event: on.Event) -> None:
        """Drop it."""


_DEAF: Final = _Deaf()
_PICKING_UP: Final = (State.RUNNING, State.ASKING)


def _owner_lost(owner: str) -> CallLost:
    return CallLost(
        f"The replica {owner} that held this call is gone, and the call cannot be picked up or run again: its server "
        "keeps no event store, and the tool does not say that it may run twice. It was cancelled and may have had "
        "effects; check before you call again without requestState",
        data={"reason": "owner_lost"},
    )


def _lost(exc: UpstreamError) -> UpstreamError:
    """An answer that did not arrive means that the call's result will not come either."""
    if isinstance(exc, Refused | CallLost):
        return exc
    return CallLost(f"{exc.message}; the call was under way and may have had effects")
