"""A call whose client may hold the handle of its task: the requests about the task are the further legs of the call.

What the server asks, and what becomes of it, are rows of the exchange like those of any call (`OWNED`, `SETTLED`). A
task needs input exactly if a question is open, whatever the server says of its status.
"""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import ClientCall
from gateway.bridge.driver import Driver
from gateway.config import Hold, InForce
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import results
from gateway.exchange.commands import TTL, Timer
from gateway.exchange.input_requests import KINDS, Question, question_digest
from gateway.exchange.machine import OWNED, Snapshot, State
from gateway.http.error_texts import texts
from gateway.identity.principal import of_headers
from gateway.parking.lot import Lot, too_many, too_many_of_one
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    Busy,
    CallLost,
    GatewayError,
    InvalidParams,
    InvalidState,
    Refused,
    ShuttingDown,
    TaskCancelled,
    UnknownTask,
    Unreachable,
    UpstreamError,
    bug,
)
from gateway.runtime.budget import Share
from gateway.runtime.call_bytes import Weight
from gateway.seal.request_state import Whereabouts
from gateway.seal.task_handle import QuestionKey, TaskHandle, TaskSealer
from gateway.tasks import legacy_tasks, modern_tasks, sep_2322_form
from gateway.tasks.follower import TaskGone
from gateway.tasks.modern_tasks import View
from gateway.tasks.task_call import TaskCall
from gateway.telemetry import COMPLETE, Event, TaskOutcome, get_logger
from gateway.telemetry.process_status import Fate
from gateway.upstream.channel import Headers

log = get_logger()

_TARGET_CHARACTERS: Final = 200


