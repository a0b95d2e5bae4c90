"""One request to another replica, with the reply to it."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway import world
from gateway.cluster.worker import Address
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.protocol.errors import InvalidState
from gateway.seal.peer_messages import End, Frame, Frames, PeerRequest, Whole
from gateway.telemetry import Ending, Outcome

_MESSAGE_BYTES: Final = 65_536
"""A task takes a larger reply, and writes it in pieces."""
_OK: Final = 200
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


class PeerExchange(AwaitedReply):
    """The reply, for a coroutine, or for a callback that waits until it is whole."""

    __slots__ = ("_is_late", "_settled", "address", "deadline", "frames", "is_connected", "peer_request")

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
        self._settled: Callable[[PeerExchange], object] | None = None
        self.is_connected = True
        """False if there was no connection until the deadline."""

    @property
    def is_sent(self) -> bool:
        """Whether the peer may have received the request: it has reacted to its head."""
        return not self._pending.awaits_continue

    async def accepted(self) -> None:
        """Wait for the head of the reply until the deadline; raises TimeoutError or RequestFailed."""
        self._settled = None  # from now on this coroutine is woken, even if the callback was not called
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

    def add_done_callback(self, callback: "Callable[[PeerExchange], object]") -> None:
        """Call back once when the whole reply is here, or when a coroutine has to wait for more; not before that.

        That is in the stack that reads the reply from the socket, so no turn of the event loop lies between.
        """
        self._settled = callback

    def settle(self) -> None:
        """Have a coroutine wait for more, if the callback was not called yet."""
        callback, self._settled = self._settled, None
        if callback is not None:
            callback(self)

    def _wake(self) -> None:
        if self._settled is None:
            super()._wake()
        elif self._is_over or not self._pending.is_read:
            self.settle()

    def message(self) -> tuple[bytes, Ending] | None:
        """Return the reply if it is complete, and one message without a status and headers of its own."""
        data = self.whole_at_most(_MESSAGE_BYTES) if self._is_begun and self.status == _OK else None
        if data is None:
            return None
        whole: Frame | None
        try:
            whole = self.frames().only(data)
        except InvalidState:
            whole = None
        if isinstance(whole, Whole) and whole.status == _OK and not whole.headers:
            return whole.data, ending(whole)
        self._parts.append(data)  # for the coroutine
        return None


def ending(end: End | Whole) -> Ending:
    """Labels for the metrics; an outcome that only a newer replica knows counts as an error, its reply is complete."""
    return Ending(_OUTCOMES.get(end.outcome, Outcome.ERROR), end.error_type)
