"""Which replies are recognised by an earlier one, and that llhttp would have read them in the same way."""

import asyncio
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http_client.client import HttpClient
from gateway.http_client.connection import Connection
from gateway.http_client.errors import ReplyCut
from gateway.http_client.familiar_heads import FamiliarHeads, FamiliarReply
from gateway.http_client.reply_parser import ReplyParser, SizedRest
from tests.support.fake_http import OK, FakeHttp, Wire, answers
from tests.support.fake_transport import Begun
from tests.support.reply_recorder import COMPLETE, Sender

DATED = (
    b"HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 10:00:00 GMT\r\nContent-Type: application/json; charset=utf-8\r\n"
    b"Mcp-Session-Id: one\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok"
)
LATER = DATED.replace(b"10:00:00", b"10:00:01").replace(b": one", b": two").replace(b"2\r\n\r\nok", b"5\r\n\r\nlater")
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = CHUNKED + b"A\r\ndata: {}\n\n\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"


def taught(*replies: bytes) -> FamiliarHeads:
    heads = FamiliarHeads()
    for reply in replies:
        heads.learn(reply)
    return heads


def test_a_reply_of_a_known_form_is_understood_with_its_own_values() -> None:
    found = taught(EMPTY, STREAM, DATED).reply(LATER)
    assert found is not None
    head, parts, rest = found
    assert (head.status, head.reason, head.content_type) == (200, "OK", "application/json")
    assert (head.content_length, head.get(b"mcp-session-id")) == (5, b"two")
    assert [name for name, _ in head.fields] == [
        b"Date",
        b"Content-Type",
        b"Mcp-Session-Id",
        b"Keep-Alive",
        b"Content-Length",
    ]
    assert (parts, rest, head.keep_alive_seconds) == ((b"later",), "kept", 5)


def test_the_head_of_a_reply_that_is_still_coming_does_not_keep_the_part_that_came_with_it() -> None:
    heads = taught(DATED)
    data = LATER.replace(b"Length: 5", b"Length: 99999") + b" " * 9000
    before = sys.getrefcount(data)
    found = heads.reply(data)
    assert found is not None
    head, _, rest = found
    assert sys.getrefcount(data) == before
    assert isinstance(rest, SizedRest)
    assert (rest.missing, head.get(b"mcp-session-id")) == (99999 - 9005, b"two")


