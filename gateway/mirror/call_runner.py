"""Runs the rounds of one mirrored call at its server.

One call has at most one request in flight upstream. Between two rounds it has none, and nothing is held there, but for
a task that the call has become: the task ends with the call, or is cancelled.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from msgspec import Raw

from gateway import world
from gateway.mirror.call_rounds import (
    NO_TRACE,
    Again,
    Ask,
    End,
    MirroredCall,
    Notify,
    Poll,
    Question,
    Step,
    with_trace,
)
from gateway.mirror.server_client import ModernRequest, ask
from gateway.mirror.upstream import CallServer
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, Unreachable
from gateway.runtime.own_ids import new_id
from gateway.runtime.tasks import telling
from gateway.upstream.channel import Headers

_PAUSES: Final = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0)
"""The pauses after requests about a task that failed in a row; after the last one the task counts as lost."""


class Hears(Protocol):
    """The client's side of a call."""

    def notify(self, message: bytes) -> None:
        """A notification is here."""

    def ask(self, questions: tuple[Question, ...]) -> None:
        """The client has to answer these; nothing is in flight upstream until it has answered all."""

    def sending(self) -> Headers:
        """A round is about to go upstream: from now on the server may have run it. Returns its trace context."""

    def end(self, message: bytes) -> None:
        """The response is here."""

    def fail(self, error: GatewayError) -> None:
        """There will be no response of the server."""


