"""Open connections without a request, kept for the next request to their origin.

A request that meets the end of its connection may have run or not, and a `tools/call` must not be sent twice. So it
gets a connection that its upstream surely still keeps: one that was idle for less than the upstream says that it keeps
them, or was seen to keep them, with a margin. What was seen last counts, because a restart ends connections early.

Only a connection that is found open shows what the upstream keeps: an end may be heard long after it came, if this
process stood still in between. So an end makes the time shorter, and never longer.
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
"""How long a connection is surely kept by an upstream of which nothing was seen yet."""
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
        self._by_origin: dict[Origin, dict[Connection, tuple[float, float]]] = {}
        """With the times since when each is idle, and until when it is kept; the one that was used last at the end."""
        self._sure_seconds: Newest[Origin, float] = Newest(_ORIGINS)
        """How long an origin surely keeps them, unless it says so; learnt from those that it has closed, or that were
        found open."""
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
        now = world.monotonic()
        expires = now + seconds
        self._by_origin.setdefault(connection.origin, {})[connection] = now, expires
        if expires < self._alarm.due:
            self._alarm.set(expires)

    def take(self, origin: Origin, *, is_repeatable: bool = False, looks: bool = True) -> Connection | None:
        """Return an open connection; close those that have ended.

        `is_repeatable`: the upstream need not surely keep it, because the request can be sent again. `looks`: look
        into the socket for its end, or for other unread bytes: the event loop knows of them later.
        """
        kept = self._by_origin.get(origin)
        if not kept:
            return None
        now, sure_seconds = world.monotonic(), self._sure_seconds.get(origin, UNSEEN_SECONDS)
        while kept:
            connection, (since, expires) = kept.popitem()
            if not (is_repeatable or now - since < sure_seconds or connection.keep_alive_seconds is not None):
                kept[connection] = since, expires
                self._note_if_open(connection, now - since)
                return None  # the others have been idle for longer
            is_good = connection.is_usable() if looks else connection.is_open
            if is_good and now < expires:
                return connection
            connection.abort()
        return None

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is kept."""
        _ = self._by_origin.get(connection.origin, {}).pop(connection, None)

    def ended(self, connection: Connection) -> None:
        """The upstream has closed a connection; if it is kept, the upstream keeps none for longer."""
        origin = connection.origin
        since, _ = self._by_origin.get(origin, {}).pop(connection, (None, None))
        if since is not None:
            known = self._sure_seconds.get(origin, UNSEEN_SECONDS)
            _ = self._sure_seconds.keep(origin, min(known, _safe_seconds(world.monotonic() - since)))

    def _sweep(self, now: float) -> float | None:
        """Close the connections that were not used for too long."""
        for origin, kept in tuple(self._by_origin.items()):
            for connection, (since, expires) in tuple(kept.items()):
                if expires <= now:
                    del kept[connection]
                    self._note_if_open(connection, now - since)
                    connection.abort()
            if not kept:
                del self._by_origin[origin]
        return min((expires for kept in self._by_origin.values() for _, expires in kept.values()), default=None)

    def _note_if_open(self, connection: Connection, seconds: float) -> None:
        """The upstream has kept a connection for so long, if that is open."""
        if connection.is_usable():
            known = self._sure_seconds.get(connection.origin, UNSEEN_SECONDS)
            _ = self._sure_seconds.keep(connection.origin, max(known, _safe_seconds(seconds)))


def _safe_seconds(seconds: float) -> float:
    """How long a connection may be used to an upstream that keeps it for so long."""
    return seconds - min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)
