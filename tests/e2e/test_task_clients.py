"""Published clients of the tasks extension before legacy servers: fastmcp-tasks and MCP Inspector's mcpdo."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.e2e.wire import wire
from tests.parts.launch import NODE, NODE_MODULES, PARTS, REPOSITORY, old_server, output_of
from tests.support.gateway_process import gateway
from tests.support.task_client import TaskClient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(90),
]

FASTMCP = (PARTS / "fm4tasks" / "bin" / "python", REPOSITORY / "tests" / "parts" / "clients" / "tasks_fm4.py")
MCPDO = (NODE, NODE_MODULES / ".bin" / "mcpdo", "--format", "json")
SERVERS = ("tasks-ts", "tasks-py")


@pytest.mark.parametrize("name", SERVERS)
async def test_fastmcp_runs_a_task_as_if_it_were_a_call(name: str) -> None:
    async with old_server(name) as server, gateway(server.url) as gw:
        said = await output_of(*FASTMCP, gw.url, "must_confirm", '{"filename": "x"}')
        assert said == "asked: Delete x?\nerror: False\ndeleted x\n"
        assert await output_of(*FASTMCP, gw.url, "failing_job", "{}") == "error: True\nthe job failed\n"
        assert await gw.metric("mcp_gateway_tasks") == 2


@asynccontextmanager
async def mcpdo(folder: Path, url: str) -> AsyncIterator[Any]:
    """Connect mcpdo, with a daemon of its own; give a function that runs one of its commands."""
    home = {"HOME": str(folder)}
    private = dict(re.findall(r"export (\w+)='([^']+)'", await output_of(*MCPDO, "private", environment=home)))
    environment = {**home, **private}

    async def do(*words: str) -> Any:
        return json.loads(await output_of(*MCPDO, "--connection", url, *words, environment=environment))

    _ = await output_of(*MCPDO, "connect", "--era", "modern", url, environment=environment)
    try:
        yield do
    finally:
        _ = await output_of(*MCPDO, "daemon", "stop", environment=environment)


@pytest.mark.parametrize("name", SERVERS)
async def test_mcpdo_answers_the_question_of_a_task(name: str, tmp_path: Path) -> None:
    async with old_server(name) as server, gateway(server.url) as gw, mcpdo(tmp_path, gw.url) as do:
        asked = (await do("tools/call", "must_confirm", '{"filename":"x"}'))["elicitationPending"]
        assert (asked["message"], asked["origin"]) == ("Delete x?", "task-input-required")
        done = await do("elicitation/respond", asked["elicitationId"], '{"confirm":true}')
        assert "deleted x" in json.dumps(done)


async def test_the_task_of_server_everything_asks_clients_of_both_kinds() -> None:
    tool, given = "simulate-research-query", {"topic": "python", "ambiguous": True}
    answer = {"action": "accept", "content": {"interpretation": "snake"}}
    forms = {"elicitation": {"form": {}}}  # it would ask for roots too, as soon as a session is open
    async with old_server("everything") as server, gateway(server.url) as gw, wire(gw.url) as client:
        extended = TaskClient(client, capabilities={**forms, "extensions": {mcp.TASKS: {}}})
        task = await extended.task(tool, given)
        plain = await client.call(tool, given, capabilities=forms)
        done = await client.answer(plain, answer, capabilities=forms)
        assert "python (snake)" in done.text
        _ = await task.answer(await task.until("input_required"), answer)
        assert "python (snake)" in json.dumps(await task.until("completed"))
