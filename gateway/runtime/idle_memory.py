"""Gives memory back to the operating system once a burst of calls has ended, but not before.

Python runs a full collection only after many new objects, which a process without work never makes, and the C library
keeps freed pages. So the memory of thousands of calls that have ended would stay for as long as nothing happens.

The C library, for its part, gives each large block back at once: a result of 1 MB, copied a few times, cost as much in
page faults as in everything else.
"""

import asyncio
import ctypes
import gc
from collections.abc import Sized
from typing import Final

from gateway import world

LOOK_SECONDS: Final = 5.0
_QUIET_SHARE: Final = 0.1
"""The share of a processor that a quiet process uses."""
_WORK_SECONDS: Final = 0.5
"""CPU time that makes a collection worth its cost."""
_TIMES: Final = 5
"""The work between two collections, as a multiple of the time of the first: a caller that makes garbage must not stall
others."""
_MANY: Final = 200
"""With this many held calls, a collection is put off: it walks the objects of all, about 0.02 ms for each call, while
nothing else runs."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt (malloc.h)."""
_LARGE_BYTES: Final = 4 << 20
"""The size from which each block has pages of its own."""
_KEPT_BYTES: Final = 32 << 20
"""How much free memory the C library keeps at its end."""


def keep_freed() -> None:
    """Have the C library keep what is freed, for the next message; other libraries than glibc stay as they are."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, size in ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, 1 << 20)):
            set_option(option, size)


async def give_back_when_quiet(held: Sized) -> None:
    """Collect garbage and give free pages back whenever the process is quiet; `held` are the held calls."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    collected, pause = world.cpu(), _WORK_SECONDS
    while True:
        before = world.cpu()
        await asyncio.sleep(LOOK_SECONDS)
        now = world.cpu()
        if now - before >= _QUIET_SHARE * LOOK_SECONDS or len(held) >= _MANY:
            continue
        if now - collected >= pause:
            _ = gc.collect()
            collected = world.cpu()
            pause = max(_WORK_SECONDS, _TIMES * (collected - now))
        trim(0)
