"""The tasks of one process, with a cap for all of them, another one for each principal.

A finished task is kept until its time is over, so that its client can fetch the result; if a cap is reached, the
oldest finished one makes room.
"""

from collections import Counter
from collections.abc import Iterator

from msgspec import Raw

from gateway import world
from gateway.bridge.call_context import ClientCall, Context
from gateway.config import InForce, TaskLimits
from gateway.identity.principal import of_headers
from gateway.protocol.errors import Busy, ShuttingDown, UnknownTask
from gateway.runtime.budget import Budget
from gateway.seal.request_state import Upstream
from gateway.seal.task_handle import TaskHandle, TaskSealer
from gateway.sessions.session import Session
from gateway.tasks import modern_tasks, sep_2322_form
from gateway.tasks.follower import Relay
from gateway.tasks.legacy_tasks import Created
from gateway.tasks.live_task import LiveTask

_RETRY_AFTER_SECONDS = 5


class TaskTable:
    """Tasks by the gateway's own ids."""

    def __init__(self, limits: InForce[TaskLimits], sealer: TaskSealer, budget: Budget) -> None:
        """`budget` is that of kept results."""
        self._limits = limits
        self.sealer = sealer
        self._budget = budget
        self._tasks: dict[str, LiveTask] = {}
        self._per_principal: Counter[bytes] = Counter()
        self.let_go: frozenset[str] = frozenset()
        """Ids of the tasks that this process left to others when it ended."""

    def __len__(self) -> int:
        """Return the number of tasks, finished ones included."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[LiveTask]:
        return iter(tuple(self._tasks.values()))

    @property
    def working(self) -> int:
        """Return the number of tasks that have not ended."""
        return sum(not task.is_over for task in self._tasks.values())

    def find(self, id_: str) -> LiveTask | None:
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
                task.close(UnknownTask(), ends_session=True)
                return True
        return False

    def adopt(self, context: Context, session: Session, created: Created, relay: Relay) -> bytes:
        """Take over a task that a call has made; returns the CreateTaskResult. Raises Busy."""
        live, key = context.live, context.key
        self.check(key.principal)
        ttl = live.config.tasks.ttl_seconds
        ttl = min(ttl, created.ttl_seconds or ttl)
        now, names = world.wall(), live.route.bound_headers
        server_info = session.shaken.server_info
        session_id = session.channel.session_id
        handle = TaskHandle(
            issued=now,
            expires=now + ttl,
            route=live.route.path,
            principal=key.principal,
            names=names,
            headers=of_headers(names, context.headers.get) if names else b"",
            exchange=world.token_urlsafe(12),
            owner=live.process.owner,
            epoch=live.process.epoch,
            ttl_ms=int(ttl * 1000),
            upstream=Upstream(session_id, session.shaken.version, created.id.encode(), bytes(server_info), None)
            if session_id is not None
            else None,
        )
        task = self._add(handle, self.sealer.seal(handle), context, server_info)
        task.begin(session, created, relay, context)
        if context.request.said.declared.tasks:
            return modern_tasks.create_result(task.view())
        return sep_2322_form.create_result(task.view())

    def continue_(self, handle: TaskHandle, sealed: str, asked: ClientCall, *, is_shared: bool) -> LiveTask:
        """Follow a task whose owner is gone; `is_shared` if that is not certain. Raises Busy."""
        assert handle.upstream is not None, "without it, only the owner can follow the task"
        self.check(asked.key.principal)
        task = self._add(handle, sealed, asked, Raw(handle.upstream.server_info))
        task.continue_(handle.upstream, is_shared=is_shared)
        return task

    def _add(self, handle: TaskHandle, sealed: str, asked: ClientCall, server_info: Raw) -> LiveTask:
        task = LiveTask(handle, sealed, asked, server_info, self.sealer, self._budget, self._remove)
        self._tasks[task.id] = task
        self._per_principal[task.principal] += 1
        task.live.process.metrics.tasks_changed(task.live.route.path, 1)
        return task

    def _remove(self, task: LiveTask) -> None:
        if self._tasks.pop(task.id, None) is None:
            return
        self._per_principal[task.principal] -= 1
        if not self._per_principal[task.principal]:
            del self._per_principal[task.principal]
        task.live.process.metrics.tasks_changed(task.live.route.path, -1)

    def leave(self, *, is_resumable: bool) -> None:
        """Let go of all tasks; if another replica cannot go on with them, their sessions end."""
        error = ShuttingDown("ask again")
        if is_resumable:
            self.let_go |= self._tasks.keys()
        for task in self:
            task.close(error, ends_session=not is_resumable)
