"""Sends requests to a gateway as bytes, each over its own connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from tests.support.workbench import Stand


class RawConnection:
    """A connection for bytes that an HTTP library would not send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """Send nothing more, but go on reading."""
        self._writer.write_eof()

    async def line(self) -> bytes:
        async with asyncio.timeout(3):
            return await self._reader.readline()

    async def until(self, end: bytes) -> bytes:
        """Return what comes until these bytes, them included."""
        async with asyncio.timeout(3):
            return await self._reader.readuntil(end)

    async def exactly(self, size: int) -> bytes:
        """Return the next bytes."""
        async with asyncio.timeout(3):
            return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """Return everything that comes until the gateway closes."""
        async with asyncio.timeout(3):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


Raw = TypeVar("Raw", bound=RawConnection)


@asynccontextmanager
async def raw_connection(
    stand: Stand, address: str = "", own: str | None = None, kind: type[Raw] = RawConnection
) -> AsyncIterator[Raw]:
    """Connect to the listener for clients, or to another address; `own` is the client's own IP address."""
    host, _, port = (address or stand.gateway.listen).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=None if own is None else (own, 0))
    try:
        yield kind(reader, writer)
    finally:
        writer.close()


def request_head(stand: Stand, headers: dict[str, str], body: bytes | None) -> bytes:
    """Return the bytes of a request; without a body, the caller gives its length in `headers`."""
    lines = ["POST /mcp HTTP/1.1", f"Host: {stand.gateway.listen}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")
