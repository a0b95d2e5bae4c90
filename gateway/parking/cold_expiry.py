"""Gives up cold calls whose clients did not come back: answers their questions, cancels them, ends their sessions."""

import asyncio
import math
from collections import deque
from functools import partial
from typing import Final

from msgspec.structs import replace

from gateway import world
from gateway.cluster import witness
from gateway.parking import orphans
from gateway.parking.cold_calls import ColdCall, ColdCalls
from gateway.routes.deadlines import CANCEL_AGAIN_SECONDS
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.tasks import Tasks
from gateway.telemetry import ColdEnding

_SWEEP_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 32
"""Calls that are given up at the same time; the others wait."""


class ColdExpiry:
    """Gives cold calls up when they are due."""

    def __init__(self, cold: ColdCalls, tasks: Tasks) -> None:
        self._cold = cold
        self._tasks = tasks
        self._queue: deque[tuple[ColdCall, int]] = deque()
        """Each with how often its cancellation did not arrive."""
        self._running = 0
        alarm = Alarm(self._sweep, _SWEEP_SECONDS, tasks, "expiry of cold calls")
        cold.after_add(alarm.set)

    def give_up_all(self) -> None:
        """Give all cold calls up, because no process has the keys to continue them."""
        self._give_up(self._cold.take_due(float("inf")))

    def _sweep(self, now: float) -> float | None:
        self._give_up(self._cold.take_due(now))
        return self._cold.next_due

    def _give_up(self, calls: list[ColdCall], failures: int = 0) -> None:
        self._queue.extend((call, failures) for call in calls)
        for _ in range(min(_MOST_AT_ONCE - self._running, len(self._queue))):
            self._running += 1
            self._tasks.spawn(self._end_queued(), "end cold calls")

    async def _end_queued(self) -> None:
        try:
            while self._queue:
                call, failures = self._queue.popleft()
                if not (failures or await self._is_left(call)):  # one that failed was asked about before
                    continue
                remains, headers = call.unpacked()
                reason = "the client did not answer in time"
                is_over = await orphans.end(call.live, call.id, remains, reason, headers)
                if not is_over and failures < len(CANCEL_AGAIN_SECONDS):  # the server has not heard of it
                    again = self._tasks.guard(partial(self._give_up, [call], failures + 1), "cancel again")
                    _ = asyncio.get_running_loop().call_later(CANCEL_AGAIN_SECONDS[failures], again)
        finally:
            self._running -= 1

    async def _is_left(self, call: ColdCall) -> bool:
        """Whether no other replica has continued a call; if one cannot be asked, this is tried again later."""
        process, route = call.live.process, call.live.route.path
        is_taken = await process.witness.is_taken(call.id, call.round)
        if is_taken is None and call.inquiries < len(witness.ASK_AGAIN_SECONDS):
            pause = witness.ASK_AGAIN_SECONDS[call.inquiries]
            due = math.ceil(world.monotonic() + pause)
            self._cold.add(replace(call, due=due, inquiries=call.inquiries + 1))
            return False
        if is_taken is not False:
            process.metrics.cold_calls_ended[route, ColdEnding.CONTINUED].inc()  # or a replica could never be asked
            return False
        process.metrics.cold_calls_ended[route, ColdEnding.EXPIRED].inc()
        return True
