"""The legs of exchanges that wait for messages, by where their client is."""

import asyncio
import math

from gateway import world
from gateway.bridge.driver import Driver
from gateway.bridge.plain_call import PlainCall
from gateway.bridge.response_queue import ResponseQueue
from gateway.downstream.round import Round
from gateway.http.outbox import FinalMessage
from gateway.http.server.response import Response
from gateway.runtime.coarse_timer import TICK_SECONDS, Alarm
from gateway.runtime.tasks import Tasks

Seen = PlainCall | Driver | Round
"""What the status page shows of a call: what serves it now."""


class Legs:
    """The exchanges whose messages a request waits for."""

    def __init__(self, tasks: Tasks) -> None:
        self._running: dict[ResponseQueue, Driver] = {}
        """The legs of clients of this replica; an exchange may have several."""
        self.plain: dict[PlainCall, float] = {}
        """Plain calls, and when each has to become an exchange (monotonic)."""
        self.preparing: dict[Round, None] = {}
        """Calls that cannot begin before the server has said more of their tools."""
        self._tasks = tasks
        self._alarm = Alarm(self._ring, TICK_SECONDS, tasks, "alarm plain calls")
        self._relayed: dict[ResponseQueue, Driver] = {}
        """The legs of requests that another replica forwarded."""

    @property
    def running(self) -> dict[Driver, None]:
        """The exchanges with a leg of a client of this replica; plain calls become exchanges for this."""
        plain = [plain.promote() for plain in self.plain if plain.final is None]
        return dict.fromkeys((*self._running.values(), *plain))

    @property
    def seen(self) -> dict[Seen, None]:
        """Each call that a request waits for, as it is: to look at a plain call makes no exchange of it."""
        plain = [plain.driver or plain for plain in self.plain if plain.final is None]
        return dict.fromkeys((*self.preparing, *self._running.values(), *self._relayed.values(), *plain))

    @property
    def relayed(self) -> dict[Driver, None]:
        """The exchanges with a leg of a request that another replica forwarded."""
        return dict.fromkeys(self._relayed.values())

    def begun(self, plain: PlainCall, deadline: float) -> None:
        """Note a plain call until it is removed from `plain`."""
        self.plain[plain] = deadline
        if deadline < self._alarm.due:
            self._alarm.set(deadline)

    def _ring(self, now: float) -> float | None:
        for plain in [plain for plain, deadline in self.plain.items() if deadline <= now]:
            self.plain[plain] = math.inf  # not deleted: whoever waits for the call does that
            if plain.final is None:
                self._tasks.guard(plain.promote, "begin an exchange")()
        return min(self.plain.values(), default=None)

    async def write_plain(self, round_: Round, plain: PlainCall) -> Response:
        """Write the result of a plain call, or what its exchange sends if it turns out not to be plain."""
        self.begun(plain, world.monotonic() + round_.live.deadlines.plain_seconds)
        try:
            if plain.final is None:
                await plain.waiter()
        except asyncio.CancelledError:
            plain.abandon()
            raise
        finally:
            del self.plain[plain]
        if plain.final is not None:
            body, ending = plain.final
            response = None if round_.item else round_.reply.plain(body, ending)
            return response or await round_.finish(FinalMessage(body, ending=ending))
        return await self.write(round_, plain.driver or plain.promote(), plain.queue)

    async def write(self, round_: Round, driver: Driver, queue: ResponseQueue) -> Response:
        """Write what an exchange sends to a round, until its final message."""
        is_relayed, seconds = round_.incoming.peer_request is not None, round_.seconds_left
        waiting = self._relayed if is_relayed else self._running
        waiting[queue] = driver
        timer: asyncio.TimerHandle | None = None
        if seconds is not None:  # before the replica that relays it ends it, so that its client comes to another one
            ends = self._tasks.guard(driver.end_legs, "end a relayed leg")
            timer = asyncio.get_running_loop().call_later(seconds, ends)
        try:
            return await round_.write(queue)
        except BaseException:
            driver.leave(queue)
            round_.incoming.exchange_id = driver.id
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del waiting[queue]
