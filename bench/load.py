"""The load generator: keep-alive connections on raw asyncio, one request in flight on each.

No HTTP library, because the load shares the machine with what it measures. Throughput and latency are what
the machine gave at that moment; the CPU that the process under test spent is the figure that travels.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from bench.http1 import Message, Reader

# A process that never answers must end the run with a finding and not hang it.
SLICE_SECONDS = 300


class Connection(asyncio.Protocol):
    """One keep-alive connection; opens itself again when the server closed it between requests."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Message] | None = None
        self._beside: dict[str, Connection] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(exc or ConnectionError("closed before the reply was complete"))

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            assert self._reply is not None, "a reply that nobody asked for"
            self._reply.set_result(message)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.address.split(":")
        self._reader = Reader()
        await loop.create_connection(lambda: self, host, int(port))

    async def request(self, data: bytes) -> Message:
        if self._transport is None:
            await self.open()
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._reply

    def beside(self, address: str) -> "Connection":
        """The same client's second connection, kept and closed with this one."""
        return self.kept(address, lambda: Connection(address))

    def kept(self, name: str, make: "Callable[[], Connection]") -> "Connection":
        """As `beside`, for a connection of another kind."""
        if name not in self._beside:
            self._beside[name] = make()
        return self._beside[name]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        for connection in self._beside.values():
            connection.close()


# One operation on a connection, over when its last reply was checked; raises Wrong when that was not right.
Operation = Callable[[Connection], Awaitable[None]]


class Wrong(Exception):
    """A reply that is not the one for this request."""


class Measured(Protocol):
    """What the load goes to, and the CPU that it spends there."""

    @property
    def address(self) -> str: ...
    def cpu_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """What one short run of one kind of operation gave."""

    seconds: float
    operations: int
    p50_ms: float
    p99_ms: float
    cpu_us: float
    wrong: tuple[str, ...]

    @property
    def per_second(self) -> float:
        return self.operations / self.seconds


async def run(address: str, operation: Operation, count: int, clients: int) -> tuple[list[float], list[str]]:
    """Run `count` operations over `clients` connections: latencies in seconds, and what went wrong."""
    connections = [Connection(address) for _ in range(min(clients, count))]
    latencies: list[float] = []
    wrong: list[str] = []
    left = iter(range(count))

    async def worker(connection: Connection) -> None:
        # The iterator is shared: whoever is free takes the next one.
        for _ in left:
            start = time.perf_counter()
            try:
                await operation(connection)
            except (Wrong, OSError) as exc:
                wrong.append(f"{type(exc).__name__}: {exc}")
            latencies.append(time.perf_counter() - start)

    try:
        async with asyncio.timeout(SLICE_SECONDS):
            await asyncio.gather(*(worker(connection) for connection in connections))
    except TimeoutError:
        wrong.append(f"{count - len(latencies)} of {count} operations not done after {SLICE_SECONDS} s")
    finally:
        for connection in connections:
            connection.close()
    return latencies, wrong


async def measure(process: Measured, operation: Operation, count: int, clients: int) -> Slice:
    cpu = process.cpu_seconds()
    start = time.perf_counter()
    latencies, wrong = await run(process.address, operation, count, clients)
    seconds = time.perf_counter() - start
    cpu = process.cpu_seconds() - cpu
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * part)] * 1e3 if latencies else 0 for part in (0.5, 0.99))
    return Slice(seconds, count, p50, p99, cpu / count * 1e6, tuple(wrong))
