"""Finds the requests of one connection in what it sends; llhttp parses them.

llhttp accepts several spaces in a request line, of which a proxy in front may see another request. So this file finds
the end of each head itself, checks its first line, and hands on a body whose length is known without llhttp. The end
of a body in chunks is where llhttp says; what a client sends behind it in the same packet is refused.
"""

import re
from dataclasses import dataclass
from typing import Final

import httptools
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.http.server.known_heads import HEAD_END, KnownHeads
from gateway.http.server.request import ReceivedHead, RequestBody
from gateway.telemetry import Malformation

MAX_LINE_BYTES: Final = 8190
"""The largest request line, and the largest header."""
MAX_HEADERS: Final = 128
_SINGLE: Final = frozenset(
    {b"content-length", b"content-location", b"content-range", b"content-type"}
    | {b"host", b"max-forwards", b"transfer-encoding", b"user-agent"}
)
"""Headers that come once: of two, each reader may believe another one (RFC 9110, 5.3)."""
_REQUEST_LINE: Final = re.compile(rb"([A-Z-]+) [^ \x00-\x1f]+ HTTP/1\.[01]")
_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
"""What makes llhttp expect a body in chunks."""


class Malformed(Exception):
    """A request that is not well-formed; unlike the errors of libraries it quotes nothing."""

    def __init__(self, kind: Malformation) -> None:
        super().__init__()
        self.kind = kind


@dataclass(slots=True, eq=False)
class HeadParser:
    """Finds the heads of one connection; between requests it keeps nothing."""

    _known: KnownHeads
    _half: "_HalfHead | None" = None
    """While a head is under way."""

    def find(self, data: bytes) -> tuple[ReceivedHead, bytes] | None:
        """Return the next head, and what stands behind it; None if that is not here yet. Raises Malformed."""
        half, is_in_one = self._half, self._half is None
        if half is None:
            data = data.lstrip(b"\r\n")  # old clients send one more line end behind a body (RFC 9112, 2.2)
            start, end, rest = data.partition(HEAD_END)
            if end and (known := self._known.find(start)) is not None:
                return known, rest
            if not data:
                return None
            half = self._half = _HalfHead()
        behind = half.take(data)
        if behind is None:
            return None
        self._half = None
        message = half.message()
        if is_in_one:
            self._known.learn(bytes(half.data), message, half.fields)
        return message, behind


