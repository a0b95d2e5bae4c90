"""Runs one gateway process from its start until a signal ends it."""

import asyncio
import gc
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, TypeVarTuple

from gateway.cluster.worker import Worker
from gateway.config import Config, ConfigFile
from gateway.runtime import idle_memory
from gateway.server.drain import drain
from gateway.server.process import Gateway

Ts = TypeVarTuple("Ts")

_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


async def serve(config: Config, worker: Worker | None = None, file: ConfigFile | None = None) -> None:
    """Run until SIGTERM or SIGINT; a second signal ends at once, and so does one before the gateway is ready.

    Raises OSError when an address is taken. `file` is read again on SIGHUP.
    """
    gateway = Gateway(config, worker, file)
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _ENDING:
        on_signal(number, signals.put_nowait, number)
    on_signal(signal.SIGHUP, gateway.reload.ask)
    _raise_open_files()
    # entry.py has blocked it, so a reload that was asked for during the start has waited.
    _ = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    starting, first = loop.create_task(gateway.start()), loop.create_task(signals.get())
    await _until_signal(starting, first)
    if starting.cancelled() or starting.exception() is not None:
        _ = first.cancel()
    else:
        _tune_garbage_collection()
        give_memory_back(gateway)
        # A process that was started at a terminal has no load balancer that must notice the drain.
        delay = gateway.config.hold.drain_delay_seconds if await first is signal.SIGTERM else 0
        second = loop.create_task(signals.get())
        await _until_signal(gateway.tasks.start(drain(gateway, delay_seconds=delay), "drain"), second)
        _ = second.cancel()
    await gateway.close()
    if not starting.cancelled():
        starting.result()  # why it could not start, if it could not
    ignore_signals()


async def _until_signal(work: asyncio.Task[None], stop: asyncio.Task[signal.Signals]) -> None:
    """Wait for the end of `work`; a signal cancels it."""
    _ = await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    _ = work.cancel()
    _ = await asyncio.wait((work,))


def on_signal(number: signal.Signals, act: Callable[[*Ts], object], *arguments: *Ts) -> None:
    """As `loop.add_signal_handler`, for a process that ends with its loop: `ignore_signals` undoes it in one step.

    A loop that removes a handler, as asyncio's does when it closes, puts the default action back for a moment: it ends
    the process, and another thread may take the signal whatever this one blocks.
    """
    loop = asyncio.get_running_loop()

    def handler(_number: int, _frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            _ = loop.call_soon_threadsafe(act, *arguments)

    _ = signal.signal(number, handler)


def ignore_signals() -> None:
    """Let nothing but the end of the process follow: one more signal would replace its exit code."""
    for number in (*_ENDING, signal.SIGHUP):
        _ = signal.signal(number, signal.SIG_IGN)


def give_memory_back(gateway: Gateway) -> None:
    """From now on, keep freed memory while there is work, and give it back to the operating system afterwards."""
    idle_memory.keep_freed()
    gateway.tasks.spawn(idle_memory.give_back_when_quiet(gateway.lot), "idle memory")


def _raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one: a held call takes two upstream connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_garbage_collection() -> None:
    """Collect less often: ten thousand held calls are a million objects that a full collection would walk.

    The objects made at start live as long as the process, so they are frozen. Opening 9,728 held calls cost 20 % less
    CPU with this. A higher first threshold saves nothing more, and broken requests, which leave cycles of references,
    would keep their memory for longer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
