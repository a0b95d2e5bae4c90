"""Parses or encodes server-sent events, incrementally within a bound.

Grammar: WHATWG HTML, "9.2.6 Interpreting an event stream": LF, CR or CRLF end a line, one BOM may come first, a line
that starts with a colon is a comment, one space after the field's colon is dropped, data lines are joined by LF.
"""

from typing import Final

import msgspec

from gateway.protocol import jsonrpc

BOM: Final = b"\xef\xbb\xbf"
KEEP_ALIVE: Final = b":\n\n"
_RETRY_DIGITS: Final = 9
"""Longer values exceed eleven days, and Python refuses to parse very long numbers."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event. `id` is None if the stream gave none, and empty if the event resets the last id.

    `data` may be empty: a priming event only marks a place in the stream, with or without a data line.
    """

    data: bytes
    id: str | None = None
    event: str = "message"


class EventTooLarge(ValueError):
    """One event exceeded the parser's bound; the rest of the stream cannot be parsed."""


class Parser:
    """Takes bytes as they come, and returns the events that they complete.

    `max_bytes` bounds one event with all its lines. After EventTooLarge the parser must not be fed again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._buffer = bytearray()
        self._scanned = 0
        self._started = False
        self._after_cr = False
        self._data: list[bytes] = []
        self._size = 0
        self._id: str | None = None
        self._event = ""
        self.retry_ms: int | None = None
        """How long the stream asks clients to wait before they reconnect."""

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes, in order; raises EventTooLarge."""
        self._buffer += chunk
        if not self._started and not self._skip_bom():
            return []
        if self._after_cr and self._buffer:
            self._after_cr = False
            if self._buffer[0] == 0x0A:
                del self._buffer[:1]
        events: list[Event] = []
        start = 0
        while (end := self._line_end(start)) is not None:
            stop, following = end
            event = self._line(bytes(self._buffer[start:stop]))
            if event is not None:
                events.append(event)
            start = following
        del self._buffer[:start]
        self._scanned = len(self._buffer)
        if self._size + len(self._buffer) > self._max:
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        return events

    def _skip_bom(self) -> bool:
        head = bytes(self._buffer[:3])
        if len(head) < len(BOM) and BOM.startswith(head):
            return False
        if head == BOM:
            del self._buffer[:3]
        self._started = True
        return True

    def _line_end(self, start: int) -> tuple[int, int] | None:
        """Where the line that begins at `start` ends and the next one begins."""
        buffer = self._buffer
        # Earlier chunks are already searched; only a final CR may still wait for its LF.
        search = max(start, self._scanned - 1)
        newline = buffer.find(b"\n", search)
        carriage = buffer.find(b"\r", search, newline if newline >= 0 else len(buffer))
        if carriage < 0:
            return None if newline < 0 else (newline, newline + 1)
        if carriage + 1 == len(buffer):
            # An LF may follow in the next chunk. The line must not wait for it (a CR-only stream would always be
            # one event late), so it ends here and `feed` drops the LF when it comes.
            self._after_cr = True
            return carriage, carriage + 1
        if buffer[carriage + 1] == 0x0A:
            return carriage, carriage + 2
        return carriage, carriage + 1

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        # `feed` checks unfinished lines against the same bound, so the result does not depend on the chunks.
        if self._size + len(line) > self._max:
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(line) + 1
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode(errors="replace")
        elif name == b"event":
            self._event = value.decode(errors="replace")
        elif name == b"retry" and value.isdigit() and len(value) <= _RETRY_DIGITS:
            self.retry_ms = int(value)
        return None

    def _dispatch(self) -> Event | None:
        event = None
        if self._data or self._id is not None:
            event = Event(b"\n".join(self._data), self._id, self._event or "message")
        self._data, self._size, self._id, self._event = [], 0, None, ""
        return event


def encode(data: bytes) -> bytes:
    """One `message` event with one JSON message, which may contain spliced, pretty-printed JSON."""
    return b"event: message\ndata: %b\n\n" % jsonrpc.without_line_ends(data)
