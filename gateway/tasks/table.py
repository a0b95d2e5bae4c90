"""The tasks of one process, with a cap for all of them, another one for each principal.

A finished task is kept until its time is over, so that its client can fetch the result; if a cap is reached, the
oldest finished one makes room.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from gateway.config import InForce, TaskLimits
from gateway.protocol.errors import Busy, GatewayError, ShuttingDown, UnknownTask
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.seal.task_handle import TaskSealer

_RETRY_AFTER_SECONDS = 5


class Task(Protocol):
    """The part of a task that the table needs."""

    live: LiveRoute
    principal: bytes

    @property
    def id(self) -> str:
        """The gateway's own id."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was cancelled."""

    def close(self, error: GatewayError, *, is_left: bool = False) -> None:
        """Remove it; `is_left` if another replica goes on with it."""


T = TypeVar("T", bound=Task)


class TaskTable(Generic[T]):
    """Tasks by the gateway's own ids."""

    def __init__(self, limits: InForce[TaskLimits], sealer: TaskSealer, results: Budget) -> None:
        self._limits = limits
        self.sealer = sealer
        self.results = results
        """The budget of kept results."""
        self._tasks: dict[str, T] = {}
        self._per_principal: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Return the number of tasks, finished ones included."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._tasks.values()))

    @property
    def working(self) -> int:
        """Return the number of tasks that have not ended."""
        return sum(not task.is_over for task in self._tasks.values())

    def find(self, id_: str) -> T | None:
        """Return the task with this id, if this process follows it."""
        return self._tasks.get(id_)

    def check(self, principal: bytes) -> None:
        """Make room for another task of this principal; raises Busy."""
        limits = self._limits.value
        if self._per_principal[principal] >= limits.max_per_principal and not self._evict(principal):
            raise Busy(
                "You have as many unfinished tasks as one caller may have (tasks.max_per_principal); answer or cancel "
                "some first",
                status=429,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        if len(self._tasks) >= limits.max and not self._evict(None):
            raise Busy(
                "The gateway follows as many tasks as it may (tasks.max); call again later",
                status=503,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    def _evict(self, principal: bytes | None) -> bool:
        """Forget the oldest finished task, of this principal if one is given; returns whether there was one."""
        for task in self:
            if task.is_over and principal in (None, task.principal):
                task.close(UnknownTask())
                return True
        return False

    def add(self, task: T) -> None:
        """Keep a task."""
        self._tasks[task.id] = task
        self._per_principal[task.principal] += 1
        task.live.process.metrics.tasks[task.live.route.path,].inc(1)

    def remove(self, task: T) -> None:
        """Forget a task."""
        del self._tasks[task.id]
        self._per_principal[task.principal] -= 1
        if not self._per_principal[task.principal]:
            del self._per_principal[task.principal]
        task.live.process.metrics.tasks[task.live.route.path,].inc(-1)

    def leave(self, *, is_resumable: bool) -> None:
        """Let go of all tasks; if another replica cannot go on with them, their sessions end."""
        for task in self:
            task.close(ShuttingDown("ask again"), is_left=is_resumable)
