"""A request of the HTTP client on a FAKE transport, over which a test hands it what the upstream says."""

import asyncio
from unittest.mock import Mock

from gateway.http_client.connection import Connection, PendingRequest
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.http_client.origin import Origin
from tests.support.reply_recorder import Recorder

ORIGIN = Origin("127.0.0.1", 1)


class FakeTransport(asyncio.Transport):
    """A FAKE open transport, which notes whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = self.is_read = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        self.is_open = False

    def pause_reading(self) -> None:
        assert self.is_open
        self.is_read = False

    def resume_reading(self) -> None:
        assert self.is_open
        self.is_read = True


class Begun:
    """One request in flight, with what was heard of its reply, and the owner of its connection."""

    def __init__(self, familiar: FamiliarHeads | None = None) -> None:
        """`familiar`: the replies that this upstream gave before."""
        self.transport, self.owner, self.heard = FakeTransport(), Mock(), Recorder()
        self.connection = Connection(ORIGIN, self.owner, familiar or FamiliarHeads())
        self.connection.connection_made(self.transport)
        self.pending = PendingRequest(ORIGIN, self.heard)
        self.connection.start(self.pending)

    def receive(self, *parts: bytes) -> "Begun":
        """Have these parts come, each as a read of its own."""
        for part in parts:
            self.connection.data_received(part)
        return self

    def heard_again(self) -> Recorder:
        """Begin the next request on the connection; what is heard of it."""
        heard = Recorder()
        self.connection.start(PendingRequest(ORIGIN, heard))
        return heard
