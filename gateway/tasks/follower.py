"""Follows a task of a legacy server to its end, in the session that made it.

Rule 1: tasks/result is held open from the first moment, because servers queue their questions for it, and some give
up on a question that nobody fetched within 60 s. Rule 2: a server that refuses to wait (fastmcp 3) is asked by
tasks/get; its questions come on the standalone GET stream. Rule 3: the requests of a task follow one another, so its
session has one call in flight; between two of them the task itself counts as the call (SEP-2260). Rule 4: tasks/get
is also asked beside a held tasks/result, because a server may forget that one, or has sent a question elsewhere.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from gateway import world
from gateway.bridge.call_context import Context
from gateway.parking import orphans
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, Refused, SessionLost, Unreachable, UpstreamError
from gateway.routes.deadlines import TASK_AGAIN_SECONDS
from gateway.runtime.own_ids import new_id
from gateway.sessions.call import Call, Listener, OwnListener
from gateway.sessions.session import Session
from gateway.tasks import legacy_tasks
from gateway.tasks.legacy_tasks import FINAL, Ended

_POLL_SECONDS: Final = 0.5
_HELD_IDS: Final = 4
"""How many ids of held requests there are per task and process; a later one is used only after it was cancelled."""
_LAST_POLL_SECONDS: Final = 60.0
"""Beside a held tasks/result the pauses double up to this one."""
_QUESTION_LOST: Final = (
    "The task waits for the answer to a question that its server sent to a replica which has ended since, and that no "
    "client has seen. It was given up, and may have had effects"
)
_CUT_SECONDS: Final = 5.0
"""A request that lasted longer was not refused but cut, as balancers do after a minute; it does not count."""


async def answer_to(
    call: Call, reading: Awaitable[None], ended: Callable[[Raw], None] | None = None
) -> Raw | jsonrpc.Error:
    """Return the answer to a request, whose listener hears everything else. Raises what `reading` its stream raises.

    `ended` is called with a result before anything else is heard.
    """
    answer = OwnListener(call.listener, ended)
    call.passes_to(answer)
    await reading
    if answer.outcome is None:
        raise CallLost("The upstream did not answer a request of a task; the task may have had effects")
    return answer.outcome


class Past(msgspec.Struct, frozen=True):
    """The past of a task that another replica followed before."""

    looked: Callable[[str | None], Awaitable[None]]
    """Hears of the task's status, which is asked for first."""
    is_shared: bool
    """Whether that replica may still hold tasks/result; then it is sent here only once the task is over."""
    may_lack_question: Callable[[], bool]
    """Whether that replica alone may have been sent a question that the task waits for now."""


