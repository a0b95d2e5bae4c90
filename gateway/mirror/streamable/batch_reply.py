"""Answers a JSON-RPC batch by one stream, on which each request of it gets its response."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from gateway.http.reply import NO_RESPONSE, ReplyWriter, WrappedReply
from gateway.http.server.response import Response
from gateway.legacy_front.backend import ClientMessage
from gateway.legacy_front.session import error_response
from gateway.protocol import sse
from gateway.protocol.errors import GatewayError
from gateway.telemetry import COMPLETE, Ending
from gateway.upstream.channel import NO_HEADERS

_SIGN_IN: Final = (401, 403)
Serve = Callable[[bytes, ReplyWriter], Awaitable[object]]


async def answer(reply: ReplyWriter, members: Sequence[ClientMessage], serve: Serve) -> Response:
    """Serve the members of a batch concurrently; raises as `serve` does, except for errors of single requests.

    A refused credential refuses the whole batch, because only its HTTP status makes a client sign in.
    """
    turn = asyncio.Lock()
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                _ = group.create_task(_serve(member, _MemberReply(reply, turn), serve))
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


async def _serve(member: ClientMessage, reply: "_MemberReply", serve: Serve) -> None:
    try:
        _ = await serve(member.data, reply)
    except GatewayError as exc:
        if reply.may_refuse(exc.status):
            raise
        if exc.request_id is not None and member.opened.method is not None:
            await reply.write(sse.encode(error_response(exc.request_id, exc)))


class _MemberReply(WrappedReply):
    """The reply to one member, on the stream of the batch; `turn` orders what the members write."""

    def __init__(self, batch: ReplyWriter, turn: asyncio.Lock) -> None:
        super().__init__(batch)
        self._turn = turn

    def may_refuse(self, status: int) -> bool:
        """Whether this status can still be that of the whole reply."""
        return status in _SIGN_IN and not self._reply.started

    async def start(self) -> None:
        async with self._turn:
            await self._start()
        self.started = True

    async def write(self, data: bytes) -> None:
        async with self._turn:
            await self._start()
            await super().write(data)

    async def _start(self) -> None:
        if not self._reply.started:
            await super().start()

    async def end(self, _: Ending) -> Response:
        return NO_RESPONSE

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> Response:
        if self.may_refuse(status):
            raise _Refused(body, status, headers, ending)
        if body:
            await self.write(sse.encode(body))
        return NO_RESPONSE
