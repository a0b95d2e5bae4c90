"""Follows a task of a legacy server to its end, in the session that made it.

Rule 1: tasks/result is held open from the first moment, because servers queue their questions for it, and some give
up on a question that nobody fetched within 60 s. Rule 2: a server that refuses to wait (fastmcp 3) is asked by
tasks/get; its questions come on the standalone GET stream. Rule 3: the requests of a task follow one another, so its
session has one call in flight; between two of them the task itself counts as the call (SEP-2260).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, Refused, Unreachable
from gateway.sessions.call import Call, Listener
from gateway.sessions.session import Session
from gateway.tasks import legacy
from gateway.tasks.legacy import Created, Ended, Status
from gateway.upstream.channel import Headers

_POLL_SECONDS: Final = 0.5
_PAUSES: Final = (0.2, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0)
"""The pauses after failures in a row; after the last one the task counts as lost."""
_CUT_SECONDS: Final = 5.0
"""A request that lasted longer was not refused but cut, as balancers do after a minute; it does not count."""


class _Answer:
    """The listener of one request of a task: it keeps the answer, and passes everything else on."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.outcome: Raw | jsonrpc.Error | None = None

    @property
    def request_id(self) -> str | None:
        return self._listener.request_id

    def hear(self, event: on.Event) -> None:
        match event:
            case on.Resulted(result=result):
                self.outcome = Raw(result)
            case on.Failed(error=error):
                self.outcome = error
            case _:
                self._listener.hear(event)


async def send(call: Call, session: Session, headers: Headers) -> Raw | jsonrpc.Error:
    """Send one request and return its answer; the call's listener hears everything else. Raises as `Session.run`."""
    answer = call.listener = _Answer(call.listener)
    await session.run(call, headers)
    if answer.outcome is None:
        raise CallLost("The upstream did not answer a request of a task; the task may have had effects")
    return answer.outcome


class Follower:
    """One task and its session."""

    def __init__(self, session: Session, created: Created, listener: Listener, headers: Callable[[], Headers]) -> None:
        """`listener` hears the questions; `headers` returns the newest ones that a client sent."""
        self.session = session
        self.task_id = created.id
        self._listener = listener
        self._headers = headers
        self._is_stopped = False
        self._waits = True
        """Whether the server holds tasks/result until the task is over, as far as is known."""
        self.progress_token: bytes | None = None

    async def run(self, looked: Callable[[Status | None], None] | None = None, *, holds: bool = True) -> Ended | None:
        """Return how the task ended, or None if it was stopped. Raises the UpstreamError after which it is lost.

        With `looked`, ask for the status first and report it. Without `holds`, leave tasks/result to another replica,
        which may still hold it, until the task is over.
        """
        self._waits = holds
        self.session.standing = Call(b"null", b"", self._listener)
        failures = 0
        while not self._is_stopped:
            began = time.monotonic()
            try:
                if looked is not None:
                    found = legacy.status(await self.ask(mcp.TASKS_GET))
                    looked(found)
                    looked = None
                ended = await self._look()
            except (CallLost, Unreachable, Refused) as exc:
                if time.monotonic() - began > _CUT_SECONDS:
                    failures = 0
                if failures >= len(_PAUSES):
                    raise
                if not isinstance(exc, Refused):  # its client may send a newer credential
                    failures += 1
                await asyncio.sleep(_PAUSES[failures - 1])
                continue
            failures = 0
            if ended is not None:
                return ended
            await asyncio.sleep(_POLL_SECONDS)
        return None

    async def _look(self) -> Ended | None:
        if self._waits:
            answer = await self.ask(mcp.TASKS_RESULT)
            if legacy.is_result(answer):
                assert isinstance(answer, Raw)
                return Ended("completed", legacy.without_task(answer))
        answer = await self.ask(mcp.TASKS_GET)
        found = legacy.status(answer)
        if found is None:
            said = answer.message if isinstance(answer, jsonrpc.Error) else "an answer without a status"
            raise _gone(said)
        if not found.is_final:
            self._waits = False
            return None
        # What tasks/result said before may have been said before the end.
        return legacy.ended(found, await self.ask(mcp.TASKS_RESULT))

    async def ask(self, method: str) -> Raw | jsonrpc.Error:
        """Send a request about the task; raises as `Session.run`."""
        id_ = self.session.next_id()
        message = jsonrpc.request(id_, method, {"taskId": self.task_id})
        return await send(Call(id_, message, self._listener, self.progress_token), self.session, self._headers())

    @property
    def must_not_be_cancelled(self) -> bool:
        """Whether tasks/cancel would do harm."""
        return legacy.must_not_be_cancelled(self.task_id)

    async def cancel(self) -> None:
        """Tell the server that the task is not wanted any more, unless that does harm; raises as `Channel.send`."""
        if self.must_not_be_cancelled:
            return
        message = jsonrpc.request(self.session.next_id(), mcp.TASKS_CANCEL, {"taskId": self.task_id})
        await self.session.channel.send(message, self._headers())

    def stop(self) -> None:
        """Follow the task no further than to the answer of the request in flight."""
        self._is_stopped = True
        self.session.standing = None


class TaskGone(CallLost):
    """The server does not know the task any more: its time is over, or the server was restarted."""


def _gone(said: str) -> TaskGone:
    return TaskGone(
        f"The upstream does not know the task any more ({said[:200]}): its time was over, or the server was "
        "restarted. The task may have had effects"
    )
