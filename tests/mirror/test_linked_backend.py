"""The mirror for a link that is the session itself."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.legacy_front.backend import ClientMessage
from gateway.mirror.linked_backend import MirrorBackend
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, InvalidRequest, Refused
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.mirror.conftest import Begin
from tests.support.fake_modern import FORM, FakeModern
from tests.support.fake_server import FakeServer, Sent, fake_live
from tests.support.legacy_client import SseClient
from tests.support.logs import Lines
from tests.support.workbench import eventually

Json = dict[str, Any]
ACCEPT: Json = {"action": "accept", "content": {}}


class FakeLink:
    """A FAKE link that writes down what the client gets."""

    def __init__(self) -> None:
        self.sent: list[tuple[Json, bytes | None]] = []
        self.refused: list[tuple[bytes, GatewayError]] = []
        self.forgotten: list[bytes] = []
        self.is_closed = False

    def send(self, message: bytes, related_to: bytes | None) -> None:
        self.sent.append((json.loads(message), related_to))

    def refuse(self, request: bytes, error: GatewayError) -> None:
        self.refused.append((request, error))

    def forget(self, request: bytes) -> None:
        self.forgotten.append(request)

    def ended(self) -> None:
        self.is_closed = True


class Host:
    """A legacy client on a link."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.server, self.link, self.live = FakeServer(), FakeLink(), fake_live(tasks)
        self.backend = MirrorBackend(self.live, self.server, self.link)
        self.headers = {"Authorization": "x"}

    def says(self, **message: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.backend.receive(ClientMessage(data, jsonrpc.message(data), self.headers))

    async def at_server(self, method: str, count: int = 1) -> Sent:
        """The request of that method with that number, once it is at the server."""
        await eventually(lambda: len(self.server.of(method)) >= count, f"the server gets {method}")
        return self.server.of(method)[count - 1]

    async def begin(self) -> None:
        params = {"protocolVersion": "2025-06-18", "capabilities": {"elicitation": {}}, "clientInfo": {}}
        self.says(id=0, method="initialize", params=params)
        (await self.at_server(mcp.DISCOVER)).completes(capabilities={"tools": {}})
        await eventually(lambda: self.link.sent)
        assert self.link.sent.pop()[0]["result"]["protocolVersion"] == "2025-06-18"

    async def call(self, id_: int = 1) -> Sent:
        """A call of the tool, once it is at the server."""
        self.says(id=id_, method="tools/call", params={"name": "t", "arguments": {}})
        return await self.at_server("tools/call", id_)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    metrics = Metrics("0")
    tasks = Tasks(metrics)
    found = Host(tasks)
    await found.begin()
    yield found
    await found.backend.close()
    await tasks.close()
    assert tasks.failures == 0
    assert all(each.is_aborted for each in found.server.of(mcp.LISTEN)[-1:])


async def test_a_cancelled_call_ends_at_the_server_without_a_response(host: Host) -> None:
    sent = await host.call()
    host.says(method=mcp.CANCELLED, params={"requestId": 1})
    await eventually(lambda: sent.is_aborted)
    host.says(method=mcp.CANCELLED, params={"requestId": 1})
    host.says(method=mcp.CANCELLED, params={"requestId": 9})
    assert (host.link.sent, host.link.forgotten) == ([], [b"1"])


async def test_a_cancelled_call_takes_no_place_in_a_session_over_http_sse(begin: Begin, server: FakeModern) -> None:
    async def wait(_: Any) -> Json:
        await asyncio.Event().wait()
        return {}

    server.tools["wait"] = wait
    stand = await begin()
    client = await SseClient(stand).initialize()
    call = client.call_message("wait")
    assert (await client.post(call))[0] == 202
    await eventually(lambda: server.of(mcp.TOOLS_CALL))
    assert (await client.post({"method": mcp.CANCELLED, "params": {"requestId": call["id"]}}))[0] == 202
    assert stand.gateway.sessions.open_requests == 0
    client.stream.close()


async def test_a_call_over_http_sse_that_fails_has_one_line_with_a_command_that_can_be_run(
    begin: Begin, server: FakeModern, log_lines: Lines
) -> None:
    client = await SseClient(await begin()).initialize()
    assert (await client.post(client.call_message("ask")))[0] == 202
    question = await client.stream.message()
    await server.close()
    assert (await client.post({"id": question["id"], "result": ACCEPT}))[0] == 202
    error = (await client.stream.message())["error"]
    client.stream.close()
    (line,) = (*log_lines("exchange.finished"), *log_lines("upstream.failed"))
    assert (line["event"], line["cause"]) == ("upstream.failed", error["message"])
    assert f"probe {server.url}" in line["fix"]


async def test_the_next_round_brings_all_answers_and_the_newest_log_level(host: Host) -> None:
    host.says(id=1, method="logging/setLevel", params={"level": "error"})
    sent = await host.call()
    asked = {"a": FORM, "b": FORM}
    sent.says(result={"resultType": "input_required", "inputRequests": asked, "requestState": "s"})
    await eventually(lambda: len(host.link.sent) == 3)
    first, second = (message["id"] for message, _ in host.link.sent[1:])
    host.says(id=first, result=ACCEPT)
    host.says(id=2, method="logging/setLevel", params={"level": "debug"})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(host.server.of("tools/call")) == 1, "a question is open"
    host.says(id=second, result=ACCEPT)
    params = (await host.at_server("tools/call", 2)).params
    assert params["inputResponses"] == {"a": ACCEPT, "b": ACCEPT}
    assert params["_meta"][mcp.META_LOG_LEVEL] == "debug"


async def test_requests_that_are_no_calls(host: Host) -> None:
    host.says(id=2, method="ping")
    host.says(id=3, method="logging/setLevel", params={"level": "error"})
    assert [message["result"] for message, _ in host.link.sent] == [{}, {}]
    assert (await host.call()).params["_meta"][mcp.META_LOG_LEVEL] == "error"
    for method, params in (("logging/setLevel", {"level": "loud"}), ("tasks/get", {}), ("tools/call", {})):
        with pytest.raises(GatewayError):
            host.says(id=4, method=method, params=params)


async def test_nothing_is_served_before_initialize() -> None:
    host = Host(Tasks(Metrics("0")))
    with pytest.raises(InvalidRequest):
        host.says(id=1, method="tools/list")
    assert host.server.sent == []


async def test_only_the_first_initialized_opens_a_stream(host: Host) -> None:
    for _ in range(3):
        host.says(method="notifications/initialized")
    (await host.at_server(mcp.LISTEN)).acknowledges()
    host.says(method="notifications/initialized")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(host.server.of(mcp.LISTEN)) == 1


async def test_a_session_is_initialized_once(host: Host) -> None:
    with pytest.raises(InvalidRequest):
        host.says(id=9, method="initialize", params={"protocolVersion": "2025-06-18", "capabilities": {}})
    assert len(host.server.of(mcp.DISCOVER)) == 1


async def test_initialize_may_come_again_after_a_refusal() -> None:
    tasks = Tasks(Metrics("0"))
    host = Host(tasks)
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {}}
    host.says(id=0, method="initialize", params=params)
    await eventually(lambda: host.server.sent)
    host.server.sent.pop().fails(Refused("no", status=401))
    await eventually(lambda: host.link.refused)
    await host.begin()
    await host.backend.close()
    await tasks.close()


