"""Queues the changes of one subscription for its client, each change once.

A client that does not read, or an upstream that floods, costs one message per thing that the client subscribed to.
Beyond `limits.behind_bytes` that message says only what changed.
"""

from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.exchange.events import Leg
from gateway.runtime.coarse_timer import CoarseTimer

Topic = tuple[str, str]
"""The subject of a change: its method, with the URI of a resource or an empty string."""


class ChangeQueue(ResponseQueue):
    """The acknowledgement, then changes, then the final message."""

    def __init__(self, leg: Leg, silence: CoarseTimer, behind_bytes: int) -> None:
        super().__init__(leg, silence, behind_bytes)
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
        self._wake()

    def _pending(self) -> object:
        return self._changes or super()._pending()

    def _next(self) -> bytes | FinalMessage | None:
        if self._changes and not self._messages:
            message = self._changes.pop(next(iter(self._changes)))
            self._changes_bytes -= len(message)
            return message
        return super()._next()
