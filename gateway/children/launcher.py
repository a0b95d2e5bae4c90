"""Starts the child processes of one route.

`upstream.warm` children are started ahead of their sessions. Such a child has received nothing, so any client may get
it. Once initialized, a child belongs to one principal and one set of capabilities, and is pooled with its session. If
children die at once, the pauses between starts grow.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final

from gateway import world
from gateway.children.child import Child
from gateway.config import Route
from gateway.http.upstream_client import Client
from gateway.protocol.errors import ChildUnreachable, DescriptorsShort, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry.upstream_health import UpstreamHealth

_FIRST_PAUSE_SECONDS: Final = 0.5
_LAST_PAUSE_SECONDS: Final = 30.0
_MAX_WAIT_SECONDS: Final = 1.0
"""A session waits for a pause up to this long. For a longer pause it fails at once, so that its client can retry."""
_LONG_LIFE_SECONDS: Final = 10.0
"""A prestarted child that lived this long did not die at its start."""
_KILL_SECONDS: Final = 5.0


class ChildLauncher:
    """Starts the children of one route."""

    def __init__(  # noqa: PLR0913  (what a child is made of, and who uses it)
        self,
        route: Route,
        client: Client,
        tasks: Tasks,
        health: UpstreamHealth,
        children: dict[Child, None],
        *,
        serves_host: bool = False,
    ) -> None:
        """`client` has the present limits and timeouts. `children` gets those that run, beside others.

        `serves_host`: as in `Child`.
        """
        self.serves_host = serves_host
        self.client = client
        self._health = health
        self._children = children
        self.newest: Child | None = None
        """The one that was started last, even if it has ended."""
        self.route = route
        self._tasks = tasks
        self._slots = asyncio.Semaphore(route.upstream.max_children)
        self._prestarted: deque[Child] = deque()
        self._lent = 0
        self._unproved: set[Child] = set()
        """Children that run, and were of no use yet."""
        self._failures = 0
        """Children in a row that ended before they answered `initialize`."""
        self.has_initialized = False
        """Whether a child has answered `initialize`, so that the server is certainly a legacy one, too."""
        self._failed: Child | None = None
        """The last of these."""
        self._not_before = 0.0
        self._trial: Child | None = None
        """After a failure, one child is started at a time: this one, until it works or fails. It may be prestarted."""
        self._changed = asyncio.Event()
        """Set after everything for which a start may wait, each time that it clears this."""
        self._may_prestart = bool(route.upstream.warm)
        self._prestarting: asyncio.Task[None] | None = None

    async def take(self) -> Child:
        """Return a child that has received nothing. Raises Unreachable."""
        while True:
            while self._prestarted:
                child = self._prestarted.popleft()
                self._changed.set()
                if not child.over.done():
                    return child
            if (started := await self._start_unless(1)) is not None:
                return started

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Child]:
        """As `take`, for who gives it back: until then, no other child is started ahead in its place."""
        self._lent += 1
        try:
            yield await self.take()
        finally:
            self._lent -= 1
            self._changed.set()

    def works(self, child: Child, *, is_legacy: bool = False) -> None:
        """The child is of use, so its command works; it `is_legacy` if it answered `initialize`."""
        self.has_initialized |= is_legacy
        self._unproved.discard(child)
        self._failures = 0
        self._settle(child)

    def keep(self, child: Child) -> None:
        """Let a child that has received nothing of a client wait for a session, unless enough do."""
        child.hear_with(None)
        if len(self._prestarted) < max(self.route.upstream.warm, 1):  # one even without `warm`, since it runs already
            self._prestarted.append(child)
            self._changed.set()
        else:
            child.end()

    def begin_prestarting(self) -> None:
        """Start children ahead of their sessions from now on, if the route wants that."""
        if self._may_prestart and self._prestarting is None:
            self._prestarting = self._tasks.start(self._prestart(), f"prestart children of {self.route.path}")

    def stop_prestarting(self) -> None:
        """End the prestarted children and start no more."""
        self._may_prestart = False
        if self._prestarting is not None:
            self._prestarting.cancel()
        while self._prestarted:
            self._prestarted.popleft().end()

    # -- starting -----------------------------------------------------------------------------------------------

    async def _wait_for_start(self, enough: int) -> None:
        """Wait until a child may start, at once or after failures one at a time, with pauses, or until enough wait."""
        while self._failures and len(self._prestarted) < enough:
            pause = self._not_before - world.monotonic()
            if self._trial is not None:
                self._changed.clear()
                _ = await self._changed.wait()
            elif pause <= 0:
                return
            elif pause > _MAX_WAIT_SECONDS:
                assert self._failed is not None
                why, stderr = f"{self._failed.over.result()}. That failed", ""
                if self._failed.has_started:
                    why = f"{self._failed.over.result()} before it answered `initialize`,"
                    stderr = ". The gateway's log has its stderr"
                times = f"{self._failures} times in a row; it is started again in {pause:.0f} s"
                raise ChildUnreachable(f"{self.route.where} {why} {times}{stderr}")
            else:
                await asyncio.sleep(pause)

    async def _start_unless(self, enough: int) -> Child | None:
        """Start a child as one of `max_children`; None if enough wait for a session by then. Raises Unreachable."""
        await self._slots.acquire()
        try:
            await self._wait_for_start(enough)
            if len(self._prestarted) >= enough:
                self._slots.release()
                return None
            child = Child(self.route, self.client, self._tasks, self._health, serves_host=self.serves_host)
            self._unproved.add(child)
            child.over.add_done_callback(lambda _: self._over(child))
            if self._failures:
                self._trial = child
            try:
                await child.start()
            except OSError as exc:
                if none_left := world.no_descriptor(exc):  # this says nothing of the command
                    self._unproved.discard(child)
                    self._settle(child)
                    await asyncio.sleep(_FIRST_PAUSE_SECONDS)  # `_prestart` would try again at once
                    raise DescriptorsShort(f"{self.route.where} cannot be started: {none_left}") from exc
                child.over.set_result(f"cannot be started: {exc.strerror}")  # its callback `_over` counts the failure
                raise ChildUnreachable(f"{self.route.where} {child.over.result()}") from exc
            except BaseException:  # its start was cancelled, which says nothing of the command
                self._unproved.discard(child)
                self._settle(child)
                raise
        except BaseException:
            self._slots.release()
            raise
        self.newest = child
        self._children[child] = None
        self._health.child_started()
        child.gone.add_done_callback(lambda _: self._gone(child))
        return child

    def _over(self, child: Child) -> None:
        """Count a child that ended before it was of any use."""
        self._settle(child)
        if child in self._prestarted:
            self._prestarted.remove(child)
        now = world.monotonic()
        if child in self._unproved and not child.asked and now - child.created <= _LONG_LIFE_SECONDS:
            self._failures += 1
            self._failed = child
            self._not_before = now + min(_FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1), _LAST_PAUSE_SECONDS)
        self._unproved.discard(child)

    def _gone(self, child: Child) -> None:
        del self._children[child]
        self._health.child_ended(child.over.result(), asked=child.asked)
        self._slots.release()  # not before: a child that is ending still counts in `max_children`
        self._changed.set()

    def _settle(self, child: Child) -> None:
        """This child works or failed, so the next one may start."""
        if self._trial is child:
            self._trial = None
        self._changed.set()

    async def _prestart(self) -> None:
        """Start a child ahead whenever one is missing and `max_children` allows it."""
        while self._may_prestart:
            self._changed.clear()
            ahead = len(self._prestarted) + self._lent
            if ahead < self.route.upstream.warm and not self._slots.locked() and self._trial is None:
                pause = self._not_before - world.monotonic()
                if self._failures and pause > 0:
                    await asyncio.sleep(pause)
                    continue
                with suppress(Unreachable):
                    if (child := await self._start_unless(self.route.upstream.warm)) is not None:
                        self.keep(child)
            else:
                _ = await self._changed.wait()


async def end_children(children: Iterable[Child]) -> None:
    """Kill these children, and wait until their processes have ended."""
    left = [child for child in children if not child.gone.done()]
    for child in left:
        child.kill()
    if left:
        _ = await asyncio.wait([child.gone for child in left], timeout=_KILL_SECONDS)
