"""The reply to one request, on its way to the client or to the replica that forwarded the request.

A reply is one whole body, or an SSE stream that ends with its final message; which of them is decided late.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDictProxy, istr

from gateway.http import request_id as ids
from gateway.protocol import sse
from gateway.protocol.errors import DownstreamError, InvalidRequest, TooLarge
from gateway.protocol.request import Posted, read
from gateway.seal.peer_messages import Hop
from gateway.telemetry import Direction, Ending, Span, bodies

_JSON: Final = "application/json"
Challenge = Callable[[web.BaseRequest, str], str]
"""Puts an upstream's WWW-Authenticate as the client of a request needs it."""
_ID_HEADER: Final = istr(ids.HEADER)
REQUEST_ID: Final = web.RequestKey("request_id", str)
"""The name of a client's request (`http.request_id`), for whoever writes the head of its reply."""
SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Incoming(msgspec.Struct, eq=False):
    """One request as its client sent it, wherever it arrived."""

    path: str
    headers: CIMultiDictProxy[str]
    remote: str | None
    body: bytes
    hop: Hop | None = None
    """What brought it, if it came through another replica."""
    is_local: bool = False
    """It came from a process of this host."""
    request_id: str = ""
    """The name of the HTTP request, wherever it came in."""
    span: Span | None = None
    """Where requests are traced: set when this one is found to be right."""
    opened: Posted | DownstreamError | None = None
    """What `posted` found."""

    def posted(self, max_depth: int) -> Posted:
        """The body as JSON-RPC, opened once however many ask; raises ParseError or InvalidRequest."""
        if self.opened is None:
            try:
                self.opened = read(self.body, max_depth)
            except DownstreamError as exc:
                self.opened = exc
        if isinstance(self.opened, DownstreamError):
            raise self.opened
        return self.opened

    @property
    def rpc_id(self) -> bytes | None:
        """JSON of the request's id; None where it has none, or the body was not opened."""
        if isinstance(self.opened, Posted):
            return bytes(self.opened.id) if self.opened.id is not None else None
        return self.opened.request_id if self.opened is not None else None

    def values(self, name: str) -> Sequence[str]:
        """All values of one header."""
        return self.headers.getall(name, ())


class ReplyWriter(ABC):
    """One reply on its way; exactly one `whole` or `end` finishes it."""

    started = False
    """Whether it has become a stream."""

    @abstractmethod
    async def start(self) -> None:
        """Make it a stream."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send SSE bytes; raises ConnectionError when nobody reads them."""

    @abstractmethod
    async def end(self, ending: Ending) -> web.StreamResponse:
        """The stream is complete."""

    async def whole(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """The final message; in a stream it is the last event, since its head is long gone."""
        if not self.started:
            return await self.only(body, status, headers, ending)
        await self.write(sse.encode(body))
        return await self.end(ending)

    @abstractmethod
    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """One body and nothing else."""


class HttpReply(ReplyWriter):
    """Straight to the client."""

    def __init__(self, http: web.BaseRequest, send_seconds: float, challenge: Challenge) -> None:
        self._http = http
        self._request_id = http[REQUEST_ID]
        self._send_seconds = send_seconds
        self._challenge = challenge
        self._stream: web.StreamResponse

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], _: Ending) -> web.StreamResponse:
        """One JSON body; aiohttp sends it."""
        if "WWW-Authenticate" in headers:
            challenge = self._challenge(self._http, headers["WWW-Authenticate"])
            headers = {**headers, "WWW-Authenticate": challenge}
        if bodies.on:
            self._show(body)
        named = {**headers, _ID_HEADER: self._request_id} if headers else {_ID_HEADER: self._request_id}
        return web.Response(body=body, status=status, headers=named, content_type=_JSON)

    async def start(self) -> None:
        """Send the head of an SSE stream."""
        self._stream = web.StreamResponse(headers={**SSE_HEADERS, _ID_HEADER: self._request_id})
        leave_open(self._http, self._stream)
        await self._stream.prepare(self._http)
        self.started = True

    async def write(self, data: bytes) -> None:
        """Send; a client that does not read for timeouts.send_seconds is gone."""
        if bodies.on and data != sse.KEEP_ALIVE:
            self._show(data.partition(b"data: ")[2].rstrip())
        await send(self._http, self._stream, data, self._send_seconds)

    async def end(self, _: Ending) -> web.StreamResponse:
        """Send the end of the stream."""
        await self._stream.write_eof()
        return self._stream

    def _show(self, data: bytes) -> None:
        bodies.show(Direction.TO_CLIENT, data, route=self._http.path[:80], request_id=self._request_id)


def leave_open(http: web.BaseRequest, stream: web.StreamResponse) -> None:
    """Have a body of unknown length end with a chunk, or with its connection where the client speaks HTTP/1.0."""
    if http.version == HttpVersion11:
        stream.enable_chunked_encoding()
    else:
        stream.force_close()


async def send(http: web.BaseRequest, stream: web.StreamResponse, data: bytes, seconds: float) -> None:
    """Write to a peer of ours within a deadline; raises ConnectionError."""
    try:
        async with asyncio.timeout(seconds):
            await stream.write(data)
    except TimeoutError as exc:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the other side does not read its reply") from exc


async def read_body(http: web.BaseRequest, limit: int, seconds: float) -> bytes:
    """The whole body, inflated; raises TooLarge or InvalidRequest."""
    if http.content.is_eof():
        # The body came with its head, as small ones do: nothing to wait for.
        body = http.content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        return body
    if http.content_length is not None and http.content_length > limit:
        raise _too_large(limit)
    if http.headers.get("Expect", "").lower() == "100-continue" and http.version >= HttpVersion11:
        # aiohttp's low-level server leaves this to its handler. HTTP/1.0 knows no interim replies.
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0
    received = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while chunk := await http.content.readany():
                received += chunk
                if len(received) > limit:
                    raise _too_large(limit)
    except TimeoutError as exc:
        raise InvalidRequest("The body did not arrive within limits.receive_seconds") from exc
    except web.RequestPayloadError as exc:
        raise InvalidRequest(f"The body is damaged: {exc}") from exc
    return bytes(received)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes (limits.body_bytes)")
