"""The reply to one request of a modern host: each message is one line."""

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from gateway.http.reply import ReplyWriter
from gateway.protocol import sse
from gateway.runtime.budget import Share
from gateway.stdio_front.host import Host
from gateway.telemetry import Direction, Ending, bodies

_NO_RESPONSE: Final = web.Response()
"""The lines of a reply are all that the host gets; an HTTP response is of no use to it."""


class LineReply(ReplyWriter):
    """Takes the events of a stream apart into lines."""

    def __init__(self, host: Host, event_bytes: int, request_id: str) -> None:
        self._host = host
        self._parser = sse.Parser(2 * event_bytes)
        self._request_id = request_id

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return self._host.share_unread()

    async def start(self) -> None:
        """Begin a stream, which needs no head here."""
        self.started = True

    async def write(self, data: bytes) -> None:
        """Write the messages of a part of a stream."""
        for event in self._parser.feed(data):
            if event.data:
                await self._write(event.data)

    async def end(self, _: Ending) -> web.StreamResponse:
        """End a stream, whose last message has been written."""
        return _NO_RESPONSE

    async def only(
        self, body: bytes, _status: int, _headers: Mapping[str, str], _ending: Ending
    ) -> web.StreamResponse:
        """Write the only message."""
        await self._write(body)
        return _NO_RESPONSE

    async def _write(self, message: bytes) -> None:
        if bodies.on:
            bodies.show(Direction.TO_CLIENT, message, route="stdio", request_id=self._request_id)
        await self._host.write(message)
