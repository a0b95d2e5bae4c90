"""Real legacy servers with an event store: a call whose streams are closed while its user thinks goes on as before.

How many calls there are at once is `MRTR_COLD_CALLS` (20); the documents name the servers with the counts of larger
runs.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest

from tests.parts.launch import OldServer, old_server
from tests.support import workbench
from tests.support.workbench import Client, Reply, Stand, eventually

pytestmark = pytest.mark.real

CALLS = int(os.environ.get("MRTR_COLD_CALLS", "20"))
SERVERS = {"py130": "py130-store", "fm3": "fm3", "py110": "py110", "ts132": "ts132-store", "everything": "everything"}


@pytest.fixture(params=SERVERS)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def store(name: str) -> AbstractAsyncContextManager[OldServer]:
    return old_server(SERVERS[name], *(["--event-store"] if name in {"fm3", "py110"} else []))


@asynccontextmanager
async def gateway(server: OldServer, **hold: float) -> AsyncIterator[Stand]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        sections = {"hold": {"cold_seconds": 0.2, **hold}, "timeouts": {"cancel_seconds": 2}}
        stand = await workbench.start(server.url, http, **sections)
        try:
            yield stand
        finally:
            await stand.gateway.close()


def client(stand: Stand) -> Client:
    """Without roots, for which `everything` asks at once."""
    return stand.client(capabilities={"elicitation": {"form": {}}})


async def ask(stand: Stand, name: str) -> Reply:
    return await client(stand).call("trigger-elicitation-request" if name == "everything" else "ask")


async def answer(stand: Stand, asked: Reply, marker: str) -> str:
    reply = await client(stand).answer(asked, {"action": "accept", "content": {"name": marker}})
    return "\n".join(str(each["text"]) for each in reply.result["content"])


def counted(stand: Stand, **labels: str) -> float:
    return stand.metric("mcp_gateway_cold_calls_ended_total", **labels)


async def all_cold(stand: Stand, count: int) -> None:
    await eventually(lambda: len(stand.gateway.lot.cold) >= count, "all calls are cold", 60)
    await eventually(lambda: not stand.sessions("busy"), "all streams are closed")


async def test_cold_calls_get_their_own_answers_and_their_own_results(name: str) -> None:
    async with store(name) as server, gateway(server) as stand:
        asked = [await ask(stand, name) for _ in range(CALLS)]
        await all_cold(stand, CALLS)
        assert stand.held == 0
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with gate:
                return await answer(stand, asked[number], f"marker-{number}-")

        said = await asyncio.gather(*map(one, range(CALLS)))
        for number, text in enumerate(said):
            assert f"marker-{number}-" in text
        assert counted(stand, ending="resumed") == CALLS
        if name != "everything":  # it keeps no ledger
            assert len(server.ledger("run", "ask")) == CALLS
            assert len(server.ledger("answered", "ask")) == CALLS


async def test_a_question_that_the_server_withdraws_from_a_cold_call_is_heard_when_the_client_comes_back(
    name: str,
) -> None:
    if name in {"everything", "py110"}:
        pytest.skip("it has no such tool, or loses every result that comes while no stream is open")
    async with store(name) as server, gateway(server) as stand:
        asked = await client(stand).call("give_up", {"seconds": 0.5})
        await all_cold(stand, 1)
        await server.wait_for("finished", "give_up")
        assert (await client(stand).answer(asked)).text == "gave up"
