"""The outboxes of the bridge: those of legs, those of subscriptions."""

import asyncio

from msgspec import Raw

from gateway.exchange.events import Leg
from gateway.http import outbox
from gateway.http.outbox import Item, Outbox
from gateway.runtime.coarse_timer import TICK_SECONDS, CoarseTimer
from gateway.telemetry import Span


class ResponseQueue(Outbox, Leg):
    """A leg with the messages for its client."""

    __slots__ = ("_silence_timer", "id", "log_level", "progress_token", "request_id", "span")

    def __init__(  # noqa: PLR0913  (what a client wants)
        self,
        id_: Raw,
        silence: CoarseTimer,
        request_id: str = "",
        span: Span | None = None,
        *,
        progress_token: Raw | None = None,
        log_level: str | None = None,
    ) -> None:
        super().__init__(silence)
        self.id, self.progress_token = id_, progress_token
        """JSON."""
        self.log_level = log_level
        """The least severe one that the client wants, None for no messages."""
        self.request_id = request_id
        """The id of the HTTP request that waits."""
        self.span = span
        """The span of that request, if it is traced."""
        self._silence_timer: asyncio.TimerHandle | None = None
        """For the first keep-alive, if it is due earlier than `silence` rings."""

    def awaited(self, waiter: asyncio.Future[None], seconds: float = 0.0, limit: float = 0.0) -> None:
        """Somebody has waited with `waiter` for `seconds` already, of the `limit` after which a keep-alive is due."""
        self._waiter = waiter
        if seconds > TICK_SECONDS:  # the shared timer would count from now
            self._silence_timer = asyncio.get_running_loop().call_later(max(0.0, limit - seconds), self._wake)
        else:
            self._silence.arm(self, self._wake)

    def waits_no_more(self) -> None:
        """See `Outbox`."""
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None
        super().waits_no_more()


Topic = tuple[str, str]
"""The subject of a change: its method, with the URI of a resource or an empty string."""


class ChangeQueue(Outbox):
    """The acknowledgement of a subscription, then its changes, each once, then the final message.

    A client that does not read, or an upstream that floods, costs one message per thing that the client subscribed to.
    Beyond `BEHIND_BYTES` that message says only what changed.
    """

    __slots__ = ("_changes", "_changes_bytes")

    def __init__(self, silence: CoarseTimer) -> None:
        super().__init__(silence)
        self._changes: dict[Topic, bytes] = {}
        self._changes_bytes = 0
        """The size of all changes that wait."""

    def has_room(self, topic: Topic, message: bytes) -> bool:
        """Whether a change may wait with its content; one without content may always wait."""
        return self._changes_bytes - len(self._changes.get(topic, b"")) + len(message) <= outbox.BEHIND_BYTES

    def tell(self, topic: Topic, message: bytes) -> None:
        """Queue a change, in place of an older one on the same topic that has not gone out."""
        self._changes_bytes += len(message) - len(self._changes.get(topic, b""))
        self._changes[topic] = message
        self._added()

    def _waiting_bytes(self) -> int:
        return self._changes_bytes + super()._waiting_bytes()

    @property
    def is_ready(self) -> bool:
        """See `Outbox`."""
        return bool(self._changes) or super().is_ready

    def _next(self) -> Item:
        if self._changes and not self._messages:
            message = self._changes.pop(next(iter(self._changes)))
            self._changes_bytes -= len(message)
            return message
        return super()._next()
