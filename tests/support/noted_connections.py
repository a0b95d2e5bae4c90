"""Notes the connections that the listeners of a test accept."""

import asyncio

import pytest

from gateway.http.server import listener
from gateway.http.server.connection import Connection, Service


class NotedConnection(Connection):
    """A connection, with its transport."""

    __slots__ = ("transport",)
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        super().connection_made(transport)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[NotedConnection]:
    """The connections of all listeners, the newest last."""
    found: list[NotedConnection] = []

    def accept(service: Service) -> NotedConnection:
        found.append(NotedConnection(service))
        return found[-1]

    monkeypatch.setattr(listener, "Connection", accept)
    return found
