"""Workers that go wrong at their start; a fresh interpreter has to find them by name."""

import errno
import time
from typing import Any, NoReturn

from gateway.cluster.worker import Worker
from gateway.config import Config
from gateway.server import supervisor
from gateway.server.reload import Read

BROKEN = 1
CODE = 3


def one_cannot_listen(config: Config, worker: Worker, read: Read | None, error: Any) -> None:
    if worker.number != BROKEN:
        supervisor._work(config, worker, read, error)
        return
    error.send((errno.EADDRINUSE, "that address is taken"))
    raise SystemExit(1)


def one_crashes(config: Config, worker: Worker, read: Read | None, error: Any) -> None:
    if worker.number == BROKEN:
        raise SystemExit(CODE)
    supervisor._work(config, worker, read, error)


def one_crashes_and_the_other_hangs(_: Config, worker: Worker, __: Read | None, ___: Any) -> NoReturn:
    supervisor._die_with_supervisor()
    if worker.number == BROKEN:
        raise SystemExit(CODE)
    while True:  # with its signals blocked, as it was born
        time.sleep(60)
