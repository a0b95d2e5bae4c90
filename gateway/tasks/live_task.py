"""One task of a client, at the replica that follows it.

It has its session for itself until its time is over. Its questions are kept as the server asks them; a task needs
input exactly if a question is open, whatever the server says of its status.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange import events as on
from gateway.exchange import questions as inputs
from gateway.exchange import results
from gateway.exchange.machine import MAX_NESTED, MAX_NESTED_ID_BYTES
from gateway.exchange.questions import MAX_QUESTIONS, Question
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    CallLost,
    GatewayError,
    InvalidParams,
    InvalidState,
    UnknownTask,
    Unreachable,
    UpstreamError,
)
from gateway.protocol.request import Capabilities
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.seal.request_state import Upstream
from gateway.seal.task_handle import QuestionKey, TaskSealer
from gateway.sessions.call import PoolKey
from gateway.sessions.session import Session
from gateway.tasks.follower import Follower, Relay, TaskGone, holder
from gateway.tasks.legacy import Created, Ended, Status
from gateway.tasks.modern import View
from gateway.tasks.report import TaskReport
from gateway.telemetry import NestedOutcome, TaskOutcome
from gateway.upstream.channel import Headers

_OUTCOMES = {"completed": TaskOutcome.COMPLETED, "failed": TaskOutcome.FAILED, "cancelled": TaskOutcome.CANCELLED}


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

    def __init__(  # noqa: PLR0913  (everything that a handle holds)
        self,
        id_: str,
        handle: str,
        origin: Origin,
        issued: float,
        expires: float,
        ttl_ms: int,
        sealer: TaskSealer,
        budget: Budget,
        forget: Callable[["LiveTask"], None],
    ) -> None:
        """`issued` and `expires` are wall-clock time. `forget` is called once, when the time of the task is over."""
        self.id = id_
        self.handle = handle
        self.live, self.key, self.headers = origin.live, origin.key, origin.headers
        self.report = TaskReport(origin.live, id_, issued)
        self.principal = origin.key.principal
        self._declared = origin.declared
        self._server_info = origin.server_info
        self._expires = expires
        self._ttl_ms = ttl_ms
        self._sealer = sealer
        self._budget = budget
        self._share = budget.share(self._give_way)
        self._forget = forget
        self._created = self._updated = _now()
        self._questions: dict[str, Question] = {}
        self._seen: set[bytes] = set()
        self._answered: set[bytes] = set()
        self._result: bytes | None = None
        self._ended: Ended | None = None
        self._message = ""
        self._is_cancelled = False
        self._follower: Follower | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_adopted = False
        self._is_known = asyncio.Event()
        """Whether the server has told of a task that another replica had followed."""
        self._is_gone = False
        self._changed = asyncio.Event()
        """Set at every change, and replaced by a new one."""

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The session of the task."""
        return self._follower.session if self._follower is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, or was cancelled."""
        return self._ended is not None or self._is_cancelled

    def begin(self, session: Session, created: Created, relay: Relay, asked: Iterable[Question]) -> None:
        """Follow the task in the session that made it; `relay` has what was heard since.

        `asked` are the open questions of the call. It has ended, so they are the task's: fastmcp 3 sends them on the
        GET stream, and they may overtake the answer that makes the task.
        """
        self._follower = self._new_follower(session, created)
        for question in asked:
            if question.upstream_id is not None and question.params is not None:
                self._seen.add(bytes(question.upstream_id))
                self._open(question.method, question.params, question.upstream_id)
        relay.to(self)
        self._is_known.set()
        self._running = self.live.process.tasks.start(self._run(self._follower), "task")

    def _new_follower(self, session: Session, created: Created) -> Follower:
        own = holder(self.live.process.owner, self.live.process.epoch)
        return Follower(session, created, self, lambda: self.headers, own)

    def continue_(self, upstream: Upstream, former_holder: str) -> None:
        """Follow a task that another replica followed; without a `former_holder` that replica may be alive."""
        self._is_adopted = True
        self._running = self.live.process.tasks.start(self._adopt(upstream, former_holder), "task")

    async def known(self) -> None:
        """Wait until the task is known to exist; raises UnknownTask, or Unreachable if its server does not tell."""
        seconds = self.live.config.timeouts.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                _ = await self._is_known.wait()
        except TimeoutError:
            raise Unreachable(
                f"The upstream {self.live.route.upstream.name} of route {self.live.route.path} did not tell in "
                f"{seconds:g} s (timeouts.handshake_seconds) whether it knows the task; ask again"
            ) from None
        if self._is_gone:
            raise UnknownTask

    async def _adopt(self, upstream: Upstream, former_holder: str) -> None:
        try:
            pool = self.live.upstream.pool
            session = await pool.adopt(self.key, upstream, self.headers, is_shared=not former_holder)
            self._follower = self._new_follower(session, Created(upstream.call.decode(), None))
            await self._run(self._follower, former_holder)
        except GatewayError:
            self._lose()

    async def _run(self, follower: Follower, former_holder: str = "") -> None:
        """Follow the task to its end, and keep how it ended until its time is over."""
        looked = self._looked if self._is_adopted else None
        try:
            async with asyncio.timeout(self._seconds_left()):
                holds = bool(former_holder) or not self._is_adopted
                ended = await follower.run(looked, holds=holds, former_holder=former_holder)
            if ended is not None:
                self._end(ended)
        except TimeoutError:
            said = "The task did not end within its time (tasks.ttl_seconds); it may have had effects"
            self._fail(CallLost(said), TaskOutcome.EXPIRED)
        except TaskGone as exc:
            if not self._is_known.is_set():
                self._lose()
                return
            self._fail(exc, TaskOutcome.EXPIRED)
        except UpstreamError as exc:
            self._fail(exc, TaskOutcome.LOST)
        self._is_known.set()
        await asyncio.sleep(self._seconds_left())
        self.close(ends_session=True)

    def _seconds_left(self) -> float:
        return max(self._expires - time.time(), 0)

    def _looked(self, found: Status | None) -> None:
        if found is not None:
            self._is_known.set()

    def _lose(self) -> None:
        """Forget a task that cannot be gone on with: it is answered as one that never was."""
        self._is_gone = True
        self.close(ends_session=True)

    def _end(self, ended: Ended) -> None:
        if self._is_cancelled:
            return
        self._ended = ended
        self._questions.clear()
        if ended.result is not None:
            _ = self._keep(ended.result)
        elif ended.error is not None:
            self._message = ended.error.message
        self._touch()
        self.report.ended(_OUTCOMES[ended.status])

    def _keep(self, result: Raw) -> bytes:
        """Keep the result in its modern form; it may have to give way, and is then asked for again."""
        body = results.modern(mcp.TOOLS_CALL, result, self._server_info, (0, "private"), retried=True).body
        self._result = body
        self._ended = Ended("completed")
        self._share.grow(len(body))
        return body

    def _give_way(self) -> None:
        self._result = None
        self._share = self._budget.share(self._give_way)

    def _fail(self, error: GatewayError, outcome: TaskOutcome) -> None:
        if self.is_over:
            return
        self._ended = Ended("failed", error=jsonrpc.Error(error.code, error.message))
        self._questions.clear()
        self._touch()
        self.report.lost(outcome, error)

    def _touch(self) -> None:
        self._updated = _now()
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until something about the task changes."""
        _ = await self._changed.wait()

    def close(self, *, ends_session: bool) -> None:
        """Forget the task. Its session ends too, unless another replica may go on with the task in it."""
        self._forget(self)
        self._share.release()
        self._is_known.set()
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
                self._withdraw(id_)
            case on.Stopped(error=error):
                self._fail(error, TaskOutcome.LOST)
            case _:
                pass  # tasks have no progress and no log messages

    def _ask(self, event: on.Nested) -> None:
        id_ = bytes(event.id)
        if id_ in self._seen:
            return self._count(event.method, NestedOutcome.DUPLICATE)
        if self.is_over:
            error = jsonrpc.Error(mcp.INVALID_PARAMS, "The task is over, so no call is in flight (SEP-2260)")
            return self._refuse(event, error, NestedOutcome.UNSOLICITED)
        return self._refuse_or_open(event, id_)

    def _refuse_or_open(self, event: on.Nested, id_: bytes) -> None:
        if event.method not in inputs.KINDS:
            return self._refuse(event, jsonrpc.Error(mcp.METHOD_NOT_FOUND, f"Method not found: {event.method[:80]}"))
        is_full = len(self._seen) >= MAX_NESTED or len(self._questions) >= MAX_QUESTIONS
        if is_full or len(id_) > MAX_NESTED_ID_BYTES:
            return self._refuse(event, jsonrpc.Error(mcp.INVALID_REQUEST, "The task cannot ask this"))
        self._seen.add(id_)
        try:
            asked = inputs.read(event.method, event.params, self._declared)
        except inputs.Malformed as exc:
            return self._refuse(event, jsonrpc.Error(mcp.INVALID_PARAMS, str(exc)), NestedOutcome.MALFORMED)
        if not asked.allowed:
            names = " and ".join(sorted(asked.required))
            error = jsonrpc.Error(mcp.INVALID_PARAMS, f"The client did not declare {names} for {event.method}")
            return self._refuse(event, error, NestedOutcome.UNDECLARED)
        self._open(event.method, asked.params, Raw(id_))
        self._count(event.method, NestedOutcome.ASKED)
        self._touch()
        return None

    def _open(self, method: str, params: Raw, id_: Raw) -> None:
        """Open a question under a key of its own."""
        key = self._sealer.seal_key(QuestionKey(self.id, method, bytes(id_)))
        self._questions[key] = Question(key, method, Raw(bytes(params)), Raw(bytes(id_)))

    def _withdraw(self, id_: Raw) -> None:
        for key, question in self._questions.items():
            if bytes(question.upstream_id or b"") == bytes(id_):
                del self._questions[key]
                self._count(question.method, NestedOutcome.WITHDRAWN)
                self._touch()
                return

    def _refuse(self, event: on.Nested, error: jsonrpc.Error, outcome: NestedOutcome = NestedOutcome.REFUSED) -> None:
        self._count(event.method, outcome)
        # A question of a task that was cancelled upstream must not be answered: `mcp` 1.30 then ends a session.
        if self._follower is not None and (not self._is_cancelled or self._follower.must_not_be_cancelled):
            self.live.process.tasks.spawn(self._respond(self._follower.session, event.id, error), "send upstream")

    async def _respond(self, session: Session, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        with suppress(UpstreamError):  # the server's own time limit ends its question
            await session.answer(Raw(bytes(id_)), body, self.headers)

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
        return "input_required" if self._questions else "working"

    def view(self) -> View:
        """The task as it is now, if its result is in memory."""
        return View(
            id=self.handle,
            status=self.status,
            created=self._created,
            updated=self._updated,
            ttl_ms=self._ttl_ms,
            questions=self._questions,
            server_info=self._server_info,
            message=self._message,
            result=self._result,
            error=self._ended.error if self._ended is not None else None,
        )

    async def full_view(self) -> View:
        """The task as it is now; a result that gave way is asked for again. Raises an UpstreamError."""
        if self.status == "completed" and self._result is None and self._follower is not None:
            answer = await self._follower.ask(mcp.TASKS_RESULT)
            if not isinstance(answer, Raw):
                raise CallLost(
                    "The result of the task was larger than the gateway keeps, and its server has it no more"
                )
            return replace(self.view(), result=self._keep(answer))
        return self.view()

    async def answer(self, responses: jsonrpc.Fields) -> None:
        """Deliver the client's answers; unknown and answered keys are ignored.

        Raises InvalidParams for an answer of the wrong kind, and what sending raises; the questions then stay open.
        """
        if self.is_over or self._follower is None:
            return
        given = [(question, raw) for key, raw in responses.items() if (question := self._find(key)) is not None]
        checked = [(question, _checked(question, raw)) for question, raw in given]
        for question, _ in checked:
            # Before anything is awaited: a client that asks in between must not see an answered question again.
            _ = self._questions.pop(question.key, None)
            self._answered.add(bytes(question.upstream_id or b""))
            self._count(question.method, NestedOutcome.ANSWERED)
        self._touch()
        for number, (question, body) in enumerate(checked):
            assert question.upstream_id is not None
            try:
                await self._follower.session.answer(question.upstream_id, body, self.headers)
            except UpstreamError:
                self._put_back([question for question, _ in checked[number:]])
                raise

    def _find(self, key: str) -> Question | None:
        """The open question of a key; another replica may have asked it."""
        if key in self._questions or not self._is_adopted:
            return self._questions.get(key)
        try:
            opened = self._sealer.open_key(key)
        except InvalidState:
            return None
        if opened.exchange != self.id or opened.upstream_id in self._answered or opened.method not in inputs.KINDS:
            return None
        return Question(key, opened.method, None, Raw(opened.upstream_id))

    def _put_back(self, questions: list[Question]) -> None:
        if self.is_over:
            return
        for question in questions:
            self._answered.discard(bytes(question.upstream_id or b""))
            if question.params is not None:
                self._questions[question.key] = question

    async def cancel(self) -> None:
        """Cancel the task as far as its server can without harm; it is cancelled for its client in any case."""
        if self.is_over:
            return
        self._is_cancelled = True
        left, follower = list(self._questions.values()), self._follower
        self._questions.clear()
        self._touch()
        self.report.ended(TaskOutcome.CANCELLED)
        if follower is not None:
            self.live.process.tasks.spawn(self._cancel(follower, left), "send upstream")

    async def _cancel(self, follower: Follower, left: list[Question]) -> None:
        """Tell the server. Where that does harm, the open questions are answered, so that the task can end."""
        try:
            async with asyncio.timeout(self.live.config.timeouts.cancel_seconds):
                if follower.must_not_be_cancelled:
                    for question in left:
                        result, error = inputs.withdrawn(question)
                        body = result if result is not None else error
                        if question.upstream_id is not None and body is not None:
                            await self._respond(follower.session, question.upstream_id, body)
                else:
                    await follower.cancel()
        except (UpstreamError, TimeoutError):
            pass  # its own time limit ends the task


def _checked(question: Question, raw: Raw) -> Raw:
    try:
        return inputs.check_answer(question, raw)
    except InvalidParams as exc:
        why = exc.message.partition("; the call still waits")[0]
        raise InvalidParams(f"{why}; the task still waits: send tasks/update again") from exc


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
