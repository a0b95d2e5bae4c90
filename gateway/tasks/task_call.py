"""An upstream call that is a task: the sibling of `bridge.upstream_call`.

The server is asked to run the tool as a task. What becomes of the task depends on the client: the gateway drives it to
its end and the client sees an ordinary call, or the client gets the task (`adopt`).
"""

import asyncio
from collections.abc import Callable

from msgspec import Raw

from gateway.bridge.exchange_context import Context
from gateway.bridge.exchange_report import Report
from gateway.bridge.exchange_timers import Timers
from gateway.bridge.response_queue import ending_of
from gateway.bridge.translation import legacy_call
from gateway.bridge.upstream_call import BUG, UpstreamCall
from gateway.exchange import events as on
from gateway.protocol.errors import CallLost, GatewayError, UpstreamError
from gateway.sessions.assignment import Opener
from gateway.sessions.call import Listener
from gateway.sessions.session import Session
from gateway.tasks import follower, legacy
from gateway.tasks.follower import Follower
from gateway.tasks.legacy import Created

Adopt = Callable[[Context, Session, Created], bytes]
"""Takes a task over from its call, and returns the CreateTaskResult for its client; raises Busy."""


class TaskCall(UpstreamCall):
    """The call, in a session of its own: some servers lose the tasks of a session when another one ends."""

    def __init__(
        self, context: Context, timers: Timers, report: Report, listener: Listener, adopt: Adopt | None = None
    ) -> None:
        """Without `adopt` the gateway drives the task."""
        super().__init__(context, timers, report, listener)
        self._adopt = adopt
        self._follower: Follower | None = None

    async def _run(self) -> None:
        live = self._context.live
        try:
            await self._create_and_follow()
        except GatewayError as exc:
            live.upstream.health.note(exc)
            if self._call is not None and self._call.span is not None:
                self._call.span.end(ending_of(exc))
            if isinstance(exc, UpstreamError):
                live.process.metrics.upstream_failed(live.route.path, exc.reason)
                exc.is_counted = True
            self._listener.hear(on.Broke(exc))
        except Exception:  # the outermost edge of the call's task: it is counted there, and the client gets an error
            self._listener.hear(on.Broke(CallLost(BUG)))
            raise

    async def _create_and_follow(self) -> None:
        context = self._context
        session = await self._session_of_its_own()
        if not self._is_wanted():
            self.release(clean=True)  # given up at the moment the session came
            return
        span = self._report.call_span(session.shaken.version)
        task = {"ttl": int(context.live.config.tasks.ttl_seconds * 1000)}
        call = legacy_call(context, session.next_id(), span, self._listener, task)
        self._sent(call)
        answer = await follower.send(call, session, self._call_headers(call))
        created = legacy.created(answer) if isinstance(answer, Raw) else None
        if created is None:  # the tool ended at once, or failed
            self._listener.hear(on.Resulted(answer) if isinstance(answer, Raw) else on.Failed(answer))
            return
        self._follower = Follower(session, created, self._listener, lambda: self._context.headers)
        if not self._is_wanted():
            self.cancel("the client closed its request")
            self.release(clean=False)
        elif self._adopt is None:
            await self._drive(self._follower, call.progress_token)
        else:
            self._hand_over(self._adopt, session, created)

    async def _session_of_its_own(self) -> Session:
        context, session = self._context, self._session
        if session is not None and not session.lost:
            return session  # reserved while the client visited the urls of a -32042
        headers, opener = context.headers, Opener(context.address, self._is_continued)
        session = self._session = await context.live.upstream.pool.open(context.key, headers, opener)
        context.server_info = session.shaken.server_info
        if (level := context.request.log_level) is not None:
            await session.set_log_level(level, headers, context.live.config.timeouts.handshake_seconds)
        return session

    def _is_wanted(self) -> bool:
        """Whether the exchange still waits for the call."""
        return self._context.exchange.calling

    def _hand_over(self, adopt: Adopt, session: Session, created: Created) -> None:
        """Give the task to its client; the session is the task's from now on."""
        try:
            body = adopt(self._context, session, created)
        except GatewayError:
            self.cancel("there is no room for another task")
            raise
        self._session = self._follower = None
        self._listener.hear(on.Resulted(body, is_modern=True))

    async def _drive(self, driven: Follower, progress_token: bytes | None) -> None:
        driven.progress_token = progress_token
        try:
            async with asyncio.timeout(self._context.live.config.tasks.ttl_seconds):
                ended = await driven.run()
        except TimeoutError:
            raise CallLost(
                "The task did not end within tasks.ttl_seconds; it was given up and may have had effects"
            ) from None
        if ended is None:
            return  # given up: the exchange has ended before
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
        if driven is None:
            super().cancel(reason)
            return
        driven.stop()

        async def cancel() -> None:
            try:
                async with asyncio.timeout(self._context.live.config.timeouts.cancel_seconds):
                    await driven.cancel()
            except (UpstreamError, TimeoutError) as exc:
                self._report.unsent(str(exc))

        self._outgoing.put(cancel)

    def release(self, *, clean: bool) -> None:  # noqa: ARG002  (a session that had a task never serves another call)
        """Give the session back, to be ended once everything for the task has gone out in it."""
        driven = self._follower
        if driven is not None:
            driven.stop()
        if self._session is None or self._is_let_go:
            super().release(clean=False)
            return
        session = self._released = self._session
        self._session = None

        async def release() -> None:
            self._context.live.upstream.pool.release(session, clean=False)

        self._outgoing.put(release)
