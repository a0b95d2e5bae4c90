"""Open connections without a request, kept for the next request to their origin.

A request that meets the end of its connection may have run or not, and a `tools/call` must not be sent twice. So it
gets a connection that its upstream surely still keeps: one that was idle for less than the upstream says that it keeps
them, or was seen to keep them, with a margin. What was seen last counts, because a restart ends connections early.
"""

from typing import Final

from gateway import world
from gateway.http_client.connection import Connection
from gateway.http_client.origin import Origin
from gateway.runtime.coarse_timer import Alarm
from gateway.runtime.newest import Newest
from gateway.runtime.tasks import Tasks

KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s."""
UNSEEN_SECONDS: Final = 0.25
"""How long a connection is surely kept by an upstream that was not seen to close or to keep one yet."""
_MARGIN_SECONDS: Final = 1.0
"""How long before the upstream closes a connection it is not used any more."""
_MARGIN_SHARE: Final = 0.25
"""The margin of a time that was seen, if that is less: it has to cover a round trip."""
_ORIGINS: Final = 256
_SWEEP_SECONDS: Final = 0.5
"""A connection is closed so much later at most; until then it is not used."""


class IdleConnections:
    """Hands out the connection that was used last, so that the others can end."""

    def __init__(self, tasks: Tasks, seconds: float = KEEP_ALIVE_SECONDS) -> None:
        self._seconds = seconds
        self._by_origin: dict[Origin, dict[Connection, None]] = {}
        """The connections of each origin, the one that was used last at the end."""
        self._seen: Newest[Origin, float] = Newest(_ORIGINS)
        """For how long an origin has kept a connection that it closed, or that was closed here."""
        self._alarm = Alarm(self._sweep, min(_SWEEP_SECONDS, seconds), tasks, "idle upstream connections")

    def __len__(self) -> int:
        return sum(map(len, self._by_origin.values()))

    def put(self, connection: Connection) -> None:
        """Keep a connection, if its upstream will keep it too."""
        said, seconds = connection.keep_alive_seconds, self._seconds
        if said is not None:
            seconds = min(seconds, said - _MARGIN_SECONDS)
            if seconds <= 0:
                connection.abort()
                return
        connection.idle_since = now = world.monotonic()
        connection.expires = now + seconds
        connections = self._by_origin.get(connection.origin)
        if connections is None:
            connections = self._by_origin[connection.origin] = {}
        connections[connection] = None
        if connection.expires < self._alarm.due:
            self._alarm.set(connection.expires)

    def take(self, origin: Origin, *, is_repeatable: bool = False, looks: bool = True) -> Connection | None:
        """Return an open connection; close those that have ended.

        `is_repeatable`: the upstream need not surely keep it, because the request can be sent again. `looks`: look
        into the socket for its end, or for other unread bytes: the event loop knows of them later.
        """
        connections = self._by_origin.get(origin)
        now = world.monotonic()
        while connections:
            connection = next(reversed(connections))
            if not is_repeatable and connection.keep_alive_seconds is None:
                seen = self._seen.get(origin)
                safe = UNSEEN_SECONDS if seen is None else seen - min(_MARGIN_SECONDS, seen * _MARGIN_SHARE)
                if now - connection.idle_since >= safe:
                    return None  # the others have been idle for longer
            del connections[connection]
            is_good = connection.is_usable if looks else connection.is_open
            if is_good and now < connection.expires:
                return connection
            connection.abort()
        return None

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is kept."""
        connections = self._by_origin.get(connection.origin)
        if connections is not None:
            connections.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        """The upstream has closed a connection; if it is kept, that shows for how long the upstream keeps them."""
        if connection not in self._by_origin.get(connection.origin, ()):
            return
        self.remove(connection)
        now = world.monotonic()
        if now < connection.expires:  # else this process was stopped, and the end may have come long before
            _ = self._seen.keep(connection.origin, now - connection.idle_since)

    def _sweep(self, now: float) -> float | None:
        """Close the connections that were not used for too long."""
        for origin, connections in tuple(self._by_origin.items()):
            for connection in [each for each in connections if each.expires <= now]:
                del connections[connection]
                if connection.is_usable:
                    _ = self._seen.keep(origin, now - connection.idle_since)
                connection.abort()
            if not connections:
                del self._by_origin[origin]
        return min((each.expires for kept in self._by_origin.values() for each in kept), default=None)
