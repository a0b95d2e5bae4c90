"""Framing of MCP over stdio: one JSON-RPC message per line, read incrementally within a bound."""

from collections.abc import Iterator

from gateway.protocol import jsonrpc


class Lines:
    """Splits incoming bytes at LF, or CR LF; skips empty lines, and goes on after a line that is too long."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._begun = bytearray()
        self._is_skipping = False

    @property
    def unfinished_bytes(self) -> int:
        """How much of a line is here that is not complete."""
        return len(self._begun)

    def drop(self) -> None:
        """Forget the line that has begun."""
        self._begun.clear()

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the lines that `data` completes, and None once for each line that is too long."""
        *whole, rest = data.split(b"\n")
        for end in whole:
            if not self._is_skipping:
                if len(self._begun) + len(end) > self._max_bytes:
                    yield None
                elif line := (bytes(self._begun) + end if self._begun else end).rstrip(b"\r"):
                    yield line
            self._begun.clear()
            self._is_skipping = False
        if not self._is_skipping:
            self._begun += rest
            if len(self._begun) > self._max_bytes:
                self._begun.clear()
                self._is_skipping = True
                yield None

    def end(self) -> Iterator[bytes | None]:
        """Yield the last line, which has no line end, once nothing more will come."""
        yield from self.feed(b"\n")


def one_line(message: bytes) -> bytes:
    """The same JSON as one line."""
    return jsonrpc.without_line_ends(message) + b"\n"
