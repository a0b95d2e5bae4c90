"""The legs of exchanges that wait for messages, by where their client is."""

from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import ResponseQueue
from gateway.cluster.reply_relay import Replied
from gateway.downstream.round import Round


class Legs:
    """The exchanges whose messages a request waits for."""

    def __init__(self) -> None:
        self.running: set[Driver] = set()
        """Those with a leg of a client of this replica."""
        self.relayed: set[Driver] = set()
        """Those with a leg of a request that another replica forwarded."""

    async def write(self, round_: Round, driver: Driver, queue: ResponseQueue) -> Replied:
        """Write what an exchange sends to a round, until its final message."""
        is_relayed = round_.incoming.peer_request is not None
        waiting = self.relayed if is_relayed else self.running
        waiting.add(driver)
        try:
            return await round_.write(queue)
        except BaseException:
            driver.leave(queue.leg, is_relayed=is_relayed)
            raise
        finally:
            waiting.discard(driver)
