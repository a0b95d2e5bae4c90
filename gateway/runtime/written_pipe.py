"""A pipe that messages are written to: the input of a child, or the output to a host."""

import asyncio
from typing import cast


class WrittenPipe(asyncio.BaseProtocol):
    """The protocol of such a pipe, which knows when the pipe has taken everything."""

    def __init__(self) -> None:
        self.pipe: asyncio.WriteTransport
        self.free: asyncio.Future[None] | None = None
        """Done when the pipe has taken everything; None if it has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pipe is open."""
        # Not later: the other side may have closed its end by then, and uvloop raises for a closed transport. With
        # this, `resume_writing` is called once everything is in the pipe.
        self.pipe = cast("asyncio.WriteTransport", transport)
        self.pipe.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """The pipe is full."""
        self.free = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The pipe has taken everything."""
        free, self.free = self.free, None
        if free is not None:
            free.set_result(None)

    def connection_lost(self, _exc: Exception | None) -> None:
        """The pipe is closed."""
        WrittenPipe.resume_writing(self)  # a subclass may look at what is in the pipe when it resumes
