"""Parses or encodes server-sent events, incrementally within a bound.

Grammar: WHATWG HTML, "9.2.6 Interpreting an event stream": LF, CR or CRLF end a line, one BOM may come first, a line
that starts with a colon is a comment, one space after the field's colon is dropped, data lines are joined by LF.
"""

import re
from typing import Final

import msgspec

from gateway.protocol import jsonrpc

BOM: Final = b"\xef\xbb\xbf"
KEEP_ALIVE: Final = b":\n\n"
_RETRY_DIGITS: Final = 9
"""Longer values exceed eleven days, and Python refuses to parse very long numbers."""
_LINE: Final = re.compile(rb"^(?:\n+|(data|event|id|retry)(?::[ ]?|(?=\n)))", re.MULTILINE)
"""One or more empty lines, or the beginning of a line with a field that has a meaning, up to its value. The search
skips all other lines in C code, so that a stream of line ends or comments costs hardly more than one of data. The end
of a value is not a matter of the expression, which would look at each byte of it."""

_ONLY: Final = re.compile(rb"(?:event: ?message\r?\n)?data: ?")
_ENDS: Final = (b"\n\n", b"\r\n\r\n")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event. `id` is None if the stream gave none, and empty if the event resets the last id.

    `data` may be empty: a priming event only marks a place in the stream, with or without a data line.
    """

    data: bytes
    id: str | None = None
    event: str = "message"


class EventTooLarge(ValueError):
    """One event exceeded the parser's bound; the rest of the stream cannot be parsed."""


class Parser(msgspec.Struct, eq=False, gc=False):
    """Takes bytes as they come, and returns the events that they complete.

    `max_bytes` bounds the lines between two empty ones, comments included. After EventTooLarge the parser must not be
    fed again.
    """

    max_bytes: int
    retry_ms: int | None = None
    """How long the stream asks clients to wait before they reconnect."""
    unfinished_bytes: int = 0
    """The size of what was read and is not part of an event yet."""
    _is_begun: bool = False
    """Whether the beginning of the stream was read, so that no byte order mark can come any more."""
    _after_cr: bool = False
    _unfinished: bytes | bytearray = b""
    """The beginning of a line."""
    _size: int = 0
    """The size of the complete lines since the last empty one, each with its line end."""
    _data: bytes | bytearray | None = None
    _id: str | None = None
    _event: str = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes, in order; raises EventTooLarge."""
        # Most parts of a stream are one plain event each.
        if not self.unfinished_bytes and len(chunk) <= self.max_bytes:
            only = only_event(chunk)
            if only is not None:
                self._is_begun, self._after_cr = True, False
                return [Event(only)]
        if not self._is_begun:
            chunk = b"".join((self._unfinished, chunk))
            if len(chunk) < len(BOM) and BOM.startswith(chunk):  # it is not clear yet whether there is one
                self._unfinished, self.unfinished_bytes = chunk, len(chunk)
                return []
            self._unfinished = b""
            self._is_begun = True
            chunk = chunk.removeprefix(BOM)
        # A CR at the end of a chunk ends the line at once, because a stream with CR alone would otherwise be one event
        # late; an LF at the beginning of the next chunk belongs to it.
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if chunk.find(b"\r") >= 0:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = chunk.rfind(b"\n") + 1
        if not end:
            self._unfinished = self._unfinished or bytearray()
            self._unfinished += chunk
            self.unfinished_bytes = self._size + len(self._unfinished)
            self._check(self.unfinished_bytes)
            return []
        lines = b"".join((self._unfinished, chunk[:end])) if self._unfinished else chunk[:end]
        self._unfinished = bytearray(chunk[end:])
        events = self._read(lines)
        self.unfinished_bytes = self._size + len(self._unfinished)
        # Without the last line end, as `_read` measures an event that is complete.
        self._check(self.unfinished_bytes if self._unfinished else self._size - 1)
        return events

    def _read(self, lines: bytes) -> list[Event]:
        """Read complete lines."""
        events: list[Event] = []
        begin = -self._size  # where the lines since the last empty one begin
        at = 0
        while (found := _LINE.search(lines, at)) is not None:
            name, at = found[1], found.end()
            if name is None:
                self._check(found.start() - begin - 1)
                begin = at
                if self._data is not None or self._id is not None:
                    events.append(Event(bytes(self._data or b""), self._id, self._event or "message"))
                    self._data = self._id = None
                self._event = ""
                continue
            end = lines.index(b"\n", at)
            value, at = lines[at:end], end + 1
            if name == b"data":
                if self._data is None:
                    self._data = value
                    continue
                self._data = bytearray(self._data) if isinstance(self._data, bytes) else self._data
                self._data += b"\n"
                self._data += value
            elif name == b"event":
                self._event = str(value, "utf-8", "replace")
            elif name == b"id" and b"\0" not in value:  # the standard ignores such an id
                self._id = str(value, "utf-8", "replace")
            elif name == b"retry" and value.isdigit() and len(value) <= _RETRY_DIGITS:
                self.retry_ms = int(value)
        self._size = len(lines) - begin
        return events

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            raise EventTooLarge(f"an event is larger than {self.max_bytes} bytes")


def only_event(begin: bytes) -> bytes | None:
    """The data of one event of one line, if a stream begins or goes on with it and has nothing behind it yet."""
    found = _ONLY.match(begin)
    end = -1 if found is None else begin.find(b"\n", found.end())
    if found is None or end < 0:
        return None
    if begin[end - 1 : end] == b"\r":
        end -= 1
    rest = begin[end:]
    return begin[found.end() : end] if rest in _ENDS and begin.find(b"\r", found.end(), end) < 0 else None


def encode(data: bytes) -> bytes:
    """One `message` event with one JSON message, which may contain spliced, pretty-printed JSON."""
    return b"event: message\ndata: %b\n\n" % jsonrpc.without_line_ends(data)
