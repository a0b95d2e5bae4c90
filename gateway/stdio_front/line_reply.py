"""The reply to one request of a modern host: each message is one line."""

from collections.abc import Mapping

from aiohttp import web

from gateway.http.reply import NO_RESPONSE, MessageReply
from gateway.runtime.budget import Share
from gateway.stdio_front.host import Host
from gateway.telemetry import Direction, Ending, bodies


class LineReply(MessageReply):
    """Writes the messages of a reply as lines, which are all that the host gets."""

    def __init__(self, host: Host, event_bytes: int, request_id: str) -> None:
        super().__init__(event_bytes)
        self._host = host
        self._request_id = request_id

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return self._host.share_unread()

    async def take(self, message: bytes) -> None:
        """Write one message."""
        if bodies.on:
            bodies.show(Direction.TO_CLIENT, message, route="stdio", request_id=self._request_id)
        await self._host.write(message)

    async def only(
        self, body: bytes, _status: int, _headers: Mapping[str, str], _ending: Ending
    ) -> web.StreamResponse:
        """Write the only message."""
        await self.take(body)
        return NO_RESPONSE
