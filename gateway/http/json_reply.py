"""A JSON reply whose head and body are written at once: the reply to nearly every request."""

from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: application/json\r\n"
    b"Date: %b\r\nX-Request-Id: %b\r\n%b\r\n%b"
)
_CLOSE: Final = b"Connection: close\r\n"


class JsonReply(web.StreamResponse):
    """One body of status 200 over HTTP/1.1; aiohttp calls `prepare`, then `write_eof`."""

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
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002  (as of aiohttp's responses)
        """Write the reply; raises ConnectionResetError."""
        request = self._request
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has closed its connection")
        date, close = rfc822_formatted_time().encode(), b"" if self._keep_alive else _CLOSE
        whole = _HEAD % (len(self._whole), date, self._request_id.encode(), close, self._whole)
        request.writer.output_size += len(whole)
        transport.write(whole)
        self._eof_sent = True
        if request.protocol.writing_paused:
            await request.writer.drain()
