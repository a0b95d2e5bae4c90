"""Calls that another process began, for processes that do not read them."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import UpstreamError
from gateway.seal.request_state import Upstream
from gateway.sessions.pool.pool import Pool
from gateway.upstream.channel import Channel, Headers

Answers = Iterable[tuple[Raw, Raw | jsonrpc.Error]]
"""The answers to the questions of a call, by their ids."""


async def tell(pool: Pool, whereabouts: Upstream, message: bytes, headers: Headers) -> None:
    """Send a message in a session that another process opened, without taking the session over."""
    channel = pool.adopted_channel(whereabouts)
    try:
        await channel.send(message, headers)
    finally:
        await channel.close(end_session=False)


async def end(
    pool: Pool,
    whereabouts: Upstream,
    answers: Answers,
    reason: str,
    headers: Headers,
) -> None:
    """Give up a call that no process reads: answer its questions, cancel it, and end its session if it ended.

    Raises an UpstreamError or TimeoutError if the cancellation does not arrive.
    """
    seconds = pool.config.timeouts.cancel_seconds
    cancelled = jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(whereabouts.call), "reason": reason})
    channel, has_ended = pool.adopted_channel(whereabouts), False
    try:
        with suppress(UpstreamError, TimeoutError):  # an answer that is not taken must not keep the call running
            async with asyncio.timeout(seconds):
                for id_, body in answers:
                    await channel.send(jsonrpc.answer(id_, body), headers)
        async with asyncio.timeout(seconds):
            await channel.send(cancelled, headers)
        # Only an answer on its stream shows that the call has ended: some servers crash if its session ends first.
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(seconds):
                await _until_answered(channel, whereabouts, headers)
                has_ended = True
    finally:
        await channel.close(end_session=has_ended)


async def _until_answered(channel: Channel, whereabouts: Upstream, headers: Headers) -> None:
    """Read the stream of a call until its answer. Raises what `Channel.resume` raises."""

    def is_answer(data: bytes) -> bool:
        try:
            message = jsonrpc.message(data)
        except (ValueError, msgspec.MsgspecError):
            return False
        return message.method is None and message.id == Raw(whereabouts.call)

    await channel.resume(whereabouts.cursor or "", headers, is_answer, lambda: None, is_shared=False)