class Runner:
    """One call at work."""

    def __init__(
        self, call: MirroredCall, upstream: CallServer, hears: Hears, log_level: Callable[[], str | None]
    ) -> None:
        self.call = call
        self.is_over = False
        self._upstream = upstream
        self._hears = hears
        self._log_level = log_level
        self._work: asyncio.Task[None] | None = None
        """Runs rounds, unless the client has to answer."""
        self.headers: Headers = {}
        """The newest headers of the client."""
        self._is_relisted = False
        self._failures = 0
        """How many requests about the task have failed in a row."""
        self._ends_at = world.monotonic() + upstream.task_seconds if call.live_task is not None else float("inf")

    @property
    def is_running(self) -> bool:
        """Whether a round is upstream, or about to go there."""
        return not self.is_over and not self.call.open

    def run(self, headers: Headers) -> None:
        """Run rounds from the present one on, until the client has to answer; `headers` are the client's."""
        self.headers = headers
        self._work = self._upstream.tasks.start(self._run(), "mirrored call")

    async def _run(self) -> None:
        with telling(self._fail):
            step: Step | None = Again()
            while isinstance(step, Again | Poll):
                if isinstance(step, Poll):
                    await asyncio.sleep(step.seconds)
                step = await self._round()

    async def _round(self) -> Step | None:
        """Send the request that is due; return what its response led to. Raises GatewayError."""
        (method, target), upstream = self.call.aim, self._upstream
        needs_schema = method == mcp.TOOLS_CALL and upstream.server.reads_headers
        if needs_schema and not upstream.catalog.knows(upstream.caller, target):
            await upstream.catalog.read(upstream.caller, upstream.server, self.call.profile, self.headers)
        if world.monotonic() > self._ends_at:
            raise CallLost("The task did not end within tasks.ttl_seconds; it was cancelled and may have had effects")
        taken: Step | None = None

        def hear(data: bytes) -> None:
            nonlocal taken
            taken = self._hear(data)

        sending = upstream.server.send(self._outgoing(method, target), hear)
        try:
            await sending
        except ValueError as exc:
            raise InvalidParams(f"A header of the request cannot be sent to the server: {exc}") from exc
        except GatewayError as exc:
            return self._tried_again(exc)
        return taken

    def _outgoing(self, method: str, target: str) -> ModernRequest:
        trace = NO_TRACE if method == mcp.TASKS_GET else self._hears.sending()
        try:
            id_ = new_id()
            body = self.call.sent(id_, self._log_level(), trace)
            headers = with_trace(self.headers, trace) if trace else self.headers
            return ModernRequest(id_, body, method, target, headers, self._param_headers(method, target))
        except ValueError as exc:
            raise InvalidParams(f'"params._meta" cannot be read: {exc}') from exc

    def _param_headers(self, method: str, target: str) -> dict[str, str]:
        if method != mcp.TOOLS_CALL:
            return {}
        mirrored = self._upstream.catalog.find(self._upstream.caller, target).mirrored
        if not mirrored:
            return {}
        return param_headers.headers_for(mirrored, jsonrpc.fields(self.call.request.params).get("arguments"))

    def answer(self, key: str, message: jsonrpc.Message, headers: Headers) -> None:
        """Take the client's response to a question; the last one sends the next round, with its own headers."""
        if self.is_over:
            return
        step = self.call.answered(key, message)
        if step is not None:
            self.headers = headers
            if self._taken(step) is not None:
                self.run(headers)

    def cancel(self) -> None:
        """Give the call up; the client's side hears nothing more."""
        self._over()
        if self._work is not None and self._work is not asyncio.current_task():
            _ = self._work.cancel()

    def _over(self) -> None:
        self.is_over = True
        if self.call.live_task is not None:
            self._upstream.tasks.spawn(self._cancel_task(self.call.live_task), "send upstream")
            self.call.live_task = None

    async def _cancel_task(self, task_id: str) -> None:
        """Tell the server that nobody waits for the task; its own time limit ends it otherwise."""
        id_ = new_id()
        body = self.call.cancelling(task_id, id_)
        with suppress(GatewayError):
            _ = await ask(self._upstream.server, ModernRequest(id_, body, mcp.TASKS_CANCEL, task_id, self.headers))

    def _fail(self, error: GatewayError) -> None:
        if not self.is_over:
            self._over()
            self._hears.fail(error)

    # -- from the server ----------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> Step | None:
        """Take a message of the server; return what is to be done next, unless that is the client's."""
        if self.is_over:
            return None
        if self._is_stale(data):
            self._is_relisted = True
            self._upstream.catalog.forget(self._upstream.caller)
            return Again()
        try:
            step = self.call.received(data)
        except CallLost as exc:
            return self._tried_again(exc)
        if step is None:
            return None
        self._failures = 0
        if isinstance(step, End):
            self._learn(data)
        return self._taken(step)

    def _taken(self, step: Step) -> Step | None:
        """Tell the client's side of a step; return it if the server is next."""
        match step:
            case Notify(message):
                self._hears.notify(message)
            case Ask(questions):
                self._hears.ask(questions)
            case End(message):
                self._over()
                self._hears.end(message)
            case Poll(_, is_new):
                if is_new:
                    self._ends_at = world.monotonic() + self._upstream.task_seconds
                    _ = self._hears.sending()
                return step
            case Again():
                return step
        return None

    def _tried_again(self, error: GatewayError) -> Poll | None:
        """The next try after a request that failed, if the server works on a task; else the call fails."""
        if isinstance(error, Unreachable) and self.call.progress.round:
            error = CallLost(f"{error.message}; the rounds before may have had effects")
        if self.call.live_task is None or isinstance(error, Refused) or self._failures >= len(_PAUSES):
            self._fail(error)
            return None
        # The server works on the task all the same, and takes answers that it has taken already.
        self._failures += 1
        return Poll(_PAUSES[self._failures - 1])

    def _learn(self, data: bytes) -> None:
        if self.call.request.method == mcp.TOOLS_LIST and self._upstream.server.reads_headers:
            result = jsonrpc.message(data).result
            if isinstance(result, Raw):
                self._upstream.catalog.learn(self._upstream.caller, result)

    def _is_stale(self, data: bytes) -> bool:
        """Whether the server refused the call, unrun, because its headers are not those of the tool's schema."""
        if self._is_relisted or self.call.aim[0] != mcp.TOOLS_CALL or b"%d" % mcp.HEADER_MISMATCH not in data:
            return False
        error = jsonrpc.message(data).error
        return isinstance(error, Raw) and jsonrpc.error(error).code == mcp.HEADER_MISMATCH
