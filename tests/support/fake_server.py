"""A FAKE `ServerClient` in memory: the test answers each request by hand."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

from gateway.mirror.server_client import ModernRequest
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import Hearer
from tests.support.fake_modern import INFO

Json = dict[str, Any]


class Sent:
    """One request that the mirror sent."""

    def __init__(self, request: ModernRequest, hearer: Hearer) -> None:
        self.request, self._hearer = request, hearer
        self.body: Json = json.loads(request.body)
        self.params: Json = self.body["params"]
        self.is_answered = self.is_aborted = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def says(self, **members: Any) -> None:
        """Let it hear a message; a response if `result` or `error` is given."""
        is_response = "result" in members or "error" in members
        id_ = {"id": self.body["id"]} if is_response else {}
        _ = self._hearer.hear(json.dumps({"jsonrpc": "2.0", **id_, **members}).encode())
        if is_response:
            self.is_answered = True
            self.over.set_result(None)

    def completes(self, **result: Any) -> None:
        self.says(result={"resultType": "complete", "_meta": INFO, **result})

    def asks(self, state: str = "state", **requests: Json) -> None:
        self.says(result={"resultType": "input_required", "inputRequests": requests, "requestState": state})

    def acknowledges(self, *uris: str) -> None:
        filters = {"toolsListChanged": True, "resourceSubscriptions": list(uris)}
        self.says(method=mcp.ACKNOWLEDGED, params={"notifications": filters})

    def fails(self, error: GatewayError) -> None:
        self.over.set_exception(error)


def fake_live(tasks: Tasks) -> Any:
    """What the mirror needs of a route that has no network."""
    live = Mock()
    live.process.tasks, live.config.tasks.ttl_seconds, live.route.tasks.undeclared = tasks, 60.0, "drive"
    return live


class FakeServer:
    """A server whose requests wait for the test."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    async def send(self, request: ModernRequest, hearer: Hearer) -> None:
        sent = Sent(request, hearer)
        self.sent.append(sent)
        try:
            await sent.over
        except asyncio.CancelledError:
            sent.is_aborted = not sent.is_answered
            raise

    def of(self, method: str) -> list[Sent]:
        return [each for each in self.sent if each.request.method == method]
