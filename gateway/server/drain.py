"""Drains a process: new calls are refused, calls in flight get `hold.drain_seconds`, the rest is handed over."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.bridge.driver import Driver
from gateway.cluster.membership import Membership
from gateway.config import Config, InForce
from gateway.downstream.handler import RequestHandler
from gateway.http.listener import Listener
from gateway.protocol.errors import Stopping
from gateway.routes.held_calls import Lot
from gateway.routes.table import RouteTable
from gateway.tasks.table import TaskTable
from gateway.telemetry import Event, get_logger

log = get_logger()

_POLL_SECONDS: Final = 0.05
_IDLE_POLLS: Final = 2
"""A drain is over after so many polls in a row that find nothing left to do; see `Listener.is_writing`."""


class Drain:
    """The drain of one process."""

    def __init__(  # noqa: PLR0913  (everything that a drain ends)
        self,
        in_force: InForce[Config],
        downstream: RequestHandler,
        routes: RouteTable,
        lot: Lot[Driver],
        table: TaskTable,
        membership: Membership,
    ) -> None:
        self._in_force = in_force
        self._downstream = downstream
        self._routes = routes
        self._lot = lot
        self._table = table
        self._membership = membership

    async def run(self, listeners: list[Listener], *, delay_seconds: float, is_resumable: Callable[[], bool]) -> None:
        """Return when every call has ended or was handed over.

        `is_resumable` returns whether another process has the keys to continue a call of this one.
        """
        seconds, loop = self._in_force.value.hold.drain_seconds, asyncio.get_running_loop()
        log.info(
            Event.SERVER_DRAINING,
            held=len(self._lot),
            in_flight=self._downstream.in_flight,
            delay_seconds=delay_seconds,
            deadline_seconds=delay_seconds + seconds,
        )
        await asyncio.sleep(delay_seconds)  # load balancers notice meanwhile; what they still send is served
        self._refuse_new_calls()
        deadline, idle_polls = loop.time() + seconds, 0
        while idle_polls < _IDLE_POLLS and loop.time() < deadline:
            # Another process can go on with a task, and needs no state of this one for that.
            is_busy = self._is_busy(listeners) or (self._table.working and not is_resumable())
            idle_polls = 0 if is_busy else idle_polls + 1
            await asyncio.sleep(_POLL_SECONDS)
        self._end_remaining(is_resumable=is_resumable())

    def _refuse_new_calls(self) -> None:
        self._downstream.stop()
        for live in self._routes.live.values():
            live.upstream.end_streams()
        if not self._membership.alone:
            for driver in self._downstream.running - self._downstream.relayed:
                driver.hand_over()

    def _is_busy(self, listeners: list[Listener]) -> bool:
        """Return whether a call is held, or a reply is not completely written."""
        writing = any(listener.is_writing for listener in listeners)
        return bool(len(self._lot) or self._downstream.busy or writing)

    def _end_remaining(self, *, is_resumable: bool) -> None:
        """Leave each call to another replica if that can continue it; end the others with an error."""
        error = Stopping("The gateway shut down before the call ended; it was cancelled and may have had effects")
        left = self._downstream.running | self._downstream.relayed | set(self._lot)
        # The lot also has finished calls, whose results are kept for a repeated retry.
        unfinished = {driver for driver in left if not driver.is_finished}
        kept = {driver for driver in left if is_resumable and driver.let_go()}
        for driver in left - kept:
            driver.stop(error)
        if unfinished:
            log.info(Event.SERVER_PARTED, let_go=len(unfinished & kept), cancelled=len(unfinished - kept))
