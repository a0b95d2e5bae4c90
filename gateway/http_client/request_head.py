"""The bytes of an outgoing request before its body.

A template holds what all requests of one kind have in common, so that a request formats only its own headers.

Rule: whatever a header value contains, it stays the value of that header. Line ends, NUL and other control characters
raise ValueError. So do the headers that delimit a message, which only this file writes.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from yarl import URL

_OWN: Final = frozenset(
    {"connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
_LINES: Final = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00-\x08\x0a-\x1f\x7f]*\r\n)*")
_METHOD: Final = re.compile(r"[A-Z]+")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods whose requests say nothing about a body that they do not have."""


class HeaderLines(NamedTuple):
    """Some headers as they are sent."""

    names: frozenset[str]
    """In lower case."""
    text: bytes

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> "HeaderLines":
        """Raise ValueError for headers that cannot be sent, without quoting a value."""
        pairs = list(pairs)
        text = "".join([f"{name}: {value}\r\n" for name, value in pairs])
        # The expression alone would take one value with a line end in it for two headers.
        if text.count("\r\n") != len(pairs) or _LINES.fullmatch(text) is None:
            raise ValueError("a header has a control character in its value, or a name that is not a token")
        names = frozenset(name.lower() for name, _ in pairs)
        for name in names & _OWN:
            raise ValueError(f"the header {name} is written by the HTTP client itself")
        return cls(names, text.encode("utf-8", "surrogateescape"))


class RequestHead:
    """The request line and the default headers of requests to one URL."""

    def __init__(self, method: str, url: URL) -> None:
        """Raises ValueError."""
        target = url.raw_path_qs
        if _METHOD.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
            raise ValueError("the method or the path of a request cannot be sent")
        self._defaults = {
            "Host": url.host_port_subcomponent or "",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": "mrtr-gateway",
        }
        """The headers of a request that gives none of its own by these names."""
        if url.raw_user is not None:
            password = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
            self._defaults["Authorization"] = f"Basic {password}"
        self._default_names = frozenset(name.lower() for name in self._defaults)
        self._line = f"{method} {target} HTTP/1.1\r\n".encode()
        self._starts: dict[frozenset[str], bytes] = {}
        """The beginnings of heads, by the defaults that they do without."""
        self._no_body = b"\r\n" if method in _WITHOUT_BODY else b"Content-Length: 0\r\n\r\n"

    def encoded(self, headers: Mapping[str, str] | HeaderLines, body_bytes: int) -> bytes:
        """The head of one request. A repeated header of `headers` is sent as often. Raises ValueError."""
        lines = headers if isinstance(headers, HeaderLines) else HeaderLines.of(headers.items())
        replaced = lines.names & self._default_names
        start = self._starts.get(replaced)
        if start is None:
            kept = HeaderLines.of(each for each in self._defaults.items() if each[0].lower() not in replaced)
            start = self._starts[replaced] = self._line + kept.text
        end = b"Content-Length: %d\r\n\r\n" % body_bytes if body_bytes else self._no_body
        return start + lines.text + end
