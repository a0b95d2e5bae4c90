"""Answers the requests of a server that reach no client, such as pings.

They go out one after the other, so that a flood of requests costs one connection.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from msgspec import Raw

from gateway.protocol import jsonrpc
from gateway.protocol.errors import GatewayError
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Event, get_logger
from gateway.upstream.channel import Headers

log = get_logger()

_MAX_QUEUED: Final = 64
"""Answers that may be queued for a slow server; its further requests stay unanswered."""
_MAX_ID_BYTES: Final = 1024

Send = Callable[[Raw, Raw | jsonrpc.Error, Headers], Awaitable[None]]


@dataclass(slots=True, eq=False)
class OwnAnswers:
    """The queue of one session."""

    _route: str
    _tasks: Tasks
    _send: Send
    _queue: deque[tuple[Raw, Raw | jsonrpc.Error, Headers]] | None = None
    """While answers are sent: an empty queue would take more memory than all else that a silent session has here."""
    _is_flooded: bool = False

    def add(self, id_: Raw, body: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Queue one answer; beyond the bounds, warn once and drop it."""
        if len(self._queue or ()) >= _MAX_QUEUED or len(bytes(id_)) > _MAX_ID_BYTES:
            if not self._is_flooded:
                self._is_flooded = True
                log.warning(Event.UPSTREAM_FAILED, route=self._route, cause=_FLOODED, fix=_FLOODED_FIX)
            return
        answer = Raw(bytes(id_)), body, headers  # a copy: the id would keep the whole message
        if self._queue is None:
            self._queue = deque((answer,))
            self._tasks.spawn(self._send_all(self._queue), "answer without a client")
        else:
            self._queue.append(answer)

    async def _send_all(self, queue: deque[tuple[Raw, Raw | jsonrpc.Error, Headers]]) -> None:
        try:
            while queue:
                id_, body, headers = queue.popleft()
                try:
                    await self._send(id_, body, headers)
                except GatewayError as exc:
                    log.debug(Event.UPSTREAM_FAILED, route=self._route, cause=exc.message)
        finally:
            self._queue = None


_FLOODED: Final = (
    "the server sends the gateway requests (pings, requests outside of calls) faster than it takes the answers"
)
_FLOODED_FIX: Final = "find out why the server asks so often; the gateway leaves further requests unanswered"
