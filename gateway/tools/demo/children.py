"""The demo's processes: their start, their readiness, their end."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_SECONDS = 30.0
STOP_SECONDS = 2.0
LAST_LINES = 30
_LOOK_SECONDS = 0.05


class DemoFailed(Exception):
    """The demo cannot go on; the message says what failed, why, and how to fix it or what a child printed."""


class DemoProcess:
    """A background process whose output goes to a file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def output(self) -> str:
        """Return what the child has printed."""
        return self._log.read_text(errors="replace")

    def announced(self, pattern: str) -> str:
        """Wait until the child prints a line that holds the pattern, whose group is returned, or ends."""
        for _ in range(round(READY_SECONDS / _LOOK_SECONDS)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                _ = self._process.wait(_LOOK_SECONDS)
            # Up to the end of the line, because the file may end in the middle of one.
            if (found := re.search(f"{pattern}.*\n", self.output())) is not None:
                return found[1]
            if self._process.returncode is not None:
                raise DemoFailed(f"{self.name} ended with status {self._process.returncode}. {self.last_words()}")
        raise DemoFailed(f"{self.name} was not ready after {READY_SECONDS:.0f} s. {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of the output, for troubleshooting."""
        lines = self.output().splitlines()[-LAST_LINES:]
        return "Its output ends with:\n" + "\n".join(f"  {line}" for line in lines) if lines else "It printed nothing."


@contextlib.contextmanager
def started(name: str, command: Sequence[str], folder: Path, **variables: str) -> Iterator[DemoProcess]:
    """Run a command in the background for as long as the block lasts, with these variables besides ours."""
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        # A separate process group: Ctrl-C reaches only the demo, which then stops its children in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **variables},
        )
    try:
        yield DemoProcess(name, process, log)
    finally:
        process.terminate()
        try:
            _ = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:  # a gateway with a held call drains for longer
            process.kill()
            _ = process.wait()
