"""One simulated world: its clock, its randomness, its network, its processes; all of it follows from one seed."""

import asyncio
import sys
from asyncio import tasks
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Final
from unittest.mock import patch

from gateway import world
from tests.simulation.children import Children
from tests.simulation.kernel import AsyncGenerators, Kernel, Loop, Process
from tests.simulation.network import Network, poll

BEGAN: Final = 1_800_000_000.0
"""The wall clock when the monotonic one is 0."""
START: Final = 1000.0
"""The monotonic clock at the beginning of a history."""


_ALL_TASKS: Final[Any] = getattr(tasks, "_all_tasks" if sys.version_info < (3, 12) else "_scheduled_tasks")
"""asyncio's set of all tasks."""


def _on_signal(number: int, act: Callable[..., object], *arguments: object) -> None:
    asyncio.get_running_loop().add_signal_handler(number, act, *arguments)


def _leave(*_: object) -> None:
    """Leave the process alone: it is no gateway's."""


_OF_A_PROCESS: Final[Mapping[str, Any]] = {
    "on_signal": _on_signal,
    **dict.fromkeys(("give_memory_back", "ignore_signals", "_raise_open_files", "_tune_garbage_collection"), _leave),
}
"""In place of what a gateway does to its whole process."""


def _forget(_: "asyncio.Task[object]") -> None:
    """In place of adding to that set: nobody asks for it, and each task would be in it with a callback."""


class Simulation:
    """A kernel, a network, and the processes in it."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.kernel = Kernel(Random(f"{seed} kernel"))
        self.kernel.now = START
        self.network = Network(self.kernel)
        self.processes: dict[str, Process] = {}
        self.children = Children(self)
        self._born = 0
        self._outside = Random(f"{seed} outside")

    def process(self, name: str, host: str) -> Process:
        """A new process; one of the same name is another one."""
        self._born += 1
        process = Process(self.kernel, name, host)
        process.random = Random(f"{self.seed} {name} {self._born}")  # type: ignore[attr-defined]
        process.loop.network = self.network
        before = self.processes.get(name)
        if before is not None:
            process.wall_offset, process.wall_drift = before.wall_offset, before.wall_drift
        self.processes[name] = process
        return process

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, the program lives in this world."""
        monotonic = partial(getattr, self.kernel, "now")
        world.enter(
            {
                "monotonic": monotonic,
                "stopwatch": monotonic,
                "cpu": monotonic,
                "wall": self._wall,
                "wall_ns": lambda: int(self._wall() * 1_000_000_000),
                "random_bytes": lambda count: self._random().randbytes(count),
                "random": lambda: self._random().random(),
                "new_socket": self.network.new_socket,
                "poll": poll,
                "is_spare": lambda _: False,
                "is_for_answers": lambda _: False,
                "free_descriptors": lambda: sys.maxsize,
                "socket_pair": self.children.socket_pair,
                "pipe": self.children.pipe,
                "start_process": self.children.start_process,
            }
        )
        _ALL_TASKS.add = _forget
        try:
            with AsyncGenerators().watched(), patch.multiple("gateway.server.serve", **_OF_A_PROCESS):
                yield
        finally:
            del _ALL_TASKS.add
            world.enter(world.REAL)

    def _wall(self) -> float:
        process = self.running()
        offset = 0.0 if process is None else process.wall_offset + process.wall_drift * (self.kernel.now - START)
        return BEGAN + self.kernel.now + offset

    def running(self) -> Process | None:
        loop = _get_running_loop()
        return loop.process if isinstance(loop, Loop) else None

    def _random(self) -> Random:
        process = self.running()
        return self._outside if process is None else process.random  # type: ignore[attr-defined, no-any-return]

    def later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Have something happen."""
        self.kernel.call_later(seconds, callback, *args)
