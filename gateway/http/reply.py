"""The reply to one request, on its way to the client or to the replica that forwarded the request.

A reply is one whole body, or an SSE stream that ends with the final message. The first message decides.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import HttpVersion11, web
from aiohttp.http import StreamWriter
from multidict import CIMultiDict

from gateway.http import request_id
from gateway.http.connection import Connection
from gateway.http.json_reply import JsonReply, WholeReply
from gateway.protocol import sse
from gateway.runtime.budget import Share
from gateway.telemetry import Direction, Ending, bodies

_BODILESS: Final = (204, 304)
_JSON: Final = "application/json"
_OK: Final = 200
_PIECE_BYTES: Final = 65_536
"""The most that is written at once."""
Challenge = Callable[[web.BaseRequest, str], str]
"""Rewrites an upstream's WWW-Authenticate for the client of a request."""
SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
NO_RESPONSE: Final = web.Response()
"""The outcome of a reply that no HTTP client reads."""


class ReplyWriter(ABC):
    """One reply on its way; exactly one `whole` or `end` finishes it."""

    started = False
    """Whether the reply has become a stream."""

    @abstractmethod
    def share_unread(self) -> Share:
        """Return a share for what waits for the other side; if it must give way, the connection is closed."""

    @abstractmethod
    async def start(self) -> None:
        """Make the reply a stream."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send SSE bytes; raises ConnectionError when the other side does not read them."""

    @abstractmethod
    async def end(self, ending: Ending) -> web.StreamResponse:
        """Complete the stream."""

    def whole(
        self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending
    ) -> Awaitable[web.StreamResponse]:
        """Send the final message; in a stream it is the last event, since the head has been sent."""
        return self._last(body, ending) if self.started else self.only(body, status, headers, ending)

    async def _last(self, body: bytes, ending: Ending) -> web.StreamResponse:
        await self.write(sse.encode(body))
        return await self.end(ending)

    @abstractmethod
    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """Send one body and nothing else."""


class WrappedReply(ReplyWriter):
    """Another reply, some of whose methods a subclass changes; `whole` and `started` are not the other reply's."""

    def __init__(self, reply: ReplyWriter) -> None:
        self._reply = reply

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return self._reply.share_unread()

    async def start(self) -> None:
        """See `ReplyWriter`."""
        await self._reply.start()

    async def write(self, data: bytes) -> None:
        """See `ReplyWriter`."""
        await self._reply.write(data)

    async def end(self, ending: Ending) -> web.StreamResponse:
        """See `ReplyWriter`."""
        return await self._reply.end(ending)

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """See `ReplyWriter`."""
        return await self._reply.only(body, status, headers, ending)


class MessageReply(ReplyWriter):
    """A reply whose reader is in this process, and takes each message on its own."""

    def __init__(self, event_bytes: int) -> None:
        self._parser = sse.Parser(2 * event_bytes)

    @abstractmethod
    async def take(self, message: bytes) -> None:
        """Take one message."""

    async def start(self) -> None:
        """Begin a stream, which needs no head here."""
        self.started = True

    async def write(self, data: bytes) -> None:
        """Take the messages of a part of a stream."""
        for event in self._parser.feed(data):
            if event.data:
                await self.take(event.data)

    async def end(self, _: Ending) -> web.StreamResponse:
        """End a stream, whose last message has been taken."""
        return NO_RESPONSE


