"""Gives memory back to the operating system once a burst of calls has ended, but not before.

Python runs a full collection only after many new objects, which a process without work never makes, and the C library
keeps freed pages. So the memory of thousands of calls that have ended would stay for as long as nothing happens.

The C library, for its part, gives each large block back at once: a result of 1 MB, copied a few times, cost as much in
page faults as in everything else.
"""

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway import world
from gateway.runtime.tasks import Tasks

LOOK_SECONDS: Final = 5.0
_GROWTH_BYTES: Final = 16 << 20
"""Less than this is not worth a collection."""
_MUCH_BYTES: Final = 4 << 20
_QUIET_SHARE: Final = 0.1
"""The share of a processor that a quiet process uses."""
_PAUSE: Final = 100
"""The pause after a collection, as a multiple of its duration: a caller that makes garbage must not stall others."""
_MANY: Final = 200
"""With this many held calls, a collection is put off: it walks the objects of all, about 0.02 ms for each call, while
nothing else runs."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt (malloc.h)."""
_LARGE_BYTES: Final = 4 << 20
"""The size from which each block has pages of its own."""
_KEPT_BYTES: Final = 32 << 20
"""How much free memory the C library keeps at its end."""
_STATM: Final = Path("/proc/self/statm")


class ProcessMemory:
    """The memory of this process; on systems that do not tell or do not trim, nothing happens."""

    def resident(self) -> int:
        """Return the resident memory in bytes, or 0."""
        try:
            pages = int(_STATM.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * resource.getpagesize()

    def keep(self) -> None:
        """Have the C library keep what is freed, for the next message."""
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            for option, size in ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, 1 << 20)):
                set_option(option, size)

    def give_back(self) -> None:
        """Collect garbage and give free pages back."""
        _ = gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class IdleMemory:
    """Looks every few seconds whether the process has become quiet with more memory than it needs."""

    def __init__(self, tasks: Tasks, held: Callable[[], int], memory: ProcessMemory | None = None) -> None:
        """`held` counts the held calls."""
        self._tasks, self._held = tasks, held
        self._memory = memory or ProcessMemory()
        self._needed = self._memory.resident()
        """The resident memory after the last collection, or less."""
        self._used_seconds = world.cpu()
        self._may_again = 0.0
        """When the next collection may begin."""

    def begin(self) -> None:
        """Keep freed memory from now on, and look whether there is too much, until the event loop ends."""
        self._memory.keep()
        look = self._tasks.guard(self.look, "idle memory")
        loop = asyncio.get_running_loop()

        def again() -> None:
            look()
            _ = loop.call_later(LOOK_SECONDS, again)

        _ = loop.call_later(LOOK_SECONDS, again)

    def look(self) -> None:
        """Give memory back if there is much and the process is quiet."""
        before, self._used_seconds = self._used_seconds, world.cpu()
        resident = self._memory.resident()
        if resident < self._needed + _GROWTH_BYTES:
            self._needed = min(self._needed, resident)
        elif self._used_seconds - before < _QUIET_SHARE * LOOK_SECONDS and self._held() < _MANY:
            began = world.monotonic()
            if began < self._may_again:
                return
            self._memory.give_back()
            ended = world.monotonic()
            self._may_again = ended + _PAUSE * (ended - began)
            # What is needed now may be more than before: without this, each look would collect again. But while much
            # is given back, the next look does: the sessions of the calls that have ended are still being closed.
            self._needed = self._memory.resident()
            if resident - self._needed >= _MUCH_BYTES:
                self._needed -= _GROWTH_BYTES
