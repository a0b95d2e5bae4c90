"""Framing of MCP over stdio: one JSON-RPC message per line, read incrementally within a bound."""

from collections.abc import Iterator

from gateway.protocol import jsonrpc


class LineTooLong(ValueError):
    """A line is larger than its bound."""


class Lines:
    """Splits incoming bytes at LF, or CR LF, and skips empty lines."""

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


def one_line(message: bytes) -> bytes:
    """The same JSON as one line."""
    return jsonrpc.without_line_ends(message) + b"\n"


class TolerantLines:
    """Splits incoming bytes as `Lines` does, but skips a line that is too long, and goes on after it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._begun = bytearray()
        self._is_skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the lines that `data` completes, and None once for each line that is too long."""
        *whole, rest = data.split(b"\n")
        for end in whole:
            yield from self._take(end)
            if not self._is_skipping and (line := bytes(self._begun).rstrip(b"\r")):
                yield line
            self._begun.clear()
            self._is_skipping = False
        yield from self._take(rest)

    def _take(self, data: bytes) -> Iterator[None]:
        if self._is_skipping:
            return
        self._begun += data
        if len(self._begun) > self.max_bytes:
            self._begun.clear()
            self._is_skipping = True
            yield None
