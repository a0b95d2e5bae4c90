"""Responses: what their heads say, how their bodies end, and who waits for the client."""

from typing import Any, cast

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.http.server.request import HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.response import JsonResponse, StreamResponse, TextResponse, WholeResponse
from tests.support.fake_upstream import FakeUpstream, text
from tests.support.garbage import cycles
from tests.support.workbench import Client


class FakeWire:
    """A wire that keeps what is written."""

    is_behind = False
    is_last = False

    def __init__(self) -> None:
        self.written = b""
        self.waits = 0

    def write(self, data: bytes | memoryview) -> None:
        self.written += data

    async def send(self, data: bytes, *, in_chunks: bool = False) -> None:
        self.written += b"%x\r\n%b\r\n" % (len(data), data) if in_chunks and data else data

    async def drained(self) -> None:
        self.waits += 1


def request(method: str = "POST", *, is_1_1: bool = True, keep_alive: bool = True) -> tuple[HttpRequest, FakeWire]:
    wire = FakeWire()
    headers = CIMultiDictProxy(CIMultiDict[str]())
    head = ReceivedHead(method, "/", headers, URL("/"), is_1_1=is_1_1, keep_alive=keep_alive)
    http = HttpRequest(head, RequestBody(is_complete=True), cast("Any", wire))
    http.id = "id-1"
    return http, wire


def lines(reply: bytes) -> tuple[str, set[str], bytes]:
    """The status line, the headers but for the date, and the body."""
    head, _, body = reply.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return first, {line for line in rest if not line.startswith("Date: ")}, body


@pytest.mark.parametrize("closes", [False, True])
def test_a_json_response_has_its_length_its_type_and_its_id(*, closes: bool) -> None:
    http, wire = request()
    wire.is_last = closes
    first, headers, body = lines(JsonResponse(b"{}").encoded(http))
    assert (first, body) == ("HTTP/1.1 200 OK", b"{}")
    own = {"Content-Length: 2", "Content-Type: application/json", "X-Request-Id: id-1"}
    assert headers == own | ({"Connection: close"} if closes else set())


@pytest.mark.parametrize("response", [JsonResponse(b"{}"), TextResponse("{}"), WholeResponse(b"{}")])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_end_of_a_connection_is_announced(response: WholeResponse, *, keeps: bool) -> None:
    response.closes = False
    http, _ = request(keep_alive=keeps)
    first, headers, body = lines(response.encoded(http))
    assert (first, body) == ("HTTP/1.1 200 OK", b"{}")
    assert ("Connection: close" in headers, response.closes) == (not keeps, not keeps)


async def test_a_whole_response_waits_for_its_client() -> None:
    http, wire = request()
    assert JsonResponse(b"{}").finish(http) is None
    assert (wire.written.endswith(b"\r\n\r\n{}"), wire.waits) == (True, 0)
    wire.is_behind = True
    waiting = JsonResponse(b"{}").finish(http)
    assert waiting is not None
    await waiting
    assert wire.waits == 1


def test_a_whole_response_has_the_headers_of_its_caller_but_its_own_length_and_id() -> None:
    given = CIMultiDict(
        [
            *(("content-type", "text/plain"), ("Date", "then"), ("Set-Cookie", "a"), ("Set-Cookie", "b")),
            *(("content-length", "99"), ("Server", "x"), ("x-request-id", "other"), ("connection", "upgrade")),
        ]
    )
    first, headers, body = lines(WholeResponse(b"no", 404, given).encoded(request()[0]))
    assert (first, body) == ("HTTP/1.1 404 Not Found", b"no")
    assert headers == {
        *("content-type: text/plain", "Set-Cookie: a", "Set-Cookie: b", "Content-Length: 2", "X-Request-Id: id-1"),
    }


def test_a_whole_response_has_a_type_a_date_and_a_reason_even_if_nobody_gave_one() -> None:
    written = WholeResponse(b"", 299).encoded(request()[0])
    assert lines(written)[:2] == (
        "HTTP/1.1 299 ",
        {"Content-Type: application/octet-stream", "Content-Length: 0", "X-Request-Id: id-1"},
    )
    assert b"\r\nDate: " in written
    assert lines(WholeResponse(b"", 299, reason="As it was").encoded(request()[0]))[0] == "HTTP/1.1 299 As it was"


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_no_length(status: int) -> None:
    _, headers, body = lines(WholeResponse(b"x", status).encoded(request()[0]))
    assert body == b""
    assert not any(line.startswith("Content-") for line in headers)


def test_a_head_request_gets_the_length_of_what_it_does_not_get() -> None:
    _, headers, body = lines(WholeResponse(b"four").encoded(request("HEAD")[0]))
    assert body == b""
    assert "Content-Length: 4" in headers


async def streamed(http: HttpRequest, wire: FakeWire, **headers: str) -> bytes:
    response = StreamResponse(headers={name.replace("_", "-"): value for name, value in headers.items()})
    response.begin(http)
    await response.write(b"one")
    await response.write(b"")
    await response.write(b"two")
    await response.finish(http)
    await response.finish(http)
    return wire.written.partition(b"\r\n\r\n")[2]


async def test_a_stream_is_chunked_and_ends_once() -> None:
    http, wire = request()
    assert await streamed(http, wire) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert b"Transfer-Encoding: chunked" in wire.written


async def test_a_stream_of_a_known_length_is_written_as_it_is() -> None:
    http, wire = request()
    assert await streamed(http, wire, Content_Length="6") == b"onetwo"
    assert wire.written.count(b"Content-Length: 6") == 1
    assert b"Transfer-Encoding" not in wire.written


async def test_a_stream_over_http_1_0_ends_with_its_connection() -> None:
    http, wire = request(is_1_1=False, keep_alive=False)
    assert await streamed(http, wire) == b"onetwo"
    assert b"keep-alive" not in wire.written


async def test_a_head_request_gets_no_part_of_a_stream() -> None:
    http, wire = request("HEAD")
    assert await streamed(http, wire, Content_Length="6") == b""


async def test_a_large_reply_is_freed_once_it_is_sent(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.result(text("x" * 200_000)))
    with cycles() as found:
        assert len((await client.call("tool")).data) > 200_000
        _ = await client.post("server/discover")  # until the next request, aiohttp keeps the reply
    assert "gateway.http.server.response.WholeResponse" not in found
