"""Queues the messages of one leg for its client: notifications, then exactly one final message.

The exchange puts messages in and never waits. The handler of the request takes them out and writes them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Raw

from gateway.exchange.events import Leg
from gateway.protocol import jsonrpc
from gateway.protocol.errors import DownstreamError, GatewayError, LocalProtocolError
from gateway.runtime.budget import Share
from gateway.runtime.coarse_timer import TICK_SECONDS, CoarseTimer
from gateway.telemetry import COMPLETE, Ending, Outcome, Span

_MAX_BEHIND: Final = 1024
"""How many notifications may wait for a client. Beyond that the oldest are dropped, because newer ones say more. Small
notifications reach this limit before `limits.behind_bytes`."""

_NO_HEADERS: Final[Mapping[str, str]] = {}


def ending_of(error: GatewayError) -> Ending:
    """The ending of a round that ends with this error."""
    return Ending(Outcome.REJECTED if isinstance(error, DownstreamError) else Outcome.ERROR, str(error.code))


class FinalMessage(msgspec.Struct, frozen=True):
    """The JSON-RPC response of a leg; status and headers count only if nothing was sent before it."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = _NO_HEADERS
    ending: Ending = COMPLETE
    cause: GatewayError | None = None

    @classmethod
    def of_error(
        cls, error: GatewayError, id_: bytes | Raw | None, request_id: str, *, in_session: bool = False
    ) -> "FinalMessage":
        """The response for an exception; `request_id` names the HTTP request, `id_` is the JSON-RPC id.

        `in_session`: the request is one of a legacy client's session, which goes on.
        """
        data = Raw(jsonrpc.encode({**(error.data or {}), "requestId": request_id}))
        body = jsonrpc.failure(id_, jsonrpc.Error(error.code, error.message, data))
        status = error.status_in_session if in_session else error.status
        return cls(body, status, error.headers, ending_of(error), error)


class _Request(bytes):
    """A request to the client, which is never dropped: the call would wait for its answer for ever."""


