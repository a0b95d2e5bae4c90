"""What the parser of one connection tells its listener, and what it says of the connection afterwards."""

import httptools
import pytest

from gateway.http_client.errors import MalformedReply
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.reply_parser import MAX_HEAD_BYTES, ReplyParser

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


def test_only_a_lenient_parser_takes_folded_headers_and_none_takes_a_space_behind_a_name() -> None:
    folded, spaced = OK.replace(b"Keep", b"X: a\r\n b\r\nKeep"), OK.replace(b"Length:", b"Length :")
    assert parse(folded, is_lenient=True)[1].body == b"ok"
    with pytest.raises(httptools.HttpParserError):
        _ = parse(folded)
    with pytest.raises(MalformedReply, match="not a token"):
        _ = parse(spaced, is_lenient=True)
    with pytest.raises(httptools.HttpParserError):
        _ = parse(spaced)
