"""Calls that another process began, for processes that do not read them."""

import asyncio
import re
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw

from gateway.exchange.input_requests import withdrawn
from gateway.protocol import jsonrpc, mcp, reply_messages
from gateway.protocol.errors import Refused, SessionLost, UpstreamError
from gateway.routes.deadlines import CANCEL_AGAIN_SECONDS
from gateway.routes.live_route import LiveRoute
from gateway.runtime.own_ids import new_id
from gateway.seal.request_state import Whereabouts
from gateway.telemetry import Event, get_logger
from gateway.upstream.channel import Headers, Hearer

log = get_logger()

_FRAGILE: Final = re.compile(r"[0-9a-f]{32}:[0-9a-f-]{36}")


class Remains(msgspec.Struct, frozen=True, array_like=True):
    """Where a call is, with its open questions (JSON of the id, method): what it takes to give it up upstream."""

    upstream: Whereabouts
    questions: tuple[tuple[bytes, str], ...]


async def give_up(live: LiveRoute, exchange_id: str, remains: Remains, reason: str, headers: Headers) -> None:
    """As `end`, again and again if that does not arrive."""
    for pause in (0.0, *CANCEL_AGAIN_SECONDS):
        await asyncio.sleep(pause)
        if await end(live, exchange_id, remains, reason, headers):
            return


async def end(live: LiveRoute, exchange_id: str, remains: Remains, reason: str, headers: Headers) -> bool:
    """Give up a call that no process reads; returns whether it need not be tried again."""
    try:
        await _end(live, remains, reason, headers)
    except (UpstreamError, TimeoutError) as exc:
        log.debug(Event.UPSTREAM_FAILED, route=live.route.path, cause=str(exc), exchange_id=exchange_id)
        return isinstance(exc, Refused | SessionLost)  # a refused credential stays so; a lost session has no call
    return True


async def _end(live: LiveRoute, remains: Remains, reason: str, headers: Headers) -> None:
    """Answer the questions of a call, cancel it, and end its session if it ended; of a task, only cancel it.

    Raises an UpstreamError or TimeoutError if the cancellation does not arrive.
    """
    pool, whereabouts, task = live.upstream.pool, remains.upstream, remains.upstream.task
    seconds = pool.config.timeouts.cancel_seconds
    if not task:
        cancelled = jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(whereabouts.call), "reason": reason})
    elif must_not_be_cancelled(task):
        return
    else:
        cancelled = jsonrpc.request(new_id(), mcp.TASKS_CANCEL, {"taskId": task})
    channel, has_ended = pool.adopted_channel(whereabouts), False
    try:
        with suppress(UpstreamError, TimeoutError):  # an answer that is not taken must not keep the call running
            async with asyncio.timeout(seconds):
                for id_, method in remains.questions:
                    await channel.send(jsonrpc.answer(Raw(id_), withdrawn(method)), headers)
        async with asyncio.timeout(seconds):
            await channel.send(cancelled, headers)
        if task is not None:
            return  # what it was answered need not be its end
        # Only an answer on its stream shows that the call has ended: some servers crash if its session ends first.
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(seconds):
                await channel.resume(whereabouts.cursor or "", headers, _AnswerTo(whereabouts.call), is_shared=False)
                has_ended = True
    finally:
        await channel.close(end_session=has_ended)


class _AnswerTo(Hearer):
    """Waits for the answer to a call, whatever it is."""

    def __init__(self, call: bytes) -> None:
        self._call = Raw(call)

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`."""
        message = reply_messages.opened(data)
        return message.method is None and message.id == self._call


def must_not_be_cancelled(task_id: str) -> bool:
    """Whether tasks/cancel would do harm: in `mcp` 1.30 the end of a cancelled task ends another session.

    It would not stop the work there either. The form of its task ids shows the server: 32 hex digits, a colon, a UUID.
    """
    return _FRAGILE.fullmatch(task_id) is not None
