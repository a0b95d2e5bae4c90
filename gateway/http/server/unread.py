"""What one client has not read of its replies: counted in the budget, with a deadline."""

import asyncio
import fcntl
import sys
import termios

from gateway import world
from gateway.config import InForce, Timeouts
from gateway.runtime.budget import Budget, Share


class Unread:
    """The bytes that wait for one client, in the transport or with the handler of its request."""

    __slots__ = (
        "_budget",
        "_is_closed",
        "_out",
        "_share",
        "_stall_timer",
        "_stalled_at",
        "_timeouts",
        "_tls_socket",
        "unsent",
    )

    def __init__(self, out: asyncio.Transport, budget: Budget, timeouts: InForce[Timeouts]) -> None:
        self._out = out
        self._budget = budget
        self._timeouts = timeouts
        self.unsent = 0
        """How much of a reply its handler has not written yet."""
        self._tls_socket: world.Socket | None = None
        if out.get_extra_info("sslcontext") is not None:
            self._tls_socket = out.get_extra_info("socket")
        self._share: Share | None = None
        self._is_closed = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stalled_at = 0
        """The size of the buffer when the timer began."""

    @property
    def is_in_process(self) -> bool:
        """Whether something that was written has not reached the kernel yet.

        The buffer of the transport below TLS cannot be read. While it is not empty, the kernel's buffer is full.
        """
        if self._out.get_write_buffer_size():
            return True
        return self._tls_socket is not None and _kernel_queue(self._tls_socket) > 0

    def new_share(self) -> Share:
        """Return a share for what waits for this client; if the client is behind too long, it is cut off."""
        return self._budget.share(self._out.abort)

    def count(self, *, is_behind: bool) -> None:
        """Count what the client has not read; the buffer is empty unless it is behind."""
        unread = self.unsent + (self._out.get_write_buffer_size() if is_behind else 0)
        if self._share is None:
            if not unread or self._is_closed:
                return
            self._share = self.new_share()
        self._share.grow(unread - self._share.used)
        if not unread:
            self._share.release()
            self._share = None

    def watch(self) -> None:
        """Cut the client off if it reads nothing for timeouts.send_seconds."""
        self._stalled_at = self._out.get_write_buffer_size()
        seconds = self._timeouts.value.send_seconds
        self._stall_timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        if self._out.get_write_buffer_size() < self._stalled_at:
            self.watch()
        else:
            self._out.abort()

    def caught_up(self) -> None:
        """The client has read everything that was written, or is gone."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def close(self) -> None:
        """Count nothing any more: the connection is lost."""
        self._is_closed = True
        self.caught_up()
        if self._share is not None:
            self._share.release()
            self._share = None


def _kernel_queue(of: world.Socket) -> int:
    """Return the number of bytes that the peer has not acknowledged; 0 if the system does not know."""
    try:
        return int.from_bytes(fcntl.ioctl(of.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # closed, or not a TCP socket
        return 0
