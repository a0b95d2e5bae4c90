"""Queues the messages for one client, of which the last is the final one.

What sends messages puts them in and never waits. What writes the client's reply takes them out. Rule: notifications
are dropped if the client does not read, the oldest first. A request never is: the call would wait for its answer for
ever.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from gateway.http.error_texts import UNKNOWN, Sender, texts
from gateway.protocol import jsonrpc
from gateway.protocol.errors import DownstreamError, GatewayError, LocalProtocolError
from gateway.runtime.budget import Share
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.telemetry import COMPLETE, Ending, Outcome

BEHIND_BYTES: Final = 1_048_576
"""How much of notifications may wait for a client that does not read. Whatever it is, such a client misses some; it is
`limits.sending_bytes` that bounds the memory of all of them."""
_MAX_BEHIND: Final = 1024
"""How many notifications may wait for a client. Small ones reach this limit before `BEHIND_BYTES`."""

_NO_HEADERS: Final[Mapping[str, str]] = {}


def ending_of(error: GatewayError) -> Ending:
    """The ending of a round that ends with this error."""
    return Ending(Outcome.REJECTED if isinstance(error, DownstreamError) else Outcome.ERROR, str(error.code))


def error_response(
    id_: bytes | Raw | None, error: GatewayError, request_id: str = "", sender: Sender = UNKNOWN
) -> bytes:
    """A JSON-RPC error for a request, if its id could be read; `request_id` names the HTTP request, if it is one."""
    data = {**(error.data or {}), "requestId": request_id} if request_id else error.data
    encoded = Raw(jsonrpc.encode(data)) if data else UNSET
    return jsonrpc.failure(id_, jsonrpc.Error(error.code, texts.told(error, request_id, sender), encoded))


class FinalMessage(msgspec.Struct, frozen=True):
    """The JSON-RPC response to a request; status and headers count only if nothing was sent before it."""

    body: bytes
    """Empty if the stream ends without one."""
    status: int = 200
    headers: Mapping[str, str] = _NO_HEADERS
    ending: Ending = COMPLETE
    cause: GatewayError | None = None

    @classmethod
    def of_error(
        cls, error: GatewayError, id_: bytes | Raw | None, request_id: str, sender: Sender, *, in_session: bool = False
    ) -> "FinalMessage":
        """The response for an exception; `request_id` names the HTTP request, `id_` is the JSON-RPC id.

        `in_session`: the request is one of a legacy client's session, which goes on.
        """
        body = error_response(id_, error, request_id, sender)
        status = error.status_in_session if in_session else error.status
        return cls(body, status, error.headers, ending_of(error), error)


Item = bytes | FinalMessage | None
"""What an outbox gives: a message, the final one, or None if the client needs a keep-alive."""


class Outbox:
    """The messages for one client, in bytes."""

    __slots__ = (
        "_bytes",
        "_droppable",
        "_droppable_bytes",
        "_messages",
        "_share",
        "_silence",
        "_waiter",
        "dropped",
        "final",
        "last",
        "taken",
    )

    def __init__(self, silence: CoarseTimer) -> None:
        """`silence` rings when the client needs a keep-alive."""
        self._silence = silence
        self._messages: OrderedDict[int, bytes] | None = None
        """What waits, by number, once there was anything: most calls get nothing but their response."""
        self._droppable: deque[int]
        """The numbers of the notifications among it."""
        self._bytes = self._droppable_bytes = 0
        self.dropped = 0
        self.final: FinalMessage | None = None
        self.last = self.taken = 0
        """The number of the last message so far, and of the one that was taken last."""
        self._share: Share | None = None
        """Set while what waits is counted."""
        self._waiter: asyncio.Future[None] | None = None
        """While somebody waits for the next message."""

    def send(self, message: bytes) -> None:
        """Queue one notification."""
        messages = self._put(message)
        droppable = self._droppable
        droppable.append(self.last)
        self._droppable_bytes += len(message)
        while len(droppable) > 1 and (len(droppable) > _MAX_BEHIND or self._droppable_bytes > BEHIND_BYTES):
            size = len(messages.pop(droppable.popleft()))
            self._bytes -= size
            self._droppable_bytes -= size
            self.dropped += 1
        self._added()

    def ask(self, message: bytes) -> None:
        """Queue one request, or several."""
        _ = self._put(message)
        self._added()

    def _put(self, message: bytes) -> OrderedDict[int, bytes]:
        if self.final is not None:
            raise LocalProtocolError("a message after the final one")
        if self._messages is None:
            self._messages, self._droppable = OrderedDict(), deque()
        self.last += 1
        self._messages[self.last] = message
        self._bytes += len(message)
        return self._messages

    def finish(self, final: FinalMessage) -> None:
        """Queue the final message."""
        if self.final is not None:
            raise LocalProtocolError("a second final message")
        self.final = final
        self.last += 1
        self._added()

    def begin_writing(self, share: Share) -> None:
        """Count what waits, from now until `end_writing`, in a share of the budget for clients that do not read."""
        self._share = share

    def end_writing(self) -> None:
        """Count nothing any more: the writer has written everything, or its client left."""
        if self._share is not None:
            self._share.release()
            self._share = None

    def _added(self) -> None:
        """Count what was added, unless the writer waits for it; and wake the writer."""
        if self._waiter is None or self._waiter.done():
            self._count()
        self._wake()

    def _count(self) -> None:
        if self._share is not None:
            self._share.hold(self._waiting_bytes())

    def _waiting_bytes(self) -> int:
        if self.final is None or self._is_final_taken:
            return self._bytes
        return self._bytes + len(self.final.body)

    @property
    def _is_final_taken(self) -> bool:
        return self.final is not None and self.taken == self.last

    async def take(self) -> Item:
        """The next message; None if the client needs a keep-alive."""
        if self._waiter is not None or not self.is_ready:
            await self._wait()
        taken = self._next()
        if self._share is not None and (self._share.used or self._messages):
            self._count()
        return taken

    async def _wait(self) -> None:
        """Wait for a message, or for the time of a keep-alive."""
        waiter = self._waiter
        if waiter is None:
            waiter = self._waiter = asyncio.Future()
            self._silence.arm(self, self._wake)
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self.waits_no_more()

    def waits_no_more(self) -> None:
        """Nobody waits for a message any more."""
        self._silence.disarm(self)
        self._waiter = None

    @property
    def is_ready(self) -> bool:
        """Whether `take` has nothing to wait for."""
        return self.final is not None or bool(self._messages)

    def _next(self) -> Item:
        if not self._messages:
            if self.final is not None:
                self.taken = self.last
            return self.final
        self.taken, message = self._messages.popitem(last=False)
        self._bytes -= len(message)
        if self._droppable and self._droppable[0] == self.taken:
            _ = self._droppable.popleft()
            self._droppable_bytes -= len(message)
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
