"""Real dual-era servers whose tools can ask only legacy clients, behind a route with `era: bridge`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

import pytest
import pytest_asyncio

from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.e2e.test_eras import OLD_CLIENTS
from tests.e2e.wire import NAMED, Wire, wire
from tests.parts.clients.drive import Kind, ModernClient, available, elicit, sample
from tests.parts.launch import OldServer, old_server
from tests.support.gateway_process import HELD, Gateway, gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]

SERVERS: Final = ("dual-py", "dual-fm4")
NO_BACK_CHANNEL: Final = "no back-channel for server-initiated requests"
UNAVAILABLE: Final = "elicitation via server-initiated requests is unavailable on 2026-07-28 connections"
PASSED: Final = "mcp_gateway_passed_through_total"
PROBES: Final = "mcp_gateway_era_probes_total"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers() -> AsyncIterator[dict[str, OldServer]]:
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(old_server(name)) for name in SERVERS]
        yield dict(zip(SERVERS, await asyncio.gather(*entering), strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gw(servers: dict[str, OldServer]) -> AsyncIterator[Gateway]:
    """A gateway with a bridged route for each server, and one with the default era."""
    routes = [{"path": f"/{name}", "upstream": {"url": it.url}, "era": "bridge"} for name, it in servers.items()]
    routes += [{"path": f"/auto-{name}", "upstream": {"url": it.url}} for name, it in servers.items()]
    async with gateway("", routes=routes) as running:
        yield running
        for name in SERVERS:
            assert await running.metric(PROBES, route=f"/{name}") == 0
            assert await running.metric(PASSED, route=f"/{name}", era="modern") == 0


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, servers: dict[str, OldServer]) -> OldServer:
    return servers[request.param]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def client(drivers: Drivers, kind: Kind, gw: Gateway, server: OldServer) -> ModernClient:
    """A modern client that is connected to the bridged route of a server."""
    return await drivers.connect(kind, f"{gw.base}/{server.name}")


def named(name: str) -> str:
    return f'accept:{{"name":"{name}"}}'


def naming(name: str, question: str) -> dict[str, object]:
    return elicit({"action": "accept", "content": {"name": name}}, match=question)


async def test_a_form_question_is_answered(client: ModernClient, server: OldServer) -> None:
    ran = len(server.ledger("run", "ask"))
    reply = await client.call_tool("ask", {"question": "Who?"})
    assert (reply.text, reply.kinds) == (NAMED, ["elicit"])
    assert reply.asked[0]["params"]["message"] == "Who?"
    declined = await client.call_tool("ask", {"question": "Who?"}, answers=[elicit({"action": "decline"})])
    assert declined.text == "decline"
    assert len(server.ledger("run", "ask")) == ran + 2, "each call ran once"


async def test_two_questions_at_once_are_each_asked_once(client: ModernClient, gw: Gateway, server: OldServer) -> None:
    rounds, ran = await gw.rounds("tools/call"), len(server.ledger("run", "ask_two"))
    asked_before = await gw.rounds("tools/call", "input_required")
    reply = await client.call_tool("ask_two", answers=[naming("Ann", "first"), naming("Bob", "second")])
    assert json.loads(reply.text) == [named("Ann"), named("Bob")]
    assert reply.kinds == ["elicit", "elicit"]
    asked = await gw.rounds("tools/call", "input_required") - asked_before
    # A slow server may pause longer than the quiet window between the two.
    assert asked in {1, 2}
    assert await gw.rounds("tools/call") == rounds + asked + 1
    assert len(server.ledger("run", "ask_two")) == ran + 1


async def test_two_questions_in_sequence_take_two_rounds(client: ModernClient, gw: Gateway, server: OldServer) -> None:
    rounds, ran = await gw.rounds("tools/call"), len(server.ledger("run", "ask_sequence"))
    reply = await client.call_tool("ask_sequence", answers=[naming("Ann", "first"), naming("Bob", "second")])
    assert json.loads(reply.text) == [named("Ann"), named("Bob")]
    assert await gw.rounds("tools/call") == rounds + 3
    assert len(server.ledger("run", "ask_sequence")) == ran + 1


async def test_sampling_is_answered(client: ModernClient) -> None:
    spoken = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "hello"}}
    reply = await client.call_tool("sample", {"prompt": "Speak"}, answers=[sample(spoken, match="Speak")])
    assert (reply.text, reply.kinds) == ("hello", ["sample"])


async def test_a_cancelled_call_is_cancelled_at_the_server(
    client: ModernClient, gw: Gateway, server: OldServer
) -> None:
    before = len(server.ledger("cancelled", "hang"))
    reply = await client.cancel_call("hang", after_seconds=0.3)
    assert reply.cancelled is True
    _ = await server.wait_for("cancelled", "hang", before + 1)
    await gw.settled()


async def test_calls_without_questions_work_too(client: ModernClient) -> None:
    tools = {tool["name"] for tool in (await client.list_all("tools")).value["tools"]}
    assert {"echo", "ask", "ask_two", "sample"} <= tools
    assert (await client.call_tool("echo", {"text": "hi"})).text == "hi"
    reply = await client.call_tool("progress", {"steps": 3}, progress=True)
    assert reply.text == "done"
    assert [step["progress"] for step in reply.progress] == [1, 2, 3]
    unknown = await client.call_tool("no_such_tool")
    assert unknown.error is not None or unknown.value["isError"]


async def test_a_question_that_is_abandoned_is_cancelled_at_the_server(servers: dict[str, OldServer]) -> None:
    server = servers["dual-py"]
    ended = len(server.ledger("finished", "ask")) + 1
    async with gateway(server.url, route={"era": "bridge"}, hold={"ttl_seconds": 0.3}) as gw, wire(gw.url) as client:
        asked = await client.call("ask", {"question": "Who?"})
        assert len(asked.asks) == 1
        await gw.settled()
        assert await gw.metric(HELD) == 0
        _ = await server.wait_for("finished", "ask", ended)


@pytest.mark.parametrize("name", ["mcp 1.30", "mcp 2.3, legacy", "client 2.4, legacy", "mcp-remote 0.15"])
async def test_legacy_clients_are_passed_through(name: str, drivers: Drivers, gw: Gateway, server: OldServer) -> None:
    opened = await gw.metric("mcp_gateway_sessions_opened_total")
    texts = await OLD_CLIENTS[name](
        drivers, f"{gw.base}/{server.name}", [("echo", {"text": "hi"}), ("ask", {"question": "Who?"})]
    )
    assert texts == ["hi", NAMED]
    assert await gw.metric("mcp_gateway_sessions_opened_total") == opened, "nothing of it was bridged"


# -- what docs/clients-and-servers.md says of other settings ---------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def automatic(gw: Gateway, server: OldServer) -> AsyncIterator[Wire]:
    """A client of a route with `era: auto`."""
    async with wire(f"{gw.base}/auto-{server.name}") as client:
        yield client


async def test_without_the_key_a_question_has_the_documented_symptom(automatic: Wire, server: OldServer) -> None:
    asked = await automatic.call("ask", {"question": "Who?"})
    sampled = await automatic.call("sample", {"prompt": "Speak"})
    if server.name == "dual-py":
        for reply in (asked, sampled):
            assert reply.error["code"] == -32600
            assert NO_BACK_CHANNEL in reply.error["message"]
    else:
        for reply, words in ((asked, UNAVAILABLE), (sampled, NO_BACK_CHANNEL)):
            assert reply.result["isError"] is True
            assert words in reply.text


@pytest.mark.parametrize("name", SERVERS)
async def test_a_stateless_legacy_side_cannot_ask(name: str) -> None:
    async with (
        old_server(name, "--stateless") as server,
        gateway(server.url, route={"era": "bridge"}) as gw,
        wire(gw.url) as client,
    ):
        assert (await client.call("echo", {"text": "hi"})).text == "hi"
        reply = await client.call("ask", {"question": "Who?"})
        if name == "dual-py":
            assert reply.error["code"] == -32600
        said = reply.error["message"] if name == "dual-py" else reply.text
        assert NO_BACK_CHANNEL in said


async def test_a_server_that_asks_only_modern_clients_does_not_work_with_the_bridge() -> None:
    async with AsyncExitStack() as stack:
        names = ("modern-py", "modern-ts-both")
        servers = [await stack.enter_async_context(old_server(name)) for name in names]
        routes = [
            {"path": f"/{name}", "upstream": {"url": server.url}, "era": "bridge"}
            for name, server in zip(names, servers, strict=True)
        ]
        gw = await stack.enter_async_context(gateway("", routes=routes))
        clients = [await stack.enter_async_context(wire(f"{gw.base}/{name}")) for name in names]
        python, typescript = [await client.call("ask", {"question": "Who?"}) for client in clients]
        assert python.error["code"] == -32603
        assert python.error["message"] == "Handler returned an invalid result"
        assert typescript.result["isError"] is True
        assert "per-request legacy serving cannot receive server-to-client requests" in typescript.text


async def test_a_server_without_a_legacy_side_is_refused_by_name_of_the_key() -> None:
    async with (
        old_server("modern-ts") as server,
        gateway(server.url, route={"era": "bridge"}) as gw,
        wire(gw.url) as client,
    ):
        error = (await client.call("echo", {"text": "hi"})).error
        assert error["data"]["reason"] == "upstream_unreachable"
        assert "The route has era: bridge" in error["message"]
        assert "set era: auto" in error["message"]
        assert await gw.metric(PROBES) == 0
