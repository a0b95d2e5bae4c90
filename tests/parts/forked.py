"""Starts Python programs of the parts as forks of a process that has imported their libraries (`stem.py`).

There is one such process for each environment and each process of a test run. It starts when the first program does,
and ends with the process that started it.
"""

import asyncio
import atexit
import json
import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEM = Path(__file__).parent / "stem.py"


class Stem:
    """The process that forks."""

    def __init__(self, interpreter: str) -> None:
        self.process = subprocess.Popen(
            [interpreter, STEM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> int:
        """Send one request; the number that answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.lock:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            (value,) = json.loads(self.process.stdout.readline()).values()
        return int(value)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()


STEMS: dict[str, Stem] = {}


class Forked:
    """A program that a stem has forked; what the tests need of `asyncio.subprocess.Process`."""

    def __init__(self, stem: Stem, pid: int) -> None:
        self.pid = pid
        self._stem = stem
        self._pidfd = os.pidfd_open(pid)  # a zombie keeps its pid until it is reaped
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        """As of asyncio's processes, without the need for its loop to run first."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(0):
                self._code = self._stem.ask({"reap": self.pid})
                os.close(self._pidfd)
        return self._code

    async def wait(self) -> int:
        """Wait for the end, in any loop; the exit code, or the signal as a negative number."""
        while (code := self.returncode) is None:
            loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.dup(self._pidfd)
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return code


async def fork(
    command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, stdout: Path, stderr: Path
) -> Forked:
    """Run a Python program; `command` begins with the interpreter of its environment."""
    interpreter, *words = command
    if interpreter not in STEMS:
        STEMS[interpreter] = Stem(interpreter)
    stem = STEMS[interpreter]
    how = {"env": dict(environment), "cwd": str(cwd), "stdout": str(stdout), "stderr": str(stderr)}
    # In a thread: the first program of a stem has to wait for the imports.
    return Forked(stem, await asyncio.to_thread(stem.ask, {"command": words, **how}))
