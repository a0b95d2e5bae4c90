"""Requests whose body waits for `100 Continue`, and connections over unix sockets or from a chosen address."""

import asyncio
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.http_client.client import HttpClient
from gateway.http_client.connection import PendingRequest, Sending
from gateway.http_client.connector import Connector
from gateway.http_client.errors import MalformedReply, NoReply, NotConnected, ReplyCut
from gateway.http_client.origin import Origin
from gateway.runtime.tasks import Tasks
from tests.support.fake_http import OK, FakeHttp, Wire, answers
from tests.support.reply_recorder import COMPLETE, Recorder
from tests.support.workbench import eventually

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REFUSED = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"


def ask(
    client: HttpClient, to: FakeHttp | Origin, body: bytes = b"{}", *, seconds: float = 20, **options: Any
) -> tuple[Recorder, PendingRequest]:
    origin = to if isinstance(to, Origin) else Origin("127.0.0.1", to.port)
    recorder = Recorder()
    head = b"POST /mcp HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    pending = PendingRequest(origin, recorder, head, body, seconds, awaits_continue=True, **options)
    client.begin(pending)
    return recorder, pending


@pytest.mark.parametrize("size", [2, 300_000])
@pytest.mark.parametrize(
    "said",
    [
        [CONTINUE],
        [bytes([byte]) for byte in CONTINUE],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n", CONTINUE],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" + CONTINUE],
        [b"HTTP/1.1 100 continue\r\nX: y\r\n\r\n"],
    ],
)
async def test_the_body_is_sent_when_the_server_asks_for_it(client: HttpClient, said: list[bytes], size: int) -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.head()
            body = asyncio.ensure_future(wire.reader.readexactly(size))
            for _ in range(20):
                await asyncio.sleep(0)
            ahead.append(body.done())
            await wire.say(*said)
            assert await body == bytes(size)
            await wire.say(OK)

    ahead: list[bool] = []
    async with FakeHttp(script) as server:
        for _ in range(3):
            heard, pending = ask(client, server, bytes(size))
            assert pending.awaits_continue
            await heard.over()
            assert heard.words == COMPLETE
            assert not pending.awaits_continue
        assert not any(ahead)
        assert server.connections == 1


async def test_a_refusal_comes_in_place_of_the_body_and_ends_the_connection(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.say(REFUSED)
        left.append(await wire.gone())

    left: list[int] = []
    async with FakeHttp(script) as server:
        for number in (1, 2):
            heard, pending = ask(client, server)
            await heard.over()
            assert (heard.words, heard.head.status) == (["head", "end"], 403)
            assert pending.awaits_continue
            await eventually(lambda number=number: len(left) == number)
        assert left == [0, 0], "the body was not sent"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("said", "failure", "is_sent"),
    [
        (b"", NoReply, False),
        (b"HTTP/1.1 1", ReplyCut, False),
        (b"garbage\r\n\r\n", MalformedReply, False),
        (CONTINUE, NoReply, True),
        (CONTINUE + b"garbage\r\n\r\n", MalformedReply, False),
        (CONTINUE + b"HTTP/1.1 200", ReplyCut, True),
    ],
)
async def test_a_failure_leaves_it_known_whether_the_body_was_sent(
    client: HttpClient, said: bytes, failure: type[Exception], *, is_sent: bool
) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.say(said)
        if is_sent:
            await wire.reader.readexactly(2)

    async with FakeHttp(script) as server:
        heard, pending = ask(client, server)
        await heard.over()
        assert isinstance(heard.failure, failure)
        assert pending.awaits_continue is not is_sent


async def test_a_fresh_connection_is_opened_beside_an_idle_one(client: HttpClient) -> None:
    async with FakeHttp(answers(CONTINUE + OK)) as server:
        for count, is_fresh in ((1, False), (2, True), (2, False)):
            sending: Sending = "fresh" if is_fresh else "usual"
            recorder = Recorder()
            head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
            origin = Origin("127.0.0.1", server.port)
            client.begin(PendingRequest(origin, recorder, head, b"{}", 20, sending=sending))
            await recorder.over()
            assert (recorder.words, server.connections) == (COMPLETE, count)


async def test_a_unix_socket_is_reached_and_kept(client: HttpClient, tmp_path: Path) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CONTINUE)
            await reader.readexactly(2)
            writer.write(OK)
        await reader.read()
        writer.close()

    path = tmp_path / "peer.sock"
    server = await asyncio.start_unix_server(serve, path)
    for _ in range(2):
        heard, _ = ask(client, Origin(str(path), 0))
        await heard.over()
        assert heard.words == COMPLETE
    assert connections == 1
    client.close()
    server.close()


async def test_a_unix_socket_that_is_gone_or_unused_says_why(client: HttpClient, tmp_path: Path) -> None:
    unused = tmp_path / "unused.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(unused))
    for path, cause in ((tmp_path / "gone.sock", FileNotFoundError), (unused, ConnectionRefusedError)):
        heard, pending = ask(client, Origin(str(path), 0))
        await heard.over()
        assert isinstance(heard.failure, NotConnected)
        assert isinstance(heard.failure.__cause__, cause)
        assert pending.awaits_continue


async def test_connections_come_from_the_chosen_address() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        seen.append(wire.writer.get_extra_info("peername")[0])
        await wire.say(OK)

    seen: list[str] = []
    client = HttpClient(Tasks(Mock()), connector=Connector("127.0.0.3"))
    async with FakeHttp(script) as server:
        recorder = Recorder()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        client.begin(PendingRequest(Origin("127.0.0.1", server.port), recorder, head, b"{}", 20))
        await recorder.over()
        assert (recorder.words, seen) == (COMPLETE, ["127.0.0.3"])
    client.close()
