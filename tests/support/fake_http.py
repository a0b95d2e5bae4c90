"""A FAKE HTTP server: what it says on each connection, and when, is a script of bytes."""

import asyncio
import os
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from types import TracebackType
from typing import Self

_ID = re.compile(rb'"id":("[^"]*")')
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Gone(Exception):
    """The client closed the connection."""


class Wire:
    """One connection as the script sees it."""

    def __init__(self, server: "FakeHttp", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._server = server

    async def request(self) -> bytes:
        """Read one whole request; raises Gone if none comes."""
        head = await self.head()
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await self.reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
        self._server.requests[-1] += body
        return head + body

    async def head(self) -> bytes:
        """Read the head of a request alone; raises Gone if none comes."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            raise Gone from exc
        self._server.requests.append(head)
        return head

    async def say(self, *parts: bytes) -> None:
        """Send bytes, each part as a read of its own as far as the kernel allows."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def gone(self) -> int:
        """Wait until the client has closed the connection; return how many bytes came before."""
        got = 0
        with suppress(ConnectionError):
            while data := await self.reader.read(65_536):
                got += len(data)
        self._server.left.set()
        return got

    def shut_down(self) -> None:
        """End the server's side at once, before the event loop runs again."""
        with socket.socket(fileno=self.duplicate()) as sock:
            sock.shutdown(socket.SHUT_WR)

    def duplicate(self) -> int:
        """Another descriptor of the socket, for what the event loop does not do."""
        return os.dup(self.writer.get_extra_info("socket").fileno())

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Wire], Awaitable[None]]


class FakeHttp:
    """The server. `script` runs once for each connection, which ends with it."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.left = asyncio.Event()
        """Set when a client that a script waited for has closed its connection."""
        self._tls = tls
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", port, family=socket.AF_INET, ssl=self._tls, limit=2**20
        )
        scheme = "http" if self._tls is None else "https"
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"{scheme}://{self.address}/mcp"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def stop_listening(self) -> None:
        """Refuse connections from now on; those that are open stay so."""
        self._server.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self.script(Wire(self, reader, writer))
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
        except (Gone, ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._running.discard(task)


class Proxy(FakeHttp):
    """A forwarder of bytes whose connections a test can break."""

    def __init__(self, to: str) -> None:
        super().__init__(self._forward)
        self._to = to
        self._methods: dict[Wire, bytes] = {}
        """Of the last request of each connection."""
        self.broken = 0
        self._stale = 0

    def cut(self, method: bytes) -> None:
        """Break each connection whose last request had this method."""
        for wire, last in self._methods.items():
            if last == method:
                wire.writer.transport.abort()

    def break_kept(self) -> None:
        """Break each present connection at its next bytes."""
        self._stale = self.connections

    async def _forward(self, wire: Wire) -> None:
        number = self.connections
        host, _, port = self._to.rpartition(":")
        there, to = await asyncio.open_connection(host, int(port))
        back = asyncio.get_running_loop().create_task(self._back(there, wire.writer))
        try:
            while data := await wire.reader.read(65_536):
                if number <= self._stale:
                    self.broken += 1
                    break
                if (method := data.partition(b" ")[0]) in {b"GET", b"POST", b"DELETE"}:
                    self._methods[wire] = method
                to.write(data)
                await to.drain()
        finally:
            _ = self._methods.pop(wire, None)
            back.cancel()
            await asyncio.wait((back,))
            to.transport.abort()
            wire.writer.transport.abort()

    async def _back(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await there.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def fake_wire(
    said: bytes | Callable[[bytes], bytes], *, times: int | None = 1, stays: bool = False
) -> AsyncIterator[str]:
    """Run a server that sends each connection these bytes, `times` times or endlessly (None); return its URL.

    A function is given the JSON of the request's id.
    """

    async def script(wire: Wire) -> None:
        heard = await wire.reader.read(1 if isinstance(said, bytes) else 65_536)
        if not heard:
            raise Gone
        sent = said if isinstance(said, bytes) else said(_ID.findall(heard)[0])
        for _ in repeat(None) if times is None else repeat(None, times):
            await wire.say(sent)
        if stays:
            _ = await wire.gone()

    async with FakeHttp(script) as fake:
        yield fake.url


def says(*parts: bytes) -> Script:
    """A script that answers one request with these bytes, then closes the connection."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(*parts)

    return script


def closes_when_used_again(reply: bytes) -> Script:
    """A script that takes a second request on a connection for one on a closed connection."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(reply)
        await wire.request()

    return script


def stays(*parts: bytes) -> Script:
    """A script that answers one request with these bytes, then waits until the client closes the connection."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(*parts)
        await wire.gone()

    return script


def answers(*replies: bytes) -> Script:
    """A script that answers each request on a connection with the next of these replies, the last one for ever."""

    async def script(wire: Wire) -> None:
        number = 0
        while True:
            await wire.request()
            await wire.say(replies[min(number, len(replies) - 1)])
            number += 1

    return script
