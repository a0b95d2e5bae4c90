"""Replies byte by byte: what is understood, what is refused, and which connections are used again."""

import asyncio
import gc
import weakref

import pytest

from gateway.http_client.client import HttpClient
from gateway.http_client.errors import MalformedReply, NoReply, ReplyCut
from gateway.http_client.reply_parser import MAX_HEAD_BYTES, MAX_INTERIM_REPLIES, ReplyParser
from gateway.runtime.tasks import Tasks
from tests.support.fake_http import OK, FakeHttp, Script, Wire, answers, closes_when_used_again, says, stays
from tests.support.fake_transport import Begun
from tests.support.reply_recorder import COMPLETE, Recorder, Sender, raises_at
from tests.support.workbench import eventually

H = b"HTTP/1.1 200 OK\r\n"
CHUNKED = H + b"Transfer-Encoding: chunked\r\n\r\n"


# -- replies that are understood --------------------------------------------------------------------------------------

UNDERSTOOD: list[tuple[str, list[bytes], bytes]] = [
    # (what is special, what the server sends before it waits for the next request, the body)
    ("content length", [OK], b"ok"),
    ("chunks", [CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"], b"ok"),
    ("a chunk extension", [CHUNKED + b'2;name="value"\r\nok\r\n0\r\n\r\n'], b"ok"),
    ("spaces behind a chunk size", [CHUNKED + b"2  \r\nok\r\n0\r\n\r\n"], b"ok"),
    ("trailers", [CHUNKED + b"2\r\nok\r\n0\r\nX: y\r\nX: z\r\n\r\n"], b"ok"),
    ("chunked in capitals", [H + b"Transfer-Encoding: CHUNKED\r\n\r\n2\r\nok\r\n0\r\n\r\n"], b"ok"),
    ("no reason phrase", [b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    (
        "HTTP/1.0 that keeps alive",
        [b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"],
        b"ok",
    ),
    ("an offer to upgrade", [H + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    ("an empty header", [H + b"X-Empty:\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    ("100 Continue", [b"HTTP/1.1 100 Continue\r\n\r\n" + OK], b"ok"),
    ("103 with headers", [b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", OK], b"ok"),
    ("interim replies", [b"HTTP/1.1 102 Processing\r\n\r\n" * MAX_INTERIM_REPLIES, OK], b"ok"),
    ("204", [b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ("204 with a length", [b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"], b""),
    ("304 with a length", [b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"], b""),
    ("an empty body", [H + b"Content-Length: 0\r\n\r\n"], b""),
    ("an error status", [b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
]


@pytest.mark.parametrize(("what", "parts", "body"), UNDERSTOOD, ids=[each[0] for each in UNDERSTOOD])
async def test_a_complete_reply_leaves_a_connection_that_is_used_again(
    client: HttpClient, what: str, parts: list[bytes], body: bytes
) -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.say(*parts)

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            heard = await sender.send()
            assert heard.words == (COMPLETE if body else ["head", "end"])
            assert heard.body == body
            assert heard.head.reason in {"OK", "", "No Content", "Not Modified", "Busy"}
            assert not {b"Link", b"X"} & {name for name, _ in heard.head.fields}
        assert server.connections == 1


ONCE: list[tuple[str, list[bytes], bytes]] = [
    ("no length", [H + b"\r\n", b"o", b"k"], b"ok"),
    ("no length, no body", [H + b"\r\n"], b""),
    ("HTTP/1.0", [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    ("connection: close", [H + b"Connection: close\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    ("close among others", [H + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
    ("keep-alive for no time", [H + b"Keep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok"], b"ok"),
]


@pytest.mark.parametrize(("what", "parts", "body"), ONCE, ids=[each[0] for each in ONCE])
async def test_a_reply_after_which_the_upstream_closes_is_complete_and_the_connection_is_not_used_again(
    client: HttpClient, what: str, parts: list[bytes], body: bytes
) -> None:
    async with FakeHttp(says(*parts)) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            heard = await sender.send()
            assert heard.words == (COMPLETE if body else ["head", "end"])
            assert heard.body == body
        assert server.connections == 2


@pytest.mark.parametrize(
    "extra", [b"x", b"HT", OK, b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 408 Timeout\r\nConnection: close\r\n\r\n"]
)
@pytest.mark.parametrize("first", [OK, CHUNKED + b"2\r\nok\r\n0\r\n\r\n", H + b"Content-Length: 0\r\n\r\n"])
async def test_a_connection_with_bytes_behind_the_reply_is_closed_and_they_reach_no_request(
    client: HttpClient, first: bytes, extra: bytes
) -> None:
    async with FakeHttp(stays(first + extra)) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            heard = await sender.send()
            assert heard.words[-1] == "end"
            assert heard.body in (b"ok", b"")
        assert server.connections == 2
        assert not client.idle
        await server.left.wait()


async def test_bytes_on_an_idle_connection_close_it(tasks: Tasks) -> None:
    client = HttpClient(tasks, keep_alive_seconds=600)
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(OK)
        await go.wait()
        await wire.say(OK)
        await wire.gone()

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        await sender.send()
        assert len(client.idle) == 1
        go.set()
        await server.left.wait()
        await eventually(lambda: len(client.connections) == len(client.idle) == 0)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
async def test_a_reply_to_head_has_no_body_whatever_its_headers_say(client: HttpClient, reply: bytes) -> None:
    async with FakeHttp(stays(reply)) as server:
        heard = await Sender(client, server.url).send("HEAD", b"")
        assert heard.words == ["head", "end"]
        await server.left.wait()


# -- replies that are refused -----------------------------------------------------------------------------------------

SECRET = b"secret"
REFUSED: list[tuple[str, bytes]] = [
    ("not HTTP", b"SSH-2.0-secret\r\n"),
    ("a request", b"GET /secret HTTP/1.1\r\n\r\n"),
    ("HTTP/2", b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ("an unknown version", b"HTTP/1.9 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ("a status of two digits", b"HTTP/1.1 20 OK\r\n\r\n"),
    ("a status of four digits", b"HTTP/1.1 2000 OK\r\n\r\n"),
    ("a status below 100", b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n"),
    ("a switch of protocols", b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: secret\r\n\r\nsecret"),
    ("a switch without a word", b"HTTP/1.1 101 Go\r\n\r\nsecret"),
    ("too many interim replies", b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INTERIM_REPLIES + 1)),
    ("length and chunks", H + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    ("chunks and length", H + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    ("two lengths", H + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok"),
    ("a list of lengths", H + b"Content-Length: 2, 2\r\n\r\nok"),
    ("a negative length", H + b"Content-Length: -2\r\n\r\nok"),
    ("a length in hex", H + b"Content-Length: 0x2\r\n\r\nok"),
    ("an enormous length", H + b"Content-Length: 99999999999999999999\r\n\r\nok"),
    ("another coding", H + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    ("another coding last", H + b"Transfer-Encoding: chunked, gzip\r\n\r\nok"),
    ("chunked twice", H + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("another version", b"HTTP/0.9 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    ("chunks in HTTP/1.0", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    ("NUL in a value", H + b"X: sec\x00ret\r\n\r\n"),
    ("a control character in a value", H + b"X: sec\x01ret\r\n\r\n"),
    ("a carriage return in a value", H + b"X: sec\rret\r\n\r\n"),
    ("a line feed in a value", H + b"X: sec\nSet-Cookie: ret\r\nContent-Length: 2\r\n\r\nok"),
    ("bare line feeds", b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok"),
    ("a folded header", H + b"X: a\r\n secret\r\n\r\n"),
    ("a space before the colon", H + b"X : secret\r\n\r\n"),
    ("a header without a name", H + b": secret\r\n\r\n"),
    ("a header without a colon", H + b"secret\r\n\r\n"),
    ("a head of 1 MB", H + b"X: " + b"x" * 2**20),
    ("a head of many headers", H + b"X: x\r\n" * 200_000),
    ("a large head in one read", H + b"X: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\nContent-Length: 2\r\n\r\nok"),
    ("an endless reason", b"HTTP/1.1 200 " + b"x" * 2**20),
]


@pytest.mark.parametrize(("what", "reply"), REFUSED, ids=[each[0] for each in REFUSED])
async def test_a_reply_that_is_not_valid_fails_without_a_head_and_is_not_quoted(
    client: HttpClient, what: str, reply: bytes
) -> None:
    async with FakeHttp(stays(reply)) as server:
        heard = await Sender(client, server.url).send()
        assert heard.words == ["failed"]
        assert isinstance(heard.failure, MalformedReply)
        assert heard.failure.sent
        assert "secret" not in str(heard.failure)
        assert "sec" not in str(heard.failure).replace("second", "")
        assert str(heard.failure).isprintable()
        assert server.connections == 1
        assert not client.idle


REFUSED_BODIES: list[tuple[str, bytes]] = [
    ("a chunk size that is no number", b"zz\r\nsecret\r\n"),
    ("an empty chunk size", b"\r\nsecret\r\n"),
    ("an enormous chunk size", b"fffffffffffffffff\r\nsecret"),
    ("a negative chunk size", b"-2\r\nok\r\n"),
    ("a chunk longer than its size", b"2\r\nsecret\r\n"),
    ("a chunk line with a bare line feed", b"2\nok\r\n0\r\n\r\n"),
    ("an endless chunk extension", b"2;" + b"x" * 2**20),
    ("an endless trailer", b"0\r\nX: " + b"x" * 2**20),
    ("endless trailers", b"0\r\n" + b"X: x\r\n" * 200_000),
    ("a length in the trailer", b"2\r\nok\r\n0\r\nContent-Length: 7\r\n\r\n"),
    ("a line feed in a trailer", b"2\r\nok\r\n0\r\nX: sec\nY: ret\r\n\r\n"),
    ("a control character in a trailer", b"0\r\nX: sec\x01ret\r\n\r\n"),
]


@pytest.mark.parametrize(("what", "said"), REFUSED_BODIES, ids=[each[0] for each in REFUSED_BODIES])
async def test_a_body_whose_chunks_are_not_valid_never_ends_well(client: HttpClient, what: str, said: bytes) -> None:
    async with FakeHttp(stays(CHUNKED, said)) as server:
        heard = await Sender(client, server.url).send()
        assert heard.words[0] == "head"
        assert heard.words[-1] == "failed"
        assert isinstance(heard.failure, MalformedReply)
        assert "secret" not in str(heard.failure)


async def test_a_large_read_with_a_small_head_is_understood(client: HttpClient) -> None:
    body = b"x" * (3 * MAX_HEAD_BYTES)
    async with FakeHttp(answers(H + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))) as server:
        assert (await Sender(client, server.url).send()).body == body


async def test_many_small_chunks_are_not_taken_for_overhead(client: HttpClient) -> None:
    reply = CHUNKED + b"1;extension=x\r\nx\r\n" * 50_000 + b"0\r\n\r\n"
    async with FakeHttp(answers(reply)) as server:
        assert (await Sender(client, server.url).send()).body == b"x" * 50_000


# -- connections that end ---------------------------------------------------------------------------------------------


async def test_a_connection_that_ends_without_a_byte_is_no_reply_and_nothing_is_sent_again(client: HttpClient) -> None:
    async with FakeHttp(says()) as server:
        heard = await Sender(client, server.url).send()
        assert heard.words == ["failed"]
        assert isinstance(heard.failure, NoReply)
        assert heard.failure.sent
        assert len(server.requests) == 1


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize(
    "began",
    [
        b"H",
        H,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        H + b"Content-Length: 2\r\n\r\n",
        H + b"Content-Length: 2\r\n\r\no",
        CHUNKED,
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"2\r\nok\r\n0\r\n",
    ],
)
async def test_a_reply_that_breaks_off_is_never_taken_for_complete(client: HttpClient, began: bytes, how: str) -> None:
    recorders: list[Recorder] = []

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(began)
        if how == "half":
            wire.writer.write_eof()
            await wire.gone()
        elif how == "reset":
            if b"\r\n\r\n" in began and b" 200 " in began:
                await recorders[0].until(lambda: recorders[0].words)
            wire.reset()

    async with FakeHttp(script) as server:
        heard, _ = Sender(client, server.url).begin()
        recorders.append(heard)
        await heard.over()
        assert heard.words[-1] == "failed"
        # A reset may overtake the bytes before it.
        assert isinstance(heard.failure, (ReplyCut, NoReply) if how == "reset" else ReplyCut)
        assert len(server.requests) == 1


async def test_a_body_without_a_length_is_not_complete_after_a_reset(client: HttpClient) -> None:
    recorders: list[Recorder] = []

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(H + b"\r\npart")
        await recorders[0].until(lambda: recorders[0].parts)
        wire.reset()

    async with FakeHttp(script) as server:
        heard, _ = Sender(client, server.url).begin()
        recorders.append(heard)
        await heard.over()
        assert heard.words == ["head", "body", "failed"]
        assert isinstance(heard.failure, ReplyCut)


async def test_a_connection_that_the_upstream_closed_is_not_used_again(client: HttpClient) -> None:
    """The end of the connection lies in the socket; the event loop did not run since it came."""
    wires: list[Wire] = []

    async def script(wire: Wire) -> None:
        wires.append(wire)
        await wire.request()
        await wire.say(OK)
        await wire.request()
        await wire.say(OK)
        await wire.gone()

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        await sender.send()
        wires[0].shut_down()
        heard = await sender.send()
        assert heard.words == COMPLETE
        assert server.connections == 2


async def test_a_used_connection_that_closes_at_the_request_is_no_reply_and_nothing_is_sent_again(
    client: HttpClient,
) -> None:
    async with FakeHttp(closes_when_used_again(OK)) as server:
        sender = Sender(client, server.url)
        await sender.send()
        heard = await sender.send()
        assert isinstance(heard.failure, NoReply)
        assert heard.failure.sent
        assert len(server.requests) == 2


# -- the request's body -----------------------------------------------------------------------------------------------

LARGE = bytes(range(256)) * 40_000


async def test_a_large_body_is_sent_whole_to_an_upstream_that_reads_slowly(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.head()
            got = bytearray()
            while len(got) < len(LARGE):
                got += await wire.reader.read(65_536)
            await wire.say(OK if got == LARGE else b"HTTP/1.1 400 Different\r\nContent-Length: 0\r\n\r\n")

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            heard = await sender.send(body=LARGE)
            assert heard.head.status == 200
        assert server.connections == 1


@pytest.mark.parametrize("status", [200, 413])
async def test_a_reply_before_the_body_was_read_is_heard_and_the_connection_is_closed(
    client: HttpClient, status: int
) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.say(b"HTTP/1.1 %d Early\r\nContent-Length: 2\r\n\r\nok" % status)
        await wire.gone()

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        heard = await sender.send(body=LARGE)
        assert (heard.words, heard.head.status) == (COMPLETE, status)
        await server.left.wait()
        assert not client.idle


async def test_an_early_success_does_not_stop_the_body(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.say(H + b"Transfer-Encoding: chunked\r\n\r\n")
        assert await wire.reader.readexactly(len(LARGE)) == LARGE
        await wire.say(b"2\r\nok\r\n0\r\n\r\n")

    async with FakeHttp(script) as server:
        assert (await Sender(client, server.url).send(body=LARGE)).words == COMPLETE


async def test_a_body_is_not_sent_on_after_the_reply_is_complete(client: HttpClient) -> None:
    received: list[int] = []

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nok")
        await recorders[0].over()
        received.append(await wire.gone())

    recorders: list[Recorder] = []
    async with FakeHttp(script) as server:
        heard, _ = Sender(client, server.url).begin(body=LARGE * 4)
        recorders.append(heard)
        await server.left.wait()
        assert heard.words == COMPLETE
        await eventually(lambda: received)
        assert received[0] < len(LARGE * 4)


# -- what the listener does -------------------------------------------------------------------------------------------


async def test_a_paused_reply_stops_and_goes_on(client: HttpClient) -> None:
    size = 16 * 2**20
    sent = 0

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.say(H + b"Content-Length: %d\r\n\r\n" % size)
        while sent < size:
            await wire.say(b"x" * 65_536)
            sent += 65_536
        await wire.request()
        await wire.say(OK)

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        heard, pending = sender.begin()
        heard.react = lambda word: pending.pause_reading() if word == "head" else None
        await heard.until(lambda: heard.words)
        before = -1
        while before != sent:  # until the buffers of the kernel are full
            before = sent
            for _ in range(50):
                await asyncio.sleep(0)
        assert len(heard.body) < 2**20
        assert sent < size
        pending.resume_reading()
        await heard.over()
        assert len(heard.body) == size
        pending.resume_reading()
        assert (await sender.send()).words == COMPLETE, "the connection is used again"
        assert server.connections == 1


async def test_a_reply_that_ends_while_it_is_paused_leaves_a_connection_that_is_read(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        sender = Sender(client, server.url)
        for _ in range(3):
            heard, pending = sender.begin()
            heard.react = lambda word, pending=pending: pending.pause_reading()  # type: ignore[misc]
            await heard.over()
            assert heard.words == COMPLETE
        assert server.connections == 1


async def test_a_request_that_is_paused_before_it_is_sent_hears_nothing(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        heard, pending = Sender(client, server.url).begin()
        pending.pause_reading()
        await eventually(lambda: server.requests)
        for _ in range(20):
            await asyncio.sleep(0)
        assert heard.words == []
        pending.resume_reading()
        await heard.over()
        assert heard.words == COMPLETE


async def test_an_abort_before_the_reply_closes_the_connection(client: HttpClient) -> None:
    async with FakeHttp(stays()) as server:
        heard, pending = Sender(client, server.url).begin()
        await eventually(lambda: server.requests)
        pending.abort()
        pending.abort()
        await server.left.wait()
        assert heard.words == []


async def test_an_abort_after_the_reply_harms_no_other_request(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        sender = Sender(client, server.url)
        first, pending = sender.begin()
        await first.over()
        second, _ = sender.begin()
        pending.abort()
        pending.pause_reading()
        await second.over()
        assert second.words == COMPLETE
        assert server.connections == 1


async def test_a_connection_that_is_distrusted_late_ends_with_the_request_that_uses_it_then() -> None:
    begun = Begun().receive(OK)
    later = begun.heard_again()
    begun.pending.distrust()
    _ = begun.receive(OK)
    assert (later.words, later.body) == (COMPLETE, b"ok")
    begun.owner.freed.assert_called_once_with(begun.connection)
    assert not begun.connection.is_open


async def test_a_request_that_is_begun_at_the_end_of_another_uses_its_connection(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        sender = Sender(client, server.url)
        later: list[Recorder] = []
        first, _ = sender.begin()
        first.react = lambda word: later.append(sender.begin()[0]) if word == "end" else None
        await first.over()
        await later[0].over()
        assert later[0].words == COMPLETE
        assert server.connections == 1


@pytest.mark.parametrize("when", ["end", "failed"])
async def test_a_listener_that_raises_at_the_end_is_reported_and_harms_nothing_else(
    tasks: Tasks, client: HttpClient, when: str
) -> None:
    script: Script = answers(OK) if when == "end" else says()
    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        heard, _ = sender.begin()
        heard.react = raises_at(when)
        await heard.over()
        assert tasks.failures == 1
        tasks.failures = 0
        server.script = answers(OK)
        assert (await sender.send()).words == COMPLETE
        assert server.connections == (1 if when == "end" else 2)


async def test_a_closed_connection_leaves_no_circle_of_objects(client: HttpClient) -> None:
    async with FakeHttp(says(H + b"Connection: close\r\nContent-Length: 2\r\n\r\nok")) as server:
        await Sender(client, server.url).send()
        await eventually(lambda: not client.connections)
        gc.collect()
        gc.disable()
        try:
            before = [each for each in gc.get_objects() if type(each).__name__ == "Connection"]  # of other tests
            await Sender(client, server.url).send()
            await eventually(lambda: not client.connections)
            after = [each for each in gc.get_objects() if type(each).__name__ == "Connection"]
            assert not [each for each in after if not any(each is known for known in before)]
        finally:
            gc.enable()


IN_PARTS = [(what, b"".join(parts), body) for what, parts, body in UNDERSTOOD]
IN_PARTS += [
    ("many chunks", CHUNKED + b"1\r\no\r\n" * 9 + b"0\r\n\r\n", b"o" * 9),
    ("line ends in chunks", CHUNKED + b"4\r\n\r\n\r\n\r\n1\r\n\n\r\n0\r\n\r\n", b"\r\n\r\n\n"),
    ("size lines in chunks", CHUNKED + b"5\r\n0\r\n\r\n\r\n5\r\n1\r\nx\n\r\n0\r\n\r\n", b"0\r\n\r\n1\r\nx\n"),
]


@pytest.mark.parametrize(("what", "said", "body"), IN_PARTS, ids=[each[0] for each in IN_PARTS])
async def test_a_reply_is_understood_wherever_it_is_cut(what: str, said: bytes, body: bytes) -> None:
    cuts = [(said[:at], said[at:]) for at in range(1, len(said))]
    for parts in [*cuts, [said[at : at + 1] for at in range(len(said))]]:
        begun = Begun().receive(*parts)
        assert begun.heard.words == (COMPLETE if body else ["head", "end"]), parts
        assert begun.heard.body == body, parts
        begun.owner.freed.assert_called_once_with(begun.connection)


async def test_a_connection_that_the_upstream_wants_closed_is_not_kept_after_a_reply_in_parts() -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    begun = Begun().receive(head, b"1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n")
    assert (begun.heard.words, begun.heard.body) == (COMPLETE, b"ok")
    begun.owner.freed.assert_not_called()
    assert not begun.connection.is_open


@pytest.mark.parametrize("said", [b"x\r\n", b"-1\r\n", b"\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_reply_that_goes_on_with_chunks_that_are_not_valid_never_ends_well(said: bytes) -> None:
    begun = Begun().receive(CHUNKED, b"1\r\no\r\n", said)
    assert begun.heard.words == ["head", "body", "failed"]


@pytest.mark.parametrize(
    ("parts", "is_kept"),
    [
        *[(parts, False) for parts in ([H + b"\r\n"], [OK[:-1]], [OK[:-2]])],
        *[(parts, False) for parts in ([CHUNKED], [CHUNKED, b"1\r\no\r\n"], [CHUNKED + b"1\r\n", b"o\r\n"])],
        *[(parts, True) for parts in ([CHUNKED[:-1]], [CHUNKED, b"1"], [CHUNKED, b"1\r\n"], [CHUNKED, b"2\r\n\r\n"])],
    ],
)
async def test_a_reply_keeps_its_parser_only_in_its_head_and_in_the_middle_of_a_chunk(
    parts: list[bytes], *, is_kept: bool
) -> None:
    begun = Begun().receive(*parts)
    assert any(isinstance(each, ReplyParser) for each in gc.get_referents(begun.connection)) is is_kept


STAYS = stays()


@pytest.mark.parametrize("script", [answers(OK), says(), STAYS])
async def test_a_request_that_is_over_refers_to_no_listener(client: HttpClient, script: Script) -> None:
    async with FakeHttp(script) as server:
        heard, pending = Sender(client, server.url).begin()
        await eventually(lambda: server.requests)
        if script is not STAYS:
            await heard.over()
        pending.abort()
        assert pending.stage == "over"
        gone = weakref.ref(heard)
        del heard
        await eventually(lambda: gone() is None)


# -- replies that pass through ----------------------------------------------------------------------------------------

LENIENT = b"HTTP/1.1 200 OK\r\n%b\r\n\r\nok"
LENGTH = b"\r\nContent-Length: 2"


@pytest.mark.parametrize(("line", "value"), [(b"X: a\x01b", b"a\x01b"), (b"X: a\r\n b", b"a b")])
async def test_odd_values_of_headers_are_accepted_for_the_requests_that_allow_them_alone(
    client: HttpClient, line: bytes, value: bytes
) -> None:
    async with FakeHttp(answers(LENIENT % (line + LENGTH))) as server:
        sender = Sender(client, server.url)
        for _ in range(2):
            lenient, _ = sender.begin(is_lenient=True)
            await lenient.over()
            assert (lenient.words, lenient.head.get(b"x")) == (COMPLETE, value)
        strict = await sender.send()
        assert isinstance(strict.failure, MalformedReply)
        assert (len(server.requests), server.connections) == (3, 1)


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length : 2",
        *(b"X : 1" + LENGTH, b"X\t: 1" + LENGTH, b"X Y: 1" + LENGTH),
        *(b"X: a\nSet-Cookie: b" + LENGTH, b"X: a\r\n b\nSet-Cookie: c" + LENGTH, b"X: 1\n" + LENGTH),
    ],
)
async def test_what_two_readers_may_read_differently_is_refused_even_then(client: HttpClient, line: bytes) -> None:
    async with FakeHttp(answers(LENIENT % line)) as server:
        recorder, _ = Sender(client, server.url).begin(is_lenient=True)
        await recorder.over()
        assert isinstance(recorder.failure, MalformedReply)
