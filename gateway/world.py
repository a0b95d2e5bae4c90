"""The seam to the world: the one file that imports clocks, randomness, sockets (the linter bans them elsewhere).

The other half of the seam is the event loop: timers, connections, listeners, name lookups, signals, threads are asked
of `asyncio.get_running_loop()`. A simulation provides both halves (`tests/simulation`).

Use it as `world.monotonic()`: a name that is imported from here stays what it was when the program began.
"""

import asyncio
import os
import random as _random
import select
import socket
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Any, Final, Protocol

AddressInfo = tuple[int, int, int, str, Any]
"""What getaddrinfo returns for one address."""
LookupFailed: Final = socket.gaierror
"""The error of a name lookup; a kind of OSError."""
Socket = socket.socket
Started = subprocess.Popen[bytes]
"""A process that was started."""
STREAM: Final = socket.SOCK_STREAM
ONLY_REACHABLE: Final = socket.AI_ADDRCONFIG
"""Look up no IPv6 addresses on a host that has none, and the like."""


class HasFileno(Protocol):
    """A socket, as far as it can be polled."""

    def fileno(self) -> int:
        """The number of the file."""


def _poll(of: HasFileno) -> Callable[[], object]:
    poll = select.poll()
    poll.register(of, select.POLLIN)
    return partial(poll.poll, 0)


def _new_socket(to: AddressInfo) -> Socket:
    family, kind, protocol, _, _ = to
    return socket.socket(family, kind, protocol)


def _pipe() -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return FileIO(reading, "r"), FileIO(writing, "w")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a program knows of the world: the real one, unless told otherwise."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds, of which only differences count. The event loop's `time` is the same clock."""
    stopwatch: Callable[[], float] = time.perf_counter
    """As `monotonic`, as finely as the machine can."""
    cpu: Callable[[], float] = time.process_time
    """Seconds of CPU that this process has used."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970. It may jump."""
    wall_ns: Callable[[], int] = time.time_ns
    """The same in nanoseconds."""
    random_bytes: Callable[[int], bytes] = os.urandom
    """So many bytes that nobody can guess."""
    random: Callable[[], float] = _random.random
    """A number from 0 to 1, to spread what would else come at once; it can be guessed."""
    new_socket: Callable[[AddressInfo], Socket] = _new_socket
    """A socket that can connect to an address. Raises OSError."""
    poll: Callable[[HasFileno], Callable[[], object]] = _poll
    """A function whose result is true if there is something to read in a socket now, such as its end."""
    socket_pair: Callable[[], tuple[Socket, Socket]] = socket.socketpair
    """Two sockets that are connected to each other."""
    pipe: Callable[[], tuple[FileIO, FileIO]] = _pipe
    """The end of a new pipe to read from, and the one to write to. Raises OSError."""
    start_process: Callable[..., Started] = subprocess.Popen
    """Start a program; takes what `subprocess.Popen` does. Raises OSError."""


_REAL: Final = World()
monotonic = _REAL.monotonic
stopwatch = _REAL.stopwatch
cpu = _REAL.cpu
wall = _REAL.wall
wall_ns = _REAL.wall_ns
random_bytes = _REAL.random_bytes
random = _REAL.random
new_socket = _REAL.new_socket
poll = _REAL.poll
socket_pair = _REAL.socket_pair
pipe = _REAL.pipe
start_process = _REAL.start_process


def enter(world: World) -> None:
    """Have the whole program live in another world from now on."""
    for name in World.__slots__:
        globals()[name] = getattr(world, name)


def token_hex(count: int) -> str:
    """So many bytes that nobody can guess, as hex digits."""
    return random_bytes(count).hex()


def token_urlsafe(count: int) -> str:
    """So many bytes that nobody can guess, as unpadded base64url."""
    return urlsafe_b64encode(random_bytes(count)).rstrip(b"=").decode()


async def resolve(host: str, port: int, *, flags: int = 0) -> list[AddressInfo]:
    """The addresses of a host, at least one. Raises OSError or UnicodeError."""
    return list(await asyncio.get_running_loop().getaddrinfo(host, port, type=STREAM, flags=flags))


def listening(host: str, port: int) -> Socket:
    """A socket that listens. Raises OSError."""
    family, _, _, _, to = socket.getaddrinfo(host, port, type=STREAM)[0]
    return socket.create_server(to[:2], family=family)


def duplicate(of: Socket) -> Socket:
    """Another file of a socket."""
    return of.dup()


def host_name() -> str:
    """The name of this host."""
    return socket.gethostname()