class ResponseQueue(Leg):
    """A leg, with a queue of JSON messages to its client."""

    __slots__ = (
        "_behind_bytes",
        "_bytes",
        "_final",
        "_is_final_taken",
        "_messages",
        "_new_share",
        "_share",
        "_silence",
        "_silence_timer",
        "_waiter",
        "dropped",
        "request_id",
        "span",
    )

    def __init__(  # noqa: PLR0913  (what a client wants, and what limits it)
        self,
        id_: Raw,
        silence: CoarseTimer,
        behind_bytes: int,
        request_id: str = "",
        span: Span | None = None,
        *,
        progress_token: Raw | None = None,
        log_level: str | None = None,
    ) -> None:
        """`silence` rings when the client needs a keep-alive; `behind_bytes` limits the notifications that wait."""
        super().__init__(id_, progress_token, log_level)
        self.request_id = request_id
        """The id of the HTTP request that waits."""
        self.span = span
        """The span of that request, if it is traced."""
        self._silence = silence
        self._behind_bytes = behind_bytes
        self._bytes = 0
        self.dropped = 0
        self._messages: deque[bytes] | None = None
        """Notifications, once there was one: most legs get none."""
        self._final: FinalMessage | None = None
        self._is_final_taken = False
        self._new_share: Callable[[], Share] | None = None
        """Set while somebody writes what this queue has."""
        self._share: Share | None = None
        """What waits here, while the client is behind."""
        self._waiter: asyncio.Future[None] | None = None
        """While somebody waits for the next message."""
        self._silence_timer: asyncio.TimerHandle | None = None
        """For the first keep-alive, if it is due earlier than `silence` rings."""

    def awaited(self, waiter: asyncio.Future[None], seconds: float = 0.0, limit: float = 0.0) -> None:
        """Somebody has waited with `waiter` for `seconds` already, of the `limit` after which a keep-alive is due."""
        self._waiter = waiter
        if seconds > TICK_SECONDS:
            self._silence_timer = asyncio.get_running_loop().call_later(max(0.0, limit - seconds), self._wake)
        else:
            self._silence.arm(self, self._wake)

    def send(self, message: bytes) -> None:
        """Queue one notification."""
        if self._final is not None:
            raise LocalProtocolError("a notification after the final message")
        messages = self._messages = deque() if self._messages is None else self._messages
        messages.append(message)
        self._bytes += len(message)
        while len(messages) > _MAX_BEHIND or self._bytes > self._behind_bytes:
            if not self._drop_oldest(messages):
                break
        self._added()

    def ask(self, message: bytes) -> None:
        """Queue one request, or several."""
        self.send(_Request(message))

    def _drop_oldest(self, messages: deque[bytes]) -> bool:
        """Drop the oldest notification except the newest message; return whether there was one."""
        for index in range(len(messages) - 1):
            message = messages[index]
            if not isinstance(message, _Request):
                del messages[index]
                self._bytes -= len(message)
                self.dropped += 1
                return True
        return False

    def finish(self, final: FinalMessage) -> None:
        """Queue the final message."""
        if self._final is not None:
            raise LocalProtocolError("a second final message")
        self._final = final
        self._added()

    def begin_writing(self, new_share: Callable[[], Share]) -> None:
        """Count what waits, from now until `end_writing`, in shares of the budget for clients that do not read."""
        self._new_share = new_share

    def end_writing(self) -> None:
        """Count nothing any more: the writer has written everything, or its client left."""
        self._new_share = None
        if self._share is not None:
            self._share.release()
            self._share = None

    def _added(self) -> None:
        """Count what was added, unless the writer waits for it; and wake the writer."""
        if self._waiter is None or self._waiter.done():
            self._count()
        self._wake()

    def _count(self) -> None:
        waiting = self._waiting_bytes()
        if self._share is None:
            if self._new_share is None or not waiting:
                return
            self._share = self._new_share()
        self._share.grow(waiting - self._share.used)
        if not waiting:
            self._share.release()
            self._share = None

    def _waiting_bytes(self) -> int:
        if self._final is None or self._is_final_taken:
            return self._bytes
        return self._bytes + len(self._final.body)

    async def take(self) -> bytes | FinalMessage | None:
        """The next message; None if the client needs a keep-alive."""
        if self._waiter is None and self._pending() is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._silence.arm(self, self._wake)
        if self._waiter is not None:
            try:
                await self._waiter
            finally:
                self.waits_no_more()
        taken = self._next()
        if self._share is not None or self._messages:
            self._count()
        return taken

    def waits_no_more(self) -> None:
        """Nobody waits for a message any more."""
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None
        self._silence.disarm(self)
        self._waiter = None

    @property
    def is_ready(self) -> bool:
        """Whether `take` has nothing to wait for."""
        return bool(self._pending())

    def _pending(self) -> object:
        """What can be taken; None if there is nothing."""
        return self._messages or self._final

    def _next(self) -> bytes | FinalMessage | None:
        if not self._messages:
            self._is_final_taken = self._final is not None
            return self._final
        message = self._messages.popleft()
        self._bytes -= len(message)
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Topic = tuple[str, str]
"""The subject of a change: its method, with the URI of a resource or an empty string."""


class ChangeQueue(ResponseQueue):
    """The acknowledgement of a subscription, then its changes, each once, then the final message.

    A client that does not read, or an upstream that floods, costs one message per thing that the client subscribed to.
    Beyond `limits.behind_bytes` that message says only what changed.
    """

    __slots__ = ("_changes", "_changes_bytes")

    def __init__(self, id_: Raw, silence: CoarseTimer, behind_bytes: int) -> None:
        super().__init__(id_, silence, behind_bytes)
        self._changes: dict[Topic, bytes] = {}
        self._changes_bytes = 0
        """The size of all changes that wait."""

    def has_room(self, topic: Topic, message: bytes) -> bool:
        """Whether a change may wait with its content; one without content may always wait."""
        return self._changes_bytes - len(self._changes.get(topic, b"")) + len(message) <= self._behind_bytes

    def tell(self, topic: Topic, message: bytes) -> None:
        """Queue a change, in place of an older one on the same topic that has not gone out."""
        self._changes_bytes += len(message) - len(self._changes.get(topic, b""))
        self._changes[topic] = message
        self._added()

    def _waiting_bytes(self) -> int:
        return self._changes_bytes + super()._waiting_bytes()

    def _pending(self) -> object:
        return self._changes or super()._pending()

    def _next(self) -> bytes | FinalMessage | None:
        if self._changes and not self._messages:
            message = self._changes.pop(next(iter(self._changes)))
            self._changes_bytes -= len(message)
            return message
        return super()._next()
