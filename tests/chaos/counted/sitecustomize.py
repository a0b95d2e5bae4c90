"""Lets a gateway of the soak write down how many asyncio tasks and blocks of memory it has, which no metric says.

Python imports this at its start because the soak puts this folder on PYTHONPATH.
"""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def write_counts(path: Path) -> None:
    """Write the numbers each second, from a thread of its own."""
    while True:
        time.sleep(1)
        with suppress(RuntimeError):  # a task was made meanwhile
            running = [task for task in list(asyncio.tasks._all_tasks) if not task.done()]  # type: ignore[attr-defined]
            path.write_text(f"{len(running)} {sys.getallocatedblocks()}")


if folder := os.environ.get("MRTR_COUNTS"):
    threading.Thread(target=write_counts, args=(Path(folder) / str(os.getpid()),), daemon=True).start()
