"""Drains a process: calls in flight get `hold.drain_seconds`, the rest is handed over.

Other replicas begin the new calls that it receives; without other replicas it refuses them. The listener of the
clients closes as soon as no call is held here or runs here, and at the latest at the deadline, so that a balancer
sends the next connection elsewhere; without other replicas, it closes at the end. Requests on open connections are
still served.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway import world
from gateway.bridge.driver import Driver
from gateway.cluster.draining import Draining
from gateway.cluster.membership import Membership
from gateway.config import Config, InForce
from gateway.downstream.handler import RequestHandler
from gateway.http.server.listener import Listener
from gateway.parking.lot import Lot
from gateway.protocol.errors import Stopping
from gateway.routes.route_table import RouteTable
from gateway.tasks.live_task import LiveTask
from gateway.tasks.table import TaskTable
from gateway.telemetry import Event, get_logger

log = get_logger()

_POLL_SECONDS: Final = 0.05
_IDLE_POLLS: Final = 2
"""A drain is over after so many polls in a row that find nothing left to do; see `Listener.is_writing`."""
_LAST_SECONDS: Final = 1.0
"""At the end: how long the last replies may take, such as those that other replicas end by the deadline."""


class Listeners(NamedTuple):
    """The listeners of one process."""

    clients: Listener
    all: list[Listener]


class Drain:
    """The drain of one process."""

    def __init__(  # noqa: PLR0913  (everything that a drain ends)
        self,
        in_force: InForce[Config],
        draining: Draining,
        downstream: RequestHandler,
        routes: RouteTable,
        lot: Lot[Driver],
        table: TaskTable[LiveTask],
        membership: Membership,
    ) -> None:
        self._in_force = in_force
        self._draining = draining
        self._downstream = downstream
        self._routes = routes
        self._lot = lot
        self._table = table
        self._membership = membership

    async def run(self, listeners: Listeners, *, delay_seconds: float, is_resumable: bool) -> None:
        """Return when every call has ended or was handed over.

        `is_resumable`: another process has the keys to continue a call of this one.
        """
        seconds, loop = self._in_force.value.hold.drain_seconds, asyncio.get_running_loop()
        log.info(
            Event.SERVER_DRAINING,
            held=len(self._lot),
            in_flight=self._downstream.in_flight,
            delay_seconds=delay_seconds,
            deadline_seconds=delay_seconds + seconds,
        )
        self._draining.leaves_results = is_resumable
        listeners.clients.send_away()
        await asyncio.sleep(delay_seconds)  # load balancers notice meanwhile; what they still send is served
        deadline = loop.time() + seconds
        self._begin_no_calls(world.monotonic() + seconds)
        if not self._membership.alone:
            await _until(lambda: not self._has_calls, deadline)
            # A balancer sends a refused connection to another replica, and no request is lost with it.
            await listeners.clients.stop_accepting()
        await self._until_idle(listeners, deadline, is_resumable=is_resumable)
        self._end_remaining(is_resumable=is_resumable)
        # The requests of those who have just connected are still refused: who is cut off cannot tell whether they ran.
        await listeners.clients.stop_accepting()
        await self._until_idle(listeners, loop.time() + _LAST_SECONDS, is_resumable=is_resumable)

    def _begin_no_calls(self, ends_at: float) -> None:
        alone = self._membership.alone
        self._draining.begin(None if alone else ends_at)
        for live in self._routes.live.values():
            live.upstream.end_streams()
        if not alone:
            relayed = self._downstream.legs.relayed
            for driver in self._downstream.legs.running:
                if driver not in relayed:
                    driver.hand_over()

    @property
    def _has_calls(self) -> bool:
        """Whether a call of this replica is held or runs; what it passes on to other replicas does not count."""
        legs, is_asking = self._downstream.legs, self._downstream.front.sessions.open_requests
        return bool(len(self._lot) or legs.running or legs.relayed or is_asking)

    async def _until_idle(self, listeners: Listeners, deadline: float, *, is_resumable: bool) -> None:
        idle_polls = 0

        def is_idle() -> bool:
            nonlocal idle_polls
            # Another process goes on with a task or a cold call without any state of this one, if it has the keys.
            is_needed = not is_resumable and (self._table.working or len(self._lot.cold))
            idle_polls = 0 if is_needed or self._is_busy(listeners.all) else idle_polls + 1
            return idle_polls >= _IDLE_POLLS

        await _until(is_idle, deadline)

    def _is_busy(self, listeners: list[Listener]) -> bool:
        """Return whether a call is held, or a reply is not completely written."""
        writing = any(listener.is_writing for listener in listeners)
        return bool(len(self._lot) or self._downstream.busy or writing)

    def _end_remaining(self, *, is_resumable: bool) -> None:
        """Leave each call to another replica if that can continue it; end the others with an error."""
        error = Stopping("The gateway shut down before the call ended; it was cancelled and may have had effects")
        legs = self._downstream.legs
        left = [*dict.fromkeys((*legs.running, *legs.relayed, *self._lot))]
        # The lot also has finished calls, whose results are kept for a repeated retry.
        unfinished = [driver for driver in left if not driver.is_finished]
        self._downstream.front.sessions.end_all(error)
        self._downstream.stateless.end_all(error)
        kept = {driver for driver in left if is_resumable and driver.let_go()}
        for driver in left:
            if driver not in kept:
                driver.stop(error)
        let_go = [driver.id for driver in unfinished if driver in kept]
        self._draining.part(let_go, is_resumable=is_resumable)
        if unfinished:
            log.info(Event.SERVER_PARTED, let_go=len(let_go), cancelled=len(unfinished) - len(let_go))


async def _until(condition: Callable[[], bool], deadline: float) -> None:
    """Poll until a condition holds, or a time of the event loop has come."""
    loop = asyncio.get_running_loop()
    while loop.time() < deadline and not condition():
        await asyncio.sleep(_POLL_SECONDS)
