"""A reply that goes back in one write, with a head whose form is known from an earlier reply of the same server.

What becomes of a head depends on its form, but for the values in it. So it is found out once for a form, and by the
same steps as for any other head (`upstream_headers.passed_back`, `server.response`).
"""

from http.client import responses
from itertools import compress
from typing import Final

import msgspec
from multidict import CIMultiDict

from gateway.http.server.request import REQUEST_ID, HttpRequest
from gateway.http.server.response import OWN, WholeResponse, http_date
from gateway.http.upstream_headers import passed_back
from gateway.http_client.familiar_heads import FamiliarReply
from gateway.http_client.reply_head import ReplyHead

_ID_HEADER: Final = REQUEST_ID.encode()


class _Template(msgspec.Struct, frozen=True, eq=False):
    """How the heads of one form go back."""

    text: bytes
    """The status line and the headers, with a place for each value; empty if it depends on the values."""
    kept: tuple[bool, ...] = ()
    """Which of the headers have a place."""
    has_date: bool = True


class FamiliarResponse(WholeResponse):
    """A whole response over HTTP/1.1, most of whose head is there already."""

    def __init__(self, body: bytes, status: int, start: bytes) -> None:
        """`start` is what `start_of` returns for the server's head, which is not kept: it has the body once more."""
        # Without the constructors of its bases, which need the headers one by one.
        self.body, self.status, self._start = body, status, start

    @property
    def headers(self) -> CIMultiDict[str]:  # type: ignore[override]
        """Made when somebody asks for them."""
        lines = self._start.decode().split("\r\n")[1:-1]
        return CIMultiDict([(name, value) for name, _, value in (line.partition(": ") for line in lines)])

    def encoded(self, http: HttpRequest) -> bytes:
        """See `WholeResponse`."""
        body, ending = self.body, self._connection_line(http).encode()
        return b"%b%b: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
            self._start,
            _ID_HEADER,
            http.id.encode(),
            len(body),
            ending,
            body,
        )


def start_of(head: ReplyHead) -> bytes | None:
    """Return what a response begins with that passes a head back; None if it has to be found out header by header."""
    if not isinstance(head, FamiliarReply):
        return None
    form = head.form
    template: _Template | None = form.template
    if template is None:
        template = form.template = _template(head)
    if not template.text:
        return None
    start = template.text % tuple(compress(head.values.groups(), template.kept))
    if b" \r\n" in start or b":  " in start:
        return None  # a value has space around it, or is empty, or only looks so
    return start if template.has_date else b"%bDate: %b\r\n" % (start, http_date())


def _template(head: FamiliarReply) -> _Template:
    """Find out what becomes of all heads of a form."""
    form, headers = head.form, passed_back(head)
    if "WWW-Authenticate" in headers:
        return _Template(b"")  # it will point to the gateway
    names = [name.decode() for name in form.names]
    kept = tuple(name in headers and name.lower() not in OWN for name in names)
    reason = form.reason.decode() or responses.get(form.status, "")
    lines = [f"HTTP/1.1 {form.status} {reason}\r\n".replace("%", "%%")]
    lines += [f"{name.replace('%', '%%')}: %b\r\n" for name in compress(names, kept)]
    if form.content_type == "text/event-stream" and "X-Accel-Buffering" not in headers:
        lines.append("X-Accel-Buffering: no\r\n")
    if "Content-Type" not in headers:
        lines.append("Content-Type: application/octet-stream\r\n")  # as `Response._head` does
    return _Template("".join(lines).encode(), kept, "Date" in headers)
