"""Sends requests to upstreams, whose replies go to listeners.

Rule 1: a request is sent once, but for one that may run twice: that is sent once more if its connection ends without
a byte of a reply. When a request fails, its caller learns whether a byte of it may have left, and decides.
Rule 2: no request has a deadline here but for its connection. Callers abort what takes too long.
"""

import asyncio
from functools import partial
from typing import Final

from gateway.http_client.connection import IDEMPOTENT, Connection, PendingRequest
from gateway.http_client.connector import Connector
from gateway.http_client.errors import ClientClosed, NoReply, NotConnected
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.http_client.idle_connections import KEEP_ALIVE_SECONDS, IdleConnections
from gateway.runtime.tasks import Tasks

_SERVERS: Final = 256
"""Servers whose heads are remembered."""


class HttpClient:
    """All connections of a process to its upstreams."""

    def __init__(
        self, tasks: Tasks, keep_alive_seconds: float = KEEP_ALIVE_SECONDS, connector: Connector | None = None
    ) -> None:
        self.tasks = tasks
        self._connector = connector or Connector()
        self.idle = IdleConnections(tasks, keep_alive_seconds)
        """Those that wait for a request."""
        self.freed = self.idle.put
        """Keeps a connection for the next request."""
        self.connections: dict[Connection, None] = {}
        """All that are open. A dictionary takes a third of the memory of a set."""
        self._connecting: dict[asyncio.Task[None], None] = {}
        self._familiar: dict[tuple[str, int], FamiliarHeads] = {}
        self._is_closed = False

    def begin(self, pending: PendingRequest) -> None:
        """Send a request, at once if a connection is idle."""
        connection = None
        if not (pending.sending == "fresh" or self._is_closed):
            # A request whose body waits can be sent again if the connection turns out to have ended.
            is_safe = pending.method in IDEMPOTENT or pending.awaits_continue
            connection = self.idle.take(pending.origin, is_repeatable=is_safe, looks=not pending.awaits_continue)
        if connection is not None:
            connection.start(pending)
        else:
            self.connect(pending)

    def connect(self, pending: PendingRequest) -> None:
        """Send a request, or send it once more, on a new connection."""
        task = self.tasks.start(self._open(pending), "connect upstream")
        self._connecting[task] = None
        pending.waits_for(task)
        task.add_done_callback(partial(self._connected, pending))

    def close(self) -> None:
        """Close all connections. The requests in flight fail, and so do new ones."""
        self._is_closed = True
        for task in self._connecting:
            _ = task.cancel()
        for connection in list(self.connections):
            connection.close(ClientClosed(sent=True))
        self._connector.close()

    # -- connecting ---------------------------------------------------------------------------------------------

    async def _open(self, pending: PendingRequest) -> None:
        origin = pending.origin
        if self._is_closed:
            return
        if len(self._familiar) > _SERVERS:
            self._familiar.clear()
        familiar = self._familiar.setdefault((origin.host, origin.port), FamiliarHeads())
        connection = Connection(origin, self, familiar)
        try:
            await self._connector.connect(connection, pending.connect_seconds)
        except NotConnected as exc:
            failure = exc
        else:
            self.connections[connection] = None
            if connection.is_open and pending.stage != "over":
                connection.start(pending)
                return
            connection.abort()
            failure = NotConnected("it closed the connection at once")
        # If it was sent before, the upstream may have got that, and ended since.
        pending.fail(NoReply() if pending.sending == "again" and pending.method not in IDEMPOTENT else failure, self)

    def _connected(self, pending: PendingRequest, task: asyncio.Task[None]) -> None:
        """The task that opened a connection has ended, perhaps before its first step."""
        _ = self._connecting.pop(task, None)
        if pending.carrier is task:  # or it was sent, and is perhaps sent again
            is_bug = not task.cancelled() and task.exception() is not None
            pending.fail(NotConnected("the gateway failed") if is_bug else ClientClosed(sent=False), self)

    # -- from connections ---------------------------------------------------------------------------------------

    def ended_idle(self, connection: Connection) -> None:
        """Remember how long the upstream keeps a connection."""
        self.idle.ended(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.pop(connection, None)
        self.idle.remove(connection)