async def test_what_a_client_asked_for_just_before_it_left_opens_nothing(host: Host) -> None:
    host.says(method="notifications/initialized")
    host.says(id=5, method="resources/subscribe", params={"uri": "a:b"})
    await host.backend.close()
    await eventually(lambda: not host.tasks)
    assert host.server.of(mcp.LISTEN) == []
    assert (host.link.sent, host.link.refused) == ([], [])


async def test_a_cancelled_call_is_found_however_its_id_is_written(host: Host) -> None:
    data = b'{"jsonrpc":"2.0","id":"a","method":"tools/list"}'
    host.backend.receive(ClientMessage(data, jsonrpc.message(data)))
    await eventually(lambda: host.server.of(mcp.TOOLS_LIST))
    data = b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"\\u0061"}}'
    host.backend.receive(ClientMessage(data, jsonrpc.message(data)))
    await eventually(lambda: host.server.of(mcp.TOOLS_LIST)[0].is_aborted)


async def test_changes_are_told_on_the_standalone_stream(host: Host) -> None:
    host.says(method="notifications/initialized")
    stream = await host.at_server(mcp.LISTEN)
    stream.acknowledges()
    await asyncio.sleep(0)
    stream.says(method=mcp.TOOLS_CHANGED, params={"_meta": {mcp.META_SUBSCRIPTION: "x"}})
    assert host.link.sent == [({"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED, "params": {}}, None)]


async def test_a_subscription_is_answered_when_the_server_acknowledges_it(host: Host) -> None:
    for id_, (uri, honoured) in enumerate([("a:b", ("a:b",)), ("c:d", ("a:b",))], 5):
        host.says(id=id_, method="resources/subscribe", params={"uri": uri})
        await eventually(lambda number=id_: len(host.server.of(mcp.LISTEN)) == number - 4)
        assert not host.link.sent
        assert not host.link.refused
        host.server.of(mcp.LISTEN)[-1].acknowledges(*honoured)
        await eventually(lambda: host.link.sent or host.link.refused)
        if uri == "a:b":
            assert host.link.sent.pop() == ({"jsonrpc": "2.0", "id": 5, "result": {}}, b"5")
    assert [id_ for id_, _ in host.link.refused] == [b"6"]
    assert host.server.of(mcp.LISTEN)[0].is_aborted, "one stream at a time"


async def test_closing_ends_everything(host: Host) -> None:
    sent = await host.call()
    host.says(id=5, method="resources/subscribe", params={"uri": "a:b"})
    await eventually(lambda: host.server.of(mcp.LISTEN))
    await host.backend.close()
    await eventually(lambda: host.server.of(mcp.LISTEN)[0].is_aborted)
    await eventually(lambda: sent.is_aborted)
    assert host.link.sent == []
