"""What passes the relay is forwarded as it came, and what was said in it is seen."""

import asyncio
from typing import Any

import pytest

from gateway.tools.demo.message_reader import Side, WireMessage, watch
from gateway.tools.demo.relay import Relay
from gateway.tools.demo.sequence_diagram import draw, rows

SIDES: tuple[Side, ...] = ("old", "new")


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunked(b': hello\r\n\r\ndata: {"id":\r\nda', b'ta: 0, "method": "elicitation/create"}\r\n', b"\r\n")
    + b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"id":true}'
    + b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
    + b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
)


async def messages(*pieces: bytes) -> list[WireMessage]:
    seen: list[WireMessage] = []
    reader = asyncio.StreamReader()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(reader, "old", to_server=False, seen=seen.append))
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()
    return seen


async def test_messages_are_found_however_the_bytes_are_cut() -> None:
    whole = await messages(STREAM)
    assert [message.body for message in whole] == [
        {"id": 0, "method": "elicitation/create"},
        {"id": True},
        None,
    ]
    assert [message.streamed for message in whole] == [True, False, False]
    assert await messages(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == whole


@pytest.mark.parametrize(
    "rubbish", [b"\r\n\r\n\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_cannot_be_read_is_left_out(rubbish: bytes) -> None:
    assert [message.body for message in await messages(rubbish) if message.body] == []


async def test_the_relay_forwards_each_byte_at_once_and_passes_on_that_a_caller_left() -> None:
    gone = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        gone.set()
        writer.close()

    async with (
        asyncio.timeout(5),
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        Relay(server.sockets[0].getsockname(), "new", lambda _: None) as relay,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        for data in (b"\x00", b"not http at all", b"\r\n\r\n"):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
        writer.close()
        await gone.wait()


@pytest.mark.parametrize("width", [40, 79, 80, 100, 250])
def test_the_picture_fits_and_takes_messages_in_any_order_and_shape(width: int) -> None:
    bodies: list[Any] = [
        {"id": 7, "result": {"resultType": "input_required", "requestState": "mrtr1." + "x" * 1200}},
        {"id": 7, "method": "tools/call", "params": ["not", "an", "object"]},
        {"id": 8, "method": "tools/call", "params": {"inputResponses": {"key": "no object"}}},
        {"id": 8, "result": {"content": "not a list of blocks"}},
        {"id": 8, "result": {"resultType": "input_required", "inputRequests": {"key": None}}},
        {"id": 9, "result": {"action": "accept", "content": {"word": "x" * 300}}},
        {"id": 7, "error": {"code": -32602, "message": "Invalid or expired requestState"}},
        {"nothing": "known"},
        None,
    ]
    told = [
        WireMessage(side, to_server, "HTTP/1.1 202 Accepted", {}, body)
        for body in bodies
        for side in SIDES
        for to_server in (True, False)
    ]
    lines = draw(rows(told), width=width, color=False)
    assert max(map(len, lines)) <= min(width, 100)
    assert "mrtr1.…(1.2 kB)" in "\n".join(lines)
    assert not any("\033" in line for line in lines)