class LiveTask(Driver):
    """One call with its task."""

    def __init__(self, asked: ClientCall, lot: Lot[Driver], table: "TaskTable", weight: Weight | None = None) -> None:
        super().__init__(asked, lot, TaskCall, weight)
        self._table = table
        self._handle: TaskHandle
        """Set once the call is a task, as are the next ones."""
        self._sealed: str
        """The handle as the client knows it."""
        self._updated: str
        self._share: Share
        self._keys: dict[str, str] = {}
        """The sealed keys of the open questions, by those of the exchange."""
        self._outcome: tuple[str, jsonrpc.Error | None] | None = None
        """The status of a task that is over, and its error."""
        self._result: bytes | None = None
        """In its modern form; None if there is none, or if it was dropped to make room."""
        self._fetching = asyncio.Lock()
        """Held because a session has one request in flight."""
        self._gone: GatewayError | None = None
        """Why the task is not followed here any more."""
        self._seen: object = None
        """What has changed was noticed up to this."""
        self._changed = asyncio.Event()
        """Set at every change, and replaced by a new one."""

    @property
    def _call(self) -> TaskCall:
        assert isinstance(self._upstream_call, TaskCall)
        return self._upstream_call

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, or was cancelled."""
        return self._outcome is not None

    # -- the handle ---------------------------------------------------------------------------------------------

    def _adopt(self, became: on.Became) -> None:
        """Give the client the handle of the task that the call has become; raises Busy."""
        context, live, session = self._context, self.live, self._call.session
        assert session is not None, "the task was made there"
        self._table.check(self.principal)
        ttl = live.config.tasks.ttl_seconds
        ttl = min(ttl, became.ttl_seconds or ttl)
        now, names, shaken = world.wall(), live.route.bound_headers, session.shaken
        session_id = session.channel.session_id
        context.exchange_id = self.id or world.token_urlsafe(12)
        handle = TaskHandle(
            issued=now,
            expires=now + ttl,
            route=live.route.path,
            principal=self.principal,
            names=names,
            headers=of_headers(names, context.headers.get),
            exchange=self.id,
            owner=live.process.owner,
            epoch=live.process.epoch,
            ttl_ms=int(ttl * 1000),
            upstream=Whereabouts(session_id, shaken.version, became.task_id.encode(), shaken.server_info, None)
            if session_id is not None
            else None,
        )
        self._hold(handle, self._table.sealer.seal(handle))
        target = context.request.target[:_TARGET_CHARACTERS]
        log.info(Event.TOOL_TASK_BEGUN, **self._about, target=target, request_id=context.request_id)
        context.answered(COMPLETE)
        _ = context.completed()
        context.finished()
        context.becomes_task()
        self._feed(became)

    def go_on(self, handle: TaskHandle, sealed: str, *, is_shared: bool) -> None:
        """Follow a task that another replica followed, and may still follow if it `is_shared`."""
        assert handle.upstream is not None, "without it, only the owner can follow the task"
        self._context.left_by_another(handle)
        self._hold(handle, sealed)
        self._context.becomes_task()
        log.info(Event.TOOL_TASK_TAKEN_OVER, **self._about, owner=handle.owner, owner_is_dead=not is_shared)
        self._restore(Snapshot(OWNED, 0, {}, None, 0))
        self._call.start_resuming(self._call.go_on(handle.upstream, is_shared=is_shared))

    def _hold(self, handle: TaskHandle, sealed: str) -> None:
        self._handle, self._sealed = handle, sealed
        self._updated = _text(world.wall())
        self._share = self._new_share()
        self._table.add(self)

    @property
    def _about(self) -> dict[str, str]:
        """What each line of the log says of the task."""
        route = self.live.route
        return {"route": route.path, "upstream": route.upstream.name, "task": self.id, "exchange_id": self.id}

    def _give(self, give: do.Give) -> None:
        form = modern_tasks if self._context.request.said.declared.tasks else sep_2322_form
        self._end(give.legs, form.create_result(self.view()), COMPLETE)

    # -- an exchange whose client is away -------------------------------------------------------------------------

    def let_go(self) -> bool:
        """As for other calls; a task is left to others by its table."""
        return self._context.is_task or super().let_go()

    @property
    def at_end(self) -> Fate | None:
        """As for other calls; a task goes on by its handle alone, which leads to no server without sessions."""
        if not self._context.is_task:
            return super().at_end
        return self._context.fate(is_resumable=self._handle.upstream is not None, may_run_twice=False)

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica follows the task, or continued its call; only asked once its owner is gone."""
        return self._context.is_task or super().has_taken_over(round_)

    def fire(self, timer: Timer) -> None:
        """As for other calls; the time of a handle ends with that of its task."""
        if not (self._context.is_task and timer is TTL):
            super().fire(timer)
            return
        said = "The task did not end within its time (tasks.ttl_seconds); it may have had effects"
        self._feed(on.Broke(TaskGone(said)))
        self.close(UnknownTask())

    def close(self, error: GatewayError, *, is_left: bool = False) -> None:
        """Forget the task; requests that still wait for it get the error.

        Its session ends too, unless the task `is_left` to another replica, which may go on in it.
        """
        if is_left:
            self._call.let_go()
        self._feed(on.Stopped(error))

    def _moved(self, before: State, after: State) -> None:
        if after is OWNED:
            self._context.request, self._context.body_bytes = self._context.request.taken(), 0
            self._lot.remove(self)
        super()._moved(before, after)
        if after is OWNED:
            # The base class has armed that of a parked call.
            self._arm(TTL, max(self._handle.expires - world.wall(), 0))

    def _ended(self) -> None:
        super()._ended()
        if self._context.is_task:
            self._gone = self._gone or bug()
            self._share.release()
            self._table.remove(self)

    # -- what becomes of the task -------------------------------------------------------------------------------

    def hear(self, event: on.Event) -> None:
        """Take one event of the call, or of the session of the task."""
        match event:
            case on.Became() if not self._context.is_task:
                self._adopt(event)
            case _ if not self._context.is_task:
                super().hear(event)
            case on.Notice():
                pass  # a task has no progress and no log messages
            case on.Resulted(result=result):
                try:
                    self._feed(on.Resulted(self._modern(Raw(result))))
                except CallLost as exc:
                    self._feed(on.Broke(exc))
            case on.Stopped(error=error):
                # Unlike `Stopped`, this keeps the task, of whose end its client has yet to hear.
                self._feed(on.Broke(error))
            case on.Broke(error=error) if (
                not self.is_over
                and self._call.is_being_resumed
                and (self._call.session is None or isinstance(error, TaskGone))
            ):
                # Its session is gone, or its server does not know it: unless a later try may succeed, it is unknown.
                self.close(error if isinstance(error, Busy | Refused | Unreachable) else UnknownTask())
            case _:
                self._feed(event)

    def _modern(self, result: Raw) -> bytes:
        """A result in its modern form; raises CallLost if it is malformed."""
        info = self._context.server_info
        assert info, "a result comes from a session"
        try:
            return results.modern(mcp.TOOLS_CALL, result, info, (0, "private"), retried=True).body
        except ValueError as exc:
            raise CallLost(
                f"The server ended the task with a malformed result ({exc}); the task may have had effects"
            ) from exc

    def _keep(self, keep: do.Keep) -> None:
        cause, final = None, keep.final
        if isinstance(final, do.Reply):
            outcome, self._outcome = TaskOutcome.COMPLETED, ("completed", None)
            self._keep_result(final.result)
        elif isinstance(final.error, TaskCancelled):
            outcome, self._outcome = TaskOutcome.CANCELLED, ("cancelled", None)
        elif isinstance(final.error, GatewayError):
            cause = final.error
            outcome = TaskOutcome.EXPIRED if isinstance(cause, TaskGone) else TaskOutcome.LOST
            if outcome is TaskOutcome.LOST:
                self._context.failed(cause)  # as a call that is lost
            told = texts.told(cause, self._context.request_id or "", self.live.sender(self.principal))
            self._outcome = "failed", jsonrpc.Error(cause.code, told)
        else:
            outcome, self._outcome = TaskOutcome.FAILED, ("failed", final.error)
        self.live.process.metrics.tasks_ended[self.live.route.path, outcome].inc()
        seconds = round(max(world.wall() - self._handle.issued, 0), 3)  # `issued` may be another replica's time
        if cause is None:
            log.info(Event.TOOL_TASK_ENDED, **self._about, outcome=outcome, seconds=seconds)
            return
        say = log.warning if isinstance(cause, UpstreamError) else log.info
        say(Event.TOOL_TASK_LOST, **self._about, outcome=outcome, seconds=seconds, cause=cause.message, fix=cause.fix)

    def _keep_result(self, body: bytes) -> None:
        self._result = body
        self._share.hold(len(body))

    def _give_way(self) -> None:
        self._result, self._share = None, self._new_share()

    def _new_share(self) -> Share:
        return self._lot.results.share(self._give_way, self.principal)

    def _feed(self, event: on.Event) -> None:
        if isinstance(event, on.Stopped):
            self._gone = self._gone or event.error
        try:
            super()._feed(event)
        finally:
            seen = self._exchange.state, tuple(self._exchange.questions)
            if self._context.is_task and seen != self._seen:
                self._seen, self._updated = seen, _text(world.wall())
                self._changed.set()
                self._changed = asyncio.Event()
                self._weight.change(self._exchange.kept_bytes)

    # -- what the client asks -----------------------------------------------------------------------------------

    async def known(self) -> None:
        """Wait until the task is known, and its end if it is over; raises UnknownTask, or why it cannot be."""
        seconds = self.live.config.timeouts.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                if (opened := self._call.opened) is not None:
                    _ = await asyncio.shield(opened)  # all requests about the task wait for it
        except TimeoutError:
            raise Unreachable(
                f"{self.live.route.where} did not tell in {seconds:g} s (timeouts.handshake_seconds) what has become "
                "of the task; ask again"
            ) from None
        self.check()

    def renew(self, headers: Headers) -> None:
        """Take the headers of a request about the task, which are the newest of its client; raises as `check`."""
        self.check()
        self._context.headers = headers

    def check(self) -> None:
        """Raise the reason why the task is not followed here any more, if there is one."""
        if self._gone is not None:
            raise self._gone

    async def change(self) -> None:
        """Wait until something about the task changes; raises as `check`."""
        _ = await self._changed.wait()
        self.check()

    @property
    def status(self) -> str:
        """The status as the client sees it."""
        if self._outcome is not None:
            return self._outcome[0]
        return "input_required" if self._exchange.questions else "working"

    def view(self) -> View:
        """The task as it is now, if its result is in memory.

        Its questions have sealed keys, with which any replica delivers the answers.
        """
        assert self._context.server_info, "it came with the handle"
        questions, seal, known = self._exchange.questions, self._table.sealer.questions.seal, self._keys
        self._keys = {
            key: known.get(key)  # sealed anew, it would be another question to its client
            or seal(QuestionKey(self.id, each.method, each.upstream_id or b"", question_digest(each)))
            for key, each in questions.items()
        }
        return View(
            id=self._sealed,
            status=self.status,
            created=_text(self._handle.issued),
            updated=self._updated,
            ttl_ms=self._handle.ttl_ms,
            questions={self._keys[key]: question for key, question in questions.items()},
            server_info=self._context.server_info,
            result=self._result,
            error=self._outcome[1] if self._outcome is not None else None,
        )

    async def full_view(self) -> View:
        """The task as it is now; a result that gave way is asked for again. Raises an UpstreamError."""
        view = self.view()
        if view.status != "completed" or view.result is not None:
            return view
        async with self._fetching:
            if self._result is not None:
                return self.view()
            answer = await self._call.result_again()
            if not isinstance(answer, Raw):
                raise CallLost(
                    "The gateway had no room to keep the result of the task (limits.results_bytes), and its server no "
                    "longer has it"
                )
            body = self._modern(legacy_tasks.without_task(answer))
            self._keep_result(body)
            return replace(view, result=body)

    async def update(self, responses: jsonrpc.Fields) -> None:
        """Deliver the client's answers; unknown and answered keys are ignored.

        Raises InvalidParams for an answer of the wrong kind, and what sending raises; the questions then stay open.
        """
        answers: list[tuple[Question, Raw]] = []
        for sealed, raw in responses.items():
            try:
                key = self._table.sealer.questions.open(sealed)
            except InvalidState:
                continue
            if key.exchange != self.id or key.method not in KINDS:
                continue
            question = self._exchange.nested_requests.asked(key.upstream_id)
            if question is not None and key.digest == question_digest(question):
                answers.append((question, raw))
            elif self._context.former is not None:  # which may have asked it
                answers.append((Question(sealed, key.method, key.upstream_id, key.digest), raw))
        before = self._call.newest  # earlier answers, whose failure is not that of these
        try:
            self._feed(on.Updated(tuple(answers)))
        except InvalidParams as exc:
            why = exc.message.partition("; the call still waits")[0]
            raise InvalidParams(f"{why}; the task still waits: send tasks/update again") from exc
        if (sending := self._call.newest) is not None:
            failure = await asyncio.shield(sending)  # a client that leaves takes no answers with it
            if failure is not None and sending is not before:
                raise failure

    def cancel(self) -> None:
        """Cancel the task as far as its server can without harm; it is cancelled for its client in any case."""
        self._feed(on.Cancelled())

    OBEY: ClassVar[Any] = {
        **Driver.OBEY,
        do.Give: _give,
        do.Keep: _keep,
    }


