"""An upstream call that is a task: the sibling of `bridge.request_call`.

The server is asked to run the tool as a task. What becomes of the task depends on the client: the gateway drives it to
its end and the client sees an ordinary call, or the client gets the task (`adopt`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec import Raw
from msgspec.structs import replace

from gateway.bridge.call_context import Context
from gateway.bridge.call_report import Report
from gateway.bridge.modern_to_legacy import legacy_call
from gateway.bridge.upstream_call import UpstreamCall
from gateway.exchange import events as on
from gateway.exchange.machine import FINISHED
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, CallLost, GatewayError, bug
from gateway.seal.request_state import Upstream
from gateway.sessions.call import Call, Listener
from gateway.sessions.session import Session
from gateway.tasks import follower, legacy_tasks
from gateway.tasks.follower import Follower, Past, Relay
from gateway.tasks.legacy_tasks import Created, Status

Adopt = Callable[[Context, Session, Created, Relay], bytes]
"""Takes a task over from its call, and returns the CreateTaskResult for its client; raises Busy."""


class TaskCall(UpstreamCall):
    """The call, in a session of its own: some servers lose the tasks of a session when another one ends."""

    def __init__(
        self,
        context: Context,
        report: Report,
        listener: Listener,
        adopt: Adopt | None = None,
        former_holder: str = "",
    ) -> None:
        """Without `adopt` the gateway drives the task. `former_holder` is the process that did so before."""
        super().__init__(context, report, listener)
        self._adopt = adopt
        self._former_holder = former_holder
        self._follower: Follower | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on with the task, or read the stream on which it will be made."""
        driven = self._follower
        is_driven = driven is not None and driven.session.channel.session_id is not None
        return super().is_resumable or (self._is_held and is_driven)

    def _may_be_resumed_elsewhere(self, session: Session) -> bool:  # noqa: ARG002  (as for a plain call)
        return self.is_resumable and self._context.live.process.witness.is_needed

    def whereabouts(self) -> Upstream | None:
        """Where another replica would find the task."""
        found = super().whereabouts()
        if found is None or found is self._left:
            return found
        return replace(found, task=self._follower.task_id if self._follower is not None else "")

    async def resume(self, upstream: Upstream, opened: asyncio.Future[bool], *, is_shared: bool) -> None:
        """Go on with the task of another replica; `is_shared` if that replica may still follow it.

        The task may have been made after the state was sealed: then its id is on the stream of the call.
        """
        session = await self._adopted_session(upstream, is_shared=is_shared)

        def looked(status: Status | None) -> None:
            if status is not None:
                self._resumed(opened)
            elif not opened.done():
                opened.set_result(False)

        former = "" if is_shared else self._former_holder
        past = Past(looked, is_shared=is_shared, former_holder=former)
        call = Call(upstream.call, b"", self._listener, upstream.call)
        if upstream.task:
            self._call, self._is_sent = call, not is_shared
            await self._drive(self._new_follower(session, upstream.task, call, self._listener), past)
            return
        self._sent(call)
        self._is_sent = not is_shared  # as in `RequestCall.resume`
        cursor, attached = upstream.cursor or "", partial(self._resumed, opened)
        reading = session.resume(call, cursor, self._call_headers(call), attached)
        await self._follow_from_creation(session, call, reading, Relay(self._listener), past)

    def _new_follower(self, session: Session, task_id: str, call: Call, listener: Listener) -> Follower:
        context = self._context
        driven = self._follower = Follower(session, task_id, listener, lambda: context.headers, context.live.process)
        driven.progress_token = call.progress_token
        return driven

    async def _run(self) -> None:
        context = self._context
        pool, relay = context.live.upstream.pool, Relay(self._listener)
        try:
            session = self._reserved_session()
            if session is None:
                is_exempt = self._is_continued
                session = self._session = await pool.open(context.key, context.headers, is_exempt=is_exempt)
                context.runs_in(session)
                await pool.prepare(session, context.request.said.log_level, context.headers)
            if not self._is_wanted():
                self.release(clean=True)  # given up at the moment the session came
                return
            span = self._report.call_span(session.shaken.version)
            task = {"ttl": int(context.live.config.tasks.ttl_seconds * 1000)}
            call = legacy_call(context.request, context.live.process.call_id(), relay, span, task)
            self._sent(call)
            await self._follow_from_creation(session, call, session.run(call, self._call_headers(call)), relay)
        except GatewayError as exc:
            await self._failed(exc, self._call)
        except Exception:  # the outermost edge of the call's task: it is counted there, and the client gets an error
            self._listener.hear(on.Broke(bug()))
            raise

    def run_again(self) -> None:
        """Ask for another task, and follow the one before no longer."""
        self._follower = None
        super().run_again()

    async def _follow_from_creation(
        self, session: Session, call: Call, reading: Awaitable[None], relay: Relay, past: Past | None = None
    ) -> None:
        """Read the answer that makes the task, then follow the task."""
        session.standing = follower.standing(relay)  # a question may come as soon as there is a task

        def ended(answer: Raw) -> None:
            """Follow the task from now on, though its server may leave the stream open for a while."""
            created = legacy_tasks.created(answer)
            if created is None:
                return
            _ = self._new_follower(session, created.id, call, relay)
            if not self._is_wanted():
                self.cancel("the client closed its request")
                self.release(clean=False)
            elif self._adopt is not None:
                relay.pause()

        try:
            answer = await follower.answer_to(call, reading, ended)
        except CallLost:
            if call is self._call:
                raise
            return
        if call is not self._call:
            return  # it was given up, left to another replica, or is run again
        created = legacy_tasks.created(answer) if isinstance(answer, Raw) else None
        driven = self._follower
        if created is None or driven is None:  # the tool ended at once, or failed
            self._listener.hear(on.Resulted(answer) if isinstance(answer, Raw) else on.Failed(answer))
        elif self._adopt is None:
            await self._drive(driven, past)
        else:
            self._hand_over(self._adopt, session, created, relay)

    def _hand_over(self, adopt: Adopt, session: Session, created: Created, relay: Relay) -> None:
        """Give the task to its client; the session is the task's from now on."""
        try:
            body = adopt(self._context, session, created, relay)
        except Busy as exc:  # another call took the last place while the task was made
            self.cancel("there is no room for another task")
            raise CallLost(f"{exc.message}. The task of this call was given up, and may have had effects") from exc
        self._session = self._follower = None
        self._listener.hear(on.Resulted(body, is_modern=True))

    async def _drive(self, driven: Follower, past: Past | None = None) -> None:
        """Follow a task to its end, which ends no other run if the call was run again meanwhile."""
        try:
            async with asyncio.timeout(self._context.live.config.tasks.ttl_seconds):
                ended = await driven.run(past)
        except (TimeoutError, GatewayError) as exc:
            if driven is not self._follower:
                return
            if isinstance(exc, GatewayError):
                raise
            raise CallLost(
                "The task did not end within tasks.ttl_seconds; it was given up and may have had effects"
            ) from None
        if ended is None or driven is not self._follower:
            return  # given up: the exchange has ended before, or its call was run again
        if ended.result is not None:
            self._listener.hear(on.Resulted(ended.result))
        elif ended.error is not None:
            self._listener.hear(on.Failed(ended.error))
        else:
            raise CallLost("The server cancelled the task of this call, which may have had effects")

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
        driven.stop()
        self._outgoing.try_to_send(driven.cancel)

    def cancel_orphan(self, upstream: Upstream, reason: str) -> None:
        """Cancel the task of a dead replica, or the request that is to make it."""
        if self._follower is not None:
            self.cancel(reason)
        elif not upstream.task:
            super().cancel_orphan(upstream, reason)
        elif not legacy_tasks.must_not_be_cancelled(upstream.task):
            id_ = upstream.call[:-1] + b'-cancel"'
            self._tell_orphan(upstream, jsonrpc.request(id_, mcp.TASKS_CANCEL, {"taskId": upstream.task}))

    def release(self, *, clean: bool) -> None:  # noqa: ARG002  (a session that had a task never serves another call)
        """Give the session back, to be ended once everything for the task has gone out in it."""
        driven = self._follower
        if driven is not None:
            driven.stop()
        if self._session is None or self._is_let_go:
            super().release(clean=False)
            return
        self.end_kept()
        may_be_read = self._may_be_read_elsewhere(self._session)
        self._released, self._session = self._session, None
        if may_be_read:
            self._kept_as_clean = False
        else:
            self._give_back(self._released, clean=False)

    def _may_be_read_elsewhere(self, session: Session) -> bool:
        return self._context.exchange.state is FINISHED and self._may_be_resumed_elsewhere(session)

    def _give_back(self, session: Session, *, clean: bool) -> None:
        async def release() -> None:
            self._context.live.upstream.pool.release(session, clean=clean)

        self._outgoing.put(release)
