"""Modern requests over HTTP to a modern server that is a child (with a fake server)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
import pytest_asyncio
from msgspec import Raw

from gateway.downstream.stdio_forwarding import StdioPassage
from gateway.http.error_texts import texts
from gateway.http.incoming import Caller
from gateway.http.reply import Discarded
from gateway.legacy_front.arrival import Arrival
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from gateway.protocol.request import ParsedBody
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.gateway_process import Gateway, gateway
from tests.support.host import META, call, fake, modern
from tests.support.logs import Lines

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

SECONDS: Final = 20.0
PASSED: Final = "mcp_gateway_passed_through_total"


def headers(message: dict[str, Any], **more: str) -> dict[str, str]:
    own = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        mcp.PROTOCOL_VERSION: mcp.MODERN,
        mcp.METHOD_HEADER: message["method"],
    }
    if "name" in message["params"]:
        own[mcp.NAME_HEADER] = message["params"]["name"]
    return own | more


class Front:
    """A gateway, with a client that sends it messages as they are."""

    def __init__(self, gw: Gateway, http: aiohttp.ClientSession) -> None:
        self.gw, self.http = gw, http

    async def post(self, message: dict[str, Any], **more: str) -> tuple[int, list[dict[str, Any]]]:
        """Send a request; return the status and the messages of the reply."""
        async with asyncio.timeout(SECONDS):
            async with self.http.post(self.gw.url, json=message, headers=headers(message, **more)) as reply:
                body = (await reply.read()).decode()
        if reply.content_type != "text/event-stream":
            return reply.status, [json.loads(body)]
        lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
        return reply.status, [json.loads(line) for line in lines]

    async def text(self, message: dict[str, Any], **more: str) -> str:
        status, (answer,) = await self.post(message, **more)
        assert status == 200
        said: str = answer["result"]["content"][0]["text"]
        return said


@asynccontextmanager
async def front_of(script: str, **sections: Any) -> AsyncIterator[Front]:
    """A gateway in front of a fake server that is a child."""
    async with gateway({"command": fake(script)}, **sections) as gw, aiohttp.ClientSession() as http:
        yield Front(gw, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    async with front_of("fake_modern_stdio.py") as found:
        yield found


async def test_a_request_passes_to_the_child_and_its_answer_has_the_id_of_the_client(front: Front) -> None:
    status, (answer,) = await front.post(call("echo", "an id", x=1))
    assert (status, answer["id"]) == (200, "an id")
    assert answer["result"]["content"][0]["text"] == '{"x": 1}'
    assert await front.gw.metric(PASSED, era="modern", outcome="answered") >= 1


async def test_the_status_shows_that_the_child_is_modern(front: Front) -> None:
    _ = await front.text(call("now", 1))
    async with front.http.get(f"{front.gw.admin}/status.json") as reply:
        (route,) = (await reply.json())["routes"]
    assert (route["transport"], route["era"]) == ("stdio", "modern")


async def test_clients_with_equal_ids_and_tokens_are_not_confused(front: Front) -> None:
    meta = {"progressToken": 1}
    async with asyncio.TaskGroup() as group:
        later = [group.create_task(front.post(call("later", 1))) for _ in range(3)]
        while await front.text(call("now", 1)) and not all(task.done() for task in later):
            pass
        told = [group.create_task(front.post(call("progress", 1, meta=meta))) for _ in range(3)]
    assert [task.result()[1][0]["result"]["content"][0]["text"] for task in later] == ["later"] * 3
    for task in told:
        _, (progress, answer) = task.result()
        assert progress["params"] == {"progressToken": 1, "progress": 1}
        assert answer["id"] == 1


async def test_all_clients_share_one_child(front: Front) -> None:
    mine = await front.text(call("pid"))
    assert await front.text(call("pid"), Authorization="Bearer another") == mine


async def test_a_log_message_reaches_the_only_request_that_wants_logs(front: Front) -> None:
    _, messages = await front.post(call("log", meta={META + "logLevel": "info"}))
    assert [each.get("method") for each in messages] == ["notifications/message", None]
    _, messages = await front.post(call("log"))
    assert len(messages) == 1


async def test_a_subscription_gets_its_changes_under_the_clients_own_id(front: Front) -> None:
    listen = modern("subscriptions/listen", 7, notifications={"toolsListChanged": True})
    async with asyncio.timeout(SECONDS), front.http.post(front.gw.url, json=listen, headers=headers(listen)) as reply:
        assert (await told(reply))["params"]["_meta"] == {META + "subscriptionId": 7}
        _ = await front.text(call("change"))
        changed = await told(reply)
        assert changed["method"] == "notifications/tools/list_changed"
        assert changed["params"]["_meta"] == {META + "subscriptionId": 7}
        _ = await front.text(call("tear_down"))
        result = {"resultType": "complete", "_meta": {META + "subscriptionId": 7}}
        assert await told(reply) == {"jsonrpc": "2.0", "id": 7, "result": result}


async def told(reply: aiohttp.ClientResponse) -> Any:
    """The next message of a stream."""
    while not (line := await reply.content.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    return json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize(
    "more", [{mcp.METHOD_HEADER: "tools/list"}, {mcp.NAME_HEADER: "die"}, {mcp.PROTOCOL_VERSION: "2027-01-01"}]
)
async def test_a_header_that_differs_from_the_body_is_refused_here(more: dict[str, str], front: Front) -> None:
    status, (answer,) = await front.post(call("echo"), **more)
    assert (status, answer["error"]["code"]) == (400, mcp.HEADER_MISMATCH)


async def test_errors_of_the_child_have_the_status_of_a_modern_server(front: Front) -> None:
    status, (answer,) = await front.post(modern("no/such", 1))
    assert (status, answer["error"]["code"]) == (404, mcp.METHOD_NOT_FOUND)
    status, (answer,) = await front.post(call("nobody", 1))
    assert (status, answer["error"]["code"]) == (200, mcp.INVALID_PARAMS)


async def test_requests_of_a_child_that_dies_are_lost_and_the_next_one_starts_another(front: Front) -> None:
    before = await front.text(call("pid"))
    _, (lost,) = await front.post(call("die", 3))
    assert lost["id"] == 3
    assert "may have had effects" in lost["error"]["message"]
    assert await front.text(call("pid")) != before


async def test_a_response_of_the_child_that_says_nothing_is_its_own_failure(front: Front) -> None:
    status, (answer,) = await front.post(call("neither", 3), **{"X-Request-Id": "neither"})
    assert (status, answer["error"]["data"]) == (200, {"reason": "call_lost", "requestId": "neither"})
    assert "sent a malformed response: a response needs a result or an error" in answer["error"]["message"]
    (line,) = [line for line in front.gw.log("upstream.failed") if line["request_id"] == "neither"]
    assert line["cause"] == answer["error"]["message"]


async def test_the_route_may_name_the_legacy_side_of_a_command() -> None:
    async with front_of("fake_stdio.py", route={"era": "bridge"}) as front:
        assert await front.text(call("echo", x=1)) == '{"x": 1}'
        assert not front.gw.log("era.found")


async def test_a_request_of_the_server_reaches_nobody(front: Front) -> None:
    """SEP-2260: modern servers send none."""
    assert await front.text(call("ask", 1)) == "done"
    outcome = {"method": mcp.ELICIT, "outcome": "refused_unsolicited"}
    assert await front.gw.metric("mcp_gateway_nested_requests_total", **outcome) == 1


@pytest.mark.parametrize("method", sorted(mcp.TASK_METHODS))
async def test_mcp_name_of_a_request_about_a_task_is_compared(method: str, front: Front) -> None:
    message = modern(method, 1, taskId="t1", inputResponses={})
    status, (answer,) = await front.post(message, **{mcp.NAME_HEADER: "t1"})
    assert (status, answer["result"]["taskId"]) == (200, "t1")
    status, (answer,) = await front.post(message, **{mcp.NAME_HEADER: "t2"})
    assert (status, answer["error"]["code"]) == (400, mcp.HEADER_MISMATCH)


async def test_a_fault_of_the_gateway_ends_the_request_that_met_it(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    monkeypatch.setattr(texts, "are_brief", True)
    tasks = Tasks(Metrics("test"))
    live: Any = SimpleNamespace(
        deadlines=SimpleNamespace(silence=CoarseTimer(60, tasks, "silence")),
        process=SimpleNamespace(tasks=tasks),
        route=SimpleNamespace(path="/mcp"),
        upstream=SimpleNamespace(stdio=Mock(modern=Mock(request=AsyncMock(side_effect=ZeroDivisionError)))),
        sender=lambda _: ("/mcp", "tag"),
    )
    incoming: Any = SimpleNamespace(path="/mcp", body=b"{}", request_id="r")
    parsed = ParsedBody(Raw(b"7"), mcp.TOOLS_LIST, {}, {})
    reply = Discarded()
    monkeypatch.setattr(Discarded, "share_unread", Mock())
    passage = StdioPassage(Arrival(incoming, reply, live, Caller(b"", None)), parsed)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(CallLost, match="Internal error"):
            await passage.run()
    while len(tasks):
        await asyncio.sleep(0)
    assert tasks.failures == 1
    (line,) = log_lines("error.shortened")
    assert (line["route"], line["caller"]) == ("/mcp", "tag")
