"""The host at the other end of this process's standard streams.

Only MCP messages may go to the host's stdout. So the real stdout is moved to another file descriptor first, and
whatever else writes to stdout writes to stderr.
"""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from gateway.protocol.stdio_framing import Lines, one_line
from gateway.runtime.budget import Budget, Share
from gateway.runtime.pieces import Turn, cut
from gateway.runtime.written_pipe import WrittenPipe

_CHUNK_BYTES: Final = 65_536
HOST: Final = b"host"
"""The principal of every host: there is one."""


class Host(WrittenPipe):
    """The lines of one host, in both directions; the protocol of the pipe to it."""

    def __init__(self, max_bytes: int, unread: Budget) -> None:
        """`max_bytes` limits a line of the host; `unread` counts what the host has not read."""
        super().__init__()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the host does not read any more."""
        self._framing = Lines(max_bytes)
        self._unread = unread
        self._behind = self.share_unread()
        self._reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        self._source: asyncio.ReadTransport
        self._pumps: list[threading.Thread] = []

    async def open(self, stdin: int, stdout: int) -> None:
        """Take these file descriptors over."""
        loop = asyncio.get_running_loop()
        sink = os.fdopen(self._awaitable(stdout, is_input=False), "wb", buffering=0)
        _ = await loop.connect_write_pipe(lambda: self, sink)
        source = os.fdopen(self._awaitable(stdin, is_input=True), "rb", buffering=0)
        self._source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), source)

    async def lines(self) -> AsyncIterator[bytes | None]:
        """Yield each line until the host closes its end; None stands for a line that is too long."""
        while chunk := await self._reader.read(_CHUNK_BYTES):
            turn = Turn()
            for piece in cut(chunk):
                for line in self._framing.feed(piece):
                    yield line
                    await turn.give_way()
                await turn.give_way()  # a piece may have no line to yield
        for line in self._framing.end():
            yield line

    def send(self, message: bytes) -> None:
        """Write one message without waiting; if the host does not read, its bytes count in the budget."""
        if self.gone.done() or self.pipe.is_closing():
            return
        self.pipe.write(one_line(message))
        self.count_unread()

    async def write(self, message: bytes) -> None:
        """Write one message, and wait until the pipe has taken everything; raises ConnectionError."""
        self.send(message)
        if self.free is not None:
            _ = await asyncio.wait((self.free, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if self.gone.done():
            raise ConnectionResetError("the host does not read any more")

    def share_unread(self) -> Share:
        """Return a share for what waits for the host elsewhere."""
        return self._unread.share(self.lost)

    def count_unread(self) -> None:
        """Count what the pipe has not taken."""
        self._behind.hold(self.pipe.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The pipe has taken everything."""
        super().resume_writing()
        self.count_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """The pipe is closed."""
        super().connection_lost(exc)
        self.lost()

    def lost(self) -> None:
        """The host does not read any more, or reads too slowly."""
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self, seconds: float) -> None:
        """Write what is left, for at most so long."""
        if self.free is not None and not self.gone.done():
            _ = await asyncio.wait((self.free, self.gone), timeout=seconds)
        self.pipe.abort()  # `close` would go on writing to a host that does not read
        self._source.close()
        self._behind.release()
        for pump in self._pumps:
            await asyncio.to_thread(pump.join, seconds)

    def _awaitable(self, file: int, *, is_input: bool) -> int:
        """Return a descriptor that the event loop can wait for: files and terminals are pumped by a thread.

        libuv aborts the process if it is given such a file as a pipe.
        """
        mode = os.fstat(file).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            return file
        reading, writing = os.pipe()
        ours, ends = (reading, (file, writing)) if is_input else (writing, (reading, file))
        # A read of a terminal cannot be interrupted, and must not keep the process alive.
        pump = threading.Thread(target=_pump, args=ends, name="pump", daemon=True)
        pump.start()
        if not is_input:  # what is read may never end
            self._pumps.append(pump)
        return ours


def take_standard_streams() -> tuple[int, int]:
    """Return new file descriptors of stdin and stdout; what else uses these gets nothing, or stderr."""
    stdin, stdout = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return stdin, stdout


def _pump(source: int, sink: int) -> None:
    with suppress(OSError):
        while data := os.read(source, _CHUNK_BYTES):
            view = memoryview(data)
            while view:
                view = view[os.write(sink, view) :]
    os.close(sink)
