"""Answers a JSON-RPC batch by one stream, on which each request of it gets its response."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from gateway.http.reply import ReplyWriter
from gateway.legacy_front.batch import Member
from gateway.legacy_front.session import error_response
from gateway.protocol import sse
from gateway.protocol.errors import GatewayError
from gateway.runtime.budget import Share
from gateway.telemetry import COMPLETE, Ending
from gateway.upstream.channel import NO_HEADERS

_PART: Final = web.Response()
"""What a member's reply returns; the client gets the reply to the batch."""
_SIGN_IN: Final = (401, 403)


async def answer(
    reply: ReplyWriter, members: Sequence[Member], serve: Callable[[bytes, ReplyWriter], Awaitable[object]]
) -> web.StreamResponse:
    """Serve the members of a batch concurrently; raises as `serve` does, except for errors of single requests.

    A refused credential refuses the whole batch, because only its HTTP status makes a client sign in.
    """
    batch = _Batch(reply)
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                _ = group.create_task(batch.serve(member, serve))
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        if not isinstance(first, _Refused):
            raise first from failed
        return await reply.only(first.body, first.status, first.headers, first.ending)
    if not reply.started:
        return await reply.only(b"", 202, NO_HEADERS, COMPLETE)
    return await reply.end(COMPLETE)


class _Refused(Exception):
    """A response that has to be the whole reply, because of its status."""

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> None:
        super().__init__(status)
        self.body, self.status, self.headers, self.ending = body, status, headers, ending


class _Batch:
    """The one reply."""

    def __init__(self, reply: ReplyWriter) -> None:
        self.reply = reply
        self._turn = asyncio.Lock()

    async def serve(self, member: Member, serve: Callable[[bytes, ReplyWriter], Awaitable[object]]) -> None:
        try:
            _ = await serve(member.data, _MemberReply(self))
        except GatewayError as exc:
            if exc.status in _SIGN_IN and not self.reply.started:
                raise
            if exc.request_id is not None and member.opened.method is not None:
                await self.write(sse.encode(error_response(exc.request_id, exc)))

    async def start(self) -> None:
        async with self._turn:
            await self._start()

    async def write(self, data: bytes) -> None:
        async with self._turn:
            await self._start()
            await self.reply.write(data)

    async def _start(self) -> None:
        if not self.reply.started:
            await self.reply.start()


class _MemberReply(ReplyWriter):
    """The reply to one member."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def share_unread(self) -> Share:
        return self._batch.reply.share_unread()

    async def start(self) -> None:
        await self._batch.start()
        self.started = True

    async def write(self, data: bytes) -> None:
        await self._batch.write(data)

    async def end(self, _: Ending) -> web.StreamResponse:
        return _PART

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        if status in _SIGN_IN and not self._batch.reply.started:
            raise _Refused(body, status, headers, ending)
        if body:
            await self._batch.write(sse.encode(body))
        return _PART
