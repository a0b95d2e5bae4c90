"""Parses requests with aiohttp's parser, whose errors quote the client's bytes: none of them leaves this file."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, StreamReader, hdrs, http_parser, web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import (
    BadHttpMessage,
    BadHttpMethod,
    BadStatusLine,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDictProxy

from gateway.http.incoming import Caller
from gateway.protocol.header_mismatch import KnownValues
from gateway.runtime.newest import Newest
from gateway.telemetry import Malformation

MAX_LINE_BYTES: Final = 8190
"""The largest request line, and the largest header."""
MAX_HEADERS: Final = 128
_READ_BYTES: Final = 65_536
"""A body of which twice as much was not read yet is not read from the network."""
_PIPELINED: Final = 32
_HEAD_BYTES: Final = 4 * MAX_LINE_BYTES
_REQUEST_LINE: Final = re.compile(rb"[A-Z-]+ [^ \x00-\x1f]+ HTTP/1\.[01]")
_HEAD_END: Final = b"\r\n\r\n"
_KNOWN: Final = 512
"""How many heads are remembered, of all clients of a listener."""
_KNOWN_BYTES: Final = 4096
"""Longer heads are not remembered."""
_ODD: Final = (hdrs.CONTENT_ENCODING, hdrs.EXPECT)
_KINDS: Final = (
    (BadHttpMethod, Malformation.METHOD),
    (BadStatusLine, Malformation.REQUEST_LINE),
    (InvalidURLError, Malformation.TARGET),
    (LineTooLong, Malformation.TOO_LONG),
    (InvalidHeader, Malformation.HEADER),
    (BadHttpMessage, Malformation.HEADER),
)

Messages = Sequence[tuple[RawRequestMessage, StreamReader]]


class Malformed(BadHttpMessage):
    """A request that is not well-formed; unlike aiohttp's errors it quotes nothing."""

    def __init__(self, kind: Malformation) -> None:
        super().__init__("")
        self.kind = kind


class ParsedHead(msgspec.Struct, eq=False):
    """The head of a POST over HTTP/1.1 after which the connection stays open."""

    message: RawRequestMessage
    path: str
    headers: CIMultiDictProxy[str]
    length: int
    """The size of the body, which is not encoded."""
    values: KnownValues
    caller: Caller | None = None
    """Who sends it, as long as `judge` stays the same."""
    judge: object = None
    rest: bytes = b""
    """The same head without its `Expect: 100-continue`, if it has one."""


class KnownHeads:
    """The heads that one listener remembers, by their bytes."""

    def __init__(self) -> None:
        self._heads: Newest[bytes, ParsedHead] = Newest(_KNOWN)
        self._seen: set[int] = set()
        """The hashes of heads that came once."""
        self.find: Callable[[bytes], ParsedHead | None] = self._heads.get

    def forget(self) -> None:
        """Forget all heads, because they have credentials; those that still come are learnt when they come again."""
        self._heads.clear()

    def learn(self, data: bytes, message: RawRequestMessage, length: int) -> None:
        """Remember a head that the parser accepted, if requests with such heads need no task."""
        if len(data) > _KNOWN_BYTES or message.method != hdrs.METH_POST or message.version != HttpVersion11:
            return
        if message.should_close or message.upgrade or message.chunked or not length or message.path[0] != "/":
            return
        if (digest := hash(data)) not in self._seen:  # some clients send each head only once
            if len(self._seen) >= 8 * _KNOWN:
                self._seen.clear()
            self._seen.add(digest)
            return
        if any(name in message.headers for name in _ODD) or not _is_head_of(data, message):
            return
        headers = message.headers
        values = KnownValues(partial(headers.getall, default=()))
        _ = self._heads.keep(data, ParsedHead(message, message.url.path, headers, length, values))


def _is_head_of(data: bytes, message: RawRequestMessage) -> bool:
    """Whether a head reads as it was parsed, without any of the leniency of parsers."""
    line, *lines = data.removesuffix(_HEAD_END).split(b"\r\n")
    headers = tuple((name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines))
    return (
        line == b"POST %b HTTP/1.1" % message.path.encode("utf-8", "surrogateescape")
        and headers == message.raw_headers
    )


