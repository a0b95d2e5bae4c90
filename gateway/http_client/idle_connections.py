"""Open connections without a request, kept for the next request to their origin."""

from typing import Final

from gateway import world
from gateway.http_client.connection import Connection
from gateway.http_client.origin import Origin
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.tasks import Tasks

KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s. An older connection may close during a request, and a
`tools/call` must not be sent twice."""
_MARGIN_SECONDS: Final = 1.0
"""How long before the upstream closes a connection it is not used any more."""
_SWEEP_SECONDS: Final = 0.5
"""A connection is closed so much later at most; until then it is not used."""


class IdleConnections:
    """Hands out the connection that was used last, so that the others can end."""

    def __init__(self, tasks: Tasks, seconds: float = KEEP_ALIVE_SECONDS) -> None:
        self._seconds = seconds
        self._by_origin: dict[Origin, dict[Connection, None]] = {}
        """The connections of each origin, the one that was used last at the end."""
        self._alarm = Alarm(self._sweep, min(_SWEEP_SECONDS, seconds), tasks, "idle upstream connections")

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
        connection.expires = world.monotonic() + seconds
        connections = self._by_origin.get(connection.origin)
        if connections is None:
            connections = self._by_origin[connection.origin] = {}
        connections[connection] = None
        if connection.expires < self._alarm.due:
            self._alarm.set(connection.expires)

    def take(self, origin: Origin, *, looks: bool = True) -> Connection | None:
        """Return an open connection; close those that have ended.

        `looks`: look into the socket for its end, or for other unread bytes: the event loop knows of them later.
        """
        connections = self._by_origin.get(origin)
        while connections:
            connection, _ = connections.popitem()
            is_good = connection.is_usable if looks else connection.is_open
            if is_good and connection.expires > world.monotonic():
                return connection
            connection.abort()
        return None

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is kept."""
        connections = self._by_origin.get(connection.origin)
        if connections is not None:
            connections.pop(connection, None)

    def _sweep(self, now: float) -> float | None:
        """Close the connections that were not used for too long."""
        for origin, connections in tuple(self._by_origin.items()):
            for connection in [each for each in connections if each.expires <= now]:
                del connections[connection]
                connection.abort()
            if not connections:
                del self._by_origin[origin]
        return min((each.expires for kept in self._by_origin.values() for each in kept), default=None)
