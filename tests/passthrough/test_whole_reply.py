"""A reply of a known form goes back as it would if its headers were looked at one by one."""

from typing import Any, cast

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.http.server import response
from gateway.http.server.request import HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.response import OWN, WholeResponse
from gateway.http.upstream_headers import passed_back
from gateway.http_client.familiar_heads import FamiliarHeads, FamiliarReply
from gateway.http_client.reply_head import ReplyHead
from gateway.passthrough import whole_reply
from gateway.passthrough.whole_reply import FamiliarResponse, start_of

BODY = b"{}"
TYPE = b"Content-Type: application/json\r\n"
DATE = b"Date: Sun, 22 Nov 2026 10:00:00 GMT\r\n"
HOP = b"Connection: X-Hop\r\nKeep-Alive: 5\r\n"


class FakeWire:
    """A wire whose connection may end with the reply."""

    is_last = False


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (response, whole_reply):
        monkeypatch.setattr(module, "http_date", lambda: b"Sun, 22 Nov 2026 11:11:11 GMT")


def request(*, is_last: bool = False) -> HttpRequest:
    wire = FakeWire()
    wire.is_last = is_last
    head = ReceivedHead("POST", "/", CIMultiDictProxy(CIMultiDict[str]()), URL("/"))
    return HttpRequest(head, RequestBody(is_complete=True), cast("Any", wire), "id-1")


def reply(lines: bytes, known: bytes | None = None, line: bytes = b"200 OK") -> FamiliarReply:
    """The reply with these headers of a server that has sent the known ones before, twice."""
    begin, end = b"HTTP/1.1 %b\r\n" % line, b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    heads = FamiliarHeads()
    heads.learn(begin + (lines if known is None else known) + end)
    if known is not None:
        earlier = heads.reply(begin + known + end)
        assert earlier is not None
        _ = start_of(earlier[0])
    found = heads.reply(begin + lines + end)
    assert found is not None, "it has the form of the other"
    return found[0]


def one_by_one(head: ReplyHead, *more: tuple[str, str]) -> WholeResponse:
    headers = passed_back(head)
    headers.extend(more)
    return WholeResponse(BODY, head.status, headers, head.reason or None)


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        (TYPE, None),
        (DATE + TYPE, DATE.replace(b"22", b"21") + TYPE),
        (b"", None),
        (b"Mcp-Session-Id: two\r\n" + TYPE + b"X-A: 100%b %s\r\n", b"Mcp-Session-Id: one\r\n" + TYPE + b"X-A: \r\n"),
        (HOP + b"X-Hop: b\r\n" + TYPE, HOP + b"X-Hop: a\r\n" + TYPE),
        (b"Server: x\r\nX-Request-Id: theirs\r\nx%b: 1\r\n" + TYPE, None),
        (b"Set-Cookie: a\r\nset-cookie: b\r\n" + TYPE, b"Set-Cookie: b\r\nset-cookie: a\r\n" + TYPE),
        (b"X-A: b:  c\r\n" + TYPE, b"X-A: c\r\n" + TYPE),
        (b"Content-Type: text/event-stream\r\n" + DATE, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("line", [b"200 OK", b"404 100% lost", b"404 ", b"299 Odd", b"500 Internal Server Error"])
@pytest.mark.parametrize("is_last", [False, True])
def test_it_goes_back_like_any_other(lines: bytes, known: bytes | None, line: bytes, *, is_last: bool) -> None:
    head, http = reply(lines, known, line), request(is_last=is_last)
    start = start_of(head)
    if start is None:
        assert b":  " in lines, "all others are recognised"
        return
    streamed = [("X-Accel-Buffering", "no")] if b"event-stream" in lines else []
    passed, other = FamiliarResponse(BODY, head.status, start), one_by_one(head, *streamed)
    assert passed.encoded(http) == other.encoded(http)
    assert (passed.status, passed.closes) == (other.status, other.closes)
    shown = CIMultiDict((name, value) for name, value in other.headers.items() if name.lower() not in OWN)
    _ = shown.setdefault("Content-Type", "application/octet-stream")
    _ = shown.setdefault("Date", response.http_date().decode())
    assert list(passed.headers.items()) == list(shown.items())


@pytest.mark.parametrize("value", [b"", b" a", b"a ", b"a  "])
def test_a_value_with_space_around_it_is_looked_at(value: bytes) -> None:
    assert start_of(reply(b"X-A: " + value + b"\r\n" + TYPE, b"X-A: a\r\n" + TYPE)) is None


def test_what_points_to_the_sign_in_is_left_to_those_who_know_the_gateways_address() -> None:
    for _ in range(2):
        assert start_of(reply(TYPE + b'WWW-Authenticate: Bearer realm="x"\r\n', line=b"401 Unauthorized")) is None


def test_a_head_that_llhttp_has_read_is_looked_at() -> None:
    assert start_of(ReplyHead(200, [(b"Content-Type", b"application/json")], b"OK")) is None
