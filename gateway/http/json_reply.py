"""Replies that are written in one piece, as nearly every reply is."""

import asyncio
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from multidict import CIMultiDict

from gateway.http.request_id import HEADER

_CLOSE: Final = "Connection: close\r\n"
_OWN: Final = frozenset({"content-length", "server", HEADER.lower()})


def json_reply(body: bytes, request_id: str, close: str = "") -> bytes:
    """The bytes of a reply of status 200; `close` is empty, or the header that announces the connection's end."""
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
        f"Date: {rfc822_formatted_time()}\r\nX-Request-Id: {request_id}\r\n{close}\r\n"
    )
    return head.encode() + body


class JsonReply(web.StreamResponse):
    """One JSON body of status 200 over HTTP/1.1; aiohttp calls `prepare`, then `write_eof`."""

    def __init__(self, body: bytes, request_id: str) -> None:
        # The constructor of aiohttp is left out: nothing reads the headers that it prepares.
        self._status = 200
        self._whole = body
        self._request_id = request_id
        self._request: web.BaseRequest

    @property
    def body(self) -> bytes:
        """The body, as of `web.Response`."""
        return self._whole

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing yet: the head goes out with the body."""
        self._request = request
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002  (as of aiohttp's responses)
        """Write the reply; raises ConnectionResetError."""
        request = self._request
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has closed its connection")
        self.send(request, transport)
        if request.protocol.writing_paused:
            await request.writer.drain()

    def send(self, request: web.BaseRequest, transport: asyncio.Transport) -> None:
        """Write the reply to an open connection."""
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        whole = self.encoded("" if self._keep_alive else _CLOSE)
        request.writer.output_size += len(whole)
        transport.write(whole)
        self._eof_sent = True

    def encoded(self, close: str) -> bytes:
        """The bytes of the whole reply."""
        return json_reply(self._whole, self._request_id, close)


class WholeReply(JsonReply):
    """One body over HTTP/1.1 with the headers that the caller chose, whose values it has checked."""

    def __init__(
        self, body: bytes, request_id: str, status: int, reason: str | None, headers: CIMultiDict[str]
    ) -> None:
        super().__init__(body, request_id)
        self._status = status
        self._line = f"HTTP/1.1 {status} {_phrase(status) if reason is None else reason}\r\n"
        self._lines = headers

    def encoded(self, close: str) -> bytes:
        """The bytes of the whole reply."""
        lines = [f"{name}: {value}\r\n" for name, value in self._lines.items() if name.lower() not in _OWN]
        if "Content-Type" not in self._lines:
            lines.append("Content-Type: application/octet-stream\r\n")
        if "Date" not in self._lines:
            lines.append(f"Date: {rfc822_formatted_time()}\r\n")
        own = f"Content-Length: {len(self.body)}\r\n{HEADER}: {self._request_id}\r\n{close}\r\n"
        return f"{self._line}{''.join(lines)}{own}".encode() + self.body


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
