"""Writes the messages of one stream to its client as server-sent events."""

import asyncio
from contextlib import suppress
from typing import Final

from gateway.http.outbox import FinalMessage, Item
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.legacy_front.session import FrontSession
from gateway.legacy_front.stream import ENDED, Stream
from gateway.protocol import sse
from gateway.runtime.pieces import Turn
from gateway.telemetry import COMPLETE
from gateway.upstream.channel import NO_HEADERS

_FIRST_SECONDS: Final = 1.0
"""How long a reply waits for its result before it becomes a stream, so that the client can come back to it."""


class StreamWriter:
    """One HTTP reply that writes a stream of a session."""

    def __init__(self, session: FrontSession, stream: Stream, reply: ReplyWriter, position: int = 0) -> None:
        """The client has everything up to `position`."""
        self._session = session
        self._stream = stream
        self._reply = reply
        stream.attach(self, position)

    async def reply(self) -> Response:
        """Write the reply to a request: one JSON body if it is the response alone, else a stream."""
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SECONDS if self._stream.is_resumable else None):
                first = await self._stream.next(self)
        if isinstance(first, FinalMessage) and first.body:
            self._session.drop(self._stream)
            if first.cause is not None:
                raise first.cause
            return await self._reply.only(first.body, 200, NO_HEADERS, COMPLETE)
        return await self.write(first)

    def left(self) -> None:
        """The reply is complete, or the client has disconnected; then it may come back."""
        session, stream = self._session, self._stream
        stream.detach(self)
        if stream.name in session.streams:
            if not (stream.is_resumable and stream.began):
                session.abandon(stream)
            elif stream.final is not None:
                session.linger(stream)

    async def write(self, item: Item = None) -> Response:
        """Write what comes until the stream is over, or another reader takes it; `item` has been taken already."""
        stream, reply = self._stream, self._reply
        stream.began = True
        begin = self._event(b"", stream.delivered) if stream.is_resumable else b""
        if isinstance(item, bytes):
            begin += self._event(item, stream.taken)
        try:
            if not reply.started:
                await reply.start()
            if begin:
                await reply.write(begin)
            turn = Turn()
            while item is not ENDED:
                item = await stream.next(self)
                message = item.body if isinstance(item, FinalMessage) else item
                if message != b"":
                    await reply.write(sse.KEEP_ALIVE if message is None else self._event(message, stream.taken))
                if stream.is_ready:
                    await turn.give_way()
            return await reply.end(COMPLETE)
        finally:
            stream.detach(self)

    def _event(self, data: bytes, number: int) -> bytes:
        encoded = sse.encode(data) if data else b"data:\n\n"
        return b"id: %d-%d\n%b" % (self._stream.name, number, encoded) if self._stream.is_resumable else encoded
