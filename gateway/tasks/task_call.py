"""An upstream call that is a task: the sibling of `bridge.request_call`.

The server is asked to run the tool as a task, which is followed to its end. The client sees an ordinary call, or gets
the handle of the task.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack

from msgspec import Raw
from msgspec.structs import replace

from gateway.bridge.modern_to_legacy import legacy_call
from gateway.bridge.upstream_call import UpstreamCall
from gateway.exchange import events as on
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import FINISHED
from gateway.parking import orphans
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallLost, GatewayError, UpstreamError
from gateway.runtime.tasks import telling
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import Call
from gateway.sessions.session import Session
from gateway.tasks import follower, legacy_tasks
from gateway.tasks.follower import Follower, Past
from gateway.tasks.legacy_tasks import FINAL
from gateway.telemetry import Step


class TaskCall(UpstreamCall):
    """The call, in a session of its own: some servers lose the tasks of a session when another one ends.

    Its listener raises Busy if there is no place for a task.
    """

    ends_its_session = True
    _follower: Follower | None = None
    _making = ExitStack()
    """Open while the task is made."""

    def _can_be_found_in(self, session: Session) -> bool:
        """As for other calls: the task can be followed in its session, or the stream read on which it will be made."""
        is_named = self._follower is not None and session.channel.session_id is not None
        return super()._can_be_found_in(session) or (self._is_held and is_named)

    def whereabouts(self) -> Whereabouts | None:
        """Where another replica would find the task."""
        found = super().whereabouts()
        if found is None or found is self._left:
            return found
        return replace(found, task=self._follower.task_id if self._follower is not None else "")

    async def resume(self, upstream: Whereabouts, *, is_shared: bool) -> None:
        """Go on with the task of another replica; `is_shared` if that replica may still follow it.

        The task may have been made after the state was sealed: then its id is on the stream of the call.
        """
        session, call = await self._adopted(upstream, is_shared=is_shared)

        async def looked(status: str | None) -> None:
            if self._context.is_task and status in FINAL:
                self._context.step(Step.RESUMED)  # the holder of the handle may know the end, and waits to hear it
            elif status is not None:
                self.attached()
                if self.newest is not None:  # answers go before tasks/result
                    _ = await asyncio.wait((self.newest,))

        def may_lack_question() -> bool:
            # The holder of a handle may have been shown it there; and an answer may be on its way.
            return not self._context.is_task and self.newest is None

        past = Past(looked, is_shared, may_lack_question)
        if upstream.task:
            self._call, self._is_sent = call, not is_shared
            await self._drive(self._new_follower(session, upstream.task, call), past)
            return
        reading = self._read_on(call, session, upstream, is_shared=is_shared)
        await self._follow_from_creation(session, call, reading, past)

    async def go_on(self, upstream: Whereabouts, *, is_shared: bool) -> None:
        """As `resume`, for the holder of the handle; `upstream` is that of the handle."""
        with telling(lambda exc: self._listener.hear(on.Broke(exc))):
            await self.resume(replace(upstream, task=upstream.call.decode()), is_shared=is_shared)

    def _failed(self, exc: GatewayError, call: Call | None) -> None:
        if self._context.is_task:  # its own report says so
            self._listener.hear(on.Broke(exc))
        else:
            super()._failed(exc, call)

    def _new_follower(self, session: Session, task_id: str, call: Call) -> Follower:
        driven = self._follower = Follower(session, task_id, self._listener, self._context, call.progress_token)
        return driven

    async def _run(self) -> None:
        context = self._context
        begin = context.live.upstream.pool.task_making.begin
        with telling(lambda exc: self._failed(exc, self._call)), await begin() as self._making:
            session = await self._ready_session()
            if not self._is_wanted():
                self.release(clean=True)  # given up at the moment the session came
                return
            span = context.begin_call_span(session.shaken.version)
            task = {"ttl": int(context.live.config.tasks.ttl_seconds * 1000)}
            call = legacy_call(context.request, next(context.live.process.call_ids), self._listener, span, task)
            await self._follow_from_creation(session, call, self._send(call, session))

    def run_again(self) -> None:
        """Ask for another task, and follow the one before no longer."""
        self._follower = None  # its end is then not taken for that of the new run
        super().run_again()

    async def _follow_from_creation(
        self, session: Session, call: Call, reading: Awaitable[None], past: Past | None = None
    ) -> None:
        """Read the answer that makes the task, then follow the task."""
        session.follow_task(self._listener)  # a question may come as soon as there is a task

        no_room: list[Busy] = []

        def ended(answer: Raw) -> None:
            if (created := legacy_tasks.created(answer)) is not None:
                try:
                    self._made(session, created, call)
                except Busy as exc:  # another call took the last place while the task was made
                    no_room.append(exc)

        try:
            answer = await follower.answer_to(call, reading, ended)
        except CallLost:
            if call is self._call:
                raise
            return
        if call is not self._call:
            return  # it was given up, left to another replica, or is run again
        for busy in no_room:
            self.cancel("there is no room for another task")
            given_up = f"{busy.message}. The task of this call was given up, and may have had effects"
            raise CallLost(given_up) from busy
        driven = self._follower
        if not isinstance(answer, Raw):
            self._listener.hear(on.Failed(answer))
        elif driven is None:  # the tool ended at once
            self._listener.hear(on.Resulted(answer))
        else:
            await self._drive(driven, past)

    def _made(self, session: Session, created: on.Became, call: Call) -> None:
        """Follow the task from now on, though its server may leave the stream of the call open for a while."""
        self._making.close()
        _ = self._new_follower(session, created.task_id, call)
        if not self._is_wanted():
            self.cancel("the client closed its request")
            self.release(clean=False)
        else:
            self._listener.hear(created)

    async def _drive(self, driven: Follower, past: Past | None = None) -> None:
        """Follow a task to its end, which ends no other run if the call was run again meanwhile."""
        context = self._context
        seconds = None if context.is_task else context.live.config.tasks.ttl_seconds  # a handle has its own time
        try:
            async with asyncio.timeout(seconds):
                ended = await driven.run(past)
        except (TimeoutError, GatewayError) as exc:
            if driven is not self._follower:
                return
            if isinstance(exc, GatewayError):
                raise
            raise CallLost(
                "The task did not end within tasks.ttl_seconds; it was given up and may have had effects"
            ) from None
        if ended is not None and not self._is_let_go:  # else another replica has yet to hear of it in the session
            driven.session.settle_task()
        if ended is None or driven is not self._follower:
            return  # given up: the exchange has ended before, or its call was run again
        if isinstance(ended, on.Broke):
            raise ended.error
        self._listener.hear(ended)

    def _check_silence(self) -> None:
        """Tasks are silent for long: tasks.ttl_seconds limits them, once there is one."""
        if self._follower is None:
            super()._check_silence()

    def cancel(self, reason: str) -> None:
        """Cancel the task, or the request that is to make it."""
        driven = self._follower
        if driven is None or not self._is_sent:  # a task that a silent replica may follow is not ours to cancel
            super().cancel(reason)
            return
        if self._context.is_task:
            # A task that was cancelled is not answered: `mcp` 1.30 would end a session.
            self.takes_answers = orphans.must_not_be_cancelled(driven.task_id)
        else:
            driven.stop()

        async def cancel() -> None:
            _ = await self._attempt(driven.cancel())

        self._enqueue(cancel)

    def send_answers(self, answers: tuple[tuple[Question, Raw], ...]) -> None:
        """As for other calls; the task may end with them."""
        super().send_answers(answers)
        if self._follower is not None:
            self._follower.answered()

    # -- for the holder of the handle ---------------------------------------------------------------------------

    def _undelivered(self, left: tuple[Question, ...], exc: UpstreamError, runs: int) -> None:
        if self._context.is_task:
            self._listener.hear(on.Undelivered(left, exc, retryable=True))
        else:
            super()._undelivered(left, exc, runs)

    async def result_again(self) -> Raw | jsonrpc.Error:
        """Ask for the result of a task that is over; raises as `Session.ask`."""
        driven = self._follower
        assert driven is not None, "it was followed to its end"
        return await driven.session.ask(mcp.TASKS_RESULT, {"taskId": driven.task_id}, self._context.headers)

    # -- the end ------------------------------------------------------------------------------------------------

    def release(self, *, clean: bool) -> None:  # noqa: ARG002  (a session that had a task never serves another call)
        """Give the session back, to be ended once everything for the task has gone out in it."""
        driven = self._follower
        if driven is not None and not self._context.is_task:
            driven.stop()
        super().release(clean=False)

    def end(self) -> None:
        """Follow the task of a client no longer: its handle leads here no more."""
        if self._context.is_task:
            if self._follower is not None:
                self._follower.stop()
            if self._task is not None and self._task is not asyncio.current_task():
                _ = self._task.cancel()
        super().end()

    def _may_be_read_elsewhere(self, session: Session) -> bool:
        """As for other calls; the session of a client's task has its result as long as the handle is valid."""
        return self._context.is_task or (self._context.exchange.state is FINISHED and self._can_be_found_in(session))

    def _give_back(self, session: Session, *, clean: bool) -> None:
        give_back = super()._give_back

        async def last() -> None:
            give_back(session, clean=clean)

        self._enqueue(last)
