"""Workers that go wrong at their start; a fresh interpreter has to find them by name."""

import signal
import time
from pathlib import Path
from typing import NoReturn

from gateway.cluster.worker import Worker
from gateway.config import Config, ConfigFile
from gateway.plugins.workers import supervisor
from tests.parts.stem import LIBC, PR_SET_PDEATHSIG

BROKEN = 1
CODE = 3


def one_cannot_listen(config: Config, worker: Worker, file: ConfigFile | None) -> None:
    """Its socket is taken."""
    if worker.number == BROKEN:
        Path(worker.socket("peer").removeprefix("unix:")).mkdir()
    supervisor._work(config, worker, file)


def one_crashes(config: Config, worker: Worker, file: ConfigFile | None) -> None:
    if worker.number == BROKEN:
        raise SystemExit(CODE)
    supervisor._work(config, worker, file)


def one_crashes_and_the_other_hangs(_: Config, worker: Worker, __: ConfigFile | None) -> NoReturn:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever becomes of the test
    if worker.number == BROKEN:
        raise SystemExit(CODE)
    while True:  # with its signals blocked, as it was born
        time.sleep(60)
