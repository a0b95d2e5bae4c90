"""Three real gateways behind a real balancer that sends every request to the next one."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import FILES, BalancerName, cluster, installed

CONTINUATIONS = "mcp_gateway_continuations_total"
DRAIN_DELAY_SECONDS = 4.0
"""HAProxy notices within one."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(installed, FILES)), reason="apt install nginx-light haproxy"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as found:
        yield found


@pytest.mark.parametrize("balancer", FILES)
async def test_every_replica_serves_and_the_owner_is_found_from_each(
    server: OldServer, balancer: BalancerName
) -> None:
    async with cluster(server.url, balancer=balancer) as c, wire(c.url) as client:
        answer = await client.call("ask_sequence", {"n": 3})
        for _ in range(2):
            (asked,) = answer.asks
            answer = await client.call("ask_sequence", {"n": 3}, state=answer.state, answers={asked: ACCEPT})
        (asked,) = answer.asks
        final = await client.call("ask_sequence", {"n": 3}, state=answer.state, answers={asked: ACCEPT})
        assert final.result["resultType"] == "complete"
        # Four requests, one after the other, to three replicas: the last one meets the owner.
        assert [await replica.rounds("tools/call") for replica in c.replicas].count(0) == 0
        assert await c.metric(CONTINUATIONS, step="forwarded") == 2
        assert await c.metric(CONTINUATIONS, step="held") > 0
        await c.settled()
    assert len(server.ledger("run", "ask_sequence")) == len(server.ledger("finished", "ask_sequence"))


@pytest.mark.parametrize("balancer", FILES)
async def test_a_client_that_leaves_its_stream_cancels_the_call(server: OldServer, balancer: BalancerName) -> None:
    before = len(server.ledger("cancelled", "progress"))
    async with cluster(server.url, balancer=balancer) as c, wire(c.url) as client:
        async with client.open(
            "tools/call",
            {"name": "progress", "arguments": {"steps": 2, "delay_seconds": 30}},
            meta={"progressToken": "p"},
        ) as response:
            # After this the call is silent, so no write can reveal that the client disconnected.
            assert (await response.content.readline()).startswith((b"event:", b"data:"))
        await server.wait_for("cancelled", "progress", count=before + 1)
        await c.settled()


async def test_clients_do_not_notice_that_a_replica_stops(server: OldServer) -> None:
    """SIGTERM behind HAProxy: new calls work, and the replica's open questions are answered through the others."""
    hold = {"drain_delay_seconds": DRAIN_DELAY_SECONDS, "drain_seconds": 30}
    async with cluster(server.url, balancer="haproxy", hold=hold) as c, wire(c.url) as client:
        parked = [await client.call("ask", {"question": "Who?"}) for _ in c.replicas]
        leaving = c.replicas[0]
        leaving.terminate()

        async def is_not_ready() -> bool:
            assert (await client.call("echo", {"text": "x"})).text == "x"
            async with client.http.get(f"{leaving.admin}/readyz") as response:
                return response.status == 503

        await c.until(is_not_ready, "the replica tells the balancer that it ends", 2 * DRAIN_DELAY_SECONDS)
        assert (await client.on(leaving.url).call("echo", {"text": "x"})).text == "x", "another replica served it"
        for answer in parked:
            (key,) = answer.asks
            final = await client.call("ask", {"question": "Who?"}, state=answer.state, answers={key: ACCEPT})
            assert final.text == NAMED
        assert await leaving.exited() == 0
        assert await c.metric(CONTINUATIONS, step="forwarded") > 0
        assert (await client.call("echo", {"text": "x"})).text == "x"
