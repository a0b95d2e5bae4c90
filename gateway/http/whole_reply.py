"""A reply of any kind whose head and body are written at once."""

from http import HTTPStatus
from typing import Final

from multidict import CIMultiDict

from gateway.http.json_reply import JsonReply
from gateway.http.request_id import HEADER

_OWN: Final = frozenset({"content-length", "server", HEADER.lower()})


class WholeReply(JsonReply):
    """One body over HTTP/1.1 with the headers that the caller chose, whose values it has checked."""

    def __init__(
        self, body: bytes, request_id: str, status: int, reason: str | None, headers: CIMultiDict[str]
    ) -> None:
        super().__init__(body, request_id)
        self._status = status
        self._line = f"HTTP/1.1 {status} {_phrase(status) if reason is None else reason}\r\n"
        self._lines = headers

    def encoded(self, date: bytes, close: bytes) -> bytes:
        """The bytes of the whole reply."""
        lines = [f"{name}: {value}\r\n" for name, value in self._lines.items() if name.lower() not in _OWN]
        if "Content-Type" not in self._lines:
            lines.append("Content-Type: application/octet-stream\r\n")
        if "Date" not in self._lines:
            lines.append(f"Date: {date.decode()}\r\n")
        own = f"Content-Length: {len(self.body)}\r\n{HEADER}: {self._request_id}\r\n"
        return b"".join((f"{self._line}{''.join(lines)}{own}".encode(), close, b"\r\n", self.body))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
