"""A real modern server whose tools run as tasks (fastmcp 4), with clients of both eras."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Final

import pytest

from tests.e2e.test_table import ALL_CLIENTS, TRANSPORTS
from tests.e2e.test_task_clients import FASTMCP
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server, output_of
from tests.support.gateway_process import gateway
from tests.support.legacy_client import Address, LegacyClient
from tests.support.task_client import TaskClient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
]

ANN: Final = 'accept:{"name":"Ann"}'
ASK: Final = ("ask", {"question": "Who?"})
CALLS: Final = [("echo", {"text": "hi"}), ASK, ("failing_job", {})]
OLD_CLIENTS: Final = ("mcp 1.10, HTTP", "mcp 1.30, HTTP", "sdk 1.32, HTTP", "mcp 1.30, HTTP+SSE")
FAILED = "mcp_gateway_task_failures_total"


@pytest.fixture
async def server() -> AsyncIterator[OldServer]:
    async with old_server("modern-tasks") as found:
        yield found


async def test_legacy_clients_call_tools_that_need_a_task(server: OldServer) -> None:
    async with gateway(server.url, route={"era": "mirror"}) as gw:
        clients = [ALL_CLIENTS[name] for name in OLD_CLIENTS]
        commands = [(*each.command, "--calls", json.dumps(CALLS), TRANSPORTS[each.row], gw.url) for each in clients]
        texts = await asyncio.gather(*(output_of(*command) for command in commands))
        assert [json.loads(each) for each in texts] == [["hi", ANN, "the job failed"]] * len(OLD_CLIENTS)
        assert len(server.ledger("run", "ask")) == 2 * len(OLD_CLIENTS), "the tool runs once for each of its rounds"
        assert await gw.metric("mcp_gateway_mirrored_calls") == 0
        assert await gw.metric(FAILED) == 0


async def test_a_legacy_client_that_cancels_its_call_cancels_the_task(server: OldServer) -> None:
    async with gateway(server.url, route={"era": "mirror"}) as gw, wire(gw.url) as client:
        legacy = await LegacyClient(Address(client.http, gw.url)).initialize()
        async with legacy.request("tools/call", {"name": "hang", "arguments": {}}, id_="c1"):
            await server.wait_for("run", "hang")
            assert await legacy.notify("notifications/cancelled", {"requestId": "c1"}) == 202
            await server.wait_for("cancelled", "hang")


async def test_the_tasks_of_a_modern_server_pass_through(server: OldServer) -> None:
    async with gateway(server.url) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task(*ASK)
        asked = await task.until("input_required")
        _ = await task.answer(asked, {"action": "accept", "content": {"name": "Ann"}})
        assert await task.text() == ANN
        other = await task.client.send("tasks/get", {"taskId": task.id}, **{"Mcp-Name": "other"})
        assert other.error["code"] == -32020, "the server compares the header, which passes through unchanged"
        cancelled = await TaskClient(client).task(*ASK)
        assert (await cancelled.cancel()).result["resultType"] == "complete"
        assert (await cancelled.until("cancelled"))["taskId"] == cancelled.id
        assert (
            await output_of(*FASTMCP, gw.url, "ask", '{"question": "Who?"}') == f"asked: Who?\nerror: False\n{ANN}\n"
        )
        assert await gw.metric("mcp_gateway_sessions_opened_total") == 0, "nothing was bridged"
        assert await gw.metric("mcp_gateway_tasks_ended_total") == 0, "they are the server's"