class Follower:
    """One task and its session."""

    def __init__(
        self, session: Session, task_id: str, listener: Listener, context: Context, progress_token: bytes
    ) -> None:
        """`listener` hears the questions; `context` has the newest headers that a client sent."""
        self.session = session
        self.task_id = task_id
        self._listener = listener
        self._context = context
        self._progress_token = progress_token
        self._holder = context.live.process.owner, context.live.process.epoch
        self._tries = 0
        """How often tasks/result was sent."""
        self._is_stopped = False
        self._waits = True
        """Whether the server holds tasks/result until the task is over, as far as is known."""
        self._looked: Callable[[str | None], Awaitable[None]] | None = None
        self._may_lack_question: Callable[[], bool] = lambda: False
        self._answered = asyncio.Event()
        session.follow_task(listener)

    async def run(self, past: Past | None = None) -> Ended | None:
        """Return how the task ended, or None if it was stopped. Raises the UpstreamError after which it is lost."""
        if past is not None:
            self._waits, self._looked = not past.is_shared, past.looked
            self._may_lack_question = past.may_lack_question
            if self._context.former is not None and not past.is_shared:
                for number in range(_HELD_IDS):  # any may still be held, and would fetch the next question
                    await self._withdraw(self._context.former, number)
        failures = 0
        while not self._is_stopped:
            began = world.monotonic()
            try:
                ended = await self._look()
            except TaskGone:
                raise
            except SessionLost as exc:
                raise _gone(exc.message) from exc
            except (CallLost, Unreachable, Refused) as exc:
                was_cut = world.monotonic() - began > _CUT_SECONDS
                # A credential that is not accepted any more is no failure: its client may send a newer one.
                failures = (0 if was_cut else failures) + (not isinstance(exc, Refused))
                if failures > len(TASK_AGAIN_SECONDS):
                    raise
                # The last pause if nothing has failed: a refused credential must not come again and again at once.
                await asyncio.sleep(TASK_AGAIN_SECONDS[failures - 1])
                continue
            failures = 0
            if ended is not None:
                return ended
            await asyncio.sleep(_POLL_SECONDS)
        return None

    async def _look(self) -> Ended | None:
        """Ask about the task as its server allows; return how it ended, if it has."""
        if self._looked is not None:
            await self._looked(legacy_tasks.status(await self.ask(mcp.TASKS_GET)))
            self._looked = None
            if self._is_stopped:
                return None
        if self._waits:
            # A server does not notice that a stream was cut, and would send the next question there: so the request
            # before is cancelled.
            if self._tries:
                await self._withdraw(self._holder, self._tries - 1)
            id_ = held_id(self._holder, self.task_id, self._tries)
            self._tries += 1
            if (result := await self._hold(id_)) is not None:
                return result
        got = await self.ask(mcp.TASKS_GET)
        found = legacy_tasks.status(got)
        if found is None:
            said = got.message if isinstance(got, jsonrpc.Error) else "an answer without a status"
            raise _gone(said)
        if found not in FINAL:
            self._waits = False
            return None
        # What tasks/result said before may have been said before the end.
        return legacy_tasks.ended(got, await self.ask(mcp.TASKS_RESULT))

    async def _hold(self, id_: bytes) -> Ended | None:
        """Hold tasks/result open; return what the tool returned, or None if only tasks/get tells how the task is."""
        held = self._request(mcp.TASKS_RESULT, id_)
        looking = self._context.live.process.tasks.start(self._look_beside(held), "look beside a task")
        try:
            return legacy_tasks.returned(await self._run(held))
        except CallLost:
            if not looking.done():
                raise
            await self._withdraw(self._holder, self._tries - 1)
            if not looking.result():
                self.session.lose()  # the task still waits there
                raise TaskGone(_QUESTION_LOST) from None
            return None
        finally:
            _ = looking.cancel()

    async def _look_beside(self, held: Call) -> bool:
        """Stop reading a tasks/result that brings nothing; return whether its task is over.

        `mcp` 1.30 forgets it if two changes of the task coincide, such as the answers to two questions at once. While
        a question is open, no task is over. Or the replica before was sent a question as it ended, for whose answer
        `mcp` 1.30 waits for ever: twice in a row, the task needs input that nothing has asked for here.
        """
        pause, before = _POLL_SECONDS, None
        while True:
            self._answered.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    _ = await self._answered.wait()
            if self._answered.is_set():
                pause = _POLL_SECONDS
                continue
            # TypeScript 1.32 fails such a task by itself, and still says that it needs input once it has an answer.
            may_lack = held.is_accepted and orphans.must_not_be_cancelled(self.task_id) and self._may_lack_question()
            heard = held.heard if may_lack else None
            status = None if self._context.exchange.questions else await self._status_beside()
            if status != "input_required" or heard != held.heard:
                heard = None
            if status in FINAL or (heard is not None and heard == before):
                self.session.leave(held)
                return status in FINAL
            pause, before = min(2 * pause, _LAST_POLL_SECONDS), heard

    async def _status_beside(self) -> str | None:
        """What tasks/get says, beside the request in flight; None if that is not known."""
        message = self._request(mcp.TASKS_GET, new_id()).message
        try:
            async with asyncio.timeout(self._context.live.config.timeouts.handshake_seconds):
                return legacy_tasks.status(await self.session.channel.beside(message, self._context.headers))
        except (TimeoutError, GatewayError):
            return None  # the held request hears of it, or the next look does

    def answered(self) -> None:
        """The server gets answers, after which the task may end."""
        self._answered.set()

    async def _withdraw(self, holder: tuple[str, str], number: int) -> None:
        """Cancel a tasks/result that nobody reads any more; the task itself goes on."""
        with suppress(UpstreamError):  # at worst, a question is lost
            held = Call(held_id(holder, self.task_id, number), b"", self._listener)
            await self.session.cancel(held, "nobody reads its stream any more", self._context.headers)

    async def ask(self, method: str) -> Raw | jsonrpc.Error:
        """Send a request about the task; raises as `Session.run`."""
        return await self._run(self._request(method, new_id()))

    def _request(self, method: str, id_: bytes) -> Call:
        message = jsonrpc.request(id_, method, {"taskId": self.task_id})
        return Call(id_, message, self._listener, self._progress_token)

    async def _run(self, call: Call) -> Raw | jsonrpc.Error:
        return await answer_to(call, self.session.run(call, self._context.headers))

    async def cancel(self) -> None:
        """Tell the server that the task is not wanted any more, unless that does harm; raises as `Channel.send`."""
        if orphans.must_not_be_cancelled(self.task_id):  # `mcp` 1.30 would end a session, maybe another caller's
            return
        await self.session.channel.send(self._request(mcp.TASKS_CANCEL, new_id()).message, self._context.headers)

    def stop(self) -> None:
        """Follow the task no further than to the answer of the request in flight."""
        self._is_stopped = True
        self.session.follow_task(None)


def held_id(holder: tuple[str, str], task_id: str, number: int) -> bytes:
    """JSON of the id of a tasks/result that a process holds open, so that another process can name it."""
    digest = hashlib.sha256(" ".join((*holder, task_id)).encode()).hexdigest()[:16]
    return b'"gw-task-%b-%d"' % (digest.encode(), number % _HELD_IDS)


class TaskGone(CallLost):
    """The task cannot come to an end: its server does not know it any more, or waits for what cannot be answered."""


def _gone(said: str) -> TaskGone:
    return TaskGone(
        f"The upstream does not know the task any more ({said[:200]}): its time was over, or the server was "
        "restarted. The task may have had effects"
    )
