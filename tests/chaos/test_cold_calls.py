"""SIGKILL and SIGTERM of the replica that let go of a cold call: its state alone continues the call."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.stage import Call, Gate, built, others, steps
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, installed
from tests.support.gateway_process import Gateway

SERVERS = ("py130-store", "ts132-store")

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(built, SERVERS)), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=SERVERS)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[tuple[OldServer, Cluster]]:
    async with (
        old_server(request.param) as server,
        cluster(server.url, replicas=2, hold={"cold_seconds": 0.2, "drain_delay_seconds": 0}) as c,
    ):
        yield server, c


async def until_cold(owner: Gateway) -> None:
    async def is_cold() -> bool:
        return await owner.metric("mcp_gateway_cold_calls") == 1

    await owner.until(is_cold, "the call is cold")


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGKILL and a new start"])
async def test_a_cold_call_outlives_its_owner(stage: tuple[OldServer, Cluster], tmp_path: Path, end: str) -> None:
    server, c = stage
    owner = c.replicas[0]
    (survivor,) = others(c, owner)
    gates = Gate(tmp_path / "before"), Gate(tmp_path / "after")
    for gate in gates:
        gate.open()
    call = Call(server, "ask_slow", f"cold {server.name} {end}", *gates)
    async with wire(owner.url) as client:
        state = await call.begin(client)
        await until_cold(owner)
        if end == "SIGTERM":
            owner.terminate()
            assert await owner.exited() == 0, "it does not wait for the call"
        else:
            await owner.kill()
        if end == "SIGKILL and a new start":
            await owner.start()
        at = owner if end == "SIGKILL and a new start" else survivor
        living = list(c.replicas) if at is owner else [survivor]
        before = await steps(living)
        answer = await call.retry(client.on(at.url), state)
        assert call.outcome(answer) == "result"
        assert (await steps(living) - before)["resumed"] == 1
    assert (call.runs, call.answers) == (1, 1)
    if end != "SIGKILL and a new start":
        await owner.start()
