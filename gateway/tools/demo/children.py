"""The demo's processes: their start, their readiness, their end."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

READY_SECONDS = 30.0
STOP_SECONDS = 2.0
LAST_LINES = 30


class ChildError(Exception):
    """A child ended or did not become ready; the message contains its output."""


class DemoProcess:
    """A background process whose output goes to a file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def output(self) -> str:
        """Return what the child has printed."""
        return self._log.read_text(errors="replace")

    async def announced(self, pattern: str) -> str:
        """Wait until the child prints a line that holds the pattern, whose group is returned, or ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while self._process.returncode is None:
                    if (found := re.search(f"{pattern}.*\n", self.output())) is not None:
                        return found[1]
                    await asyncio.sleep(0.05)
        status = self._process.returncode
        what = f"was not ready after {READY_SECONDS:.0f} s" if status is None else f"ended with status {status}"
        raise ChildError(f"{self.name} {what}. {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of the output, for troubleshooting."""
        lines = self.output().splitlines()[-LAST_LINES:]
        return "Its output ends with:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It printed nothing."


@contextlib.asynccontextmanager
async def started(name: str, command: Sequence[str], folder: Path, **variables: str) -> AsyncIterator[DemoProcess]:
    """Run a command in the background for as long as the block lasts, with these variables besides ours."""
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        # A separate process group: Ctrl-C reaches only the demo, which then stops its children in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **variables},
        )
    try:
        yield DemoProcess(name, process, log)
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    """End a process, by force if it ignores SIGTERM (a gateway with a held call drains for longer)."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
                return
        process.kill()
    await process.wait()
