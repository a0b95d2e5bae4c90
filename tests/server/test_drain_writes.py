"""A drain waits for replies that are being written: a request ends when its last byte is with the kernel."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.protocol import sse
from gateway.server.drain import drain
from tests.support.authority import Authority
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, text
from tests.support.gateway_process import gateway
from tests.support.noted_connections import NotedConnection
from tests.support.stand import Start
from tests.support.workbench import Client, later

SIZE = 12_000_000
"""More than the kernel takes of a reply that nobody reads."""
CALL = {"name": "tool", "arguments": {}}
TOKEN = {"progressToken": "p"}
STILL_THERE_SECONDS = 3.0
"""By then a process that does not wait for the replies has ended."""


class SlowClient:
    """A connection whose reply is not read before the test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, headers: Mapping[str, str], body: bytes) -> None:
        fields = {"Host": "127.0.0.1", "Content-Length": str(len(body)), "Connection": "close", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body)
        await self.writer.drain()

    async def message(self) -> Any:
        """Read the reply to its end; its last message, or None where it was cut short."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            try:
                data = await self._body(head)
            except asyncio.IncompleteReadError:
                return None
        if b"text/event-stream" in head:
            data = sse.Parser(1 << 26).feed(data)[-1].data
        return json.loads(data)

    async def _body(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" not in head:
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return await self.reader.readexactly(int(length))
        data = bytearray()
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            data += await self.reader.readexactly(size)
            _ = await self.reader.readexactly(2)
        return bytes(data)


@asynccontextmanager
async def slow(address: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[SlowClient]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=host if tls else None)
    try:
        yield SlowClient(reader, writer)
    finally:
        writer.transport.abort()


async def large(turn: Turn) -> None:
    """A result of SIZE bytes: as one body, or as an event after one of progress."""
    name = turn.body["params"]["name"]
    if name == "progress":
        await turn.notify("notifications/progress", {"progressToken": turn.id, "progress": 1})
        await turn.progress(1)
    await turn.result(text("x" * SIZE))


def legacy(name: str) -> tuple[dict[str, str], bytes]:
    """A call of the old era, which is passed through."""
    params = {"name": name, "arguments": {}, "_meta": {"progressToken": 1}}
    body = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}
    return {"Content-Type": "application/json", "Mcp-Session-Id": "old"}, json.dumps(body).encode()


async def test_a_drain_waits_for_the_bytes_below_tls(
    upstream: FakeUpstream, tmp_path: Path, begin: Start, accepted: list[NotedConnection]
) -> None:
    ca = Authority(tmp_path)
    stand = await begin(tls={"cert_file": str(ca.sign("gateway"))})
    upstream.tool(large)
    async with slow(stand.gateway.listen, ssl.create_default_context(cafile=ca.file)) as client:
        await client.send(*stand.client().build("tools/call", CALL))
        _ = await client.reader.readuntil(b"\r\n\r\n")
        (connection,) = accepted
        transport = connection.transport
        read = 0
        while transport.get_write_buffer_size():
            read += len(await client.reader.read(65_536))
        assert read < SIZE, "all that is left is below TLS"
        draining = later(drain(stand.gateway, delay_seconds=0))
        _ = await asyncio.wait((draining,), timeout=0.2)
        assert not draining.done()
        async with asyncio.timeout(DEADLINE):
            assert read + len(await client.reader.read()) > SIZE
            await draining


async def test_a_drain_does_not_wait_longer_than_it_may(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 0.1})
    upstream.tool(large)
    async with slow(stand.gateway.listen) as client:
        await client.send(*stand.client().build("tools/call", CALL))
        await upstream.saw("tools/call")
        await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), DEADLINE)


async def test_a_connection_that_is_idle_does_not_hold_a_drain_up(begin: Start) -> None:
    stand = await begin()
    async with slow(stand.gateway.listen), slow(stand.gateway.admin):
        assert (await stand.client().call()).text == "done"
        await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), DEADLINE)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "is_secure"), [("body", False), ("body", True), ("streams", False)], ids=["body", "body, TLS", "streams"]
)
async def test_a_process_ends_when_its_last_reply_is_written(
    upstream: FakeUpstream, tmp_path: Path, kind: str, *, is_secure: bool
) -> None:
    """None of the replies is read before SIGTERM; a body is written when nothing else is left to do for it."""
    ca = Authority(tmp_path)
    sections: dict[str, Any] = {"hold": {"drain_seconds": 20}}
    if is_secure:
        sections["tls"] = {"cert_file": str(ca.sign("gateway"))}
    context = ssl.create_default_context(cafile=ca.file) if is_secure else None
    upstream.tool(large)
    upstream.known.add("old")
    async with gateway(upstream.url, **sections) as gw, AsyncExitStack() as stack:
        modern = Client(gw.http, gw.url)
        requests = [modern.build("tools/call", CALL)]
        if kind == "streams":
            progress = modern.build("tools/call", {**CALL, "name": "progress"}, TOKEN)
            requests = [progress, legacy("tool"), legacy("progress")]
        clients = [await stack.enter_async_context(slow(gw.base, context)) for _ in requests]
        idle = await stack.enter_async_context(slow(gw.base, context))
        for client, (headers, body) in zip(clients, requests, strict=True):
            await client.send(headers, body)
        await upstream.saw("tools/call", len(requests))
        for client in clients:  # the head, which comes with the first bytes of the body
            assert await client.reader.readexactly(5) == b"HTTP/"
        gw.terminate()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(STILL_THERE_SECONDS):
                _ = await gw.exited()
        told = await asyncio.gather(*(client.message() for client in clients))
        assert [len(message["result"]["content"][0]["text"]) for message in told if message] == [SIZE] * len(requests)
        assert await gw.exited() == 0
        assert await idle.reader.read() == b""