class TaskTable:
    """The tasks of one process by the gateway's own ids, with the caps of parked calls: both wait for their clients.

    A finished task is kept until its time is over, so that its client can fetch the result; if a cap is reached, the
    oldest finished one makes room.
    """

    def __init__(self, limits: InForce[Hold], sealer: TaskSealer) -> None:
        self._limits = limits
        self.sealer = sealer
        self._tasks: dict[str, LiveTask] = {}

    def __iter__(self) -> Iterator[LiveTask]:
        return iter(tuple(self._tasks.values()))

    @property
    def working(self) -> int:
        """Return the number of tasks that have not ended."""
        return sum(not task.is_over for task in self._tasks.values())

    def find(self, id_: str) -> LiveTask | None:
        """Return the task with this id, if this process follows it."""
        return self._tasks.get(id_)

    def check(self, principal: bytes) -> None:
        """Make room for another task of this principal; raises Busy."""
        limits = self._limits.value
        of_one = sum(task.principal == principal for task in self)
        if of_one >= limits.max_calls_per_principal and not self._evict(principal):
            raise too_many_of_one(limits, principal, "unfinished tasks", "answer or cancel")
        if len(self._tasks) >= limits.max_calls and not self._evict(None):
            raise too_many(limits, "follows as many tasks")

    def _evict(self, principal: bytes | None) -> bool:
        """Forget the oldest finished task, of this principal if one is given; returns whether there was one."""
        for task in self:
            if task.is_over and principal in (None, task.principal):
                task.close(UnknownTask())
                return True
        return False

    def add(self, task: LiveTask) -> None:
        """Keep a task."""
        self._tasks[task.id] = task
        task.live.process.metrics.tasks[task.live.route.path,].inc(1)

    def remove(self, task: LiveTask) -> None:
        """Forget a task."""
        del self._tasks[task.id]
        task.live.process.metrics.tasks[task.live.route.path,].inc(-1)

    def leave(self, *, is_resumable: bool) -> None:
        """Let go of all tasks; if another replica cannot go on with them, their sessions end."""
        for task in self:
            task.close(ShuttingDown("ask again"), is_left=is_resumable)


def _text(at: float) -> str:
    """A wall-clock time as ISO 8601."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
