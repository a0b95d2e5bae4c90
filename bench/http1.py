"""Whole HTTP/1.1 messages out of a byte stream, as cheaply as pure Python can.

Both ends of the benchmark use it, so that the process under test dominates the machine and not its harness.
It trusts its peer (loopback, our own processes): no limits, no obsolete line folding, no trailers.
"""

from typing import NamedTuple


class Message(NamedTuple):
    """One request or response. `head` is lower-cased and starts with the start line."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head[9:12])

    def header(self, name: bytes) -> bytes:
        return header(self.head, name)


def header(head: bytes, name: bytes) -> bytes:
    """The value of a header, `name` in lower case; empty when absent."""
    start = head.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    return head[start : head.index(b"\r\n", start)].strip()


class Reader:
    """Incremental: bytes in, complete messages out. A body is framed by Content-Length or by chunks."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        self._buffer = self._buffer + data if self._buffer else data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Message | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self._buffer[: end + 2].lower()
        start = end + 4
        if header(head, b"transfer-encoding") == b"chunked":
            return self._chunked(head, start)
        stop = start + int(header(head, b"content-length") or 0)
        if len(self._buffer) < stop:
            return None
        body = self._buffer[start:stop]
        self._buffer = self._buffer[stop:]
        return Message(head, body)

    def _chunked(self, head: bytes, at: int) -> Message | None:
        """Starts again at the first chunk on every call: our messages have one or two."""
        parts: list[bytes] = []
        while True:
            line = self._buffer.find(b"\r\n", at)
            if line < 0:
                return None
            size = int(self._buffer[at:line].split(b";")[0], 16)
            at = line + 2 + size + 2
            if len(self._buffer) < at:
                return None
            if size == 0:
                self._buffer = self._buffer[at:]
                return Message(head, b"".join(parts))
            parts.append(self._buffer[line + 2 : at - 2])
