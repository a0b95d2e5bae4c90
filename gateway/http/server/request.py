"""One request of a client, with its body as it arrives."""

import asyncio
from typing import Final

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping
from yarl import URL

from gateway.http.server.wire import Wire
from gateway.protocol.header_mismatch import KnownValues

_PAUSED_BYTES: Final = 131_072
"""Of a body of which so much was not read yet, no more is read from the network."""

NO_HEADERS: Final = CIMultiDictProxy(CIMultiDict[str]())


class BodyBroken(Exception):
    """The rest of a body will not come: its chunks are malformed, or it took too long."""


class ReceivedHead(msgspec.Struct, eq=False):
    """The head of one request."""

    method: str
    target: str
    """As the client wrote it, which may be a whole URL."""
    headers: CIMultiDictProxy[str]
    url: URL
    """The path and the query."""
    is_1_1: bool = True
    """False: HTTP/1.0."""
    keep_alive: bool = True
    """Whether the client wants to send another request after this one."""
    length: int = 0
    """The size of the body, if that is said; 0 for one in chunks."""
    is_chunked: bool = False
    values: KnownValues | None = None
    """The values of the headers, once the same head has come again."""


class RequestBody:
    """The body of one request; what nobody reads soon is not read from the network."""

    __slots__ = ("_is_paused", "_parts", "_size", "_waiter", "_wire", "is_broken", "is_complete")

    def __init__(self, wire: Wire | None = None, *, is_complete: bool = False) -> None:
        self._wire = wire
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self.is_broken = False
        """Whether the rest will not come."""
        self.is_complete = is_complete
        """Whether all of it is here, read or not."""

    @property
    def is_read(self) -> bool:
        """Whether all of it came and was read."""
        return self.is_complete and not self._parts

    def feed(self, data: bytes) -> None:
        """Take a part."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > _PAUSED_BYTES and not self._is_paused and self._wire is not None:
            self._is_paused = True
            self._wire.pause_reading()
        if self._waiter is not None:
            self._wake()

    def finish(self, whole: bytes = b"") -> None:
        """All of it was fed, or is given now."""
        if whole:
            self._parts.append(whole)
        self.is_complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self) -> None:
        """No more will come, or what comes is not wanted."""
        self.is_broken = True
        self._wake()

    def read_now(self) -> bytes:
        """Return what is here and was not read."""
        parts, self._parts, self._size = self._parts, [], 0
        if self._is_paused:
            self._is_paused = False
            assert self._wire is not None, "it was paused"
            self._wire.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """Wait for a part; empty at the end. Raises BodyBroken."""
        while not self._parts:
            if self.is_broken:
                raise BodyBroken
            if self.is_complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.read_now()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class HttpRequest:
    """One request on its connection."""

    __slots__ = ("body", "head", "headers", "id", "method", "path", "url", "wire")

    def __init__(self, head: ReceivedHead, body: RequestBody, wire: Wire) -> None:
        self.head = head
        self.method, self.headers, self.url = head.method, head.headers, head.url
        self.path = head.url.path
        """Decoded."""
        self.body = body
        self.wire = wire
        self.id = ""
        """What its reply has as `X-Request-Id`, once that is known."""

    @property
    def is_1_1(self) -> bool:
        """False: HTTP/1.0."""
        return self.head.is_1_1

    @property
    def remote(self) -> str | None:
        """The address of the client."""
        return self.wire.remote

    @property
    def scheme(self) -> str:
        """Whether the connection is TLS."""
        return "https" if self.wire.is_secure else "http"

    @property
    def content_type(self) -> str:
        """The media type of the body, without its parameters."""
        return media_type(self.headers)


def media_type(headers: MultiMapping[str]) -> str:
    """The type in `Content-Type`, without its parameters; empty if there is none."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()
