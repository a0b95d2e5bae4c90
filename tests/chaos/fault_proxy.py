"""A TCP forwarder between gateway and upstream whose connections a test can cut.

async with fault_proxy(server.port) as proxy, gateway(proxy.url) as gw:
    ...
    assert proxy.cut(b"POST") == 1  # the connections whose last request was a POST
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Pair:
    """One connection of the gateway, and its twin to the upstream."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    method: bytes = b""

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@dataclass
class FaultProxy:
    """Forwards bytes unchanged."""

    port: int
    """The upstream's port."""
    listener: asyncio.Server | None = None
    accepted: int = 0
    """How many answers and notifications the upstream accepted."""
    _pairs: set[_Pair] = field(default_factory=set)

    @property
    def url(self) -> str:
        assert self.listener is not None
        return f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}/mcp"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair((writer, back))
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, pair))
                group.create_task(self._pump(there, writer, None))
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair | None = None
    ) -> None:
        """Copy until either side ends; `pair` is given for the direction of requests."""
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                method = chunk.partition(b" ")[0]
                if pair is not None and method in {b"GET", b"POST", b"DELETE"}:
                    pair.method = method
                writer.write(chunk)
                await writer.drain()
                self.accepted += pair is None and chunk.startswith(b"HTTP/1.1 202")
        writer.close()

    async def accepts(self, since: int) -> None:
        """Wait until the upstream accepted one more, so that a later cut cannot lose it."""
        async with asyncio.timeout(5):
            while self.accepted <= since:
                await asyncio.sleep(0.01)

    def cut(self, method: bytes) -> int:
        """Break every connection whose last request had this method; return their number."""
        found = [pair for pair in self._pairs if pair.method == method]
        for pair in found:
            pair.abort()
        return len(found)


@asynccontextmanager
async def fault_proxy(port: int) -> AsyncIterator[FaultProxy]:
    """Run a proxy in the test's own event loop."""
    proxy = FaultProxy(port)
    proxy.listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield proxy
    finally:
        proxy.listener.close()
        for method in (b"", b"GET", b"POST", b"DELETE"):
            proxy.cut(method)
        await proxy.listener.wait_closed()
