"""What the parser of one connection tells its listener, and what it says of the connection afterwards."""

import httptools
import pytest

from gateway.http_client.errors import MalformedReply
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.reply_parser import MAX_HEAD_BYTES, MAX_INTERIM_REPLIES, ReplyParser

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: timeout=7\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: y\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"


class Heard:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heads: list[ReplyHead] = []
        self.body = b""

    def on_head(self, head: ReplyHead) -> None:
        self.heads.append(head)

    def on_body(self, part: bytes) -> None:
        self.body += part


def parse(*pieces: bytes, is_head: bool = False, is_lenient: bool = False) -> tuple[ReplyParser, Heard]:
    """Parse one reply; raises the error behind that of httptools, or that of httptools."""
    parser, heard = ReplyParser(), Heard()
    parser.expect(heard, is_head=is_head, is_lenient=is_lenient)  # type: ignore[arg-type]
    for piece in pieces:
        try:
            parser.feed(piece)
        except httptools.HttpParserCallbackError as exc:
            raise exc.__context__ or exc from None
    return parser, heard


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reply", [OK, CHUNKED, INTERIM * 3 + OK])
def test_a_reply_is_told_however_it_arrives(reply: bytes, size: int) -> None:
    parser, heard = parse(*[reply[start : start + size] for start in range(0, len(reply), size)])
    (head,) = heard.heads
    assert (head.status, head.version, head.reason, heard.body) == (200, "1.1", "OK", b"ok")
    assert head.get(b"link") is head.get(b"x") is None, "neither interim replies nor trailers belong to it"
    assert (parser.is_complete, parser.keeps_alive, parser.has_extra) == (True, True, False)
    assert parser.keep_alive_seconds == (None if reply is CHUNKED else 7)


def test_it_knows_how_a_body_ends() -> None:
    sized, chunked, closed = (
        parse(head)[0] for head in (OK[:-2], CHUNKED.partition(b"2\r\n")[0], b"HTTP/1.0 200 OK\r\n\r\n")
    )
    assert (sized.is_sized, sized.is_between_chunks, sized.until_close) == (True, False, False)
    assert (chunked.is_sized, chunked.is_between_chunks, chunked.until_close) == (False, True, False)
    assert (closed.is_sized, closed.is_between_chunks, closed.until_close) == (False, False, True)
    assert [sized.will_keep_alive, chunked.will_keep_alive, closed.will_keep_alive] == [True, True, False]
    chunked.feed(b"2\r\no")
    assert not chunked.is_between_chunks
    chunked.feed(b"k\r\n")
    assert chunked.is_between_chunks


def test_the_reply_to_head_is_complete_with_its_head() -> None:
    parser, heard = parse(OK[:-2], is_head=True)
    assert (parser.is_complete, len(heard.heads), heard.body) == (True, 1, b"")


def test_what_comes_behind_a_reply_is_noticed_and_not_told() -> None:
    parser, heard = parse(OK + OK)
    assert (parser.has_extra, len(heard.heads), heard.body) == (True, 1, b"ok")


def test_the_next_reply_goes_to_the_next_listener() -> None:
    parser, first = parse(OK)
    second = Heard()
    parser.expect(second, is_head=False, is_lenient=False)  # type: ignore[arg-type]
    parser.feed(OK.replace(b"ok", b"no"))
    assert (first.body, second.body) == (b"ok", b"no")


def test_a_muted_or_released_parser_tells_nothing() -> None:
    parser, heard = parse(OK[:-2])
    parser.mute()
    parser.feed(b"ok")
    parser.release()
    parser.feed(OK)
    assert (len(heard.heads), heard.body, parser.will_keep_alive) == (1, b"", False)


@pytest.mark.parametrize("keeps_alive", [True, False])
def test_another_parser_goes_on_behind_a_chunk(*, keeps_alive: bool) -> None:
    heard = Heard()
    parser = ReplyParser.between_chunks(heard, keeps_alive=keeps_alive)  # type: ignore[arg-type]
    parser.feed(b"2\r\nok\r\n0\r\n\r\n")
    assert (heard.heads, heard.body, parser.is_complete, parser.keeps_alive) == ([], b"ok", True, keeps_alive)


def test_interim_replies_are_left_out_up_to_a_bound() -> None:
    parser, _ = parse(INTERIM * MAX_INTERIM_REPLIES + OK)
    assert not parser.is_continued
    assert parse(b"HTTP/1.1 100 Continue\r\n\r\n" + INTERIM)[0].is_continued
    with pytest.raises(MalformedReply, match="more than 16 interim replies"):
        _ = parse(INTERIM * (MAX_INTERIM_REPLIES + 1))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"),
        (b"HTTP/1.1 099 No\r\n\r\n", "status 99"),
        (OK.replace(b"/1.1", b"/0.9"), "HTTP version 0.9"),
        (OK.replace(b"Content-Length: 2", b"Transfer-Encoding: gzip"), "a transfer coding"),
        (CHUNKED.replace(b"chunked", b"chunked\r\nTransfer-Encoding: chunked"), "a transfer coding"),
        (CHUNKED.replace(b"/1.1", b"/1.0"), "a transfer coding"),
        (OK.replace(b"Keep", b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\nKeep"), "a head of more than 65536 bytes"),
    ],
)
def test_a_reply_that_can_be_read_in_two_ways_is_refused(reply: bytes, why: str) -> None:
    with pytest.raises(MalformedReply, match=why):
        _ = parse(reply)


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        OK.replace(b"Keep", b"X: a\nSet-Cookie: b\r\nKeep"),
        OK.replace(b"Keep", b"X: a\r\n b\nSet-Cookie: c\r\nKeep"),
        OK.replace(b"OK\r\n", b"OK\nSet-Cookie: b\r\n"),
        OK.replace(b"\r\n\r\n", b"\r\n\n"),
        OK.replace(b"\r\n\r\n", b"\n\r\n"),
        OK.replace(b"\r\n", b"\n"),
        CHUNKED.replace(b"2\r\nok", b"2\nok"),
        CHUNKED.replace(b"ok\r\n", b"ok\n"),
        CHUNKED.replace(b"y\r\n", b"y\nZ: z\r\n"),
    ],
)
def test_no_parser_takes_a_bare_line_feed_for_the_end_of_a_line(reply: bytes, *, is_lenient: bool) -> None:
    with pytest.raises(httptools.HttpParserError):
        _ = parse(reply, is_lenient=is_lenient)


def test_a_large_body_that_comes_with_its_head_is_not_taken_for_a_large_head() -> None:
    body = b"x" * 2 * MAX_HEAD_BYTES
    parser, heard = parse(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert heard.body == body
    assert not parser.is_oversized


def test_much_that_is_no_body_is_oversized() -> None:
    parser, _ = parse(CHUNKED[:-2], b"Y: " + b"x" * MAX_HEAD_BYTES)
    assert parser.is_oversized


def test_only_a_lenient_parser_takes_folded_headers_and_none_takes_a_space_behind_a_name() -> None:
    folded, spaced = OK.replace(b"Keep", b"X: a\r\n b\r\nKeep"), OK.replace(b"Length:", b"Length :")
    assert parse(folded, is_lenient=True)[1].body == b"ok"
    with pytest.raises(httptools.HttpParserError):
        _ = parse(folded)
    with pytest.raises(MalformedReply, match="not a token"):
        _ = parse(spaced, is_lenient=True)
    with pytest.raises(httptools.HttpParserError):
        _ = parse(spaced)
