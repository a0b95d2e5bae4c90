"""Responses: one body that is written with its head, or a stream whose parts are written as they come."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http.client import responses
from typing import Final, Literal

from multidict import CIMultiDict

from gateway import world
from gateway.http.server.request import REQUEST_ID, HttpRequest, media_type
from gateway.http.server.wire import PIECE_BYTES, Wire
from gateway.telemetry import COMPLETE, Ending

Headers = Mapping[str, str] | Iterable[tuple[str, str]]

BODILESS: Final = frozenset({204, 304})
"""Statuses without a body."""
_JSON_RESPONSE: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: application/json\r\n"
    b"Date: %b\r\n" + REQUEST_ID.encode() + b": %b\r\n\r\n%b"
)
_READABLE: Final = (
    "Access-Control-Allow-Origin: %s\r\n"
    "Access-Control-Expose-Headers: Mcp-Session-Id, Retry-After, WWW-Authenticate, " + REQUEST_ID + "\r\n"
    "Vary: Origin\r\n"
)
OWN: Final = frozenset({"connection", "content-length", "server", "transfer-encoding", REQUEST_ID.lower()})
"""Headers that follow from how the response is written."""


class Response(ABC):
    """What a handler returns; its connection writes what the handler has not written."""

    headers: CIMultiDict[str]
    reason: str | None = None
    closes = False
    """Whether its connection ends with it."""
    ending = COMPLETE
    """How the round ends that it answers."""

    def __init__(self, status: int = 200, headers: Headers | None = None, reason: str | None = None) -> None:
        self.status = status
        self.reason = reason
        self.headers = CIMultiDict(headers or ())

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        return media_type(self.headers)

    @abstractmethod
    def finish(self, http: HttpRequest) -> Awaitable[None] | None:
        """Write what is not written yet; raises ConnectionError. What it returns has to be awaited."""

    def _head(self, http: HttpRequest, framing: str) -> bytes:
        """The head of the response, with what says how long the body is."""
        headers = self.headers
        lines = [f"{name}: {value}\r\n" for name, value in headers.items() if name.lower() not in OWN]
        if "Content-Type" not in headers and self.status not in BODILESS:
            lines.append("Content-Type: application/octet-stream\r\n")
        if "Date" not in headers:
            lines.append(f"Date: {http_date().decode()}\r\n")
        if http.id:
            lines.append(f"{REQUEST_ID}: {http.id}\r\n")
        if http.page is not None:
            lines.append(_READABLE % http.page)
        reason = responses.get(self.status, "") if self.reason is None else self.reason
        version = "1.1" if http.head.is_1_1 else "1.0"
        head = f"HTTP/{version} {self.status} {reason}\r\n{''.join(lines)}{framing}{self._connection_line(http)}\r\n"
        return head.encode("utf-8", "surrogateescape")

    def _connection_line(self, http: HttpRequest) -> str:
        # The rest of a broken body cannot be told from a next request.
        self.closes = self.closes or http.wire.is_last or not http.head.keep_alive or http.body.is_broken
        return "Connection: close\r\n" if self.closes else ""


class WholeResponse(Response):
    """One body, written at once with its head unless it is large; the caller has checked the values of the head."""

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Headers | None = None,
        reason: str | None = None,
        ending: Ending = COMPLETE,
    ) -> None:
        super().__init__(status, headers, reason)
        self.body, self.ending = body, ending

    def finish(self, http: HttpRequest) -> Awaitable[None] | None:
        """See `Response`."""
        wire = http.wire
        if len(self.body) > PIECE_BYTES and http.head.method != "HEAD":  # too large to copy it behind its head
            wire.write(self._head(http, f"Content-Length: {len(self.body)}\r\n"))
            return wire.send(self.body)
        wire.write(self.encoded(http))
        return wire.drained() if wire.is_behind else None

    def encoded(self, http: HttpRequest) -> bytes:
        """The bytes of the whole response."""
        if self.status in BODILESS:
            return self._head(http, "")
        head = self._head(http, f"Content-Length: {len(self.body)}\r\n")
        return head if http.head.method == "HEAD" else head + self.body


class TextResponse(WholeResponse):
    """A short text for people."""

    def __init__(self, text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text.encode(), status, headers)
        self.headers.setdefault("Content-Type", "text/plain; charset=utf-8")


class JsonResponse(WholeResponse):
    """One JSON body of status 200, in reply to a POST: what nearly every response is."""

    status = 200

    def __init__(self, body: bytes, ending: Ending = COMPLETE) -> None:
        self.body, self.closes, self.ending = body, False, ending

    @property
    def headers(self) -> CIMultiDict[str]:  # type: ignore[override]
        """Made when somebody asks for them."""
        return CIMultiDict({"Content-Type": "application/json"})

    def encoded(self, http: HttpRequest) -> bytes:
        """See `WholeResponse`."""
        if http.page is not None or self._connection_line(http):
            return super().encoded(http)
        return json_response(http, self.body)


def json_response(http: HttpRequest, body: bytes) -> bytes:
    """The bytes of such a response if the connection stays open after it."""
    return _JSON_RESPONSE % (len(body), _formatted(int(world.wall())), http.id.encode(), body)


class StreamResponse(Response):
    """A body in parts: chunked, unless its length is known; over HTTP/1.0 it ends with the connection."""

    _progress: Literal["new", "chunked", "as it is", "bodiless", "over"] = "new"
    """Where it is: before its head, in a body of one of these forms, or behind its end."""
    _wire: Wire

    def begin(self, http: HttpRequest) -> None:
        """Write the head; raises ConnectionError."""
        self._wire, self._progress = http.wire, "as it is"
        framing, length = "", self.headers.get("Content-Length")
        if length is not None:
            framing = f"Content-Length: {length}\r\n"
        if http.head.method == "HEAD" or self.status in BODILESS:
            self._progress = "bodiless"
        elif length is None and http.head.is_1_1:
            self._progress, framing = "chunked", "Transfer-Encoding: chunked\r\n"
        http.wire.write(self._head(http, framing))

    async def write(self, data: bytes) -> None:
        """Write a part, and wait until the client has room for more; raises ConnectionError."""
        if self._progress in ("chunked", "as it is"):
            await self._wire.send(data, in_chunks=self._progress == "chunked")

    async def finish(self, http: HttpRequest) -> None:
        """See `Response`; a second time, it does nothing."""
        if self._progress == "new":
            self.begin(http)
        before, self._progress = self._progress, "over"
        if before == "chunked":
            http.wire.write(b"0\r\n\r\n")
        if before != "over":
            await http.wire.drained()


def http_date() -> bytes:
    """The time of now, as the header `Date` has it (RFC 9110, 5.6.7)."""
    return _formatted(int(world.wall()))


@lru_cache(1)
def _formatted(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
