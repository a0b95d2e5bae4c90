"""The legs of exchanges that wait for messages, by where their client is."""

import asyncio

from gateway.bridge.driver import Driver
from gateway.bridge.plain_call import PlainCall
from gateway.bridge.response_queue import ResponseQueue
from gateway.cluster.reply_relay import Replied
from gateway.downstream.round import Round


class Legs:
    """The exchanges whose messages a request waits for."""

    def __init__(self) -> None:
        self._running: set[Driver] = set()
        """Those with a leg of a client of this replica."""
        self._plain: set[PlainCall] = set()
        self.relayed: set[Driver] = set()
        """Those with a leg of a request that another replica forwarded."""

    @property
    def running(self) -> set[Driver]:
        """The exchanges with a leg of a client of this replica; plain calls become exchanges for this."""
        return self._running | {plain.promote() for plain in self._plain if plain.final is None}

    async def write_plain(self, round_: Round, plain: PlainCall) -> Replied:
        """Write the result of a plain call, or what its exchange sends if it turns out not to be plain."""
        self._plain.add(plain)
        try:
            await plain.waiter
        except asyncio.CancelledError:
            plain.leave()
            raise
        finally:
            self._plain.discard(plain)
        if plain.final is not None:
            return await round_.finish(plain.final)
        return await self.write(round_, plain.promote(), plain.queue)

    async def write(self, round_: Round, driver: Driver, queue: ResponseQueue) -> Replied:
        """Write what an exchange sends to a round, until its final message."""
        is_relayed = round_.incoming.peer_request is not None
        waiting = self.relayed if is_relayed else self._running
        waiting.add(driver)
        try:
            return await round_.write(queue)
        except BaseException:
            driver.leave(queue.leg, is_relayed=is_relayed)
            raise
        finally:
            waiting.discard(driver)
