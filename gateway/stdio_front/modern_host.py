"""The requests of a modern host, of which several are in flight at the same time."""

import asyncio  # noqa: TC003  (one import style; it costs nothing here)
from contextlib import suppress
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway import world
from gateway.downstream.handler import RequestHandler
from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import MessageReply
from gateway.http.server.request import numbered
from gateway.protocol import mcp, request
from gateway.protocol.errors import IdInUse
from gateway.protocol.jsonrpc import RequestId, request_id
from gateway.protocol.request import ParsedBody
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Share
from gateway.stdio_front.host import HOST, Host
from gateway.telemetry import Direction, bodies

_CALLER: Final = Caller(HOST, None)
"""The only caller there is."""
_NO_HEADERS: Final = CIMultiDictProxy[str](CIMultiDict())


class ModernHost:
    """One modern host."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute) -> None:
        self._host = host
        self._handler = handler
        self._live = live
        self._ids = numbered(world.token_hex(6))
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._listening: set[RequestId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a request is worked on; a subscription ends only with its host."""
        return len(self._running) > len(self._listening)

    def receive(self, line: bytes) -> None:
        """Take one message of the host; raises DownstreamError."""
        parsed = request.read(line)
        if parsed.id is None:
            given_up = parsed.params.get("requestId") if parsed.method == mcp.CANCELLED else None
            task = None if given_up is None else self._running.get(request_id(given_up))
            if task is not None:  # else it has been answered
                _ = task.cancel()  # the host gets nothing more of it
            return
        id_ = request_id(parsed.id)
        if id_ in self._running:
            raise IdInUse  # without the id, for that would end the other request
        if parsed.method == mcp.LISTEN:
            self._listening.add(id_)
        task = self._running[id_] = self._live.process.tasks.start(self._serve(parsed, line), "request of the host")

        def ended(_: object) -> None:
            del self._running[id_]
            self._listening.discard(id_)

        task.add_done_callback(ended)

    async def _serve(self, parsed: ParsedBody, line: bytes) -> None:
        incoming = Incoming(
            self._live.route.path,
            _NO_HEADERS,
            None,
            body=line,
            request_id=next(self._ids),
            caller=_CALLER,
            opened=parsed,
            has_headers=False,
        )
        reply = LineReply(self._host, self._live.config.limits.event_bytes, incoming.request_id)
        with suppress(ConnectionError):  # the host is gone
            _ = await self._handler.handle_message(incoming, reply, self._live)

    def close(self) -> None:
        """Cancel everything."""
        for task in self._running.values():
            _ = task.cancel()


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
            bodies.show(Direction.TO_CLIENT, message, route="stdio", about={"request_id": self._request_id})
        await self._host.write(message)
