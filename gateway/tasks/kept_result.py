"""The result of a task, which may give way to others; it is asked for again when its client wants it."""

import asyncio
from functools import partial

from msgspec import Raw

from gateway.exchange import results
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from gateway.runtime.budget import Budget
from gateway.tasks import legacy_tasks
from gateway.tasks.follower import Follower
from gateway.upstream.channel import Headers


class KeptResult:
    """The result of one task in its modern form."""

    def __init__(self, server_info: Raw, budget: Budget, principal: bytes) -> None:
        """`budget` is that of all results."""
        self.body: bytes | None = None
        """None if there is no result, or if it was dropped to make room."""
        self._server_info = server_info
        self._new_share = partial(budget.share, self._give_way, principal)
        self._share = self._new_share()
        self._fetching = asyncio.Lock()
        """Held because a session has one request in flight."""

    def keep(self, result: Raw) -> bytes:
        """Keep a result, if there is room for it; raises CallLost if it is malformed."""
        try:
            body = results.modern(mcp.TOOLS_CALL, result, self._server_info, (0, "private"), retried=True).body
        except ValueError as exc:
            raise CallLost(
                f"The server ended the task with a malformed result ({exc}); the task may have had effects"
            ) from exc
        self.body = body
        self._share.grow(len(body))
        return body

    def _give_way(self) -> None:
        self.body = None
        self._share = self._new_share()

    async def fetch(self, follower: Follower, headers: Headers, seconds: float) -> bytes:
        """Ask the server for the result, unless it is here; raises an UpstreamError."""
        async with self._fetching:
            if self.body is not None:
                return self.body
            answer = await follower.session.ask(mcp.TASKS_RESULT, {"taskId": follower.task_id}, headers, seconds)
            if not isinstance(answer, Raw):
                raise CallLost(
                    "The gateway had no room to keep the result of the task (limits.results_bytes), and its server no "
                    "longer has it"
                )
            return self.keep(legacy_tasks.without_task(answer))

    def release(self) -> None:
        """Keep nothing any more."""
        self._share.release()
