"""Starts background tasks: keeps a reference to each, reports its exceptions."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gateway.protocol.errors import GatewayError, bug
from gateway.telemetry import Event, Metrics, get_logger

log = get_logger()

T = TypeVar("T")
_SHORT = frozenset(
    {"send upstream", "close session", "close subscription", "answer without a client", "end cold calls"}
)

_AGAIN_SECONDS: Final = 5.0


@contextmanager
def telling(fail: Callable[[GatewayError], None]) -> Iterator[None]:
    """Tell whoever waits for the work of a task why it failed; a bug goes on to the task, which counts it."""
    try:
        yield
    except GatewayError as exc:
        fail(exc)
    except Exception:
        fail(bug())
        raise


@dataclass(eq=False)
class Tasks:
    """The tasks of one running gateway."""

    _metrics: Metrics
    failures: int = 0
    """Unexpected exceptions so far."""
    _running: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    _shared: dict[object, asyncio.Task[Any]] = field(default_factory=dict)
    """Those of the running ones that are shared, by key."""
    _waiting: Counter[object] = field(default_factory=Counter)
    """How many wait for each of these."""

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start `work` in the background; its exceptions are logged and counted."""
        _ = self.start(work, name)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work` as a task that its owner may cancel."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._done)
        return task

    async def share(
        self, key: object, work: Coroutine[Any, Any, T], name: str, *, outlives: bool = True
    ) -> asyncio.Task[T]:
        """Wait for the task of this key, which does `work` for all that want it at the same time; return it.

        One that is cancelled while it waits does not cancel the task, but the last one does unless it `outlives` them.
        """
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = self.start(work, name)
            task.add_done_callback(lambda _: self._shared.pop(key))
        else:
            work.close()
        self._waiting[key] += 1
        try:
            _ = await asyncio.wait((task,))
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                _ = outlives or task.cancel()  # which does nothing to one that is over
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        _ = self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.get_name(), task.exception())

    def failed(self, name: str, error: BaseException | None) -> None:
        """Count and log an exception that is a bug."""
        self.failures += 1
        self._metrics.task_failures.inc()
        log.error(Event.TASK_FAILED, task=name, exc_info=error)

    def guard(self, callback: Callable[[], object], name: str) -> Callable[[], None]:
        """Return a timer's callback whose exceptions are logged and counted, not lost in the event loop."""

        def guarded() -> None:
            try:
                _ = callback()
            except Exception as exc:  # noqa: BLE001  (the outermost edge of a timer)
                self.failed(name, exc)

        return guarded

    async def settle(self, seconds: float) -> None:
        """Give short tasks (cancellations, ends of sessions) this long to finish."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        # One may start another: the end of a subscription ends its session.
        while True:
            short = [task for task in self._running if task.get_name() in _SHORT]
            if not short:
                return
            left = deadline - loop.time()
            if left <= 0:
                return
            _ = await asyncio.wait(short, timeout=left)

    async def close(self) -> None:
        """Cancel the tasks that still run, and wait for them."""
        left = list(self._running)
        while left:
            for task in left:
                task.cancel()
            # Again after a while: an error in a `finally` replaces a cancellation, and the task may go on after that.
            _ = await asyncio.wait(left, timeout=_AGAIN_SECONDS)
            left = [task for task in left if not task.done()]
