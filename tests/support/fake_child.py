"""A child without a process, and its launcher."""

import asyncio
import json
from typing import Any, cast
from unittest.mock import Mock

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher
from gateway.config import InForce, Limits, Route, Timeouts, Upstream
from gateway.http.upstream_client import Bounds, Client
from gateway.http_client.client import HttpClient
from gateway.protocol import jsonrpc
from gateway.runtime.tasks import Tasks


class FakeChild(Child):
    """A FAKE child: it takes what is sent to it, and says what the test has it say."""

    def __init__(self, client: Client | None = None) -> None:
        super().__init__(
            Route(upstream=Upstream(command=("fake",))), client or fake_client(), cast("Tasks", Mock()), Mock()
        )
        self.stderr_log.pid = 1
        self.lines: list[bytes] = []
        self.is_closed = False

    async def send(self, message: bytes) -> None:
        self.write(message)

    def write(self, message: bytes) -> None:
        self.lines.append(message)

    @property
    def sent(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    @property
    def methods(self) -> list[str]:
        return [each["method"] for each in self.sent]

    def say(self, **message: Any) -> None:
        assert self.hear is not None
        line = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.hear(line, jsonrpc.message(line))

    def end(self) -> None:
        self.asked = self.is_closed = True

    async def close(self) -> None:
        self.end()


class FakeLauncher(ChildLauncher):
    """A FAKE launcher of such children."""

    def __init__(self, client: Client | None = None) -> None:
        super().__init__(Route(upstream=Upstream(command=("fake",))), client or fake_client(), Mock(), Mock(), Mock())
        self.children: list[FakeChild] = []
        self.room = 10
        """How many children it starts."""

    async def take(self) -> FakeChild:
        if len(self.children) == self.room:
            _ = await asyncio.get_running_loop().create_future()
        self.children.append(self.new_child())
        return self.children[-1]

    def new_child(self) -> FakeChild:
        return FakeChild(self.client)


def fake_client(event_bytes: int = 4096, **timeouts: Any) -> Client:
    bounds = Bounds(Limits(event_bytes=event_bytes), Timeouts(**timeouts))
    return Client(InForce(bounds), HttpClient(Tasks(Mock())))