class _HalfHead:
    """A head that did not come before, until it is whole."""

    def __init__(self) -> None:
        self.data = bytearray()
        """What has come of it."""
        self.fields: list[tuple[bytes, bytes]] = []
        self._target = b""
        self._line = 0
        """Where in the data the line begins that is not checked yet."""
        self._llhttp = httptools.HttpRequestParser(self)
        self._is_whole = False
        """Whether llhttp has seen its end."""
        self._has_extra = False
        """Whether llhttp has seen another request behind that end."""
        self._keeps_alive = True

    def take(self, data: bytes) -> bytes | None:
        """Parse a part; return what stands behind the head, or None if more of it has to come. Raises Malformed."""
        head = self.data
        before = len(head)
        head += data
        size = head.find(HEAD_END, max(0, before - 3)) + len(HEAD_END)  # its end may have begun in the part before
        is_whole = size >= len(HEAD_END)
        if is_whole:
            del head[size:]
        if len(head) - self._line > MAX_LINE_BYTES:  # a line that is too long is refused before all of it is here
            *lines, last = head[self._line :].split(b"\r\n")
            if any(len(line) > MAX_LINE_BYTES for line in (*lines, last)):
                raise Malformed(Malformation.TOO_LONG)
            self._line = len(head) - len(last)
        self._parse(data[: size - before] if is_whole else data, is_whole=is_whole)
        if not is_whole:
            return None
        del self._llhttp  # it refers to this head, which would be left to the garbage collector
        return data[size - before :]

    def _parse(self, data: bytes, *, is_whole: bool) -> None:
        """Parse a part, with which the head is whole or not. Raises Malformed."""
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the connection stays what it is (RFC 9110, 7.8)
        except httptools.HttpParserInvalidMethodError:
            raise Malformed(Malformation.METHOD) from None
        except httptools.HttpParserInvalidURLError:
            raise Malformed(Malformation.TARGET) from None
        except httptools.HttpParserError:
            raise Malformed(self._wrong_part()) from None
        if len(self.fields) > MAX_HEADERS:
            raise Malformed(Malformation.HEADER)
        if self._is_whole is not is_whole or self._has_extra:  # it ended where only a lenient parser sees an end
            raise Malformed(self._wrong_part())

    def _wrong_part(self) -> Malformation:
        line = self.data[: self.data.find(b"\r\n")]
        return Malformation.HEADER if _REQUEST_LINE.fullmatch(line) else Malformation.REQUEST_LINE

    def message(self) -> ReceivedHead:
        """Return the whole head. Raises Malformed."""
        line = _REQUEST_LINE.fullmatch(self.data[: self.data.find(b"\r\n")])
        if line is None:
            raise Malformed(Malformation.REQUEST_LINE)
        method = line[1].decode()
        if method == "CONNECT":
            raise Malformed(Malformation.METHOD)
        headers = CIMultiDictProxy(CIMultiDict([(_text(name), _text(value)) for name, value in self.fields]))
        is_1_1 = line[0].endswith(b"1")
        names = [name for name in (name.lower() for name, _ in self.fields) if name in _SINGLE]
        if len(names) != len(set(names)) or (is_1_1 and b"host" not in names):
            raise Malformed(Malformation.HEADER)
        target = _text(self._target)
        if (url := _url(method, target)) is None:
            raise Malformed(Malformation.TARGET)
        keep_alive = is_1_1 and self._keeps_alive  # nginx, whose default is 1.0, opens a connection for each request
        return ReceivedHead(method, target, headers, url, is_1_1, keep_alive, int(headers.get("Content-Length", 0)))

    # -- what llhttp calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._has_extra = self._is_whole

    def on_url(self, part: bytes) -> None:
        """A part of the target."""
        self._target += part

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """A header."""
        self.fields.append((name, (value or b"").rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._is_whole = True
        self._keeps_alive = self._llhttp.should_keep_alive()  # llhttp forgets it with the end of the request


class SizedBody:
    """A body whose length is known, as it comes."""

    def __init__(self, body: RequestBody, length: int) -> None:
        self.body = body
        self._left = length
        """How many bytes are missing."""

    def take(self, data: bytes) -> bytes:
        """Take a part; return what stands behind the body."""
        part, behind = data[: self._left], data[self._left :]
        self._left -= len(part)
        self.body.feed(part)
        if not self._left:
            self.body.finish()
        return behind


class ChunkedBody:
    """A body in chunks, as it comes, up to its end or to what is malformed."""

    def __init__(self, body: RequestBody, *, is_last: bool) -> None:
        """`is_last`: what stands behind it is no request."""
        self.body = body
        self._is_last = is_last
        self._parts: list[bytes] = []
        """The data that llhttp has found."""
        self._other_bytes = 0
        """How much was read that is no data, since the last of these."""
        self._is_whole = False
        """Whether llhttp has seen the end."""
        self._has_extra = False
        """Whether something stands behind that end."""
        self._llhttp = httptools.HttpRequestParser(self)
        self._llhttp.feed_data(_CHUNKED_HEAD)

    def take(self, data: bytes) -> bytes:
        """Take a part; nothing stands behind it. Raises Malformed, after which everything is dropped."""
        if self.body.is_complete or self.body.is_broken:
            return b""
        is_broken = False
        try:
            self._llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # the latter behind the end of the body
            is_broken = True
        parts, self._parts = self._parts, []
        if parts:
            self.body.feed(b"".join(parts))  # chunks of one byte would take forty each
        if self._is_whole:
            self.body.finish()
            del self._llhttp  # as that of a head
            if (is_broken or self._has_extra) and not self._is_last:
                raise Malformed(Malformation.PIPELINED)
            return b""
        self._other_bytes = 0 if parts else self._other_bytes + len(data)
        if is_broken or self._other_bytes > MAX_LINE_BYTES:
            self.body.fail()
            raise Malformed(Malformation.BODY)
        return b""

    # -- what llhttp calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins, perhaps behind the end of this body."""
        self._has_extra = self._is_whole

    def on_body(self, data: bytes) -> None:
        """Some data."""
        if not self._is_whole:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The end of the body, or of what stands behind it."""
        self._is_whole = True


def _url(method: str, target: str) -> URL | None:
    """The path and the query of a target; None if it is malformed (RFC 9112, 3.2)."""
    try:
        if target.startswith("/"):
            path, _, rest = target.partition("#")
            path, _, query = path.partition("?")
            return URL.build(path=path, query_string=query, fragment=rest, encoded=True)
        url = URL(target, encoded=True)
        if target == "*" and method == "OPTIONS":
            return url
        return url.relative() if url.absolute and url.host and url.port else None
    except Exception:  # noqa: BLE001  (yarl raises several kinds, which quote the target)
        return None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
