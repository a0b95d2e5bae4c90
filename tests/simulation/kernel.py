"""Virtual time, and simulated processes that each have an event loop of their own in it.

Nothing here reads a clock or waits. The kernel runs what is ready, process after process in an order that the seed
decides, and lets the time jump to the next event when nothing is. Within a process, order is what asyncio promises:
callbacks run in the order in which they became ready.
"""

import asyncio
import sys
import weakref
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from inspect import CORO_CREATED, getcoroutinestate
from random import Random
from typing import Any, Final

from msgspec import Struct

_MAX_TURNS: Final = 100_000
"""Turns without any time passing: by then something spins."""


class Spinning(AssertionError):
    """The processes keep each other busy and no time passes."""


class Kernel:
    """The clock, and what is due."""

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self._times: list[float] = []
        """A heap of the times at which something is due: floats are compared much faster than tuples."""
        self._due: dict[float, Handle | list[Handle]] = {}
        """What is due at each time; a list, in the order in which it was asked for, only if there is more than one."""
        self.runnable: list[Loop] = []
        """The processes that have something to run."""
        self.running: Loop | None = None
        """The process that was the last to run: to say so to asyncio takes a system call."""
        self.turns = 0
        self.last_turn = 0
        """By this turn some time must have passed."""

    def call_at(self, when: float, callback: Callable[..., object], *args: object) -> None:
        """Have the world itself do something; which process was the last to run must not matter to that."""
        self.add(when, Handle(callback, args))

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> None:
        """As `call_at`, so many seconds from now."""
        self.add(self.now + seconds, Handle(callback, args))

    def add(self, when: float, handle: "Handle") -> None:
        """Have the world call a function then, or a process find a timer ready."""
        due = self._due
        if when not in due:
            due[when] = handle
            heappush(self._times, when)
        elif isinstance(before := due[when], list):
            before.append(handle)
        else:
            due[when] = [before, handle]

    def run(self, until: float) -> None:
        """Let time pass up to a moment."""
        try:
            self._run(until)
        finally:
            self.running = None
            _set_running_loop(None)

    def _run(self, until: float) -> None:
        runnable, times, due, bits = self.runnable, self._times, self._due, self.random.getrandbits
        when, entries = self.now, list[Handle]()
        self.last_turn = self.turns + _MAX_TURNS
        while True:
            while count := len(runnable):
                if self.turns >= self.last_turn:
                    names = sorted({loop.process.name for loop in runnable})
                    raise Spinning(f"at {self.now:.6f} s: {names}")
                self.turns += 1
                chosen = 0
                if count > 1:  # as `randrange` does it
                    size = count.bit_length()
                    chosen = bits(size)
                    while chosen >= count:
                        chosen = bits(size)
                runnable.pop(chosen).run_turns()
            if not entries:
                if not times or times[0] > until:
                    self.now = max(self.now, until)
                    return
                when = heappop(times)
                found = due.pop(when)
                entries = found[::-1] if isinstance(found, list) else [found]
            handle = entries.pop()
            callback = handle.callback
            if callback is None:
                continue
            self.last_turn = self.turns + _MAX_TURNS
            self.now = max(self.now, when)
            if handle.loop is None:
                callback(*handle.args)
            else:
                handle.loop.ready(handle)


