"""A transparent TCP relay that copies its traffic to an observer.

It forwards every byte unchanged and at once. In this way the demo shows the wire without hooks in the server, the
gateway or the client.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.tools.demo.message_reader import HEAD_BYTES, Side, WireMessage, watch


class Relay:
    """Listens on a free loopback port, and connects each caller to the target."""

    def __init__(self, target: tuple[str, int], side: Side, seen: Callable[[WireMessage], None]) -> None:
        self._target = target
        self._side: Side = side
        self._seen = seen
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        # Suppressed, because asyncio would log a cancelled connection as an error of the server's callback.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._connect(reader, writer)
        self._connections.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            with contextlib.closing(target_writer):
                await asyncio.gather(
                    self._pump(reader, target_writer, to_server=True),
                    self._pump(target_reader, writer, to_server=False),
                )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        copy = asyncio.StreamReader(limit=HEAD_BYTES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(copy, self._side, to_server=to_server, seen=self._seen))
            try:
                while data := await reader.read(1 << 16):
                    # The observer comes first, so that no answer appears before its question.
                    copy.feed_data(data)
                    writer.write(data)
                    await writer.drain()
                # Half-close, so that the target sees a caller that went away: that is a cancellation.
                writer.write_eof()
            except OSError:
                writer.close()
            finally:
                copy.feed_eof()
