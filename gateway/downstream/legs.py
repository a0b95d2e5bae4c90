"""The legs of exchanges that wait for messages, by where their client is."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

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
            with _handed_over_in_time(round_, driver):
                return await round_.write(queue)
        except BaseException:
            driver.leave(queue.leg, is_relayed=is_relayed)
            raise
        finally:
            waiting.discard(driver)


@contextmanager
def _handed_over_in_time(round_: Round, driver: Driver) -> Iterator[None]:
    """End the leg before the replica that relays it does, so that its client comes back through another one."""
    peer_request = round_.incoming.peer_request
    if peer_request is None or peer_request.leg_seconds is None:
        yield
        return
    guarded = round_.live.process.tasks.guard(driver.hand_over, "end a relayed leg")
    timer = asyncio.get_running_loop().call_later(peer_request.leg_seconds, guarded)
    try:
        yield
    finally:
        timer.cancel()
