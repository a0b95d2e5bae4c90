"""Open connections without a request, kept for the next request to their origin."""

import time
from typing import Final

from gateway.http_client.connection import Connection
from gateway.http_client.origin import Origin
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks

KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s. An older connection may close during a request, and a
`tools/call` must not be sent twice."""
_MARGIN_SECONDS: Final = 1.0
"""How long before the upstream closes a connection it is not used any more."""


class IdleConnections:
    """Hands out the connection that was used last, so that the others can end."""

    def __init__(self, tasks: Tasks, seconds: float = KEEP_ALIVE_SECONDS) -> None:
        self._seconds = seconds
        self._timer = CoarseTimer(seconds, tasks, "idle upstream connection")
        self._by_origin: dict[Origin, dict[Connection, None]] = {}
        """The connections of each origin, the one that was used last at the end."""

    def __len__(self) -> int:
        return sum(map(len, self._by_origin.values()))

    def put(self, connection: Connection) -> None:
        """Keep a connection, if its upstream will keep it too."""
        seconds = self._seconds
        if connection.keep_alive_seconds is not None:
            seconds = min(seconds, connection.keep_alive_seconds - _MARGIN_SECONDS)
        if seconds <= 0:
            connection.abort()
            return
        connection.expires = time.monotonic() + seconds
        self._by_origin.setdefault(connection.origin, {})[connection] = None
        self._timer.arm(connection, connection.abort)

    def take(self, origin: Origin) -> Connection | None:
        """Return an open connection; close those that have ended or hold unread bytes."""
        while connections := self._by_origin.get(origin):
            connection = next(reversed(connections))
            self.remove(connection)
            if connection.expires > time.monotonic() and connection.is_open and connection.is_quiet:
                return connection
            connection.abort()
        return None

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is kept."""
        connections = self._by_origin.get(connection.origin)
        if connections is not None and connection in connections:
            self._timer.disarm(connection)
            del connections[connection]
            if not connections:
                del self._by_origin[connection.origin]
