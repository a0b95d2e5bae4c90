"""Parses the replies on one connection with llhttp, for their listeners.

Rule: llhttp parses strictly. Allowed are spaces behind the size of a chunk, which servers send in the wild. Where the
caller wants it, the values of headers may be folded or have control characters too; llhttp then allows spaces behind a
name as well, which is checked here. A bare LF is never allowed: in a value that somebody else chose, it would begin a
header. The bodies of replies that end with the connection are delimited here, because httptools does not offer
llhttp's `finish`.
"""

import re
from dataclasses import dataclass, field
from typing import Final

import httptools

from gateway.http_client.errors import MalformedReply
from gateway.http_client.pending_request import ReplyListener
from gateway.http_client.reply_head import ReplyHead

MAX_HEAD_BYTES: Final = 65_536
"""The bound for the head of a reply. It also holds for all else that is not body: interim replies, chunk extensions,
trailers."""
MAX_INTERIM_REPLIES: Final = 16
_CONTINUE: Final = 100
_SWITCHING_PROTOCOLS: Final = 101
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BETWEEN_CHUNKS: Final = {
    True: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    False: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
}
"""What brings a new parser to the place behind a chunk of a reply, by whether the connection will be kept."""


@dataclass(slots=True, eq=False, repr=False)
class ReplyParser:
    """The parser of one connection; it takes as much memory as the rest of the connection."""

    keep_alive_seconds: int | None = None
    """How long the upstream keeps the connection open, if its last reply says so."""
    until_close: bool = False
    """Whether the body ends with the connection."""
    is_continued: bool = False
    """Whether the server has said `100 Continue`."""
    is_complete: bool = False
    is_between_chunks: bool = False
    """Whether the last thing that was read was the end of a chunk, or of the head before the first."""
    _llhttp: httptools.HttpResponseParser | None = None
    _listener: ReplyListener | None = None
    _is_lenient: bool = False
    _is_head: bool = False
    _fields: list[tuple[bytes, bytes]] | None = field(default_factory=list)
    """The headers so far; None once the head is complete."""
    _reason: bytes = b""
    _interim: int = 0
    _other_bytes: int = 0
    """How much was read since the last byte of a body."""
    _keeps_alive: bool = False
    """Whether the upstream keeps the connection open behind the complete reply, and has sent nothing there."""

    def __post_init__(self) -> None:
        self._llhttp = httptools.HttpResponseParser(self)
        self._llhttp.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)

    @classmethod
    def between_chunks(
        cls, listener: ReplyListener, *, keeps_alive: bool, keep_alive_seconds: int | None
    ) -> "ReplyParser":
        """Return a parser for the rest of a reply, behind one of its chunks."""
        parser = cls()
        parser.feed(_BETWEEN_CHUNKS[keeps_alive])
        parser._fields, parser._other_bytes, parser._listener = None, 0, listener
        parser.keep_alive_seconds = keep_alive_seconds
        return parser

    def expect(self, listener: ReplyListener, *, is_head: bool, is_lenient: bool) -> None:
        """Expect another reply."""
        self.until_close = self.is_continued = self.is_complete = self.is_between_chunks = self._keeps_alive = False
        self._fields, self._reason, self._interim, self._other_bytes = [], b"", 0, 0
        self._listener, self._is_head = listener, is_head
        if is_lenient is not self._is_lenient:
            self._is_lenient = is_lenient
            assert self._llhttp is not None
            self._llhttp.set_dangerous_leniencies(lenient_headers=is_lenient)

    def mute(self) -> None:
        """Tell the listener nothing more."""
        self._listener = None

    def release(self) -> None:
        """End the use of this parser, which is in a circle of objects."""
        self._llhttp = self._listener = None

    @property
    def is_delimited(self) -> bool:
        """Whether the head is here, of a reply whose body has an end of its own."""
        return self._fields is None and not (self.until_close or self._is_head)

    @property
    def is_oversized(self) -> bool:
        """Whether too much was read that is no body."""
        return self._other_bytes > MAX_HEAD_BYTES

    @property
    def will_keep_alive(self) -> bool:
        """Whether the connection can be used again behind the reply, as far as is known."""
        if self.is_complete:
            return self._keeps_alive
        return self._llhttp is not None and self._llhttp.should_keep_alive()

    def feed(self, data: bytes) -> None:
        """Parse what was read; raises MalformedReply, or what a method of the listener raises."""
        self._other_bytes += len(data)
        try:
            if self._llhttp is not None:
                self._llhttp.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            raise exc.__context__ or exc from None
        except httptools.HttpParserError as exc:
            if not self.is_complete:
                raise MalformedReply(str(exc)) from None
            self._keeps_alive = False
        # Without a line end, the beginning of a size line may have been read.
        self.is_between_chunks = self.is_between_chunks and data.endswith(b"\n")

    # -- from llhttp --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A reply begins."""
        if self.is_complete:
            self._keeps_alive = False

    def on_status(self, text: bytes) -> None:
        """A part of the reason phrase."""
        if self._fields is not None:
            self._reason += text

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those of trailers are ignored. Raises MalformedReply."""
        if self._is_lenient and _TOKEN.fullmatch(name) is None:
            raise MalformedReply("a header whose name is not a token")
        if self._fields is not None:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """A head is complete. Raises MalformedReply."""
        fields, listener, llhttp = self._fields, self._listener, self._llhttp
        if fields is None or listener is None or llhttp is None:
            return  # it belongs to nothing that was asked for
        status = llhttp.get_status_code()
        # Much of what was read may be body.
        if (
            self._other_bytes > MAX_HEAD_BYTES
            and sum(len(each) + len(value) + 4 for each, value in fields) > MAX_HEAD_BYTES
        ):
            raise MalformedReply(f"a head of more than {MAX_HEAD_BYTES} bytes")
        if status < 200:
            self._skip_interim(status)
            return
        head = ReplyHead(status, llhttp.get_http_version(), fields, self._reason)
        self.until_close = _is_delimited_by_close(head)
        self.is_between_chunks = head.get(b"transfer-encoding") is not None
        self._fields = None
        self._other_bytes = 0
        self.keep_alive_seconds = head.keep_alive_seconds
        # The parser expects a body, because it does not know of the HEAD. The connection is not used again.
        self.is_complete = self._is_head
        listener.on_head(head)

    def on_chunk_header(self) -> None:
        """The size of a chunk is here."""
        self.is_between_chunks = False

    def on_chunk_complete(self) -> None:
        """A chunk is complete."""
        self.is_between_chunks = True

    def on_body(self, data: bytes) -> None:
        """A part of a body."""
        self._other_bytes = 0
        if self._listener is not None and not self.is_complete:
            self._listener.on_body(data)

    def on_message_complete(self) -> None:
        """A reply is complete."""
        if self._fields is None and not self.is_complete:  # it is no interim one
            self._keeps_alive = self.will_keep_alive
            self.is_complete = True

    def _skip_interim(self, status: int) -> None:
        """Leave out a reply like 100 or 103. Raises MalformedReply."""
        if status == _SWITCHING_PROTOCOLS or status < 100:
            raise MalformedReply(f"status {status}, which was not asked for")
        self._interim += 1
        if self._interim > MAX_INTERIM_REPLIES:
            raise MalformedReply(f"more than {MAX_INTERIM_REPLIES} interim replies")
        self.is_continued = self.is_continued or status == _CONTINUE
        self._fields = []
        self._reason = b""


def _is_delimited_by_close(head: ReplyHead) -> bool:
    """Whether the body, if there is one, ends with the connection. Raises MalformedReply."""
    if head.version not in ("1.0", "1.1"):
        raise MalformedReply(f"HTTP version {head.version}")
    codings = head.get_all(b"transfer-encoding")
    if not codings:
        return head.get(b"content-length") is None
    if codings[0].lower() != b"chunked" or len(codings) > 1 or head.version == "1.0":
        raise MalformedReply("a transfer coding that was not asked for")
    return False
