"""The link of one mirrored call: it calls the server again with the answers of each round.

One call has at most one request in flight upstream. Between two rounds it has none, and nothing is held there, but for
a task that the call has become: the task ends with the call, or is cancelled.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from gateway import world
from gateway.exchange import events as on
from gateway.exchange.input_requests import Question
from gateway.mirror.call_report import CallReport
from gateway.mirror.call_rounds import NO_TRACE, Rounds, with_trace
from gateway.mirror.server_client import ModernRequest, ServerClient, ask
from gateway.mirror.tool_catalog import CallerKey, ToolCatalog
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, Unreachable
from gateway.protocol.param_headers import Tool
from gateway.routes.live_route import LiveRoute
from gateway.runtime.own_ids import new_id
from gateway.runtime.tasks import telling
from gateway.sessions.call import Listener
from gateway.upstream.channel import Headers

_PAUSES: Final = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0)
"""The pauses after requests about a task that failed in a row; after the last one the task counts as lost."""
_NEVER: Final = float("inf")


class CallServer(msgspec.Struct, frozen=True, eq=False):
    """The modern server of a call, with what calls of the same caller share."""

    live: LiveRoute
    server: ServerClient
    catalog: ToolCatalog
    caller: CallerKey

    @property
    def drives_tasks(self) -> bool:
        """Whether the gateway declares tasks for a client that cannot."""
        return self.live.route.tasks.undeclared == "drive"


class Runner:
    """The rounds at work. Nothing is in flight upstream until the client has answered all questions of a round."""

    def __init__(
        self, rounds: Rounds, upstream: CallServer, listener: Listener, report: CallReport, headers: Headers
    ) -> None:
        self._rounds = rounds
        self._upstream = upstream
        self._listener = listener
        self._report = report
        self._is_released = False
        self._work: asyncio.Task[None] | None = None
        """Runs rounds, unless the client has to answer."""
        self.headers = headers
        """The newest headers of the client."""
        self._is_relisted = False
        self._failures = 0
        """How many requests about the task have failed in a row."""
        self._ends_at = self._task_end() if rounds.live_task is not None else _NEVER

    def _task_end(self) -> float:
        return world.monotonic() + self._upstream.live.config.tasks.ttl_seconds

    def start(self) -> None:
        """Run rounds from the present one on, until the client has to answer."""
        self._work = self._upstream.live.process.tasks.start(self._run(), "mirrored call")

    async def _run(self) -> None:
        with telling(self._broke):
            pause: float | None = 0.0
            while pause is not None:
                if pause:
                    await asyncio.sleep(pause)
                pause = await self._round()

    async def _round(self) -> float | None:
        """Send the request that is due; return the pause before the next one, unless the client is to answer first.

        Raises GatewayError.
        """
        (method, target), upstream = self._rounds.aim, self._upstream
        tool = Tool()
        if method == mcp.TOOLS_CALL and upstream.server.reads_headers:
            profile, headers = self._rounds.profile, self.headers
            tool = await upstream.catalog.tool(upstream.caller, upstream.server, profile, headers, target)
        if world.monotonic() > self._ends_at:
            raise CallLost("The task did not end within tasks.ttl_seconds; it was cancelled and may have had effects")
        pause: float | None = None

        def hear(data: bytes) -> None:
            nonlocal pause
            pause = self._hear(data)

        sending = upstream.server.send(self._outgoing(method, target, tool), hear)
        try:
            await sending
        except ValueError as exc:
            raise InvalidParams(f"A header of the request cannot be sent to the server: {exc}") from exc
        except GatewayError as exc:
            return self._tried_again(exc)
        return pause

    def _outgoing(self, method: str, target: str, tool: Tool) -> ModernRequest:
        trace = NO_TRACE if method == mcp.TASKS_GET else self._sending()
        try:
            id_ = new_id()
            body = self._rounds.sent(id_, trace)
            headers = with_trace(self.headers, trace) if trace else self.headers
            arguments = jsonrpc.fields(self._rounds.request.params).get("arguments") if tool.mirrored else None
            repeated = param_headers.headers_for(tool.mirrored, arguments)
            return ModernRequest(id_, body, method, target, headers, repeated)
        except ValueError as exc:
            raise InvalidParams(f'"params._meta" cannot be read: {exc}') from exc

    def _sending(self) -> Headers:
        """Say that the server may run the call from here on; returns the trace context."""
        self._listener.hear(on.Sent())
        return self._report.sending()

    def deliver(self, answers: Iterable[tuple[Question, Raw | jsonrpc.Error]], *, is_whole: bool) -> None:
        """Keep the client's answers; `is_whole` if they are the last ones of the round, which goes upstream then."""
        for question, answer in answers:
            if (ended := self._rounds.answered(question, answer)) is not None:
                self._listener.hear(ended)
                return
        if is_whole:
            self.start()

    def cancel(self) -> None:
        """Give the call up."""
        self.release()
        if self._work is not None and self._work is not asyncio.current_task():
            _ = self._work.cancel()

    def release(self) -> None:
        """Say nothing more. A task that is not over ends with its call."""
        self._is_released = True
        if (task := self._rounds.abandoned_task()) is not None:
            self._upstream.live.process.tasks.spawn(self._cancel_task(task), "send upstream")

    async def _cancel_task(self, task_id: str) -> None:
        """Tell the server that nobody waits for the task; its own time limit ends it otherwise."""
        id_ = new_id()
        body = self._rounds.cancelling(task_id, id_)
        with suppress(GatewayError):
            _ = await ask(self._upstream.server, ModernRequest(id_, body, mcp.TASKS_CANCEL, task_id, self.headers))

    def _broke(self, error: GatewayError) -> None:
        if not self._is_released:
            self._listener.hear(on.Broke(error))

    # -- from the server ----------------------------------------------------------------------------------------

    def _hear(self, data: bytes) -> float | None:
        """Take a message of the server; return as `_round`."""
        if self._is_released:
            return None
        if self._is_stale(data):
            self._is_relisted = True
            self._upstream.catalog.forget(self._upstream.caller)
            return 0.0
        try:
            said = self._rounds.received(data)
        except CallLost as exc:
            return self._tried_again(exc)
        if said is None:
            return None
        self._failures = 0
        if isinstance(said, float):
            if self._rounds.live_task is not None and self._ends_at == _NEVER:  # the call has become a task
                self._ends_at = self._task_end()
                _ = self._sending()
            return said
        upstream, request = self._upstream, self._rounds.request
        if isinstance(said, on.Resulted) and request.method == mcp.TOOLS_LIST and upstream.server.reads_headers:
            result = jsonrpc.message(data).result
            if isinstance(result, Raw):
                upstream.catalog.learn(upstream.caller, jsonrpc.fields(request.params), result)
        self._listener.hear(said)
        return None

    def _tried_again(self, error: GatewayError) -> float | None:
        """The pause before the next try after a request that failed, if the server works on a task; else it fails."""
        if isinstance(error, Unreachable) and self._rounds.progress.round:
            error = CallLost(f"{error.message}; the rounds before may have had effects")
        if self._rounds.live_task is None or isinstance(error, Refused) or self._failures >= len(_PAUSES):
            self._broke(error)
            return None
        # The server works on the task all the same, and takes answers that it has taken already.
        self._failures += 1
        return _PAUSES[self._failures - 1]

    def _is_stale(self, data: bytes) -> bool:
        """Whether the server refused the call, unrun, because its headers are not those of the tool's schema."""
        if self._is_relisted or self._rounds.aim[0] != mcp.TOOLS_CALL or b"%d" % mcp.HEADER_MISMATCH not in data:
            return False
        error = jsonrpc.message(data).error
        return isinstance(error, Raw) and jsonrpc.error(error).code == mcp.HEADER_MISMATCH