class HttpReply(ReplyWriter):
    """A reply that goes straight to the client."""

    def __init__(self, http: web.BaseRequest, send_seconds: float, challenge: Challenge) -> None:
        self._http = http
        self._send_seconds = send_seconds
        self._challenge = challenge
        self._stream: web.StreamResponse

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], _: Ending) -> web.StreamResponse:
        """Return one JSON body, which aiohttp sends."""
        if "WWW-Authenticate" in headers:
            headers = CIMultiDict(headers)
            self.rewrite_challenges(headers)
        if bodies.on:
            self._show(body)
        if len(body) <= _PIECE_BYTES:
            http = self._http
            if status == _OK and not headers and http.version == HttpVersion11 and http.method == "POST":
                return JsonReply(body, http[request_id.KEY])
            return web.Response(body=body, status=status, headers=headers, content_type=_JSON)
        return _LargeReply(self._http, body, self._send_seconds, status=status, headers=headers)

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return share_unread(self._http)

    async def start(self) -> None:
        """Send the head of an SSE stream."""
        await self.begin(web.StreamResponse(headers=SSE_HEADERS))
        self.started = True

    def takes_whole(self, status: int) -> bool:
        """Whether this client can have the reply that `at_once` makes."""
        http = self._http
        return http.version == HttpVersion11 and http.method != "HEAD" and status not in _BODILESS

    def at_once(self, body: bytes, status: int, reason: str | None, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Return a reply of any kind whose head and body are written at once."""
        return WholeReply(body, self._http[request_id.KEY], status, reason, headers)

    async def begin(self, stream: web.StreamResponse) -> None:
        """Send the head of a reply whose body is sent in parts."""
        self._stream = stream
        if self._http.method != "HEAD" and "Content-Length" not in stream.headers:
            leave_open(self._http, stream)
        await stream.prepare(self._http)

    async def write(self, data: bytes) -> None:
        """Send a part of an SSE stream."""
        if bodies.on and data != sse.KEEP_ALIVE:
            self._show(data.partition(b"data: ")[2].rstrip())
        await self.send(data)

    async def send(self, data: bytes) -> None:
        """Send a part; a client that does not read for timeouts.send_seconds counts as gone."""
        if len(data) <= _PIECE_BYTES:
            await send(self._http, self._stream, data, self._send_seconds)
        else:
            await _send_pieces(self._http, self._stream, data, self._send_seconds)

    async def end(self, _: Ending) -> web.StreamResponse:
        """Send the end of the stream."""
        await self._stream.write_eof()
        return self._stream

    def cut_short(self) -> None:
        """Close the connection without the end that the client waits for; bytes written before are still sent."""
        transport = self._http.transport
        if transport is not None:
            transport.close()
            _ = asyncio.get_running_loop().call_later(self._send_seconds, transport.abort)

    def rewrite_challenges(self, headers: CIMultiDict[str]) -> None:
        """Point the client to the gateway for its sign-in."""
        values = headers.popall("WWW-Authenticate", ())
        headers.extend([("WWW-Authenticate", self._challenge(self._http, value)) for value in values])

    def _show(self, data: bytes) -> None:
        bodies.show(Direction.TO_CLIENT, data, route=self._http.path[:80], request_id=self._http[request_id.KEY])


class _LargeReply(web.StreamResponse):
    """One JSON body that goes out in pieces; aiohttp calls `write_eof` for the whole of it."""

    def __init__(self, http: web.BaseRequest, body: bytes, send_seconds: float, **head: Any) -> None:
        super().__init__(**head)
        self.content_type, self.content_length = _JSON, len(body)
        self._http, self._json, self._send_seconds = http, body, send_seconds

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the body."""
        await _send_pieces(self._http, self, self._json, self._send_seconds)
        await super().write_eof(data)


async def _send_pieces(http: web.BaseRequest, stream: web.StreamResponse, data: bytes, seconds: float) -> None:
    """Send in pieces, so that what the client has not read is counted, over TLS too, and each has a deadline."""
    connection = connection_of(http)
    whole = memoryview(data)
    try:
        for end in range(_PIECE_BYTES, len(data) + _PIECE_BYTES, _PIECE_BYTES):
            connection.unsent(max(0, len(data) - end))
            await send(http, stream, whole[end - _PIECE_BYTES : end], seconds)
    finally:
        connection.unsent(0)


def leave_open(http: web.BaseRequest, stream: web.StreamResponse) -> None:
    """Have a body of unknown length end with a last chunk, or for HTTP/1.0 with the end of the connection."""
    if http.version == HttpVersion11:
        stream.enable_chunked_encoding()
    else:
        stream.force_close()


def connection_of(http: web.BaseRequest) -> Connection:
    """Return the connection of a request."""
    assert isinstance(http.protocol, Connection), "every listener has connections of this class"
    return http.protocol


def share_unread(http: web.BaseRequest) -> Share:
    """Return a share for what waits for the sender of a request; if it must give way, its connection is closed."""
    return connection_of(http).unread.new_share()


async def send(http: web.BaseRequest, stream: web.StreamResponse, data: bytes | memoryview, seconds: float) -> None:
    """Write to the other side, and wait within a deadline until it has room for more; raises ConnectionError."""
    writer = http.writer
    is_written = isinstance(writer, StreamWriter) and not _is_behind(http)
    if isinstance(writer, StreamWriter) and is_written:
        # A timer costs as much as a write, and nearly all writes go to the kernel at once.
        await writer.write(data, drain=False)
        if not _is_behind(http):
            return
    try:
        async with asyncio.timeout(seconds):
            if not is_written:
                await stream.write(data)
            if _is_behind(http):
                await writer.drain()
    except TimeoutError as exc:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the other side does not read its reply") from exc


def _is_behind(http: web.BaseRequest) -> bool:
    """Whether the other side has not read everything."""
    return bool(http.protocol.writing_paused)
