"""The status line of a reply with its headers, as bytes that are decoded when they are asked for."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What a client waits for that holds its body back, as the gateway writes it."""
_TIMEOUT: Final = re.compile(rb"(?:^|[,;\s])timeout\s*=\s*\"?(\d{1,6})", re.IGNORECASE)
_PRINTABLE: Final = re.compile(rb"[\x20-\x7e\x80-\xff]*")


class ReplyHead(msgspec.Struct, eq=False):
    """The head of one reply."""

    status: int
    _fields: list[tuple[bytes, bytes]] | None
    raw_reason: bytes = b""
    _first: dict[bytes, bytes] | None = None

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """The headers in their order, as they were sent."""
        assert self._fields is not None
        return self._fields

    def get(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        if self._first is None:
            self._first = {}
            for each, value in self.fields:
                _ = self._first.setdefault(each.lower(), value)
        found = self._first.get(name)
        return found if found is None else found.strip(b" \t")

    def get_all(self, name: bytes) -> list[bytes]:
        """All values of a header; `name` in lower case."""
        if self.get(name) is None:
            return []
        return [value.strip(b" \t") for other, value in self.fields if other.lower() == name]

    def text(self, name: bytes) -> str | None:
        """The first value of a header, bytes that are not UTF-8 as surrogates; `name` in lower case."""
        value = self.get(name)
        return value if value is None else value.decode("utf-8", "surrogateescape")

    def texts(self) -> Iterator[tuple[str, str]]:
        """All headers in their order, bytes that are not UTF-8 as surrogates."""
        for name, value in self.fields:
            yield name.decode("ascii"), value.strip(b" \t").decode("utf-8", "surrogateescape")

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters; empty if there is none."""
        value = self.get(b"content-type")
        return "" if value is None else value.partition(b";")[0].strip().lower().decode("latin-1")

    @property
    def content_length(self) -> int | None:
        """The length of the body, if the upstream gave one."""
        value = self.get(b"content-length")
        return None if value is None else int(value)

    @property
    def reason(self) -> str:
        """The reason phrase; empty if it has a character that cannot be sent on."""
        if _PRINTABLE.fullmatch(self.raw_reason) is None:
            return ""
        return self.raw_reason.decode("utf-8", "replace")

    @property
    def keep_alive_seconds(self) -> int | None:
        """How long the upstream keeps the connection open without a request, if it says so."""
        value = self.get(b"keep-alive")
        found = None if value is None else _TIMEOUT.search(value)
        return None if found is None else int(found[1])
