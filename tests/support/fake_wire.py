"""A FAKE server of bytes: it sends each connection the same bytes, then closes it or leaves it open."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Final

_ID: Final = re.compile(rb'"id":("[^"]*")')


@asynccontextmanager
async def fake_wire(
    said: bytes | Callable[[bytes], bytes], *, times: int | None = 1, stays: bool = False
) -> AsyncIterator[str]:
    """Run it and return its URL; it sends the bytes `times` times, or endlessly if None.

    A function is given the JSON of the request's id.
    """
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            heard = await reader.read(1 if isinstance(said, bytes) else 65_536)
            if heard == b"":
                return
            sent = said if isinstance(said, bytes) else said(_ID.findall(heard)[0])
            each: Iterator[None] = repeat(None) if times is None else repeat(None, times)
            for _ in each:
                writer.write(sent)
                await writer.drain()
            if stays:
                while await reader.read(65_536):
                    pass
        except ConnectionError:
            pass
        finally:
            open_now.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, family=socket.AF_INET)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}/mcp"
    finally:
        server.close()
        for writer in open_now:
            writer.transport.abort()
