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
from gateway.mirror.modern_server import Outgoing, Pending, ask
from gateway.mirror.upstream import Upstream
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, Unreachable
from gateway.runtime.own_ids import new_id
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
        self, call: MirroredCall, upstream: Upstream, hears: Hears, log_level: Callable[[], str | None]
    ) -> None:
        self.call = call
        self.is_over = False
        self._upstream = upstream
        self._hears = hears
        self._log_level = log_level
        self._pending: Pending | None = None
        self.headers: Headers = {}
        """The newest headers of the client."""
        self._is_relisted = False
        self._polling: asyncio.TimerHandle | None = None
        self._failures = 0
        """How many requests about the task have failed in a row."""
        self._ends_at = world.monotonic() + upstream.task_seconds if call.live_task is not None else float("inf")

    @property
    def is_running(self) -> bool:
        """Whether a round is upstream, or about to go there."""
        return not self.is_over and not self.call.open

    def run(self, headers: Headers) -> None:
        """Send the present round; `headers` are the client's."""
        self.headers = headers
        (method, target), upstream = self.call.aim, self._upstream
        needs_schema = method == mcp.TOOLS_CALL and upstream.server.reads_headers
        if not needs_schema or upstream.catalog.knows(upstream.caller, target):
            self._send()
        else:
            self._upstream.tasks.spawn(self._list_and_send(), "list tools")

    async def _list_and_send(self) -> None:
        upstream = self._upstream
        await upstream.catalog.read(upstream.caller, upstream.server, self.call.profile, self.headers)
        if not self.is_over:
            self._send()

    def _send(self) -> None:
        (method, target), upstream = self.call.aim, self._upstream
        if world.monotonic() > self._ends_at:
            self._fail(
                CallLost("The task did not end within tasks.ttl_seconds; it was cancelled and may have had effects")
            )
            return
        trace = NO_TRACE if method == mcp.TASKS_GET else self._hears.sending()
        try:
            id_ = new_id()
            body = self.call.sent(id_, self._log_level(), trace)
            headers = with_trace(self.headers, trace) if trace else self.headers
            outgoing = Outgoing(id_, body, method, target, headers, self._param_headers(method, target))
        except InvalidParams as exc:
            self._fail(exc)
            return
        except ValueError as exc:
            self._fail(InvalidParams(f'"params._meta" cannot be read: {exc}'))
            return
        try:
            self._pending = upstream.server.begin(outgoing, self)
        except ValueError as exc:
            self._fail(InvalidParams(f"A header of the request cannot be sent to the server: {exc}"))

    def _param_headers(self, method: str, target: str) -> dict[str, str]:
        if method != mcp.TOOLS_CALL:
            return {}
        mirrored = self._upstream.catalog.find(self._upstream.caller, target).mirrored
        if not mirrored:
            return {}
        return param_headers.headers_for(mirrored, jsonrpc.fields(self.call.request.params).get("arguments"))

    def _poll_in(self, seconds: float) -> None:
        poll = self._upstream.tasks.guard(self._send, "poll a task")
        self._polling = asyncio.get_running_loop().call_later(seconds, poll)

    def answer(self, key: str, message: jsonrpc.Message, headers: Headers) -> None:
        """Take the client's response to a question; the last one sends the next round, with its own headers."""
        if self.is_over:
            return
        step = self.call.answered(key, message)
        if step is not None:
            self.headers = headers
            self._take(step)

    def cancel(self) -> None:
        """Give the call up; the client's side hears nothing more."""
        self.is_over = True
        self._abort()

    def _abort(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abort()
        if self._polling is not None:
            self._polling.cancel()
        if self.call.live_task is not None:
            self._upstream.tasks.spawn(self._cancel_task(self.call.live_task), "send upstream")
            self.call.live_task = None

    async def _cancel_task(self, task_id: str) -> None:
        """Tell the server that nobody waits for the task; its own time limit ends it otherwise."""
        id_ = new_id()
        body = self.call.cancelling(task_id, id_)
        with suppress(GatewayError):
            _ = await ask(self._upstream.server, Outgoing(id_, body, mcp.TASKS_CANCEL, task_id, self.headers))

    def _fail(self, error: GatewayError) -> None:
        self.is_over = True
        self._abort()
        self._hears.fail(error)

    # -- from the server ----------------------------------------------------------------------------------------

    def on_message(self, data: bytes, /) -> None:
        """See `Listener`."""
        if self.is_over:
            return
        if self._is_stale(data):
            self._is_relisted, self._pending = True, None
            self._upstream.catalog.forget(self._upstream.caller)
            self._upstream.tasks.spawn(self._list_and_send(), "list tools")
            return
        try:
            step = self.call.received(data)
        except CallLost as exc:
            self.on_failed(exc)
            return
        if step is not None:
            self._failures = 0
            if isinstance(step, End):
                self._learn(data)
            self._take(step)

    def on_failed(self, error: GatewayError, /) -> None:
        """See `Listener`."""
        self._pending = None
        if self.is_over:
            return
        if isinstance(error, Unreachable) and self.call.progress.round:
            error = CallLost(f"{error.message}; the rounds before may have had effects")
        if self.call.live_task is None or isinstance(error, Refused) or self._failures >= len(_PAUSES):
            self._fail(error)
            return
        # The server works on the task all the same, and takes answers that it has taken already.
        self._poll_in(_PAUSES[self._failures])
        self._failures += 1

    def _take(self, step: Step) -> None:
        match step:
            case Notify(message):
                self._hears.notify(message)
            case Ask(questions):
                self._pending = None
                self._hears.ask(questions)
            case Again():
                self._pending = None
                self._send()
            case Poll(seconds, is_new):
                self._pending = None
                if is_new:
                    self._ends_at = world.monotonic() + self._upstream.task_seconds
                    self._hears.sending()
                self._poll_in(seconds)
            case End(message):
                self.is_over = True
                self._pending = None
                self._abort()
                self._hears.end(message)

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