@pytest.mark.parametrize(
    "reply",
    [
        LATER[: LATER.index(b"later") - 1],
        LATER + b"x",
        LATER.replace(b"Length: 5", b"Length: 4"),
        LATER.replace(b"Length: 5", b"Length: +5"),
        LATER.replace(b"Length: 5", b"Length: 5, 5"),
        LATER.replace(b"Length: 5", b"Length: 5\r\nContent-Length: 5"),
        LATER.replace(b"Length: 5", b"Length: 5\r\nTransfer-Encoding: chunked"),
        LATER.replace(b"200 OK", b"204 OK"),
        LATER.replace(b"HTTP/1.1", b"HTTP/1.0"),
        LATER.replace(b"timeout=5", b"timeout=1"),
        LATER.replace(b": two", b": \x01"),
        LATER.replace(b": two", b": \xff"),
        LATER.replace(b": two", b": " + b"x" * 8192),
        LATER.replace(b"\r\n", b"\n"),
        LATER.replace(b"Date: ", b"Date : "),
        b"HTTP/1.1 100 Continue\r\n\r\n" + LATER,
        STREAM[:-2],
        STREAM + b"x",
        STREAM.replace(b"A\r\n", b"A;name=value\r\n"),
        STREAM.replace(b"A\r\n", b"0xA\r\n"),
        STREAM.replace(b"A\r\n", b"B\r\n"),
        STREAM.replace(b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n"),
        CHUNKED + b"1\r\na\r\n" * 9 + b"0\r\n\r\n",
    ],
)
def test_whatever_deviates_is_not_recognised(reply: bytes) -> None:
    assert taught(DATED, STREAM).reply(reply) is None


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length:2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: \xff\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_a_reply_whose_body_may_be_read_in_two_ways_is_not_learnt(reply: bytes) -> None:
    assert taught(reply).reply(reply) is None


def test_the_forms_that_came_last_are_known() -> None:
    forms = [OK.replace(b"\r\n\r\n", b"\r\nX-%d: y\r\n\r\n" % number) for number in range(9)]
    heads = taught(*forms)
    assert [heads.reply(form) is not None for form in forms] == [False, *[True] * 8]


def test_a_server_with_ever_new_heads_is_given_up() -> None:
    heads = taught(*[OK.replace(b"\r\n\r\n", b"\r\nX-%d: y\r\n\r\n" % number) for number in range(40)])
    heads.learn(OK)
    assert heads.reply(OK) is None


@given(st.lists(st.sampled_from([b"Content-Length", b": ", b"5", b"\r\n", b" ", b"X", b"0", b"a", b"\n"]), max_size=9))
def test_what_is_recognised_is_what_llhttp_understands(pieces: list[bytes]) -> None:
    heads = taught(DATED, STREAM)
    for reply in (LATER, STREAM):
        begin, end = reply[: len(reply) // 2], reply[len(reply) // 2 :]
        changed = begin + b"".join(pieces) + end
        found = heads.reply(changed)
        if found is not None and found[2] == "kept":
            head, parts, rest = ReplyParser().feed(changed)
            assert head is not None
            assert (list(head.texts()), head.status) == (list(found[0].texts()), found[0].status)
            assert (list(parts), rest) == (list(found[1]), "kept")


# -- on a connection ------------------------------------------------------------------------------------------------


@pytest.fixture
def is_recognised(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each reply was recognised; nothing else shows it."""
    found: list[bool] = []
    recognised = FamiliarHeads.reply

    def watched(self: FamiliarHeads, data: bytes) -> FamiliarReply | None:
        reply = recognised(self, data)
        found.append(reply is not None)
        return reply

    monkeypatch.setattr(FamiliarHeads, "reply", watched)
    return found


async def test_a_recognised_reply_is_heard_like_any_other(client: HttpClient, is_recognised: list[bool]) -> None:
    async with FakeHttp(answers(DATED, LATER, STREAM, STREAM, EMPTY, EMPTY)) as server:
        sender = Sender(client, server.url)
        heard = [await sender.send() for _ in range(6)]
        assert [each.body for each in heard] == [b"ok", b"later", b"data: {}\n\n", b"data: {}\n\n", b"", b""]
        assert [each.words for each in heard] == [COMPLETE] * 4 + [["head", "end"]] * 2
        assert is_recognised == [False, True] * 3
        assert server.connections == 1


@pytest.mark.parametrize("reply", [LATER, STREAM])
async def test_a_reply_of_a_known_form_is_understood_wherever_it_is_cut(reply: bytes) -> None:
    body = b"later" if reply is LATER else b"data: {}\n\n"
    for parts in [(reply[:cut], reply[cut:]) for cut in range(1, len(reply))]:
        begun = Begun(taught(DATED, STREAM)).receive(*parts)
        assert (begun.heard.words, begun.heard.body) == (COMPLETE, body), parts
        begun.owner.freed.assert_called_once_with(begun.connection)


BEGUN = CHUNKED + b"2\r\nla\r\n"


async def test_chunks_that_come_one_after_the_other_take_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Begun(taught(DATED, STREAM))
    monkeypatch.setattr(ReplyParser, "__init__", Mock(side_effect=AssertionError("a parser was made")))
    _ = begun.receive(CHUNKED, b"2\r\nla\r\n", b"1\r\nt\r\n2\r\ner\r\n", b"0\r\n\r\n")
    assert (begun.heard.words, begun.heard.body) == (COMPLETE, b"later")
    begun.owner.freed.assert_called_once_with(begun.connection)


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        (LATER[:-2], b"erHTTP/1.1 200 OK\r\n"),
        (BEGUN, b"3\r\nter\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n"),
        (BEGUN, b"3\r\nter\r\n0\r\n\r\n0\r\n\r\n"),
    ],
)
async def test_bytes_behind_the_rest_of_a_familiar_reply_close_the_connection(begun: bytes, rest: bytes) -> None:
    it = Begun(taught(DATED, STREAM)).receive(begun, rest)
    assert (it.heard.words, it.heard.body) == (COMPLETE, b"later")
    it.owner.freed.assert_not_called()
    assert not it.connection.is_open


@pytest.mark.parametrize("begun", [LATER[:-3], BEGUN])
@pytest.mark.parametrize("end", [Connection.eof_received, lambda connection: connection.connection_lost(None)])
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "after one without a body"])
async def test_a_familiar_reply_that_breaks_off_is_never_taken_for_complete(
    begun: bytes, end: Callable[[Connection], None], *, is_second: bool
) -> None:
    it = Begun(taught(DATED, STREAM))
    heard = it.heard
    if is_second:
        _ = it.receive(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert heard.words == ["head", "end"]
        heard = it.heard_again()
    end(it.receive(begun).connection)
    assert (heard.words, heard.body) == (["head", "body", "failed"], b"la")
    assert isinstance(heard.failure, ReplyCut)
    assert it.owner.freed.call_count == is_second


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("when", ["head", "body"])
@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        (CHUNKED + b"1\r\nl\r\n" * 2 + b"0\r\n\r\n", b""),
        (LATER + b"x", b""),
        (LATER + LATER, b""),
        (LATER[:-5], b"later"),
        (CHUNKED, b"1\r\nl\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("taught_by", [(), (DATED, STREAM)], ids=["unknown", "familiar"])
async def test_a_listener_that_ends_in_a_reply_hears_nothing_more(
    begun: bytes, rest: bytes, when: str, taught_by: tuple[bytes, ...], *, raises: bool
) -> None:
    it = Begun(taught(*taught_by))

    def react(word: str) -> None:
        if word == when and raises:
            raise LookupError(word)
        if word == when:
            it.pending.abort()

    it.heard.react = react
    _ = it.receive(begun, *([rest] if rest and when == "body" else []))
    assert it.heard.words == ["head", *(["body"] if when == "body" else []), *(["failed"] if raises else [])]
    assert it.heard.failure is None or isinstance(it.heard.failure.__cause__, LookupError)
    assert not it.connection.is_open
    it.owner.freed.assert_not_called()


@pytest.mark.parametrize("cut", [(OK, len(OK) - 2), (STREAM, len(CHUNKED)), (STREAM, len(STREAM) - 5)])
async def test_a_form_is_learnt_from_a_reply_that_comes_in_parts(
    client: HttpClient, is_recognised: list[bool], cut: tuple[bytes, int]
) -> None:
    reply, at = cut

    async def script(wire: Wire) -> None:
        for _ in range(2):
            await wire.head()
            _ = await wire.reader.readexactly(2)
            await wire.say(reply[:at])
            await heads.wait()
            heads.clear()
            await wire.say(reply[at:])
        await wire.gone()

    heads = asyncio.Event()
    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            heard, _ = sender.begin()
            await heard.until(lambda heard=heard: heard.words)
            heads.set()
            await heard.over()
            assert heard.body == (b"ok" if reply is OK else b"data: {}\n\n")
        assert is_recognised == [False, True]
        assert server.connections == 1


async def test_a_reply_to_head_is_never_recognised(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        sender = Sender(client, server.url)
        _ = await sender.send()
        heard = await sender.send("HEAD", b"")
        assert heard.words == ["head", "end"]
        assert not client.idle


async def test_a_reply_after_which_the_server_closes_is_not_learnt(
    client: HttpClient, is_recognised: list[bool]
) -> None:
    async with FakeHttp(answers(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            assert (await sender.send()).words == COMPLETE
            assert not client.idle
        assert is_recognised == [False, False]
