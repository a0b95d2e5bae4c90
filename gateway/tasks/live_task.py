"""One task of a client, at the replica that follows it.

It has its session for itself until its time is over. Its questions are kept as the server asks them; a task needs
input exactly if a question is open, whatever the server says of its status.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.bridge.upstream_call import BUG
from gateway.exchange import events as on
from gateway.exchange.input_requests import Question
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Busy, CallLost, GatewayError, Refused, UnknownTask, Unreachable, UpstreamError
from gateway.protocol.request_meta import Capabilities
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.seal.request_state import Upstream
from gateway.seal.task_handle import TaskHandle, TaskSealer
from gateway.sessions.call import PoolKey
from gateway.sessions.session import Session
from gateway.tasks.follower import Follower, Past, Relay, TaskGone
from gateway.tasks.kept_result import KeptResult
from gateway.tasks.legacy_tasks import Created, Ended, Status
from gateway.tasks.modern_tasks import View
from gateway.tasks.open_questions import OpenQuestions
from gateway.tasks.report import TaskReport
from gateway.telemetry import NestedOutcome, TaskOutcome
from gateway.upstream.channel import Headers


class Origin(msgspec.Struct, frozen=True):
    """What a task needs to know of the request that made it, or of the one that another replica continues it for."""

    live: LiveRoute
    key: PoolKey
    headers: Headers
    declared: Capabilities
    server_info: Raw


class LiveTask:
    """One task."""

    request_id: str | None = None

    def __init__(  # noqa: PLR0913  (what a handle does not hold)
        self,
        handle: TaskHandle,
        sealed: str,
        origin: Origin,
        sealer: TaskSealer,
        budget: Budget,
        forget: Callable[["LiveTask"], None],
    ) -> None:
        """`sealed` is the handle as the client knows it. `forget` is called when the task is closed."""
        self.id = handle.exchange
        self.live, self.key, self.headers = origin.live, origin.key, origin.headers
        self.report = TaskReport(origin.live, handle.exchange, handle.issued)
        self.principal = origin.key.principal
        self._handle, self._sealed = handle, sealed
        self._server_info = origin.server_info
        self._forget = forget
        self._created, self._updated = _text(handle.issued), _now()
        self._questions = OpenQuestions(self.id, sealer, origin.declared)
        self._result = KeptResult(origin.server_info, budget, self.principal)
        self._ended: Ended | None = None
        self._is_cancelled = False
        self._follower: Follower | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_known = asyncio.Event()
        """Whether the server has told of a task that another replica had followed, and how it ended if it is over."""
        self._gone: GatewayError | None = None
        """Why the task is not followed here any more."""
        self._changed = asyncio.Event()
        """Set at every change, and replaced by a new one."""
        self._weight = origin.live.process.calls.take(self.principal, 0, is_continued=True)
        """What the open questions weigh; released when the task is closed."""

    @property
    def session(self) -> Session | None:
        """The session of the task."""
        return self._follower.session if self._follower is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, or was cancelled."""
        return self._ended is not None or self._is_cancelled

    def has_taken_over(self, _round: int) -> bool:
        """Whether this replica follows the task; only asked once its owner is gone."""
        return True

    def begin(self, session: Session, created: Created, relay: Relay, asked: Iterable[Question]) -> None:
        """Follow the task in the session that made it; `relay` has what was heard since.

        `asked` are the open questions of the call. It has ended, so they are the task's: fastmcp 3 sends them on the
        GET stream, and they may overtake the answer that makes the task.
        """
        follower = self._follower = self._new_follower(session, created.id)
        self._questions.take_over(asked)
        self._weigh()
        relay.to(self)
        self._is_known.set()
        self._start(lambda: self._run(follower))

    def _start(self, follow: Callable[[], Awaitable[None]]) -> None:
        self._running = self.live.process.tasks.start(self._guarded(follow), "task")

    async def _guarded(self, follow: Callable[[], Awaitable[None]]) -> None:
        try:
            await follow()
        except Exception:  # the outermost edge of the task, where it is counted
            self.close(CallLost(BUG), ends_session=True)
            raise

    def _new_follower(self, session: Session, task_id: str) -> Follower:
        return Follower(session, task_id, self, lambda: self.headers, self.live.process)

    def continue_(self, upstream: Upstream, former_holder: str) -> None:
        """Follow a task that another replica followed; without a `former_holder` that replica may be alive."""
        self._questions.is_adopted = True
        self._start(lambda: self._adopt(upstream, former_holder))

    async def known(self) -> None:
        """Wait until the task is known, and its end if it is over; raises UnknownTask, or why it cannot be."""
        seconds = self.live.config.timeouts.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                _ = await self._is_known.wait()
        except TimeoutError:
            raise Unreachable(
                f"The upstream {self.live.route.upstream.name} of route {self.live.route.path} did not tell in "
                f"{seconds:g} s (timeouts.handshake_seconds) what has become of the task; ask again"
            ) from None
        self.check()

    def check(self) -> None:
        """Raise the reason why the task is not followed here any more, if there is one."""
        if self._gone is not None:
            raise self._gone

    async def _adopt(self, upstream: Upstream, former_holder: str) -> None:
        try:
            pool = self.live.upstream.pool
            session = await pool.adopt(self.key, upstream, self.headers, is_shared=not former_holder)
            self._follower = self._new_follower(session, upstream.call.decode())
        except GatewayError as exc:
            self._lose(exc)
        else:
            past = Past(self._looked, is_shared=not former_holder, former_holder=former_holder)
            await self._run(self._follower, past)

    async def _run(self, follower: Follower, past: Past | None = None) -> None:
        """Follow the task to its end, and keep how it ended until its time is over."""
        try:
            async with asyncio.timeout(self._seconds_left()):
                ended = await follower.run(past)
            if ended is not None:
                self._end(ended)
        except TimeoutError:
            said = "The task did not end within its time (tasks.ttl_seconds); it may have had effects"
            self._fail(CallLost(said), TaskOutcome.EXPIRED)
        except TaskGone as exc:
            if not self._is_known.is_set():
                self._lose(exc)
                return
            self._fail(exc, TaskOutcome.EXPIRED)
        except UpstreamError as exc:
            self._fail(exc, TaskOutcome.LOST)
        self._is_known.set()
        await asyncio.sleep(self._seconds_left())
        self.close(UnknownTask(), ends_session=True)

    def _seconds_left(self) -> float:
        return max(self._handle.expires - world.wall(), 0)

    def _looked(self, found: Status | None) -> None:
        if found is not None and not found.is_final:  # else its client may know the end, and has to hear it again
            self._is_known.set()

    def _lose(self, error: GatewayError) -> None:
        """Forget a task that cannot be continued. Unless a later try may succeed, it counts as unknown."""
        may_be_found = isinstance(error, Busy | Refused | Unreachable)
        self.close(error if may_be_found else UnknownTask(), ends_session=True)

    def _end(self, ended: Ended) -> None:
        if self.is_over:
            return
        if ended.result is not None:
            try:
                _ = self._result.keep(ended.result)
            except CallLost as exc:
                self._fail(exc, TaskOutcome.LOST)
                return
        self._over(replace(ended, result=None))
        self.report.ended(TaskOutcome(ended.status))

    def _fail(self, error: GatewayError, outcome: TaskOutcome) -> None:
        if self.is_over:
            return
        self._over(Ended("failed", error=jsonrpc.Error(error.code, error.message)))
        self.report.lost(outcome, error)

    def _over(self, ended: Ended) -> None:
        self._ended = ended
        _ = self._questions.clear()
        self._touch()

    def _touch(self) -> None:
        self._updated = _now()
        self._changed.set()
        self._changed = asyncio.Event()
        self._weigh()

    def _weigh(self) -> None:
        asked = self._questions.open.values()
        self._weight.change(sum([len(question.params) for question in asked if question.params is not None]))

    async def change(self) -> None:
        """Wait until something about the task changes; raises as `check`."""
        _ = await self._changed.wait()
        self.check()

    def close(self, error: GatewayError, *, ends_session: bool) -> None:
        """Forget the task; requests that still wait for it get the error.

        Its session ends too, unless another replica may go on with the task in it.
        """
        self._gone = self._gone or error
        self._forget(self)
        self._weight.release()
        self._result.release()
        self._is_known.set()
        self._touch()
        running, self._running = self._running, None
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.stop()
            if not ends_session:
                follower.session.detach()
            self.live.upstream.pool.release(follower.session, clean=False)
        if running is not None and running is not asyncio.current_task():
            _ = running.cancel()

    # -- what the server asks -----------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take an event of the task's session: a question, or its withdrawal."""
        match event:
            case on.Nested():
                self._ask(event)
            case on.Withdrawn(id=id_):
                if (question := self._questions.withdraw(bytes(id_))) is not None:
                    self._count(question.method, NestedOutcome.WITHDRAWN)
                    self._touch()
            case on.Stopped(error=error):
                self._fail(error, TaskOutcome.LOST)
            case _:
                pass  # tasks have no progress and no log messages

    def _ask(self, event: on.Nested) -> None:
        outcome, error = self._questions.hear(event, is_over=self.is_over)
        self._count(event.method, outcome)
        if outcome is NestedOutcome.ASKED:
            self._touch()
        elif error is not None and self._follower is not None and self._may_answer(self._follower):
            self._follower.session.answer_later(event.id, error)

    def _may_answer(self, follower: Follower) -> bool:
        """A task that was cancelled upstream must not be answered: `mcp` 1.30 then ends a session."""
        return not self._is_cancelled or follower.must_not_be_cancelled

    def _count(self, method: str, outcome: NestedOutcome) -> None:
        self.live.process.metrics.nested_request(self.live.route.path, method, outcome)

    # -- what the client asks -----------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """The status as the client sees it."""
        if self._is_cancelled:
            return "cancelled"
        if self._ended is not None:
            return self._ended.status
        return "input_required" if self._questions.open else "working"

    def view(self) -> View:
        """The task as it is now, if its result is in memory."""
        return View(
            id=self._sealed,
            status=self.status,
            created=self._created,
            updated=self._updated,
            ttl_ms=self._handle.ttl_ms,
            questions=self._questions.open,
            server_info=self._server_info,
            result=self._result.body,
            error=self._ended.error if self._ended is not None else None,
        )

    async def full_view(self) -> View:
        """The task as it is now; a result that gave way is asked for again. Raises an UpstreamError."""
        view, follower = self.view(), self._follower
        if view.status != "completed" or view.result is not None or follower is None:
            return view
        seconds = self.live.config.timeouts.handshake_seconds
        return replace(view, result=await self._result.fetch(follower, self.headers, seconds))

    async def answer(self, responses: jsonrpc.Fields) -> None:
        """Deliver the client's answers; unknown and answered keys are ignored.

        Raises InvalidParams for an answer of the wrong kind, and what sending raises; the questions then stay open.
        """
        if self.is_over or self._follower is None:
            return
        # Before anything is awaited: a client that asks in between must not see an answered question again.
        taken = self._questions.take(responses)
        for question, _ in taken:
            self._count(question.method, NestedOutcome.ANSWERED)
        self._touch()
        # A task of its own, because a client that leaves now must not keep the rest of its answers from the server.
        failures: list[UpstreamError] = []
        delivery = self._deliver(self._follower, taken, failures)
        _ = await asyncio.wait((self.live.process.tasks.start(delivery, "send upstream"),))
        if failures:
            raise failures[0]

    async def _deliver(
        self, follower: Follower, taken: list[tuple[Question, Raw]], failures: list[UpstreamError]
    ) -> None:
        for number, (question, body) in enumerate(taken):
            assert question.upstream_id is not None
            if not self._may_answer(follower):
                return
            try:
                await follower.session.answer(question.upstream_id, body, self.headers)
            except UpstreamError as exc:
                if not self.is_over:
                    self._questions.put_back(question for question, _ in taken[number:])
                failures.append(exc)
                return

    def cancel(self) -> None:
        """Cancel the task as far as its server can without harm; it is cancelled for its client in any case."""
        if self.is_over:
            return
        self._is_cancelled = True
        withdrawn, follower = self._questions.clear(), self._follower
        self._touch()
        self.report.ended(TaskOutcome.CANCELLED)
        if follower is None:
            return
        if follower.must_not_be_cancelled:  # its open questions are answered instead, so that it can end
            for id_, body in withdrawn:
                follower.session.answer_later(id_, body)
        else:
            self.live.process.tasks.spawn(self._cancel(follower), "send upstream")

    async def _cancel(self, follower: Follower) -> None:
        with suppress(UpstreamError, TimeoutError):  # its own time limit ends the task
            async with asyncio.timeout(self.live.config.timeouts.cancel_seconds):
                await follower.cancel()


def _now() -> str:
    return _text(world.wall())


def _text(at: float) -> str:
    """A wall-clock time as ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
