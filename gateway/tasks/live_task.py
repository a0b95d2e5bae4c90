"""One task of a client, at the replica that follows it.

It has its session for itself until its time is over. Its questions are kept as the server asks them; a task needs
input exactly if a question is open, whatever the server says of its status.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import ClientCall, Context
from gateway.exchange import events as on
from gateway.exchange import results
from gateway.exchange.input_requests import Question
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallLost, GatewayError, Refused, UnknownTask, Unreachable, UpstreamError, bug
from gateway.runtime.budget import Budget
from gateway.seal.request_state import Upstream
from gateway.seal.task_handle import TaskHandle, TaskSealer
from gateway.sessions.session import Session
from gateway.tasks.follower import Follower, Past, Relay, TaskGone, holder
from gateway.tasks.legacy_tasks import Created, Ended, Status, without_task
from gateway.tasks.modern_tasks import View
from gateway.tasks.open_questions import OpenQuestions
from gateway.telemetry import Event, NestedOutcome, TaskOutcome, get_logger

log = get_logger()

_TARGET_CHARACTERS: Final = 200


class LiveTask:
    """One task."""

    request_id: str | None = None

    def __init__(  # noqa: PLR0913  (what a handle does not hold)
        self,
        handle: TaskHandle,
        sealed: str,
        asked: ClientCall,
        server_info: Raw,
        sealer: TaskSealer,
        budget: Budget,
        forget: Callable[["LiveTask"], None],
    ) -> None:
        """`sealed` is the handle as the client knows it; `forget` is called when the task is closed.

        `asked` is the call that made it, or the request that another replica continues it for. `budget` is that of
        all kept results.
        """
        self.id = handle.exchange
        self.live, self.key, self.headers = asked.live, asked.key, asked.headers
        self.principal = asked.key.principal
        self._handle, self._sealed = handle, sealed
        self._about = {
            "route": self.live.route.path,
            "upstream": self.live.route.upstream.name,
            "task": handle.exchange,
        }
        """What each line of the log says of the task."""
        self._server_info = server_info
        self._forget = forget
        self._created, self._updated = _text(handle.issued), _text(world.wall())
        self._questions = OpenQuestions(self.id, sealer, asked.request.said.declared)
        self._ended: Ended | None = None
        self._is_cancelled = False
        """Whether its client has cancelled it."""
        self._result: bytes | None = None
        """In its modern form; None if there is none, or if it was dropped to make room."""
        self._new_share = partial(budget.share, self._give_way, self.principal)
        self._share = self._new_share()
        self._fetching = asyncio.Lock()
        """Held because a session has one request in flight."""
        self._follower: Follower | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_known = asyncio.Event()
        """Whether the server has told of a task that another replica had followed, and how it ended if it is over."""
        self._gone: GatewayError | None = None
        """Why the task is not followed here any more."""
        self._changed = asyncio.Event()
        """Set at every change, and replaced by a new one."""
        self._weight = asked.live.process.calls.take(self.principal, 0, is_continued=True)
        """What the open questions weigh; released when the task is closed."""

    @property
    def session(self) -> Session | None:
        """The session of the task."""
        return self._follower.session if self._follower is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, or was cancelled."""
        return self._ended is not None

    def has_taken_over(self, _round: int) -> bool:
        """Whether this replica follows the task; only asked once its owner is gone."""
        return True

    def begin(self, session: Session, created: Created, relay: Relay, context: Context) -> None:
        """Follow the task in the session that made it; `relay` has what was heard since.

        The call has ended, so its open questions are the task's: fastmcp 3 sends them on the GET stream, and they may
        overtake the answer that makes the task.
        """
        target = context.request.target[:_TARGET_CHARACTERS]
        log.info(Event.TOOL_TASK_BEGUN, **self._about, target=target, request_id=context.request_id)
        follower = self._follower = self._new_follower(session, created.id)
        self._questions.take_over(context.exchange.questions.values())
        self._weigh()
        relay.to(self)
        self._is_known.set()
        self._start(lambda: self._run(follower))

    def _start(self, follow: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await follow()
            except Exception:  # the outermost edge of the task, where it is counted
                self.close(bug(), ends_session=True)
                raise

        self._running = self.live.process.tasks.start(guarded(), "task")

    def _new_follower(self, session: Session, task_id: str) -> Follower:
        return Follower(session, task_id, self, lambda: self.headers, self.live.process)

    def continue_(self, upstream: Upstream, *, is_shared: bool) -> None:
        """Follow a task that another replica followed, and may still follow if it `is_shared`."""
        owner = self._handle.owner
        log.info(Event.TOOL_TASK_TAKEN_OVER, **self._about, owner=owner, owner_is_dead=not is_shared)
        self._questions.is_adopted = True
        self._start(lambda: self._adopt(upstream, is_shared=is_shared))

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

    async def _adopt(self, upstream: Upstream, *, is_shared: bool) -> None:
        def looked(found: Status | None) -> None:
            if found is not None and not found.is_final:  # else its client may know the end, and has to hear it again
                self._is_known.set()

        try:
            session = await self.live.upstream.pool.adopt(self.key, upstream, self.headers, is_shared=is_shared)
            self._follower = self._new_follower(session, upstream.call.decode())
        except GatewayError as exc:
            self._lose(exc)
        else:
            former = "" if is_shared else holder(self._handle.owner, self._handle.epoch)
            await self._run(self._follower, Past(looked, is_shared=is_shared, former_holder=former))

    async def _run(self, follower: Follower, past: Past | None = None) -> None:
        """Follow the task to its end, and keep how it ended until its time is over."""
        try:
            async with asyncio.timeout(self._seconds_left()):
                ended = await follower.run(past)
            if ended is not None and not self.is_over:
                if ended.result is not None:
                    _ = self._keep(ended.result)
                self._end(replace(ended, result=None), TaskOutcome(ended.status))
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

    def _lose(self, error: GatewayError) -> None:
        """Forget a task that cannot be continued. Unless a later try may succeed, it counts as unknown."""
        may_be_found = isinstance(error, Busy | Refused | Unreachable)
        self.close(error if may_be_found else UnknownTask(), ends_session=True)

    def _fail(self, error: GatewayError, outcome: TaskOutcome) -> None:
        """Nobody will learn how the task ends."""
        if not self.is_over:
            self._end(Ended("failed", error=jsonrpc.Error(error.code, error.message)), outcome, error)

    def _end(self, ended: Ended, outcome: TaskOutcome, cause: GatewayError | None = None) -> None:
        """The task is over: as its server or its client wants, or because of the `cause`."""
        self._ended = ended
        _ = self._questions.clear()
        self._touch()
        self.live.process.metrics.task_ended(self.live.route.path, outcome)
        seconds = round(max(world.wall() - self._handle.issued, 0), 3)
        if cause is None:
            log.info(Event.TOOL_TASK_ENDED, **self._about, outcome=outcome, seconds=seconds)
            return
        say = log.warning if isinstance(cause, UpstreamError) else log.info
        say(Event.TOOL_TASK_LOST, **self._about, outcome=outcome, seconds=seconds, cause=cause.message, fix=cause.fix)

    def _touch(self) -> None:
        self._updated = _text(world.wall())
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
        self._share.release()
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

    # -- its result ---------------------------------------------------------------------------------------------

    def _keep(self, result: Raw) -> bytes:
        """Keep the result, if there is room for it; raises CallLost if it is malformed."""
        try:
            body = results.modern(mcp.TOOLS_CALL, result, self._server_info, (0, "private"), retried=True).body
        except ValueError as exc:
            raise CallLost(
                f"The server ended the task with a malformed result ({exc}); the task may have had effects"
            ) from exc
        self._result = body
        self._share.grow(len(body))
        return body

    def _give_way(self) -> None:
        self._result = None
        self._share = self._new_share()

    async def full_view(self) -> View:
        """The task as it is now; a result that gave way is asked for again. Raises an UpstreamError."""
        view, follower = self.view(), self._follower
        if view.status != "completed" or view.result is not None or follower is None:
            return view
        async with self._fetching:
            if self._result is not None:
                return self.view()
            seconds = self.live.config.timeouts.handshake_seconds
            params = {"taskId": follower.task_id}
            answer = await follower.session.ask(mcp.TASKS_RESULT, params, self.headers, seconds)
            if not isinstance(answer, Raw):
                raise CallLost(
                    "The gateway had no room to keep the result of the task (limits.results_bytes), and its server no "
                    "longer has it"
                )
            return replace(view, result=self._keep(without_task(answer)))

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
            result=self._result,
            error=self._ended.error if self._ended is not None else None,
        )

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
        failures: list[UpstreamError] = []
        # A task of its own, because a client that leaves now must not keep the rest of its answers from the server.
        delivery = self.live.process.tasks.start(self._deliver(self._follower, taken, failures), "send upstream")
        _ = await asyncio.wait((delivery,))
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
        self._end(Ended("cancelled"), TaskOutcome.CANCELLED)
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


def _text(at: float) -> str:
    """A wall-clock time as ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
