"""The state of a real legacy server's session is still there in the next call of a principal, or of a client."""

import asyncio

import aiohttp
import pytest

from tests.parts.launch import PARTS, old_server
from tests.support.cluster import cluster, installed
from tests.support.gateway_process import gateway
from tests.support.state_keeper import KeepingClient
from tests.support.workbench import ACCEPT, Client, Reply

pytestmark = pytest.mark.real

SAMPLED = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hello"}}


async def counted(client: Client) -> int:
    return int((await client.call("counter")).text)


async def asked(client: Client, tool: str) -> Reply:
    return await client.call(tool, {"prompt": "Hi"} if tool == "sample" else {})


@pytest.mark.parametrize("server_name", ["py130", "ts132"])
async def test_a_counter_continues_while_its_user_thinks(server_name: str) -> None:
    if not (PARTS / ("py130" if server_name == "py130" else "node")).exists():
        pytest.skip("scripts/parts has not built it")
    route = {"sessions": {"affinity": "principal"}}
    async with (
        old_server(server_name) as server,
        gateway(server.url, route=route, timeouts={"session_wait_seconds": 3}) as gw,
        aiohttp.ClientSession() as http,
    ):
        ada, bob = (Client(http, gw.url, f"Bearer {name}") for name in ("ada", "bob"))
        assert sorted(await asyncio.gather(*(counted(ada) for _ in range(3)))) == [1, 2, 3]
        assert await counted(bob) == 1

        # The form comes on the stream of its call, so the counter continues beside it.
        form = await asked(ada, "ask")
        assert await counted(ada) == 4
        done = await ada.call("ask", state=form.state, answers=dict.fromkeys(form.questions, ACCEPT))
        assert done.text.startswith("accept")
        assert await counted(ada) == 5

        # The prompt comes on the standalone GET stream and names no call, so its call has the session for itself.
        prompt = await asked(ada, "sample")
        busy = await ada.call("counter")
        assert busy.outcome == (503, -32603, "busy")
        assert await counted(bob) == 2
        answers = dict.fromkeys(prompt.questions, SAMPLED)
        assert (await ada.call("sample", {"prompt": "Hi"}, state=prompt.state, answers=answers)).text == "hello"
        assert await counted(ada) == 6
        await gw.settled()


@pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light")
@pytest.mark.parametrize("server_name", ["py130", "ts132"])
async def test_a_client_that_keeps_state_counts_on_behind_a_balancer_that_is_not_sticky(server_name: str) -> None:
    if not (PARTS / ("py130" if server_name == "py130" else "node")).exists():
        pytest.skip("scripts/parts has not built it")
    async with (
        old_server(server_name) as server,
        cluster(server.url, route={"dialects": ["sep-1655"]}) as c,
        aiohttp.ClientSession() as http,
    ):
        one, two = KeepingClient(http, c.url), KeepingClient(http, c.url)
        assert [await counted(one) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        (owner,) = [each for each in c.replicas if await each.metric("mcp_gateway_sessions_opened_total")]
        assert [await counted(two) for _ in range(3)] == [1, 2, 3], "a client of the same principal"
        form = await asked(one, "ask")
        done = await one.call("ask", state=form.state, answers=dict.fromkeys(form.questions, ACCEPT))
        assert done.text.startswith("accept")
        assert await counted(one) == 7
        await owner.kill()
        assert [await counted(one) for _ in range(3)] == [1, 2, 3]
        await c.settled()
