"""The children of one route: started ahead, handed out, bounded, and started ever more seldom where they die at once.

What is kept warm is a process that has been started and has heard nothing: neither whose it will be nor what that
client can do. A child that is initialised belongs to one principal and one set of capabilities, and is pooled with its
session like any other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.config import Route, Upstream
from gateway.http.client import Client
from gateway.process.child import Child
from gateway.protocol.errors import Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics

_FIRST_PAUSE_SECONDS: Final = 0.5
_LAST_PAUSE_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 1.0
"""Who wants a child waits for a pause this short; after a longer one it has called again."""
_LONG_LIFE_SECONDS: Final = 10.0
"""A warm child that lived this long did not die at its start."""


class ChildLauncher:
    """Starts the children of one route."""

    def __init__(  # noqa: PLR0913  (what starts them, and who hears of their ends)
        self,
        route: Route,
        client: Client,
        metrics: Metrics,
        tasks: Tasks,
        living: set[Child],
        ended: Callable[[str], None],
    ) -> None:
        """`client` has the bounds of everything that upstreams send; `living` has all children of the process.

        `ended` hears how a child ended that nobody asked to end.
        """
        self._ended = ended
        self.where = f"The upstream {route.upstream.name} of route {route.path}"
        self._path = route.path
        self._upstream: Upstream = route.upstream
        self._client = client
        self._metrics = metrics
        self._tasks = tasks
        self._living = living
        self._room = asyncio.Semaphore(route.upstream.max_children)
        self._warm: deque[Child] = deque()
        self._failures = 0
        """Children in a row that ended before they had answered `initialize`."""
        self._why = ""
        self._not_before = 0.0
        self._trial: Child | None = None
        """After a failure: the one child that may be started until it is known whether it works."""
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._warmer = tasks.start(self._keep_warm(), f"warmer of {route.path}") if route.upstream.warm else None

    @property
    def bounds(self) -> Client:
        """The limits and timeouts that hold now."""
        return self._client

    async def take(self) -> Child:
        """A child that nobody has spoken to. Raises Unreachable."""
        while self._warm:
            child = self._warm.popleft()
            self._changed.set()
            if not child.over.done():
                return child
        await self._room.acquire()
        try:
            await self._may_start()
            return await self._start()
        except BaseException:
            self._room.release()
            raise

    def proved(self, child: Child) -> None:
        """The child has answered `initialize`: its command works."""
        child.proven = True
        self._failures = 0
        self._settle(child)

    def cool(self) -> None:
        """Keep no child warm any more."""
        if self._warmer is not None:
            self._warmer.cancel()
        while self._warm:
            self._tasks.spawn(self._warm.popleft().close(), "close session")

    # -- starting -----------------------------------------------------------------------------------------------

    async def _may_start(self) -> None:
        """Wait for leave to start a child: any time, until one dies at once; then one after the other, with pauses."""
        while self._failures:
            if self._trial is not None:
                self._settled.clear()
                _ = await self._settled.wait()
                continue
            pause = self._not_before - time.monotonic()
            if pause <= 0:
                return
            if pause > _PATIENCE_SECONDS:
                raise Unreachable(
                    f"{self.where} {self._why} before it answered `initialize`, {self._failures} times in a row; it "
                    f"is started again in {pause:.0f} s. The gateway's log has its stderr"
                )
            await asyncio.sleep(pause)

    async def _start(self) -> Child:
        child = Child(self._upstream, self._path, self._client.limits.event_bytes, self._tasks)
        child.over.add_done_callback(lambda _: self._over(child))
        if self._failures:
            self._trial = child
        try:
            await child.start()
        except OSError as exc:
            child.over.set_result(f"cannot be started: {exc.strerror}")
            raise Unreachable(f"{self.where} {child.over.result()}") from exc
        except BaseException:
            self._settle(child)
            raise
        self._living.add(child)
        self._metrics.child_started(self._path)
        child.gone.add_done_callback(lambda _: self._gone(child))
        return child

    def _over(self, child: Child) -> None:
        """Learn from a child that ended before it was of any use."""
        self._settle(child)
        if child in self._warm:
            self._warm.remove(child)
            self._changed.set()
        if child.asked or child.proven or time.monotonic() - child.born > _LONG_LIFE_SECONDS:
            return
        now = time.monotonic()
        self._failures += 1
        self._why = child.over.result()
        self._not_before = now + min(_FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1), _LAST_PAUSE_SECONDS)

    def _gone(self, child: Child) -> None:
        self._living.discard(child)
        self._metrics.child_ended(self._path, asked=child.asked)
        if not child.asked:
            self._ended(child.over.result())
        self._room.release()
        self._changed.set()

    def _settle(self, child: Child) -> None:
        """It is known whether this child works, or will never be."""
        if self._trial is child:
            self._trial = None
            self._changed.set()
        self._settled.set()

    async def _keep_warm(self) -> None:
        """Start a child ahead whenever one is missing and there is room."""
        while True:
            self._changed.clear()
            if len(self._warm) < self._upstream.warm and not self._room.locked() and self._trial is None:
                await self._warm_one()
            else:
                _ = await self._changed.wait()

    async def _warm_one(self) -> None:
        pause = self._not_before - time.monotonic()
        if self._failures and pause > 0:
            await asyncio.sleep(pause)
            return
        await self._room.acquire()
        try:
            child = await self._start()
        except Unreachable:
            self._room.release()
        except BaseException:
            self._room.release()
            raise
        else:
            self._warm.append(child)
