"""The transport of one connection of a client: what was written to it, and when it is read from.

What the client has not read of its replies is counted in the budget of the process, and has a deadline.
"""

import asyncio
import fcntl
import termios
from dataclasses import dataclass, field
from typing import Final

from gateway import world
from gateway.config import InForce, Timeouts
from gateway.http_client.reply_head import CONTINUE
from gateway.runtime.budget import Budget, Share

PIECE_BYTES: Final = 65_536
"""The most that is written at once."""
_LOST: Final = "the client has closed its connection"


@dataclass(slots=True, eq=False, repr=False)
class Wire:
    """What requests and responses need of their connection."""

    _out: asyncio.Transport
    _budget: Budget
    _timeouts: InForce[Timeouts]
    remote: str | None = None
    """The address of the client."""
    is_behind: bool = False
    """Whether the client has not read everything."""
    is_last: bool = False
    """Whether the connection ends with the next reply."""
    writes: int = 0
    """How many parts of responses were written."""
    _tls_socket: world.Socket | None = None
    _room: asyncio.Future[None] | None = None
    """While somebody waits until the client has read everything."""
    _unsent: int = 0
    """How much of a reply is not written yet."""
    _unread: Share = field(init=False)
    _deadline: asyncio.TimerHandle = field(init=False)
    """While the client is behind."""
    _pauses: int = 0
    """For how many reasons nothing is read."""

    def __post_init__(self) -> None:
        self._unread = self.new_share()
        peer = self._out.get_extra_info("peername")
        self.remote = peer[0] if isinstance(peer, tuple) else peer
        if self._out.get_extra_info("sslcontext") is not None:
            self._tls_socket = self._out.get_extra_info("socket")

    @property
    def is_secure(self) -> bool:
        """Whether it is TLS."""
        return self._tls_socket is not None

    # -- writing ------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a part of a response has not reached the kernel yet.

        The buffer of the transport below TLS cannot be read. While it is not empty, the kernel's buffer is full.
        """
        if self.is_behind or self._unsent or self._out.get_write_buffer_size():
            return True
        if self._tls_socket is None:
            return False
        try:
            unacknowledged = fcntl.ioctl(self._tls_socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # it is closed, or the system does not know
            return False
        return any(unacknowledged)

    def write(self, data: bytes | memoryview) -> None:
        """Write a part of a response; raises ConnectionError."""
        if self._out.is_closing():
            raise ConnectionResetError(_LOST)
        self.writes += 1
        self._out.write(data)

    async def send(self, data: bytes, *, in_chunks: bool = False) -> None:
        """Write a part, and wait until the client has read it; raises ConnectionError.

        In pieces, so that what the client has not read is counted, over TLS too, and each has a deadline.
        """
        if self.is_behind:
            await self.drained()
        whole = data if len(data) <= PIECE_BYTES else memoryview(data)
        try:
            for start in range(0, len(data), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                self._unsent = len(data) - start - len(piece)
                if self._unsent:
                    self._count()
                self.write(b"".join((b"%x\r\n" % len(piece), piece, b"\r\n")) if in_chunks else piece)
                if self.is_behind:
                    await self.drained()
        finally:
            self._unsent = 0
            if self._unread.used:
                self._count()

    def say_continue(self) -> None:
        """Tell the client to send the body, unless it has left."""
        if not self._out.is_closing():
            self._out.write(CONTINUE)

    async def drained(self) -> None:
        """Wait until the client has read everything; raises ConnectionError."""
        if not self.is_behind:
            return
        if self._out.is_closing():
            raise ConnectionResetError(_LOST)
        if self._room is None or self._room.done():
            self._room = asyncio.Future()
        await asyncio.shield(self._room)  # others may wait for it too

    def new_share(self) -> Share:
        """Return a share for what waits for this client; if the client is behind too long, it is cut off."""
        return self._budget.share(self._out.abort)

    def _count(self) -> None:
        """Count what the client has not read; the buffer is empty unless it is behind."""
        unread = self._unsent + (self._out.get_write_buffer_size() if self.is_behind else 0)
        self._unread.hold(unread)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed, or is being closed."""
        return self._out.is_closing()

    def end_after_reply(self) -> None:
        """Close the connection with the next reply."""
        self.is_last = True

    def end(self) -> None:
        """Close the connection once what was written has reached the kernel."""
        self._out.close()

    def abort(self) -> None:
        """Close the connection now: the client sees that its reply is incomplete."""
        self._out.abort()

    # -- reading ------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        self._pauses += 1
        if self._pauses == 1 and not self._out.is_closing():
            self._out.pause_reading()

    def resume_reading(self) -> None:
        """Read on, once each reason for a pause is gone."""
        self._pauses -= 1
        if not self._pauses and not self._out.is_closing():
            self._out.resume_reading()

    # -- what the transport says --------------------------------------------------------------------------------

    def fell_behind(self) -> None:
        """Count what the client has not read, and cut it off if it does not read it in time."""
        if not self.is_behind:
            self.is_behind = True
            seconds = self._timeouts.value.send_seconds
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._out.abort)
        self._count()

    def caught_up(self) -> None:
        """Stop counting: the client has read everything."""
        if self.is_behind:
            self.is_behind = False
            self._deadline.cancel()
        self._count()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def lost(self) -> None:
        """The client has left: whoever waits for it hears so."""
        if self.is_behind:
            self._deadline.cancel()
        self._unread.release()
        if self._room is not None and not self._room.done():
            self._room.set_exception(ConnectionResetError(_LOST))
            _ = self._room.exception()  # nobody may wait any more
