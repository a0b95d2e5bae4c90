"""Replies that are written in one piece."""

from unittest.mock import AsyncMock, Mock

import pytest
from multidict import CIMultiDict

from gateway.http.json_reply import JsonReply, WholeReply, json_reply


def lines(reply: bytes) -> tuple[str, set[str], bytes]:
    """The status line, the headers but for the date, and the body."""
    head, _, body = reply.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return first, {line for line in rest if not line.startswith("Date: ")}, body


@pytest.mark.parametrize("close", ["", "Connection: close\r\n"])
def test_a_json_reply_has_its_length_its_type_and_its_id(close: str) -> None:
    first, headers, body = lines(json_reply(b"{}", "id-1", close))
    assert (first, body) == ("HTTP/1.1 200 OK", b"{}")
    own = {"Content-Length: 2", "Content-Type: application/json", "X-Request-Id: id-1"}
    assert headers == own | ({"Connection: close"} if close else set())


@pytest.mark.parametrize("keep_alive", [True, False])
def test_the_end_of_a_connection_is_announced(*, keep_alive: bool) -> None:
    http, transport = Mock(keep_alive=keep_alive), Mock()
    http.writer.output_size = 0
    reply = JsonReply(b"{}", "id-1")
    reply.send(http, transport)
    (written,) = transport.write.call_args.args
    assert (b"Connection: close" in written) is not keep_alive
    assert http.writer.output_size == len(written)


async def test_a_reply_to_a_client_that_has_left_is_a_broken_connection() -> None:
    for transport in (None, Mock(**{"is_closing.return_value": True})):
        reply = JsonReply(b"{}", "id-1")
        _ = await reply.prepare(Mock(transport=transport))
        with pytest.raises(ConnectionResetError):
            await reply.write_eof()


@pytest.mark.parametrize("paused", [True, False])
async def test_a_client_that_is_behind_is_waited_for(*, paused: bool) -> None:
    http = Mock(transport=Mock(**{"is_closing.return_value": False}))
    http.protocol.writing_paused, http.writer.output_size, http.writer.drain = paused, 0, AsyncMock()
    reply = JsonReply(b"{}", "id-1")
    _ = await reply.prepare(http)
    await reply.write_eof()
    assert http.writer.drain.await_count == paused


def test_a_whole_reply_has_the_headers_of_its_caller_but_its_own_length_and_id() -> None:
    given = CIMultiDict(
        [
            *(("content-type", "text/plain"), ("Date", "then"), ("Set-Cookie", "a"), ("Set-Cookie", "b")),
            *(("content-length", "99"), ("Server", "x"), ("x-request-id", "other")),
        ]
    )
    first, headers, body = lines(WholeReply(b"no", "id-1", 404, None, given).encoded(""))
    assert (first, body) == ("HTTP/1.1 404 Not Found", b"no")
    assert headers == {
        *("content-type: text/plain", "Set-Cookie: a", "Set-Cookie: b", "Content-Length: 2", "X-Request-Id: id-1"),
    }


def test_a_whole_reply_has_a_type_a_date_and_a_reason_even_if_nobody_gave_one() -> None:
    reply = WholeReply(b"", "id-1", 299, None, CIMultiDict())
    assert lines(reply.encoded(""))[:2] == (
        "HTTP/1.1 299 ",
        {"Content-Type: application/octet-stream", "Content-Length: 0", "X-Request-Id: id-1"},
    )
    assert b"\r\nDate: " in reply.encoded("")
    assert lines(WholeReply(b"", "id-1", 299, "As it was", CIMultiDict()).encoded(""))[0] == "HTTP/1.1 299 As it was"
