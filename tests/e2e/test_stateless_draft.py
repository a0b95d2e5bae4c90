"""The client of SEP-1442 with real servers of both eras, before one gateway and before three behind a balancer."""

import aiohttp
import pytest

from gateway.protocol import mcp
from tests.e2e.matrix import KINDS
from tests.parts.clients.drive import available
from tests.parts.launch import old_server
from tests.support.cluster import cluster, installed
from tests.support.gateway_process import gateway
from tests.support.mirrored_client import Json
from tests.support.paper_client import PaperClient

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]

ROUTE = {"dialects": ["sep-1442"]}
ACCEPT: Json = {"action": "accept", "content": {"name": "Ann"}}


async def play(url: str) -> None:
    """Discover, call, answer questions over whatever replica, then initialize and call again."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        client = PaperClient(http, [url], capabilities={"elicitation": {}})
        status, message = await client.ask("server/discover")
        assert status == 200
        assert "2025-06-18" in message["result"]["supportedVersions"]
        assert (await PaperClient(http, [url], version="1.0").ask("tools/list"))[1]["error"]["code"] == -32000
        for _ in range(2):
            _, message = await client.ask(mcp.TOOLS_CALL, {"name": "echo", "arguments": {"text": "hi"}})
            assert message["result"]["content"][0]["text"] == "hi"
            for _ in range(3):  # the balancer gives each request to the next replica
                arguments = {"question": "Who?"}
                async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": arguments}) as stream:
                    question = await stream.message()
                    assert question["method"] == mcp.ELICIT
                    assert await client.answer(question, ACCEPT) == 202
                    assert (await stream.message())["result"]["content"][0]["text"] == 'accept:{"name":"Ann"}'
            await client.initialize()


@pytest.mark.parametrize("name", ["py130", "ts132", "modern-py"])
async def test_the_client_of_the_paper_plays_with_a_real_server(name: str) -> None:
    async with old_server(name) as server:
        async with gateway(server.url, route=ROUTE) as gw:
            await play(gw.url)
        async with cluster(server.url, route=ROUTE) as c:
            await play(c.url)