class Process:
    """A process on a host, which can be stopped, continued and killed."""

    def __init__(self, kernel: Kernel, name: str, host: str) -> None:
        self.name, self.host, self.kernel = name, host, kernel
        self.is_alive = True
        self.is_frozen = False
        self.wall_offset = 0.0
        """How far the wall clock of its host is off."""
        self.wall_drift = 0.0
        """Seconds that it gains each second."""
        self.resources: dict[Any, None] = {}
        """What the kernel of its host closes when it ends: objects with `process_ended()`."""
        self.failures: list[str] = []
        """Exceptions that nobody handled."""
        self.exit: BaseException | None = None
        self.when_ended: list[Callable[[], object]] = []
        self._kept: dict[asyncio.Task[Any], None] = {}
        self._remains: list[asyncio.Task[Any]] = []
        """Tasks of a dead process. Until it is buried nothing may collect them, which would run their `finally`."""
        self.loop = Loop(self)

    def start(self, main: Coroutine[Any, Any, object]) -> None:
        """Run a main program; the process ends with it."""
        with self.running():
            task = self.loop.create_task(main, name=self.name)
            self.keep(task)
            task.add_done_callback(self._main_is_done)

    def _main_is_done(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self.exit = task.exception()
        self.end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, code runs in this process."""
        before = _get_running_loop()
        _set_running_loop(self.loop)
        try:
            yield
        finally:
            _set_running_loop(before)

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Keep a task of a simulated part, which nobody else refers to."""
        self._kept[task] = None
        task.add_done_callback(self._kept.pop)

    def end(self) -> None:
        """End it now (kill -9): nothing of it runs any more, and the host closes its files."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.loop.drop()
        self._remains = sorted(self.loop.tasks(), key=lambda task: task.get_name())
        for resource in list(self.resources):
            resource.process_ended()
        self.resources.clear()
        for callback in self.when_ended:
            callback()

    def bury(self) -> None:
        """Let go of everything of a dead process; what its code does now has no effect."""
        with self.running():
            for task in self._remains:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if (coroutine := task.get_coro()) is not None and getcoroutinestate(coroutine) == CORO_CREATED:
                    coroutine.close()  # it was never begun, which Python would warn of
            self._remains.clear()
            self._kept.clear()

    def freeze(self) -> None:
        """SIGSTOP, or a loop that is stalled."""
        self.is_frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.is_frozen = False
        self.loop.wake()

    def signal(self, number: int) -> None:
        """Deliver a signal; without a handler, it ends the process."""
        if not self.is_alive:
            return
        handler = self.loop.handlers.get(number)
        if handler is None:
            self.end()
        else:
            callback, args = handler
            self.loop.call_soon(callback, *args)


class Handle(Struct, eq=False):
    """What `call_soon` and `call_at` return: `asyncio.TimerHandle` without what only its debugger needs.

    A history makes thousands, which took a tenth of its time. There is no context in it, because nothing of the
    gateway has context variables.
    """

    callback: Callable[..., object] | None
    """None if it is cancelled."""
    args: tuple[Any, ...]
    loop: "Loop | None" = None
    """The loop of a timer; without, the world itself does something."""

    def cancel(self) -> None:
        self.callback, self.args = None, ()


class Loop(asyncio.AbstractEventLoop):
    """The event loop of one process. The network adds the rest (`network.NetworkLoop`)."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._kernel = process.kernel
        self._ready: deque[Handle] = deque()
        self._never: deque[Handle] = deque()
        """What a dead process would have run."""
        self._is_queued = False
        self._runnable = process.kernel.runnable
        self.handlers: dict[int, tuple[Callable[..., object], tuple[object, ...]]] = {}
        self.network: Any = None
        self.time = partial(getattr, self._kernel, "now")  # type: ignore[method-assign]
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []

    # -- running ------------------------------------------------------------------------------------------------

    def ready(self, handle: Handle) -> None:
        """Run a handle in the next turn."""
        process = self.process
        if process.is_alive:
            self._ready.append(handle)
            if not self._is_queued and not process.is_frozen:
                self._is_queued = True
                self._runnable.append(self)

    def wake(self) -> None:
        """Ask for a turn, if there is anything to do."""
        if self._ready and not self._is_queued and not self.process.is_frozen and self.process.is_alive:
            self._is_queued = True
            self._runnable.append(self)

    def run_turns(self) -> None:
        """Run what is ready now; what becomes ready meanwhile comes in the next turn.

        That one is run too, and so on, as long as no other process has something to run.
        """
        process, kernel, ready, runnable = self.process, self._kernel, self._ready, self._runnable
        next_handle = ready.popleft
        if kernel.running is not self:
            kernel.running = self
            _set_running_loop(self)
        try:
            while not process.is_frozen and process.is_alive:
                for _ in range(len(ready)):
                    handle = next_handle()
                    callback = handle.callback
                    if callback is not None:
                        try:
                            callback(*handle.args)
                        except (SystemExit, KeyboardInterrupt):
                            raise
                        except BaseException as exc:  # noqa: BLE001 - as asyncio does
                            self.call_exception_handler(
                                {"message": f"Exception in callback {callback!r}", "exception": exc}
                            )
                if not ready or runnable or kernel.turns >= kernel.last_turn:
                    break
                kernel.turns += 1
        finally:
            if ready and not process.is_frozen and process.is_alive:
                runnable.append(self)
            else:
                self._is_queued = False

    def tasks(self) -> "list[asyncio.Task[Any]]":
        """The tasks that have not ended. `asyncio.all_tasks` looks at those of all histories so far."""
        return [task for ref in self._tasks if (task := ref()) is not None and not task.done()]

    def drop(self) -> None:
        """Run nothing any more."""
        self._never, self._ready = self._ready, deque()
        self._is_queued = False
        self.handlers.clear()

    # -- asyncio ------------------------------------------------------------------------------------------------

    get_debug: Any = staticmethod(bool)
    """False. Every future asks, and a function in C is the fastest to say it."""

    def is_closed(self) -> bool:
        return not self.process.is_alive

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args)
        if self._is_queued:  # nothing else is called as often
            self._ready.append(handle)
        else:
            self.ready(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_at(self._kernel.now + delay, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, self)
        if self.process.is_alive:
            self._kernel.add(when, handle)
        return handle

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        if self.process.is_alive:
            self._tasks.append(weakref.ref(task))
        else:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self.handlers[sig] = callback, args

    def remove_signal_handler(self, sig: int) -> bool:
        return self.handlers.pop(sig, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what went wrong: nothing may."""
        if self.process.is_alive:
            exc = context.get("exception")
            self.process.failures.append(f"{context.get('message')}: {exc!r}")

    # -- network ------------------------------------------------------------------------------------------------

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        return await self.network.look_up(self, host, port)

    async def sock_connect(self, sock: Any, address: tuple[str, int]) -> None:
        await sock.connect_from(self, address)

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: str | None = None, port: int | None = None, **options: Any
    ) -> tuple[Any, Any]:
        sock = options.get("sock")
        if sock is None:
            assert host is not None
            assert port is not None
            infos = await self.getaddrinfo(host, port)
            sock = self.network.new_socket(infos[0])
            await self.sock_connect(sock, infos[0][4])
        assert options.get("ssl") is None, "there is no TLS in the simulation"
        protocol = protocol_factory()
        transport = sock.transport(protocol, self)
        waiter = self.create_future()
        self.call_soon(transport.begin, waiter)
        await waiter
        return transport, protocol

    async def create_unix_connection(
        self, protocol_factory: Callable[[], Any], path: Any = None, *, sock: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        return await self.create_connection(protocol_factory, sock=sock)

    async def connect_read_pipe(self, protocol_factory: Callable[[], Any], pipe: Any) -> tuple[Any, Any]:
        return await self.create_connection(protocol_factory, sock=pipe)

    async def connect_write_pipe(self, protocol_factory: Callable[[], Any], pipe: Any) -> tuple[Any, Any]:
        transport, wrapped = await self.create_connection(lambda: pipe.writing(protocol_factory()), sock=pipe)
        return transport, wrapped.protocol

    async def create_server(
        self, protocol_factory: Callable[[], Any], host: str | None = None, port: int | None = None, **options: Any
    ) -> Any:
        return self.network.listen(self, protocol_factory, host, port)


class AsyncGenerators:
    """Closes async generators that are dropped before their end in the process that began them, as asyncio does."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, Loop] = weakref.WeakKeyDictionary()

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._began, self._dropped)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*before)

    def _began(self, generator: Any) -> None:
        loop = _get_running_loop()
        if isinstance(loop, Loop):
            self._of[generator] = loop

    def _dropped(self, generator: Any) -> None:
        loop = self._of.pop(generator, None)
        if loop is not None and loop.process.is_alive:
            loop.call_soon(loop.create_task, generator.aclose())
