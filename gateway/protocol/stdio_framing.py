"""Bytes to lines: the framing of MCP over stdio, one JSON-RPC message a line; incremental and bounded."""

from collections.abc import Iterator
from typing import Final

_SPACES: Final = bytes.maketrans(b"\r\n", b"  ")


class LineTooLong(ValueError):
    """A line is larger than its bound."""


class Lines:
    """Cuts what comes at LF; a CR before it belongs to the line's end too. Empty lines are left out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._begun = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes; raises LineTooLong."""
        *whole, rest = data.split(b"\n")
        for end in whole:
            if len(self._begun) + len(end) > self.max_bytes:
                raise LineTooLong(f"a line of more than {self.max_bytes} bytes")
            line = (bytes(self._begun) + end if self._begun else end).rstrip(b"\r")
            self._begun.clear()
            if line:
                yield line
        self._begun += rest
        if len(self._begun) > self.max_bytes:
            raise LineTooLong(f"a line of more than {self.max_bytes} bytes")


def without_line_ends(message: bytes) -> bytes:
    """The same JSON without line ends: between tokens they are white space, and strings cannot contain them."""
    if b"\n" in message or b"\r" in message:
        return message.translate(_SPACES)
    return message


def one_line(message: bytes) -> bytes:
    """The same JSON as one line."""
    return without_line_ends(message) + b"\n"
