"""Finds the requests of one connection in what it sends; llhttp parses them.

llhttp accepts several spaces in a request line, of which a proxy in front may see another request. So this file finds
the end of each head itself, checks its first line, and hands on a body whose length is known without llhttp. The end
of a body in chunks is where llhttp says; what a client sends behind it in the same packet is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
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


class Malformed(Exception):
    """A request that is not well-formed; unlike the errors of libraries it quotes nothing."""

    def __init__(self, kind: Malformation) -> None:
        super().__init__()
        self.kind = kind


@dataclass(slots=True, eq=False, repr=False)
class RequestParser:
    """The parser of one connection; between requests it keeps nothing."""

    _begun: Callable[[ReceivedHead, bytes], RequestBody]
    """Gets each head, with the whole body if that is here, and returns what takes its body."""
    _heads: KnownHeads
    """Heads that are not parsed."""
    body: RequestBody | None = None
    """The body under way."""
    _keeps_alive: bool = True
    """Whether the client may send a request behind the one under way; if not, nothing is parsed after that."""
    _llhttp: httptools.HttpRequestParser | None = None
    """While a head or a body in chunks is under way."""
    _head: bytearray = field(default_factory=bytearray)
    """The part of a head that has arrived."""
    _line: int = 0
    """Where in it the line begins that is not checked yet."""
    _target: bytes = b""
    _fields: list[tuple[bytes, bytes]] = field(default_factory=list)
    _is_complete: bool = False
    """Whether llhttp has seen the end of what it parses: of the head, then of the body in chunks."""
    _has_extra: bool = False
    """Whether something stands behind that end."""
    _left: int = 0
    """How many bytes are missing of a body whose length is known."""
    _parts: list[bytes] = field(default_factory=list)
    """What llhttp has found of the data of a body in chunks."""
    _other_bytes: int = 0
    """How much was read of a body in chunks that is none of its data, since the last of these."""

    @property
    def is_costly(self) -> bool:
        """Whether what comes next may take long to parse: chunks of one byte do."""
        return self.body is not None and not self._left

    def feed(self, data: bytes) -> bytes:
        """Parse up to the end of one request, and return what stands behind it.

        Raises Malformed, after which nothing is parsed any more.
        """
        body, left = self.body, self._left
        if body is not None and left:
            self._left = max(left - len(data), 0)
            body.feed(data[:left])
            if not self._left:
                self._finish(body)
            return data[left:]
        if body is None and not self._keeps_alive:
            return b""
        if body is None and not self._head:
            data = data.lstrip(b"\r\n")
            start, end, rest = data.partition(HEAD_END)
            if end and (known := self._heads.find(start)) is not None:
                if len(rest) == known.length:
                    _ = self._begun(known, rest)
                    return b""
                self.body, self._left = self._begun(known, b""), known.length
                return rest
        try:
            return self._feed_head(data) if body is None else self._feed_chunks(body, data)
        except Malformed:
            self._keeps_alive, self._llhttp, self.body = False, None, None
            self._head.clear()
            raise

    # -- heads --------------------------------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes:
        head = self._head
        if not data:
            return b""
        if not head:
            self._llhttp, self._line = httptools.HttpRequestParser(self), 0
            self._target, self._fields, self._is_complete, self._has_extra = b"", [], False, False
        before = len(head)
        head += data
        size = head.find(HEAD_END, max(0, before - 3)) + len(HEAD_END)
        is_whole = size >= len(HEAD_END)
        if is_whole:
            del head[size:]
        if len(head) - self._line > MAX_LINE_BYTES:  # a line that is too long is refused before all of it is here
            *lines, last = head[self._line :].split(b"\r\n")
            if any(len(line) > MAX_LINE_BYTES for line in (*lines, last)):
                raise Malformed(Malformation.TOO_LONG)
            self._line = len(head) - len(last)
        self._parse_head(data[: size - before] if is_whole else data, is_whole=is_whole)
        if not is_whole:
            return b""
        whole = bytes(head)
        head.clear()
        self._begin(whole, is_in_one=not before)
        return data[size - before :]

    def _parse_head(self, data: bytes, *, is_whole: bool) -> None:
        kind: Malformation | None = None
        assert self._llhttp is not None
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the connection stays what it is (RFC 9110, 7.8)
        except httptools.HttpParserInvalidMethodError:
            kind = Malformation.METHOD
        except httptools.HttpParserInvalidURLError:
            kind = Malformation.TARGET
        except httptools.HttpParserError:
            kind = self._wrong_part()
        if kind is None and len(self._fields) > MAX_HEADERS:
            kind = Malformation.HEADER
        if kind is None and self._is_complete is not is_whole:  # it ended where only a lenient parser sees an end
            kind = self._wrong_part()
        if kind is not None:
            raise Malformed(kind)

    def _wrong_part(self) -> Malformation:
        line = self._head[: self._head.find(b"\r\n")]
        return Malformation.HEADER if _REQUEST_LINE.fullmatch(line) else Malformation.REQUEST_LINE

    def _begin(self, whole: bytes, *, is_in_one: bool) -> None:
        """Begin with a request whose head is complete."""
        line = _REQUEST_LINE.fullmatch(whole[: whole.find(b"\r\n")])
        if line is None:
            raise Malformed(Malformation.REQUEST_LINE)
        method = line[1].decode()
        if method == "CONNECT":
            raise Malformed(Malformation.METHOD)
        fields = [(name, value.rstrip(b" \t")) for name, value in self._fields]
        headers = CIMultiDictProxy(CIMultiDict([(_text(name), _text(value)) for name, value in fields]))
        is_1_1 = whole[line.end() - 1 : line.end()] == b"1"
        self._keeps_alive = self._keeps_alive and is_1_1  # nginx, whose default is 1.0, opens a connection for each
        names = [name for name in (name.lower() for name, _ in fields) if name in _SINGLE]
        if len(names) != len(set(names)) or (is_1_1 and b"host" not in names):
            raise Malformed(Malformation.HEADER)
        target = _text(self._target)
        if (url := _url(method, target)) is None:
            raise Malformed(Malformation.TARGET)
        length = int(headers.get("Content-Length", 0))
        message = ReceivedHead(method, target, headers, url, is_1_1, self._keeps_alive, length)
        self._fields = []
        if is_in_one:
            self._heads.learn(whole, message, fields)
        body = self.body = self._begun(message, b"")
        self._left = length
        if "Transfer-Encoding" in headers:
            self._is_complete, self._other_bytes = False, 0
            return
        self._llhttp = None
        if not length:
            self._finish(body)

    def _finish(self, body: RequestBody) -> None:
        self._llhttp = self.body = None
        body.finish()

    # -- bodies -------------------------------------------------------------------------------------------------

    def _feed_chunks(self, body: RequestBody, data: bytes) -> bytes:
        assert self._llhttp is not None
        is_broken = False
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            is_broken = True
        parts, self._parts = self._parts, []
        if parts:
            body.feed(b"".join(parts))  # chunks of one byte would take forty each
        if self._is_complete:
            self._finish(body)
            if (is_broken or self._has_extra) and self._keeps_alive:
                raise Malformed(Malformation.PIPELINED)
            return b""
        self._other_bytes = 0 if parts else self._other_bytes + len(data)
        if is_broken or self._other_bytes > MAX_LINE_BYTES:
            body.fail()
            raise Malformed(Malformation.BODY)
        return b""

    # -- what llhttp calls --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins, perhaps behind the one under way."""
        self._has_extra = self._is_complete

    def on_url(self, part: bytes) -> None:
        """A part of the target."""
        if not self._has_extra:
            self._target += part

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """A header; trailers are dropped."""
        if self.body is None and not self._has_extra:
            self._fields.append((name, value or b""))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.body is None and not self._has_extra:
            self._is_complete = True
            assert self._llhttp is not None
            self._keeps_alive = self._llhttp.should_keep_alive()  # llhttp forgets it with the end of the request

    def on_body(self, data: bytes) -> None:
        """A part of a body in chunks."""
        if self.body is not None and not self._is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The end of a body in chunks, or of a request without one."""
        if self.body is not None:
            self._is_complete = True


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
