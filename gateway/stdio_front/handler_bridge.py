"""Gives the requests of a modern host to the request handler of this process; the caller is always the host."""

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway import world
from gateway.downstream.handler import RequestHandler
from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import NO_RESPONSE, MessageReply
from gateway.http.server import request_id as ids
from gateway.http.server.response import Response
from gateway.protocol.request import ParsedBody
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Share
from gateway.stdio_front.host import HOST, Host
from gateway.telemetry import Direction, Ending, bodies

_HOST: Final = Caller(HOST, None)
"""The only caller there is."""
_NO_HEADERS: Final = CIMultiDictProxy[str](CIMultiDict())


class Bridge:
    """The way from one host to the request handler."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute) -> None:
        self._host = host
        self._handler = handler
        self._live = live
        self._ids = ids.numbered(world.token_hex(6))

    async def serve(self, parsed: ParsedBody, line: bytes) -> None:
        """Serve a request; if cancelled, its call is cancelled."""
        incoming = Incoming(
            self._live.route.path,
            _NO_HEADERS,
            None,
            body=line,
            request_id=next(self._ids),
            caller=_HOST,
            opened=parsed,
            has_headers=False,
        )
        reply = LineReply(self._host, self._live.config.limits.event_bytes, incoming.request_id)
        _ = await self._handler.handle_hop(incoming, reply)


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

    async def only(self, body: bytes, _status: int, _headers: Mapping[str, str], _ending: Ending) -> Response:
        """Write the only message."""
        await self.take(body)
        return NO_RESPONSE
