"""The upstream call of one exchange, held across its rounds."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from msgspec import Raw

from gateway import world
from gateway.bridge.call_context import Context
from gateway.exchange import events as on
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import FINISHED
from gateway.http.outbox import ending_of
from gateway.http.upstream_headers import own_headers
from gateway.protocol import jsonrpc
from gateway.protocol.errors import (
    Busy,
    CallLost,
    CallSilent,
    GatewayError,
    Refused,
    SessionLost,
    Unreachable,
    UpstreamError,
    bug,
)
from gateway.routes.deadlines import CANCEL_AGAIN_SECONDS
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import OF_NO_REQUEST, Call, Listener, Runner
from gateway.sessions.session import Session
from gateway.telemetry import GIVEN_UP, Step
from gateway.upstream.channel import Headers

_CANCEL_PAUSES: Final = (0.0, 0.2, 1.0)
_YOUNG_SECONDS: Final = 0.5
_MAX_UNSENT: Final = 256
"""Messages that may wait until the upstream takes them; its further questions get no answer of the gateway's own."""


@dataclass(slots=True, eq=False, repr=False)
class UpstreamCall(Runner, ABC):
    """The call, the session that it runs in, and what is sent to the upstream beside it.

    A subclass knows how it runs: as one request, or as a task.
    """

    ends_its_session: ClassVar[bool] = False
    """Whether the session never serves another call, and ends once everything has gone out in it."""
    takes_answers = True
    """Whether the upstream may be sent answers."""

    _context: Context
    _listener: Listener
    """Hears the events of the call, and `Stopped` if the upstream is silent for too long."""
    runs: int = 0
    """How often the call was run again."""
    _starts: int = 0
    """How often it was sent: again after visits to URLs, too."""
    _session: Session | None = None
    _released: Session | None = None
    """The session of a call that was given up: late questions are answered there."""
    _kept_as_clean: bool | None = None
    """Set while `_released` is kept from the pool: how `release` is to give it back."""
    _call: Call | None = None
    _is_sent: bool = False
    _task: asyncio.Task[None] | None = None
    opened: asyncio.Future[bool] | None = None
    """For a call of another replica: True when its stream is open here, False if it will not be opened."""
    _is_let_go: bool = False
    """Whether another replica continues the call."""
    _left: Whereabouts | None = None
    """Where another process left the call, until this one has a session for it, or sends the call itself."""
    newest: asyncio.Task[UpstreamError | None] | None = None
    """Sends the newest message beside the call, if the upstream has not accepted it yet."""
    _unsent: int = 0
    """How many of these messages there are."""

    @property
    def session(self) -> Session | None:
        """The session in which the call runs, or ran last."""
        return self._session or self._released

    @property
    def message_bytes(self) -> int:
        """The size of the call as it goes upstream, as long as it may have to be sent again."""
        return self._context.body_bytes if self._call is None else len(self._call.message)

    @property
    def is_started(self) -> bool:
        """Whether the call was sent, or a task is about to send it."""
        return self._task is not None or self._is_sent

    @property
    def is_being_resumed(self) -> bool:
        """Whether the call of another process is being looked for: no answer has been sent to it yet."""
        return self.opened is not None and not self.opened.done()

    @property
    def _is_held(self) -> bool:
        """Whether the state of a round leads to the call; else each round is a run of its own, which none resumes."""
        return self._context.live.route.continuation == "hold"

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could find the call in its session and read its stream from here on."""
        if self._left is not None and not self.is_started:
            return self._is_held and self._left.is_resumable
        return self._session is not None and self._can_be_found_in(self._session)

    def _can_be_found_in(self, session: Session) -> bool:
        """Whether another process could read on in this session, in which the call runs or has ended."""
        return self._is_held and session.can_be_resumed

    @property
    def keeps_result_readable(self) -> bool:
        """Whether another replica could read the result that waits for its client here."""
        return self._kept_as_clean is not None

    @property
    def heard(self) -> float | None:
        """Monotonic time at which the upstream last said something in the call; None if the call was not sent."""
        return self._call.heard if self._call is not None and self._is_sent else None

    @property
    def can_be_left(self) -> bool:
        """Whether nothing is lost if the streams of the call are closed now, and resumed later."""
        session = self._session
        return self.is_resumable and (session is None or (session.can_be_left and self.newest is None))

    @property
    def may_be_resumed_elsewhere(self) -> bool:
        """Whether another replica could have resumed the call without this one knowing."""
        if self._session is None and self._left is not None:
            return self._left.is_resumable and self._context.live.process.witness.is_needed
        session = self._session if self._kept_as_clean is None else self._released
        return session is not None and self._may_be_resumed_elsewhere(session)

    def _may_be_resumed_elsewhere(self, session: Session) -> bool:
        return self._can_be_found_in(session) and self._context.live.process.witness.is_needed

    def whereabouts(self) -> Whereabouts | None:
        """Where another replica would find the call."""
        session, call = self._session, self._call
        if session is None or call is None:
            return self._left
        if (session_id := session.channel.session_id) is None:
            return None
        shaken = session.shaken
        return Whereabouts(
            session_id,
            shaken.version,
            call.id,
            shaken.server_info,
            session.channel.cursor,
            may_have_others=session.group.is_affine and not session.shared.asked_aside,
        )

    def _is_wanted(self) -> bool:
        """Whether the exchange still waits for the call."""
        return self._context.exchange.calling

    async def _ready_session(self, *, again: bool = False) -> Session:
        """The session of the exchange if a further call can run in it, else another one, with all that the call needs.

        That of the exchange may have been lost while urls were visited. In an adopted one, the process that opened it
        may still read the side stream, and would refuse the questions of a call that it does not know.
        """
        context, session, pool = self._context, self._session, self._context.live.upstream.pool
        if session is not None and (session.lost or (session.adopted and not session.channel.hears_side)):
            self.release(clean=False)
            session = None
        if session is None:
            # It is never refused if the call, or a round of its exchange, has been with the upstream before.
            is_continued = self.runs > 0 or context.exchange.round > 0 or context.request.request_state is not None
            is_exempt = again or is_continued
            obtain = pool.open if self.ends_its_session else pool.acquire
            self._session = session = await obtain(context.key, context.headers, is_exempt=is_exempt)
            context.runs_in(session)
        try:
            await pool.prepare(session, context.request.said.log_level, context.headers)
        except SessionLost:
            if again:
                raise
            session = await self._another_session(session)
        return session

    async def _another_session(self, lost: Session) -> Session:
        """Open a new session, once: the upstream refused this one before it took the call."""
        pool = self._context.live.upstream.pool
        self._is_sent = False
        self._session = None
        pool.forget_idle(self._context.key)  # a server that was restarted has forgotten those, too
        pool.release(lost, clean=False)
        return await self._ready_session(again=True)

    def rest(self, *, resting: bool) -> None:
        """Tell the pool whether the call waits for its client."""
        if self._session is not None:
            self._context.live.upstream.pool.rest(self._session, resting=resting)

    # -- running the call ---------------------------------------------------------------------------------------

    def left_at(self, upstream: Whereabouts | None) -> None:
        """Another process began the call, and left it there."""
        self._left = upstream

    def start(self) -> None:
        """Send the call, in the session of the exchange if it has one."""
        self._left, self._is_sent = None, False  # the call that visits to URLs followed was another one
        self._starts += 1
        self._task = self._context.live.process.tasks.start(self._run(), "call")

    @abstractmethod
    async def _run(self) -> None:
        """The call's own task: it outlives the leg that started it."""

    def _failed(self, exc: GatewayError, call: Call | None) -> None:
        """Say how the call broke, unless another call of the exchange runs already: a referral had it sent again."""
        live, exchange = self._context.live, self._context.exchange
        is_newest = call is None or call is self._call
        not_begun = is_newest and not self._is_sent and isinstance(exc, Busy | Unreachable) and bool(exchange.round)
        if not_begun and not isinstance(exc, Busy):  # whose status and Retry-After say so
            again = "Nothing was run: call again with the same requestState and inputResponses"
            exc = type(exc)(f"{exc.message}. {again}", fix=exc.fix, brief=f"{exc.brief}. {again}")
        live.upstream.note(exc)
        live.upstream.health.count(exc)
        if is_newest:
            self._context.end_call_span(ending_of(exc))
            is_unheard = not exchange.legs and isinstance(exc, UpstreamError)
            self._listener.hear(on.Broke(exc, self._context.may_run_again(exc), self._may_run_on(), not_begun))
            if is_unheard and not exchange.is_lost:  # it is to run again; the driver tells of one that is lost
                self._context.unheard(exc)

    def _may_run_on(self) -> bool:
        """Whether the upstream may still work on the call, and no other replica can have picked it up."""
        session, call = self._session, self._call
        if session is None or call is None or not self._is_sent or session.is_forgotten:
            return False
        return session.in_flight is call or not self._may_be_resumed_elsewhere(session)

    def run_again(self) -> None:
        """Send the call once more, and ignore what is still said about the one before."""
        if self._call is not None:
            self._call.passes_to(_DEAF)
            if self.session is not None:
                self.session.give_up(self._call)
        self._call = self.opened = None
        self.runs += 1
        self._context.run_again()
        self.start()

    def start_resuming(self, resuming: Coroutine[Any, Any, None]) -> None:
        """Start a task that calls `resume`; answers wait until `opened` tells whether there is a stream."""
        opened = self.opened = asyncio.get_running_loop().create_future()
        self._task = self._context.live.process.tasks.start(resuming, "call")

        def over(_: asyncio.Task[None]) -> None:
            if not opened.done():
                opened.set_result(False)

        self._task.add_done_callback(over)  # a task may be cancelled before its first step

    @abstractmethod
    async def resume(self, upstream: Whereabouts, *, is_shared: bool) -> None:
        """Go on with the call of another replica; `is_shared` if that replica may still hold it."""

    def attached(self) -> None:
        """The call of another replica was found: answers may be sent from now on. See `Runner`."""
        if self.opened is not None and not self.opened.done():
            self._is_sent = True
            self._context.step(Step.RESUMED)
            self.opened.set_result(True)

    async def _adopted(self, upstream: Whereabouts, *, is_shared: bool) -> tuple[Session, Call]:
        """That call in its session. Whatever ends the exchange meanwhile cancels the task that waits here."""
        key, headers, pool = self._context.key, self._context.headers, self._context.live.upstream.pool
        session = self._session = await pool.adopt(key, upstream, headers, is_shared=is_shared)
        return session, Call(upstream.call, b"", self._listener, upstream.call)

    def _read_on(
        self, call: Call, session: Session, upstream: Whereabouts, *, is_shared: bool
    ) -> Coroutine[Any, Any, None]:
        """Read that call where its stream broke off."""
        self._sent(call)
        self._is_sent = not is_shared  # the call of a replica that may live is not ours before its stream is open
        return session.resume(call, upstream.cursor or "", self._call_headers, self)

    def _send(self, call: Call, session: Session) -> Coroutine[Any, Any, None]:
        self._sent(call)
        return session.run(call, self._call_headers)

    @property
    def _call_headers(self) -> Headers:
        """The headers of the newest leg, with those of the call's own span if it has one."""
        span = self._context.call_span
        if span is None:
            return self._context.headers
        # The route's own come last: the headers of the span must not replace them.
        return {**self._context.headers, **span.headers(), **own_headers(self._context.live.route)}

    def _sent(self, call: Call) -> None:
        """Note that the call may have effects from here on, and limit the silence of its upstream."""
        self._call = call
        self._is_sent = True
        if self._is_watched:
            self.watch_silence()

    # -- silence ------------------------------------------------------------------------------------------------

    @property
    def _is_watched(self) -> bool:
        """Whether the silence of the upstream is limited from the beginning of a call: no leg limit comes before."""
        live, legs = self._context.live, self._context.live.config.legs
        if not legs.rounds or not self._context.exchange.legs or self._context.request.method not in live.policies:
            return True
        return live.config.timeouts.idle_seconds < legs.limit_seconds

    def watch_silence(self) -> None:
        """Limit how long the upstream may be silent.

        The watch begins with the limit of the first leg, which few calls reach, or at once if silence has the shorter
        limit. A later leg does not begin it anew.
        """
        idle = self._context.live.deadlines.idle
        if idle.deadline(self) is None:
            idle.arm(self, self._check_silence)

    def _check_silence(self) -> None:
        """End a call whose upstream is silent. A call that waits for its client, or for a session, is not silent."""
        limit, exchange = self._context.live.config.timeouts.idle_seconds, self._context.exchange
        if not exchange.calling:
            return
        if self._call is None or exchange.questions or world.monotonic() - self._call.heard < limit:
            # Silence is noticed after one to two times the limit.
            self.watch_silence()
            return
        route = self._context.live.route
        suspect = (
            self._session.channel.suspect(is_accepted=self._call.is_accepted) if self._session is not None else ""
        )
        silent = CallSilent(
            f"{route.where} was silent for {limit:g} s in a call (timeouts.idle_seconds); the call was cancelled and "
            f"may have had effects{'. ' if suspect else ''}{suspect}"
        )
        self._listener.hear(on.Stopped(silent))

    # -- messages beside the call -------------------------------------------------------------------------------

    def send_answers(self, answers: tuple[tuple[Question, Raw], ...]) -> None:
        """Send answers of the client; the listener hears `Undelivered` about those that cannot be delivered."""
        if self._call is not None:
            self._call.stirs()  # the silence of its server counts from the answers on
        starts = self._starts

        async def deliver() -> UpstreamError | None:
            """Send the answers one after the other; return why not all of them were sent."""
            if self.opened is not None and not await asyncio.shield(self.opened):  # others wait for it
                return None  # without an open stream the call would have its effects, and its result would be lost
            # The one that was adopted meanwhile, if the call is another replica's.
            session = self.session if self._is_let_go else self._session
            # What is sent anew may run in another session, in which their ids are those of other questions. It gets
            # them from the record.
            if session is None or starts != self._starts:
                return None
            for number, (question, answer) in enumerate(answers):
                assert question.upstream_id is not None
                if not self.takes_answers:  # a task may be cancelled between two of them
                    return None
                try:
                    await session.answer(Raw(question.upstream_id), answer, self._context.headers)
                except UpstreamError as exc:
                    self._undelivered(tuple(question for question, _ in answers[number:]), exc, starts)
                    return exc
                except Exception:  # the task reports it; without the answer no result would come
                    if starts == self._starts:
                        self._listener.hear(on.Stopped(bug()))
                    raise
            return None

        self._enqueue(deliver)

    def _enqueue(self, send: Callable[[], Awaitable[UpstreamError | None]]) -> None:
        """Send something as soon as everything before it is sent."""
        before = self.newest

        async def sending() -> UpstreamError | None:
            try:
                if before is not None:
                    _ = await asyncio.wait((before,))  # which, unlike `await before`, raises none of its bugs
                return await send()
            finally:
                self._unsent -= 1
                if not self._unsent:
                    self.newest = None

        self._unsent += 1
        self.newest = self._context.live.process.tasks.start(sending(), "send upstream")

    def _undelivered(self, left: tuple[Question, ...], exc: UpstreamError, starts: int) -> None:
        """Say that these questions have no answer yet, unless the call was sent anew meanwhile."""
        replayable = self._context.may_run_again(exc)
        if starts != self._starts:
            return
        retryable = isinstance(exc, Refused | Unreachable)
        if isinstance(exc, Unreachable) and self._context.exchange.round:
            again = "The answers were not sent: call again with the same requestState and inputResponses"
            exc = type(exc)(f"{exc.message}. {again}", fix=exc.fix, brief=f"{exc.brief}. {again}")
        elif not isinstance(exc, Refused | CallLost):  # no result will come either
            exc = CallLost(f"{exc.message}; the call was under way and may have had effects")
        self._listener.hear(on.Undelivered(left, exc, retryable, replayable, self._may_run_on()))

    def respond(self, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer a question of the upstream without the client."""
        session, headers = self.session, self._context.headers
        if session is None or not self.takes_answers or self._unsent >= _MAX_UNSENT:
            return
        own_id = Raw(bytes(id_))  # a copy, because the original keeps the whole message in memory

        async def answer() -> None:
            try:
                await session.answer(own_id, body, headers)
            except UpstreamError as exc:
                self._context.unsent(exc.message)

        self._enqueue(answer)

    def cancel(self, reason: str) -> None:
        """Tell the upstream that the call is no longer wanted, or do not send it in the first place."""
        # As they are now: before this is sent, the call may run again in another session.
        session, call, headers = self._session, self._call, self._context.headers
        if session is None or call is None or not self._is_sent:
            self._stop_task()
            return

        async def cancel() -> None:
            # The call has a connection of its own, and the upstream ignores a cancellation that overtakes it. So the
            # cancellation of a young call is repeated while the upstream still works on it.
            is_young, is_over = world.monotonic() - call.sent < _YOUNG_SECONDS, False
            for pause in _CANCEL_PAUSES if is_young else _CANCEL_PAUSES[:1]:
                await asyncio.sleep(pause)
                # The first one is sent in any case: a call whose stream broke is not in flight here, but may run on.
                if pause and session.in_flight is not call:
                    break  # it has ended, or nothing reads it any more
                is_over = await self._attempt(session.cancel(call, reason, headers))
            if not is_over:
                again = self._cancel_again(session, call, reason, headers)
                self._context.live.process.tasks.spawn(again, "cancel again")

        self._enqueue(cancel)

    async def _cancel_again(self, session: Session, call: Call, reason: str, headers: Headers) -> None:
        """Cancel a call that may still run; nothing waits behind it, and another replica may have gone on with it."""
        exchange, witness = self._context.exchange, self._context.live.process.witness
        for pause in CANCEL_AGAIN_SECONDS:
            await asyncio.sleep(pause)
            may_run = session.in_flight is call or session.shared.must_not_end
            if not may_run or session.is_forgotten:
                return
            # Without a state, no other replica can have gone on with it.
            if exchange.round and self._may_be_resumed_elsewhere(session):
                is_taken = await witness.is_taken(self._context.exchange_id, exchange.round)
                if is_taken is not False:
                    continue
            if await self._attempt(session.cancel(call, reason, headers)):
                return

    async def _attempt(self, sending: Awaitable[None]) -> bool:
        """Send something; returns whether it need not be sent again, because it arrived or never will."""
        try:
            async with asyncio.timeout(self._context.live.config.timeouts.cancel_seconds):
                await sending
        except (UpstreamError, TimeoutError) as exc:
            self._context.unsent(str(exc))
            return isinstance(exc, Refused | SessionLost)
        return True

    # -- the end ------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Leave the call to another replica: the session is only detached when it is released."""
        self._is_let_go = True

    def leave_result(self) -> None:
        """Leave a result that its client may not have read to another process, which can read it in the session."""
        if self._released is not None:
            self._leave_result_in(self._released)

    def _leave_result_in(self, session: Session) -> None:
        if not session.pending and self._can_be_found_in(session):
            session.shared.stray(may_ask=False)

    def release(self, *, clean: bool) -> None:
        """Give the session back; `clean` if the call ended with nothing left open."""
        if self._context.call_span is not None:  # here, as nearly no call has one
            self._context.end_call_span(GIVEN_UP)
        self.end_kept()
        session, self._session, self._left = self._session, None, None
        if session is None:
            if self.is_being_resumed and self._task is not asyncio.current_task():
                self._stop_task()  # it would go on in the session that it waits for
            return
        is_spoilt = (session.lost or not clean) and not self.ends_its_session
        if self._is_let_go:
            # The upstream's further questions are for the replica that continues the call.
            if self._call is not None:
                self._call.passes_to(_DEAF)
            session.detach()
            self._released = session  # for answers that are still to be sent: its client has a newer state
        elif is_spoilt and not session.pending and self._may_be_resumed_elsewhere(session):
            # Another replica may have answered the open question, or taken the side stream, and reads the end.
            session.detach()
        else:
            self._released = session
            if self._may_be_read_elsewhere(session):
                self._kept_as_clean = clean
                return
        self._give_back(session, clean=clean)

    def _may_be_read_elsewhere(self, session: Session) -> bool:
        """Whether a result that no client waited for can be read in the session, should this process end first.

        Another call in it would have a state of its own that leads to the session, and whoever continues one of the
        two would end it under the other.
        """
        is_alone = not (session.pending or session.lost or session.group.is_affine)
        return is_alone and self._context.exchange.state is FINISHED and self._can_be_found_in(session)

    def end_kept(self) -> None:
        """Keep the session of a result no longer: its client has come, or the time for that is over."""
        clean, self._kept_as_clean = self._kept_as_clean, None
        if clean is not None and self._released is not None:
            if self._is_let_go:
                self._released.detach()
            self._give_back(self._released, clean=clean)

    def _give_back(self, session: Session, *, clean: bool) -> None:
        live = self._context.live
        is_last = self.ends_its_session or session.adopted  # the pool ends it rather than keep it for other calls
        if live.process.draining.leaves_results and self._context.exchange.keeps_end and is_last:
            self._leave_result_in(session)
        live.upstream.pool.release(session, clean=clean)

    def drop(self, reason: str) -> None:
        """Give the session back at once, and cancel the call unless its answer has come."""
        session, call = self._session, self._call
        try:
            if session is None or call is None or session.in_flight is call:
                self.cancel(reason)
        finally:
            self.release(clean=False)

    def abandon(self) -> None:
        """Stop before anything was sent: the exchange was restored in vain."""
        self._stop_task()
        self.end()

    def _stop_task(self) -> None:
        if self._task is not None:
            _ = self._task.cancel()

    def end(self) -> None:
        """Drop the call and the listener, because the exchange is over.

        Both lead back to the exchange; without these reference cycles a plain call leaves nothing to the collector.
        """
        self.end_kept()
        self._context.live.deadlines.idle.disarm(self)
        self._call = self._task = None
        self._listener = _DEAF


class _Deaf:
    """The listener of a call that is over for its exchange."""

    about = OF_NO_REQUEST

    def hear(self, event: on.Event) -> None:
        """Drop the event."""


_DEAF: Final = _Deaf()
