"""Parses a reply with llhttp, as far as nothing simpler can read it: its head, and chunks that are cut.

Rule: llhttp parses strictly. Allowed are spaces behind the size of a chunk, which servers send in the wild. Where the
caller wants it, the values of headers may be folded or have control characters too; llhttp then allows spaces behind a
name as well, which is checked here. A bare LF is never allowed: in a value that somebody else chose, it would begin a
header. No parser is needed once the head says where the body ends: after a known length, with the connection
(httptools does not offer llhttp's `finish`), or behind the last chunk.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import httptools

from gateway.http_client.errors import MalformedReply
from gateway.http_client.reply_head import ReplyHead

MAX_HEAD_BYTES: Final = 65_536
"""The bound for the head of a reply. It also holds for all else that is not body: interim replies, chunk extensions,
trailers."""
MAX_INTERIM_REPLIES: Final = 16
_CONTINUE: Final = 100
_SWITCHING_PROTOCOLS: Final = 101
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
_MAX_CHUNKS: Final = 4
"""More of them in a packet are left to llhttp, which takes less time for each."""
_BETWEEN_CHUNKS: Final = {
    "kept": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "closed": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
}
"""What brings a new parser to the place behind a chunk of a reply, by what the head of that has said."""

Ending = Literal["kept", "closed"]
"""What becomes of the connection behind a complete reply."""
_At = Literal["head", "sized body", "unsized body", "chunk", "between chunks", "end"]
"""Where in a reply its parser is. Interim replies belong to the head, the line that begins a chunk to the chunk."""


@dataclass(slots=True, eq=False, repr=False)
class ReplyParser:
    """The parser of one reply; it takes as much memory as the connection."""

    is_head: bool = False
    """Whether the reply is one to HEAD."""
    is_lenient: bool = False
    """See `PendingRequest`."""
    is_continued: bool = False
    """Whether the server has said `100 Continue`."""
    ending: Ending = "closed"
    """As far as is known."""
    _at: _At = "head"
    _llhttp: httptools.HttpResponseParser = field(init=False)
    _fields: list[tuple[bytes, bytes]] = field(default_factory=list)
    """The headers so far."""
    _reason: bytes = b""
    _interim: int = 0
    _other_bytes: int = 0
    """How much was read since the last byte of a body."""
    _head: ReplyHead | None = None
    """If it was read now."""
    _parts: list[bytes] = field(default_factory=list)
    """Of the body, read now."""

    def __post_init__(self) -> None:
        self._llhttp = httptools.HttpResponseParser(self)
        self._llhttp.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True, lenient_headers=self.is_lenient)

    def release(self) -> None:
        """End the use of this parser, which is in a circle of objects."""
        del self._llhttp

    def feed(self, data: bytes) -> "Read":
        """See `Read`."""
        self._other_bytes += len(data)
        failure = None
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserError as exc:
            cause = exc.__context__  # what one of the methods below raised
            failure = cause if isinstance(cause, MalformedReply) else MalformedReply(str(exc))
            self.ending = "closed"
        head, parts, self._head, self._parts = self._head, self._parts, None, []
        rest = failure if failure is not None and self._at != "end" else self._rest(data, head, parts)
        if rest is not self:
            self.release()
        return head, parts, rest

    def _rest(self, data: bytes, head: ReplyHead | None, parts: list[bytes]) -> "Rest":
        """What reads on behind what was parsed."""
        match self._at:
            case "end":
                return self.ending
            case "unsized body":
                return UnsizedRest()
            case "sized body" if head is not None:
                missing = (head.content_length or 0) - sum(map(len, parts))
                return SizedRest(missing, head.content_type, self.ending)
            case "between chunks" if data.endswith(b"\n"):
                return ChunkedRest("kept" if self._llhttp.should_keep_alive() else "closed")
            case "between chunks":
                self._at = "chunk"  # the beginning of its size line may have been read
            case _:
                pass
        if self._other_bytes > MAX_HEAD_BYTES:
            return MalformedReply(f"more than {MAX_HEAD_BYTES} bytes that are no body")
        return self

    # -- from llhttp --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A reply begins."""
        if self._at == "end":
            self.ending = "closed"

    def on_status(self, text: bytes) -> None:
        """A part of the reason phrase."""
        if self._at == "head":
            self._reason += text

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those of trailers are ignored. Raises MalformedReply."""
        if self.is_lenient and _TOKEN.fullmatch(name) is None:
            raise MalformedReply("a header whose name is not a token")
        if self._at == "head":
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """A head is complete. Raises MalformedReply."""
        if self._at != "head":
            return  # it belongs to nothing that was asked for
        status, fields = self._llhttp.get_status_code(), self._fields
        # Much of what was read may be body.
        if (
            self._other_bytes > MAX_HEAD_BYTES
            and sum(len(each) + len(value) + 4 for each, value in fields) > MAX_HEAD_BYTES
        ):
            raise MalformedReply(f"a head of more than {MAX_HEAD_BYTES} bytes")
        if status < 200:  # it is left out: another one comes
            if status == _SWITCHING_PROTOCOLS or status < 100:
                raise MalformedReply(f"status {status}, which was not asked for")
            self._interim += 1
            if self._interim > MAX_INTERIM_REPLIES:
                raise MalformedReply(f"more than {MAX_INTERIM_REPLIES} interim replies")
            self.is_continued = self.is_continued or status == _CONTINUE
            self._fields, self._reason = [], b""
            return
        head = ReplyHead(status, fields, self._reason)
        self._at = _body_of(head, self._llhttp.get_http_version())
        self._head, self._other_bytes = head, 0
        if self.is_head:
            # llhttp expects a body, because it does not know of the HEAD. So the connection is not used again.
            self._at = "end"
        elif self._llhttp.should_keep_alive():
            self.ending = "kept"

    def on_chunk_header(self) -> None:
        """The size of a chunk is here."""
        if self._at != "end":
            self._at = "chunk"

    def on_chunk_complete(self) -> None:
        """A chunk is complete."""
        if self._at != "end":
            self._at = "between chunks"

    def on_body(self, data: bytes) -> None:
        """A part of a body."""
        self._other_bytes = 0
        if self._at != "end":
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """A reply is complete."""
        if self._at not in ("head", "end"):  # it is no interim one
            self._at = "end"
            self.ending = "kept" if self._llhttp.should_keep_alive() else "closed"


@dataclass(slots=True, eq=False)
class SizedRest:
    """The rest of a body of which so many bytes are missing."""

    missing: int
    content_type: str
    ending: Ending

    def feed(self, data: bytes) -> "Read":
        """See `Read`."""
        missing, self.missing = self.missing, self.missing - len(data)
        if self.missing > 0:
            return None, (data,), self
        return None, (data[:missing],), "closed" if self.missing else self.ending


class UnsizedRest:
    """The rest of a body that ends with the connection."""

    def feed(self, data: bytes) -> "Read":
        """See `Read`."""
        return None, (data,), self


@dataclass(slots=True, eq=False)
class ChunkedRest:
    """The rest of a body of chunks, of which the next one begins now; it takes a parser only while a chunk is cut."""

    ending: Ending

    def feed(self, data: bytes) -> "Read":
        """See `Read`."""
        found = chunks(data)
        if found is None:
            _, parts, rest = ReplyParser().feed(_BETWEEN_CHUNKS[self.ending] + data)
            return None, parts, rest
        parts, is_complete = found
        return None, parts, self.ending if is_complete else self


def chunks(data: bytes, begin: int = 0) -> tuple[Sequence[bytes], bool] | None:
    """What a few chunks hold, without extensions and trailers, and whether the last one is here; None for all else."""
    parts: list[bytes] = []
    while begin < len(data):
        size = _CHUNK_SIZE.match(data, begin)
        if size is None or len(parts) > _MAX_CHUNKS:
            return None
        begin = size.end()
        end = begin + int(size[1], 16)
        if data[end : end + 2] != b"\r\n":
            return None
        if end == begin:
            return (parts, True) if len(data) == end + 2 else None
        parts.append(data[begin:end])
        begin = end + 2
    return parts, False


Reader = ReplyParser | ChunkedRest | SizedRest | UnsizedRest
"""What reads the rest of a reply."""
Rest = Reader | Ending | MalformedReply
"""The same, or how the reply has ended."""
Read = tuple[ReplyHead | None, Sequence[bytes], Rest]
"""What was read of a reply at once: its head if that is complete now, parts of its body, none of which is empty, and
what reads on."""


def _body_of(head: ReplyHead, version: str) -> _At:
    """Which body comes, if there is one. Raises MalformedReply."""
    if version not in ("1.0", "1.1"):
        raise MalformedReply(f"HTTP version {version}")
    codings = head.get_all(b"transfer-encoding")
    if not codings:
        return "unsized body" if head.get(b"content-length") is None else "sized body"
    if codings[0].lower() != b"chunked" or len(codings) > 1 or version == "1.0":
        raise MalformedReply("a transfer coding that was not asked for")
    return "between chunks"
