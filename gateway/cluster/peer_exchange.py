"""One request to another replica, with the reply to it."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway import world
from gateway.cluster.worker import Address
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.seal.peer_messages import End, Frames, PeerRequest, Whole
from gateway.telemetry import Ending, Outcome

_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


class PeerExchange(AwaitedReply):
    """The reply, and the deadline by which the peer has to accept the request."""

    __slots__ = ("_is_late", "address", "deadline", "frames", "is_connected", "peer_request")

    def __init__(
        self,
        begin: Callable[[ReplyListener], PendingRequest],
        address: Address,
        peer_request: PeerRequest,
        frames: Callable[[], Frames],
        deadline: float,
    ) -> None:
        """`begin` sends the request, and `frames` makes a decoder of its reply."""
        super().__init__(begin)
        self.address = address
        self.peer_request = peer_request
        self.frames = frames
        self.deadline = deadline
        """Until when the peer has to accept the request; monotonic."""
        self._is_late = False
        self.is_connected = True
        """False if there was no connection until the deadline."""

    @property
    def is_sent(self) -> bool:
        """Whether the peer may have received the request: it has reacted to its head."""
        return not self._pending.awaits_continue

    async def accepted(self) -> None:
        """Wait for the head of the reply until the deadline; raises TimeoutError or RequestFailed."""
        seconds = max(self.deadline - world.monotonic(), 0.0)
        timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        try:
            _ = await self.begun()
        except RequestFailed as exc:
            if self._is_late:
                raise TimeoutError from exc
            raise
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._is_late, self.is_connected = True, not self._pending.is_connecting
        self.cut()


def ending(end: End | Whole) -> Ending:
    """Labels for the metrics; an outcome that only a newer replica knows counts as an error, its reply is complete."""
    return Ending(_OUTCOMES.get(end.outcome, Outcome.ERROR), end.error_type)
