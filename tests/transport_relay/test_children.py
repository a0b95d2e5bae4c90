"""Legacy clients before a stdio server: each session has a process of its own, which ends with it."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.parts.launch import REPOSITORY
from tests.support.gateway_process import Gateway, gateway
from tests.support.legacy_client import LegacyClient, SseClient
from tests.support.workbench import eventually

FAKE: Final = (sys.executable, "-I", "-S", str(REPOSITORY / "tests" / "support" / "fake_stdio.py"))
CHILDREN: Final = "mcp_gateway_children"
SESSIONS: Final = "mcp_gateway_client_sessions"

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


def upstream(*flags: str) -> dict[str, Any]:
    return {"command": [*FAKE, *flags], "warm": 0}


async def becomes(value: float, read: Callable[[], Awaitable[float]]) -> None:
    async def has_become() -> bool:
        return await read() == value

    await eventually(has_become)


async def sessions(gw: Gateway) -> float:
    return await gw.metric(SESSIONS)


async def test_each_client_session_has_a_process_of_its_own_which_ends_with_it() -> None:
    async with gateway(upstream()) as gw:
        clients = [await LegacyClient(gw).initialize() for _ in range(2)]
        found = [(await client.post(client.call_message("pid")))[2][0] for client in (*clients, clients[0])]
        pids = [answer["result"]["content"][0]["text"] for answer in found]
        assert pids[0] == pids[2] != pids[1]
        assert await gw.metric(CHILDREN) == await sessions(gw) == 2
        for client in clients:
            assert await client.end() == 200
            assert (await client.post(client.call_message("pid")))[0] == 404
        await becomes(0, lambda: gw.metric(CHILDREN))
        assert await gw.metric("mcp_gateway_children_ended_total", why="asked") == 2


async def test_the_process_ends_when_a_client_of_http_sse_leaves() -> None:
    async with gateway(upstream()) as gw:
        client = await SseClient(gw).initialize()
        assert (await client.post(client.call_message("ask")))[0] == 202
        assert (await client.stream.message())["method"] == "elicitation/create"
        client.stream.close()
        await becomes(0, lambda: gw.metric(CHILDREN))
        assert await sessions(gw) == 0


async def test_the_process_ends_when_the_session_was_idle() -> None:
    async with gateway(upstream(), sessions={"client_idle_seconds": 0.05}) as gw:
        listening = await LegacyClient(gw).initialize()
        stream = await listening.listen()
        client = await LegacyClient(gw).initialize()
        await becomes(1, lambda: gw.metric(CHILDREN))
        assert (await client.post(client.call_message("pid")))[0] == 404
        assert (await listening.post(listening.call_message("pid")))[0] == 200
        stream.close()
        await becomes(0, lambda: gw.metric(CHILDREN))


@pytest.mark.parametrize("kind", [LegacyClient, SseClient])
async def test_a_process_that_dies_ends_each_open_call_with_one_error_and_the_session(
    kind: type[LegacyClient],
) -> None:
    async with gateway(upstream()) as gw:
        client = await kind(gw).initialize()
        if isinstance(client, SseClient):
            assert (await client.post(client.call_message("die")))[0] == 202
            messages = await client.stream.rest()
        else:
            _, _, messages = await client.post(client.call_message("die"))
        assert [(each["id"], each["error"]["data"]["reason"]) for each in messages] == [(1, "call_lost")]
        assert (await client.post({"id": 9, "method": "ping"}))[0] == 404
        assert await sessions(gw) == 0
        assert len(gw.log("relay.lost")) == 1


async def test_a_command_that_cannot_start_refuses_the_session() -> None:
    async with gateway(upstream("--die")) as gw:
        client = LegacyClient(gw)
        _, headers, (answer,) = await client.post(client.begin_message())
        assert (answer["id"], answer["error"]["data"]["reason"]) == (0, "upstream_unreachable")
        assert mcp.SESSION_ID not in headers
        assert await sessions(gw) == 0


async def test_the_caps_of_the_route_hold_for_the_sessions_of_clients() -> None:
    async with gateway(upstream(), sessions={"max_per_principal": 1}) as gw:
        first = await LegacyClient(gw).initialize()
        second = LegacyClient(gw)
        status, _, (answer,) = await second.post(second.begin_message())
        assert (status, answer["error"]["data"]["reason"]) == (429, "busy")
        assert "You sent no credential" in answer["error"]["message"]
        other = await LegacyClient(gw, authorization="Bearer other").initialize()
        assert await first.end() == await other.end() == 200
        assert await (await second.initialize()).end() == 200


async def test_any_worker_serves_any_request_of_a_session() -> None:
    async with gateway(upstream(), workers=3) as gw:
        client = await LegacyClient(gw).initialize()
        pids = set()
        for _ in range(12):
            client.headers["Connection"] = "close"  # the kernel distributes connections
            _, _, (answer,) = await client.post(client.call_message("pid"))
            pids.add(answer["result"]["content"][0]["text"])
        assert len(pids) == 1
        assert await gw.metric("mcp_gateway_peer_requests_total", outcome="served") > 0
        assert await client.end() == 200


async def test_lines_that_are_no_messages_reach_no_client() -> None:
    async with gateway(upstream()) as gw:
        client = await LegacyClient(gw).initialize()
        stream = await client.listen()
        _, _, messages = await client.post(client.call_message("noise"))
        assert [each["id"] for each in messages] == [1]
        assert await gw.metric("mcp_gateway_upstream_errors_total", kind="malformed") > 0
        assert await client.end() == 200
        assert await stream.rest() == []
