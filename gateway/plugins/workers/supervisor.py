"""The supervisor: runs several worker processes on this host that share `listen` as replicas of one another.

It serves no clients. It starts the workers, restarts workers that end unexpectedly, forwards signals to them, and
answers the operator for all of them.

Rule 1: the first start is all or nothing. A worker that ends before it was ever ready ends the program. After that,
a worker that ends is restarted with growing delays.
Rule 2: no worker outlives its supervisor. The kernel kills it (PR_SET_PDEATHSIG), even if its event loop hangs.
Rule 3: a worker gets signals from its supervisor only, and none before it can handle them. It has its own session, so
a terminal's Ctrl-C does not reach it twice, which would mean "end now". It starts with the signals blocked, and
unblocks them when its handlers are set.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Final

from gateway import __version__, world
from gateway.admin.reload import Reload
from gateway.children.process_tree_reaper import PR_SET_PDEATHSIG, prctl
from gateway.cluster.worker import Worker
from gateway.config import KEY_BYTES, Config, ConfigFile, InForce, split_address
from gateway.http.server.listen_errors import explained
from gateway.http.server.listener import UNIX, Listener
from gateway.http.server.traffic import Traffic
from gateway.plugins.workers.workers_view import Overview
from gateway.runtime import event_loop
from gateway.runtime.tasks import Tasks
from gateway.server.drain import AFTER_SECONDS
from gateway.server.key_purposes import ephemeral_key
from gateway.server.serve import ignore_signals, on_signal, serve
from gateway.telemetry import Event, Metrics, configure_logging, get_logger

log = get_logger()

_SPAWN: Final = multiprocessing.get_context("spawn")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST_PAUSE_SECONDS: Final = 0.1
_LAST_PAUSE_SECONDS: Final = 5.0
_LONG_LIFE_SECONDS: Final = 10.0
"""A worker that ran this long is restarted with the shortest delay."""
_POLL_SECONDS: Final = 0.05
_PATH_BYTES: Final = 107
"""The longest address of a unix socket (unix(7)), without its final zero."""


async def supervise(config: Config, file: ConfigFile | None = None) -> int:
    """Run config.workers processes until SIGTERM or SIGINT and return the exit code.

    Raises OSError when an address is taken. On SIGHUP it reads `file` again, and so does each worker.
    """
    # The workers always share a key, for the messages among them.
    key = world.random_bytes(KEY_BYTES) if config.state.keys else ephemeral_key("these workers")
    with _private_directory(config.workers) as directory:
        return await Supervisor(config, directory, key, file).run()


class Supervisor:
    """The parent process of the workers."""

    def __init__(self, config: Config, directory: str, key: bytes, file: ConfigFile | None) -> None:
        self._in_force = InForce(config)
        """A worker starts with the newest configuration that was valid."""
        self._file = file
        self._directory = directory
        self._key = key
        self._metrics = Metrics(__version__)
        self._tasks = Tasks(self._metrics)
        self._lives: dict[int, _Life] = {}
        self._reload = Reload(file, self._in_force, self, self._tasks, process="supervisor")
        self._overview = Overview(self._metrics, self._in_force, self._reload)
        self._listener: Listener | None = None
        self._stopping = asyncio.Event()
        self._failed = False
        self._kill: asyncio.TimerHandle | None = None

    def apply(self, config: Config) -> None:
        """See `Reloadable`."""
        self._in_force.replace(config)

    def reloaded(self, *, applied: bool) -> None:  # noqa: ARG002  (each worker finds out for itself)
        """See `Reloadable`: only now the workers get the signal, so a worker that started meanwhile reloads too."""
        self._send(signal.SIGHUP)

    async def run(self) -> int:
        """Run until all workers have ended; return 0 if each was asked to end and ended without an error."""
        loop, config = asyncio.get_running_loop(), self._in_force.value
        for address in filter(None, (config.listen, config.replica.listen)):
            # With SO_REUSEPORT the workers would share the address with another process that has it. It is bound here,
            # and no more: a connection that was accepted would be lost.
            with explained(config, address):
                claim = await loop.create_server(asyncio.Protocol, *split_address(address), start_serving=False)
                claim.close()
                await claim.wait_closed()
        address = ""
        if config.admin is not None:
            limits = self._in_force.part(lambda config: config.limits)
            timeouts = self._in_force.part(lambda config: config.timeouts)
            traffic = Traffic(limits, timeouts, self._metrics)
            self._listener = Listener(self._overview.handle, config.admin, traffic)
            with explained(config, config.admin):
                address = await self._listener.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            on_signal(number, self._stop, number)
        on_signal(signal.SIGHUP, self._reload.ask)
        _ = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by entry.py
        log.info(
            Event.SUPERVISOR_STARTED,
            version=__version__,
            listen=config.listen,
            admin=address,
            workers=config.workers,
        )
        # When the tracker starts it unblocks the signals, which must not happen while a worker starts.
        resource_tracker.ensure_running()
        restarters = [self._tasks.start(self._run_worker(number), "worker") for number in range(config.workers)]
        self._reload.begin()
        try:
            _ = await asyncio.gather(*restarters)
        finally:
            # Only after a bug is a worker left here.
            self._stopping.set()
            self._kill_all()
            _ = await asyncio.gather(*restarters, return_exceptions=True)
            if self._kill is not None:
                self._kill.cancel()
            await self._tasks.close()
            if self._listener is not None:
                await self._listener.close()
        if not self._failed:
            ignore_signals()
        return int(self._failed)

    async def _run_worker(self, number: int) -> None:
        """Run one worker, and restart it until the supervisor stops."""
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            began = loop.time()
            config = self._in_force.value
            worker = Worker(number, config.workers, self._directory, self._key)
            life = self._lives[number] = _Life(config, worker, self._file)
            self._overview.began(number, worker.socket("admin"))
            log.info(Event.WORKER_STARTED, worker=number, pid=life.pid)
            # Without a health check from outside, nothing else would notice that it is ready.
            if number not in self._overview.proven:
                self._tasks.spawn(self._prove(number), "watch worker")
            code = await life.ended()
            del self._lives[number]
            self._overview.ended(number)
            seconds = round(loop.time() - began, 3)
            if self._stopping.is_set():
                self._failed |= code != 0
                return
            if number not in self._overview.proven:
                # What made a first start fail would make the next one fail too.
                self._failed = True
                log.error(Event.WORKER_ENDED, worker=number, exit_code=code, note="it ended before it was ready")
                self._stop(signal.SIGINT)  # SIGTERM would wait for load balancers
                return
            if seconds >= _LONG_LIFE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            log.warning(Event.WORKER_ENDED, worker=number, exit_code=code, seconds=seconds, again_in_seconds=pause)
            self._metrics.worker_restarts.inc()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    _ = await self._stopping.wait()
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def _prove(self, number: int) -> None:
        while number in self._lives and not await self._overview.is_ready(number):
            await asyncio.sleep(_POLL_SECONDS)

    def _stop(self, number: signal.Signals) -> None:
        """Forward a signal; a second one makes the workers end at once."""
        config = self._in_force.value
        hold, spare = config.hold, config.timeouts.cancel_seconds + AFTER_SECONDS
        grace = spare if self._stopping.is_set() else hold.drain_delay_seconds + hold.drain_seconds + spare
        self._stopping.set()
        self._reload.close()
        self._send(number)
        if self._kill is not None:
            self._kill.cancel()
        self._kill = asyncio.get_running_loop().call_later(grace, self._kill_all)

    def _send(self, number: signal.Signals) -> None:
        for life in self._lives.values():
            life.send(number)

    def _kill_all(self) -> None:
        for number, life in self._lives.items():
            log.error(Event.WORKER_ENDED, worker=number, note="it did not end in time and is killed")
            life.send(signal.SIGKILL)


class _Life:
    """One process of a worker, from its start to its end."""

    def __init__(self, config: Config, worker: Worker, file: ConfigFile | None) -> None:
        # A daemon, so that multiprocessing ends it if a bug ends the supervisor.
        self._process = _SPAWN.Process(target=_work, args=(config, worker, file), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the worker starts with this mask
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Signal the process, unless it has ended: another process may have its pid by then."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for its end; return the exit code, or minus the signal that ended it."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, gone.set)
        try:
            _ = await gone.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        # The kernel has closed its files, so this waits for microseconds.
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        self._process.close()
        return code


def _work(config: Config, worker: Worker, file: ConfigFile | None) -> None:
    """Run a worker in its own process."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died before prctl
        sys.exit(1)
    os.setsid()
    configure_logging(config.log.level, config.log.format)
    try:
        event_loop.run(_serve(config, worker, file))
    except OSError as exc:
        log.error(Event.SERVER_FAILED, cause=exc.strerror or str(exc))  # noqa: TRY400 - as for a process alone
        sys.exit(1)


async def _serve(config: Config, worker: Worker, file: ConfigFile | None) -> None:
    loop = asyncio.get_running_loop()
    serving = loop.create_task(serve(config, worker, file))
    # `serve` sets its handlers in its first step, which runs before this callback.
    loop.call_soon(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS)
    await serving


def _private_directory(workers: int) -> tempfile.TemporaryDirectory[str]:
    """Make the folder of the workers' sockets where their paths are short enough; raises OSError."""
    longest = len(Worker(number=workers - 1, count=workers, directory="", key=b"").socket("admin")) - len(UNIX)
    # A container with a read-only file system has at least /dev/shm.
    for base in (None, "/tmp", "/dev/shm"):  # noqa: S108 - mkdtemp makes a new folder, for this user only
        with suppress(OSError):
            made = tempfile.TemporaryDirectory(prefix="mrtr-", dir=base)
            if len(os.fsencode(made.name)) + longest <= _PATH_BYTES:
                return made
            made.cleanup()
    raise OSError("no folder for the workers' sockets: neither TMPDIR nor /tmp nor /dev/shm can be written")
