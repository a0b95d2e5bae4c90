"""Replies that take long to parse: other connections are served meanwhile, and nothing that was received is lost."""

from pathlib import Path

import pytest

from gateway.http_client.client import HttpClient
from gateway.http_client.errors import ReplyCut
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.runtime.pieces import PIECE_BYTES
from tests.http_client.test_connector import sender
from tests.support.authority import Authority, server_context
from tests.support.fake_http import OK, FakeHttp, answers, says
from tests.support.fake_transport import Begun
from tests.support.reply_recorder import COMPLETE, Recorder, Sender
from tests.support.turns import FLOODS, SIZE, TINY_CHUNKS, Turns, gives_way

pytestmark = pytest.mark.usefixtures("busy_clock")

H = b"HTTP/1.1 200 OK\r\n"
CHUNKED = H + b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = b"Content-Type: text/event-stream\r\n"
LINES = FLOODS["event ids"]
SIZED = H + STREAM + b"Content-Length: %d\r\n\r\n" % len(LINES)
SHORT = H + STREAM + b"Content-Length: 2\r\n\r\nok"
MANY = SIZE // PIECE_BYTES // 2
"""In how many turns a flood is parsed at least."""
X = b"x" * (SIZE // 6)

REPLIES: list[tuple[str, bytes, bytes]] = [
    # (what is special, the reply, its body)
    ("chunks of one byte", CHUNKED + TINY_CHUNKS + b"0\r\n\r\n", X),
    ("one chunk", CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(LINES), LINES), LINES),
    ("a length", SIZED + LINES, LINES),
    ("until the end", H + b"\r\n" + LINES, LINES),
]


@pytest.mark.parametrize(("what", "reply", "body"), REPLIES, ids=[each[0] for each in REPLIES])
async def test_other_callbacks_run_between_the_pieces_of_a_reply(
    client: HttpClient, what: str, reply: bytes, body: bytes
) -> None:
    with Turns() as turns:
        async with FakeHttp(says(reply)) as server:
            heard, _ = Sender(client, server.url).begin()
            heard.react = turns.note
            await heard.over()
    assert (heard.words, heard.body) == (COMPLETE, body), what
    assert len(turns.noted) >= MANY


async def test_a_reply_whose_head_is_familiar_gives_way_too(client: HttpClient) -> None:
    async with FakeHttp(answers(SHORT, SIZED + LINES)) as server:
        sender = Sender(client, server.url)
        await sender.send()
        with Turns() as turns:
            heard, _ = sender.begin()
            heard.react = turns.note
            await heard.over()
    assert heard.body == LINES
    assert len(turns.noted) >= MANY
    assert server.connections == 1


@pytest.mark.parametrize(("what", "reply", "body"), REPLIES, ids=[each[0] for each in REPLIES])
async def test_the_end_of_tls_comes_behind_the_pieces(
    client: HttpClient, tmp_path: Path, what: str, reply: bytes, body: bytes
) -> None:
    ca = Authority(tmp_path)
    async with FakeHttp(says(reply), server_context(ca.sign("server"))) as server:
        with Turns() as turns:
            heard, _ = sender(client, server.url, ca_file=ca.file).begin()
            heard.react = turns.note
            await heard.over()
    assert (heard.words, heard.body) == (COMPLETE, body), what
    assert len(turns.noted) >= MANY


async def test_what_was_received_before_a_reset_is_heard_before_it() -> None:
    begun = Begun()
    begun.connection.data_received(CHUNKED + TINY_CHUNKS)
    begun.transport.abort()
    begun.connection.connection_lost(ConnectionResetError())
    assert await gives_way(lambda: begun.heard.failure is not None)
    await begun.heard.over()
    assert begun.heard.body == X
    assert isinstance(begun.heard.failure, ReplyCut)
    begun.owner.closed.assert_called_once_with(begun.connection)


async def test_what_comes_while_the_rest_waits_is_parsed_behind_it() -> None:
    begun = Begun()
    begun.connection.data_received(CHUNKED + TINY_CHUNKS)
    begun.connection.data_received(b"2\r\nyy\r\n0\r\n\r\n")
    await begun.heard.over()
    assert begun.heard.body == X + b"yy"
    assert begun.connection.is_open


async def test_a_connection_with_bytes_in_a_piece_behind_the_reply_is_closed_and_they_reach_no_request() -> None:
    size = PIECE_BYTES - len(CHUNKED) - len(b"fff\r\n\r\n0\r\n\r\n")
    reply = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"y" * size)
    assert len(reply) == PIECE_BYTES
    begun = Begun()
    begun.connection.data_received(reply + OK * 200)
    await begun.heard.over()
    assert begun.heard.words == COMPLETE
    begun.owner.freed.assert_not_called()
    assert not begun.transport.is_open


async def test_a_request_that_is_given_up_hears_no_more_pieces() -> None:
    begun = Begun()
    begun.connection.data_received(CHUNKED + TINY_CHUNKS)
    heard = len(begun.heard.body)
    begun.pending.abort()
    begun.connection.connection_lost(None)
    begun.owner.closed.assert_called_once_with(begun.connection)
    assert not await gives_way(lambda: len(begun.heard.body) == heard)


@pytest.mark.parametrize("is_paused", [True, False])
async def test_reading_goes_on_behind_the_pieces_unless_the_listener_wants_a_pause(*, is_paused: bool) -> None:
    begun = Begun()
    begun.connection.data_received(CHUNKED + TINY_CHUNKS)
    assert not begun.transport.is_read
    begun.pending.pause_reading()
    begun.pending.resume_reading()
    assert not begun.transport.is_read, "the rest is not parsed yet"
    if is_paused:
        begun.pending.pause_reading()
    await begun.heard.until(lambda: begun.heard.body == X)
    assert await gives_way(lambda: False)
    assert begun.transport.is_read is not is_paused
    begun.pending.resume_reading()
    assert begun.transport.is_read


async def test_the_next_request_on_the_connection_is_read() -> None:
    begun, later = Begun(), list[Recorder]()
    begun.heard.react = lambda word: later.append(begun.heard_again()) if word == "end" else None
    begun.connection.data_received(CHUNKED + TINY_CHUNKS + b"0\r\n\r\n")
    await begun.heard.over()
    assert await gives_way(lambda: False)
    assert begun.transport.is_read
    begun.connection.data_received(OK)
    assert later[0].body == b"ok"


async def test_a_large_body_that_is_only_kept_is_not_cut() -> None:
    familiar = FamiliarHeads()
    json = H + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    familiar.learn(json % 2)
    begun = Begun(familiar)
    begun.connection.data_received(json % (2 * SIZE) + b"y" * SIZE)
    begun.connection.data_received(b"z" * SIZE)
    assert begun.heard.parts == [b"y" * SIZE, b"z" * SIZE]
    assert begun.heard.words == COMPLETE
