"""The seam to the world: the one file that imports clocks, randomness, sockets (the linter bans them elsewhere).

The other half of the seam is the event loop: timers, connections, listeners, name lookups, signals, threads are asked
of `asyncio.get_running_loop()`. A simulation provides both halves (`tests/simulation`).

Use it as `world.monotonic()`: a name that is imported from here stays what it was when the program began.
"""

import asyncio
import errno
import os
import random as _random
import resource
import select
import socket
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final

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
_SPARE_DESCRIPTORS: Final = 16
"""So many are left by connections, for an operator who asks why there are no others, files and name lookups."""
_MOST_FOR_ANSWERS: Final = 256
OPEN_DESCRIPTORS: Final = Path("/proc/self/fd")
"""The folder that has one entry for each."""


monotonic = time.monotonic
"""Seconds, of which only differences count. The event loop's `time` is the same clock."""
stopwatch = time.perf_counter
"""As `monotonic`, as finely as the machine can."""
cpu = time.process_time
"""Seconds of CPU that this process has used."""
wall = time.time
"""Seconds since 1970. It may jump."""
wall_ns = time.time_ns
"""The same in nanoseconds."""
random_bytes = os.urandom
"""So many bytes that nobody can guess."""
random = _random.random
"""A number from 0 to 1, to spread what would else come at once; it can be guessed."""
socket_pair = socket.socketpair
"""Two sockets that are connected to each other."""
host_name = socket.gethostname
"""The name of this host."""
start_process: Callable[..., Started] = subprocess.Popen
"""Start a program; takes what `subprocess.Popen` does. Raises OSError."""


def poll(of: Socket) -> Callable[[], object]:
    """A function whose result is true if there is something to read in a socket now, such as its end."""
    polled = select.poll()
    polled.register(of, select.POLLIN)
    return partial(polled.poll, 0)


def most_descriptors() -> int:
    """How many file descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def no_descriptor(cause: BaseException | None) -> str:
    """In words that this process has no file descriptor left; empty if the cause is another one."""
    is_it = isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
    return f"the gateway has no file descriptor left (ulimit -n {most_descriptors()})" if is_it else ""


def kept_descriptors(most: int) -> int:
    """How many of so many new sessions leave to others: to answers of calls that are held, and as spare ones."""
    return _SPARE_DESCRIPTORS + min(most // 8, _MOST_FOR_ANSWERS)


def is_spare(new: Socket, left: int = _SPARE_DESCRIPTORS) -> bool:
    """Whether a new socket has one of the last descriptors: the kernel gives the lowest number that is free."""
    return 0 < most_descriptors() - left <= new.fileno()  # -1 stands for no limit


def is_for_answers(new: Socket) -> bool:
    """Whether a new socket has a descriptor that is kept for answers, or a spare one."""
    return is_spare(new, kept_descriptors(most_descriptors()))


def free_descriptors() -> int:
    """How many new sessions may take; fewer than none if they have taken some that are kept."""
    most = most_descriptors()
    if most < 0:  # no limit
        return sys.maxsize
    # Linux tells the number since 6.2. Before, it is about the lowest one that is free, unless many closed just now.
    used = OPEN_DESCRIPTORS.stat().st_size if OPEN_DESCRIPTORS.exists() else 0
    if not used:
        with suppress(OSError), socket.socket() as new:
            used = new.fileno()
    return most - kept_descriptors(most) - (used or most)


def new_socket(to: AddressInfo) -> Socket:
    """A socket that can connect to an address. Raises OSError."""
    family, kind, protocol, _, _ = to
    new = socket.socket(family, kind, protocol)
    if is_spare(new):
        new.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return new


def pipe() -> tuple[FileIO, FileIO]:
    """The end of a new pipe to read from, and the one to write to. Raises OSError."""
    reading, writing = os.pipe()
    return FileIO(reading, "r"), FileIO(writing, "w")


_NAMES: Final = (
    *("monotonic", "stopwatch", "cpu", "wall", "wall_ns", "random_bytes", "random"),
    *("socket_pair", "start_process", "poll", "is_spare", "is_for_answers", "free_descriptors", "new_socket", "pipe"),
)
REAL: Final[Mapping[str, Any]] = {name: globals()[name] for name in _NAMES}
"""What a program knows of the world, unless told otherwise."""


def enter(world: Mapping[str, Any]) -> None:
    """Have the whole program live in another world from now on, which has all the names of the real one."""
    globals().update({name: world[name] for name in REAL})


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
