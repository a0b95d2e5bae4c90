"""Writes the messages of one stream to its client as server-sent events."""

from typing import Final

from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.legacy_front.replay_buffer import Entry
from gateway.legacy_front.session import FrontSession, Stream
from gateway.protocol import sse
from gateway.runtime.pieces import Turn
from gateway.telemetry import COMPLETE
from gateway.upstream.channel import NO_HEADERS

_PIECE_BYTES: Final = 1_048_576
"""The most that is written at once: less than a frame between replicas may have."""
_FIRST_SECONDS: Final = 1.0
"""How long a reply waits for its result before it becomes a stream, so that the client can come back to it."""


class StreamWriter:
    """One HTTP reply that writes a stream of a session."""

    def __init__(self, session: FrontSession, stream: Stream, reply: ReplyWriter) -> None:
        self._session = session
        self._stream = stream
        self._reply = reply
        self._keepalive_seconds = session.live.config.timeouts.keepalive_seconds

    async def reply(self) -> Response:
        """Write the reply to a request: one JSON body if it is the response alone, else a stream."""
        session, stream = self._session, self._stream
        try:
            stream.attach(self)
            first = await self._first()
            if stream.refusal is not None:
                session.drop(stream)
                raise stream.refusal
            if first is not None and stream.is_over and stream.last == first.number:
                response = await self._reply.only(first.data, 200, NO_HEADERS, COMPLETE)
                session.drop(stream)
                return response
            return await self.write(0)
        finally:
            self.left()

    def left(self) -> None:
        """The reply is complete, or the client has disconnected; then it may come back."""
        session, stream = self._session, self._stream
        stream.detach(self)
        if stream.name in session.streams:
            if not (stream.is_resumable and stream.began):
                session.abandon(stream)
            elif stream.is_over:
                session.linger(stream)

    async def _first(self) -> Entry | None:
        """Wait for the first message; None if it takes long."""
        stream = self._stream
        if stream.after(0) is None and not stream.is_over:
            await stream.changed(_FIRST_SECONDS if stream.is_resumable else self._keepalive_seconds)
        return stream.after(0)

    async def write(self, position: int) -> Response:
        """Write what comes behind a position until the stream is over, or another reader takes it."""
        stream, reply = self._stream, self._reply
        stream.began = True
        stream.deliver(position)  # the client says that it has these
        stream.attach(self)
        try:
            if not reply.started:
                await reply.start()
            if stream.is_resumable:
                await reply.write(_event(b"", f"{stream.name}-{position}"))
            turn = Turn()
            while stream.reader is self:
                entry = stream.after(position)
                if entry is not None:
                    await self._write(entry)
                    position = entry.number
                    await turn.give_way()
                elif stream.is_over:
                    break
                else:
                    if not await stream.changed(self._keepalive_seconds):
                        await reply.write(sse.KEEP_ALIVE)
                    turn.begin()
            return await reply.end(COMPLETE)
        finally:
            stream.detach(self)

    async def _write(self, entry: Entry) -> None:
        stream = self._stream
        data = _event(entry.data, f"{stream.name}-{entry.number}" if stream.is_resumable else None)
        for start in range(0, len(data), _PIECE_BYTES):
            await self._reply.write(data[start : start + _PIECE_BYTES])
        stream.deliver(entry.number)


def _event(data: bytes, id_: str | None) -> bytes:
    encoded = sse.encode(data) if data else b"data:\n\n"
    return encoded if id_ is None else b"id: %b\n%b" % (id_.encode(), encoded)
