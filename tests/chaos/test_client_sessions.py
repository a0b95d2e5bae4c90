"""Sessions of legacy clients over three replicas behind a round robin, and SIGKILL to the replica that has one."""

from typing import Any

import aiohttp
import pytest

from tests.chaos.stage import built
from tests.e2e.test_eras import ANN, ASK, ASK_GET, ECHO, mcp_1, mcp_1_sse
from tests.parts.launch import old_server, stdio_server
from tests.support.cluster import cluster, installed
from tests.support.legacy_client import Address, LegacyClient, later

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not built("py130"), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]

NO_DRIVERS: Any = None
"""These clients are programs of their own."""
SESSIONS = "mcp_gateway_client_sessions"


async def test_no_two_requests_of_a_relayed_session_need_the_same_replica() -> None:
    async with old_server("py130-sse") as old:
        with stdio_server("py130") as (_, upstream):
            routes = [{"path": "/mcp", "upstream": upstream}, {"path": "/sse", "upstream": {"url": old.url}}]
            async with cluster(old.url, routes=routes) as c:
                calls = [ECHO, ASK, ASK_GET]
                for play, url in ((mcp_1, c.url), (mcp_1_sse, c.url), (mcp_1, f"{c.base}/sse")):
                    assert await play(NO_DRIVERS, url, calls) == ["hi", ANN, ANN]
                forwarded = [
                    await replica.metric("mcp_gateway_peer_requests_total", outcome="served") for replica in c.replicas
                ]
                assert sum(forwarded) > 0

                async def none_left() -> bool:
                    return await c.metric(SESSIONS) == 0

                await c.until(none_left, "every session has ended")


async def test_a_client_begins_anew_after_the_replica_of_its_session_was_killed() -> None:
    with stdio_server("py130") as (server, upstream):
        routes = [{"path": "/mcp", "upstream": upstream}]
        async with cluster("http://127.0.0.1:1/mcp", routes=routes) as c, aiohttp.ClientSession() as http:
            client = await LegacyClient(Address(http, c.url)).initialize()
            calling = later(client.post(client.call_message("hang")))
            await server.wait_for("run", tool="hang")
            (owner,) = [replica for replica in c.replicas if await replica.metric(SESSIONS) == 1]
            await owner.kill()
            status, _, messages = await calling
            if messages:  # else the balancer spoke to the owner itself
                assert [(each["id"], "error" in each) for each in messages] == [(1, True)]
            assert status in (200, 502)
            assert len(server.ledger("run", "hang")) == 1, "it is not sent again"
            found = [(await client.post({"id": 9, "method": "ping"}))[0] for _ in range(3)]
            assert set(found) <= {404, 502}
            assert found.count(404) >= 2
            again = await LegacyClient(Address(http, c.url)).initialize()
            assert (await again.post(again.call_message("echo", {"text": "hi"})))[0] == 200
            assert await again.end() == 200