class RequestParser(HttpRequestParser):
    """Parses the requests of one connection.

    aiohttp's parser accepts several spaces in a request line, of which a proxy in front may see another request. So
    this class follows where each head begins and checks its first line. The end of a chunked body cannot be followed:
    what a client sends behind it in the same packet is refused.
    """

    def __init__(
        self,
        protocol: Any,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[Malformation], None],
        heads: KnownHeads | None = None,
    ) -> None:
        """`failed` is called once, with the kind of the error after which nothing is parsed any more."""
        super().__init__(
            protocol,
            loop,
            _READ_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=_PIPELINED,
        )
        self._failed = failed
        self._heads = heads
        self._is_broken = False
        self._head = bytearray()
        """The part of a head that has arrived."""
        self._left = 0
        """How many bytes are missing of a body whose length is known."""
        self._is_chunked = False
        """Whether a chunked body is under way."""
        self._is_followed = True
        """Whether it is certain where the next request begins; not behind a chunked body."""
        self.body: StreamReader | None = None
        """The body of the newest request."""

    @property
    def is_in_body(self) -> bool:
        """Whether a body is under way."""
        return self.body is not None and not self.body.is_eof()

    def known(self, data: bytes) -> tuple[ParsedHead, bytes] | None:
        """Return a request that needs no parsing; its body is whole, or empty if none of it is here.

        None if the bytes have to be parsed.
        """
        if self._heads is None or self._head or self._left or not self._is_followed or self._is_broken:
            return None
        end = data.find(_HEAD_END) + len(_HEAD_END)
        head = self._heads.find(data[:end])
        if head is None or len(data) - end not in (0, head.length):
            return None
        return head, data[end:]

    def feed_data(self, data: bytes) -> tuple[Messages, bool, bytes]:  # type: ignore[override]
        """Parse bytes; raises Malformed, unless the error is in the body of a request that is being served."""
        if self._is_broken:
            return (), False, b""
        before = self.body
        try:
            messages, is_upgraded, tail = super().feed_data(data)
            self._follow(data, messages)
        except Exception as exc:  # noqa: BLE001  (yarl's errors come through the parser too)
            kind = _kind(exc)
        else:
            if is_upgraded:
                self._head.clear()
            return messages, is_upgraded, tail
        self._is_broken = True
        self._head.clear()
        self.body = before
        if before is None or before.is_eof():
            self._failed(kind)
            raise Malformed(kind)
        self._failed(Malformation.BODY)
        # The request has one reply: the one of its handler, which cannot read the body.
        before.set_exception(web.RequestPayloadError("malformed"))
        return (), False, b""

    def _follow(self, data: bytes, messages: Messages) -> None:
        """Find the head of each request; raises Malformed for a request line that is not strictly right."""
        if self._is_chunked:
            self._is_chunked = self.is_in_body
            if messages:
                raise Malformed(Malformation.PIPELINED)
            return
        if self._left:
            skipped = min(self._left, len(data))
            self._left -= skipped
            data = data[skipped:]
        if not messages:
            self._head += data
            if len(self._head) > _HEAD_BYTES:
                # Of a long head, only the first line and the last bytes count; the filler keeps them apart.
                first = bytes(self._head).lstrip(b"\r\n").partition(b"\r\n")[0]
                self._head[:] = b"%b\r\n...%b" % (first, bytes(self._head[-len(_HEAD_END) :]))
            return
        heads = None if self._head else self._heads  # what was kept of a long head are not its bytes
        rest = bytes(self._head) + data if self._head else data
        for message, body in messages:
            if self._is_chunked:
                raise Malformed(Malformation.PIPELINED)
            rest = self._after(rest.lstrip(b"\r\n"), message, body, heads)
        if not self.is_in_body:
            self._is_chunked = False
        self._head[:] = rest

    def _after(self, data: bytes, message: RawRequestMessage, body: StreamReader, heads: KnownHeads | None) -> bytes:
        """Return what follows a request in the bytes that begin with its head."""
        self.body = body
        end = data.find(_HEAD_END)
        if _REQUEST_LINE.fullmatch(data[: data.find(b"\r\n")]) is None or end < 0:
            raise Malformed(Malformation.REQUEST_LINE)
        if message.method == hdrs.METH_CONNECT:
            raise Malformed(Malformation.METHOD)
        if not message.path.startswith("/"):
            _ = message.url.host, message.url.port, message.url.relative() if message.url.absolute else None
        if message.chunked:
            self._is_chunked, self._is_followed = True, False
            return b""
        end += len(_HEAD_END)
        length = int(message.headers.get(hdrs.CONTENT_LENGTH, 0))
        self._left = max(0, end + length - len(data))
        if heads is not None:
            heads.learn(data[:end], message, length)
        return data[end + length :]


def _kind(exc: Exception) -> Malformation:
    if isinstance(exc, Malformed):
        return exc.kind
    return next((kind for type_, kind in _KINDS if isinstance(exc, type_)), Malformation.TARGET)


def parser_caution(parser: type = http_parser.HttpRequestParser) -> str | None:
    """Return a warning if requests are parsed in Python.

    Two parsers that read a malformed request differently are what request smuggling needs, and the gateway's tests run
    against the C parser.
    """
    if parser is not http_parser.HttpRequestParserPy:
        return None
    return (
        "aiohttp parses HTTP in Python: it was installed without its C parser, or AIOHTTP_NO_EXTENSIONS is set; the "
        "gateway's tests against request smuggling run with the C parser, which is also several times faster; "
        "install aiohttp from its wheel, and unset the variable"
    )
