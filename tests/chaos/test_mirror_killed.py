"""SIGKILL of the replica that holds the stream of a legacy client before a modern server.

Three replicas stand behind a round robin, so no two requests of the client's session reach the same one.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.chaos.stage import steps
from tests.parts.clients.drive import HERE
from tests.parts.launch import PARTS, OldServer, old_server, output_of
from tests.support.cluster import Cluster, cluster, needs
from tests.support.gateway_process import Gateway

PROGRAM: Final = PARTS / "py130" / "bin" / "python"
MIRRORED: Final = "mcp_gateway_mirrored_calls"
ANN: Final = 'accept:{"name":"Ann"}'

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    needs("nginx"),
]


@dataclass(frozen=True)
class Stage:
    server: OldServer
    c: Cluster


@pytest_asyncio.fixture(loop_scope="session")
async def stage() -> AsyncIterator[Stage]:
    async with old_server("modern-py") as server, cluster(server.url, route={"era": "mirror"}) as c:
        yield Stage(server, c)


class Legacy:
    """The Python SDK 1.30 with one call; it answers questions when the gate is open."""

    def __init__(self, c: Cluster, directory: Path) -> None:
        self.c, self.gate = c, directory / "gate"

    def call(self, tool: str, **arguments: Any) -> "asyncio.Task[str]":
        calls = json.dumps([[tool, arguments]])
        program = output_of(PROGRAM, HERE / "scenario.py", "--gate", self.gate, "--calls", calls, "http", self.c.url)
        return asyncio.get_running_loop().create_task(program)

    async def has(self, what: str) -> None:
        """Wait until it is asked, or has heard of progress."""
        await self.c.until(self.gate.with_name(f"gate.{what}").exists, what)


async def owner(c: Cluster) -> Gateway:
    """The replica that holds the one mirrored call."""
    await c.until_metric(MIRRORED, lambda held: held == 1)
    (holder,) = [replica for replica in c.replicas if await replica.metric(MIRRORED)]
    return holder


async def test_a_client_gets_its_result_if_the_replica_dies_with_a_question_open(stage: Stage, tmp_path: Path) -> None:
    client = Legacy(stage.c, tmp_path)
    call = client.call("ask", question="Who?")
    await client.has("asked")
    await (await owner(stage.c)).kill()
    client.gate.touch()
    assert json.loads(await call) == [ANN]
    assert len(stage.server.ledger("run", "ask")) == 2, "each round ran once"
    assert len(stage.server.ledger("finished", "ask")) == 2
    assert (await steps(replica for replica in stage.c.replicas if replica.alive))["resumed"] == 1


async def test_a_call_that_was_running_is_lost_with_its_replica(stage: Stage, tmp_path: Path) -> None:
    client = Legacy(stage.c, tmp_path)
    call = client.call("progress", steps=3, delay_seconds=1)
    await client.has("progressed")
    await (await owner(stage.c)).kill()
    assert "may have had effects" in await call
    assert len(stage.server.ledger("run", "progress")) == 1
