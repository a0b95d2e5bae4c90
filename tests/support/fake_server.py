"""A FAKE `ModernServer` in memory: the test answers each request by hand."""

import json
from typing import Any

from gateway.mirror.modern_server import Listener, Outgoing
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError
from tests.support.fake_modern import INFO

Json = dict[str, Any]


class Sent:
    """One request that the mirror sent, and its `Pending`."""

    def __init__(self, request: Outgoing, listener: Listener) -> None:
        self.request, self._listener = request, listener
        self.body: Json = json.loads(request.body)
        self.params: Json = self.body["params"]
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def says(self, **members: Any) -> None:
        """Let it hear a message; a response if `result` or `error` is given."""
        is_response = "result" in members or "error" in members
        id_ = {"id": self.body["id"]} if is_response else {}
        self._listener.on_message(json.dumps({"jsonrpc": "2.0", **id_, **members}).encode())

    def completes(self, **result: Any) -> None:
        self.says(result={"resultType": "complete", "_meta": INFO, **result})

    def asks(self, state: str = "state", **requests: Json) -> None:
        self.says(result={"resultType": "input_required", "inputRequests": requests, "requestState": state})

    def acknowledges(self, *uris: str) -> None:
        filters = {"toolsListChanged": True, "resourceSubscriptions": list(uris)}
        self.says(method=mcp.ACKNOWLEDGED, params={"notifications": filters})

    def fails(self, error: GatewayError) -> None:
        self._listener.on_failed(error)


class FakeServer:
    """A server whose requests wait for the test."""

    reads_headers = True

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def begin(self, request: Outgoing, listener: Listener) -> Sent:
        self.sent.append(Sent(request, listener))
        return self.sent[-1]

    def of(self, method: str) -> list[Sent]:
        return [each for each in self.sent if each.request.method == method]
