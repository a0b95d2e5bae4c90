"""What one subscription still has to tell its client: each thing once, however often it was said meanwhile.

A client that does not read, or an upstream that floods, costs one message per thing that was subscribed to; beyond
`limits.behind_bytes` that message says nothing but what changed.
"""

from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.exchange.events import Leg
from gateway.runtime.coarse_timer import CoarseTimer

Topic = tuple[str, str]
"""What a change is about: its method, and the URI of a resource or nothing."""


class ChangeQueue(ResponseQueue):
    """The acknowledgement, then changes, then the end."""

    def __init__(self, leg: Leg, silence: CoarseTimer, behind_bytes: int) -> None:
        super().__init__(leg, silence, behind_bytes)
        self._changes: dict[Topic, bytes] = {}
        self._told = 0
        """The size of all that waits."""

    def has_room(self, topic: Topic, message: bytes) -> bool:
        """Whether a change may wait with all that it says; that it happened may always be told."""
        return self._told - len(self._changes.get(topic, b"")) + len(message) <= self._behind_bytes

    def tell(self, topic: Topic, message: bytes) -> None:
        """Queue a change, in place of an older one about the same that has not gone out."""
        self._told += len(message) - len(self._changes.get(topic, b""))
        self._changes[topic] = message
        self._wake()

    def _pending(self) -> object:
        return self._changes or super()._pending()

    def _next(self) -> bytes | FinalMessage | None:
        if self._changes and not self._messages:
            message = self._changes.pop(next(iter(self._changes)))
            self._told -= len(message)
            return message
        return super()._next()
