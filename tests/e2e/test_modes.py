"""Real legacy servers in modes that cannot carry a question, or that forgot their sessions."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio

from tests.e2e.wire import ACCEPT, NAMED, Wire, wire
from tests.parts.launch import NODE, PARTS, OldServer, old_server
from tests.support.gateway_process import Gateway, gateway
from tests.support.workbench import jwt

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not all((PARTS / name).exists() for name in ("py130", "py110")) or not NODE.exists(),
        reason="scripts/parts has not been run",
    ),
]

MODES = {
    "py-stateless": ("py130", "--stateless"),
    "py-json": ("py130", "--json"),
    "py-both": ("py130", "--stateless", "--json"),
    "ts-stateless": ("ts132", "--stateless"),
    "ts-json": ("ts132", "--json"),
}
FORGETFUL = {
    "py110": "HTTP 400 and plain text",
    "ts132": "HTTP 404 and -32001",
    "everything": "HTTP 400 and -32000",
}
"""How each server refuses an unknown session; py130 (404 and -32600) is restarted in test_faults.py of upstream."""
IDLE_SECONDS = 0.4


@asynccontextmanager
async def before(
    servers: Mapping[str, tuple[str, ...]],
) -> AsyncIterator[tuple[Gateway, Wire, dict[str, OldServer]]]:
    """One gateway with a route for each of the servers."""
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(old_server(*command)) for command in servers.values()]
        started = dict(zip(servers, await asyncio.gather(*entering), strict=True))
        routes = [{"path": f"/{name}", "upstream": {"url": server.url}} for name, server in started.items()]
        gw = await stack.enter_async_context(gateway("", routes=routes, timeouts={"idle_seconds": IDLE_SECONDS}))
        yield gw, await stack.enter_async_context(wire(gw.base)), started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def modes() -> AsyncIterator[Wire]:
    async with before(MODES) as (_, client, _servers):
        yield client


def at(client: Wire, name: str) -> Wire:
    return client.on(f"{client.url}/{name}")


@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_that_asks_nothing_works_in_every_mode(modes: Wire, mode: str) -> None:
    client = at(modes, mode)
    assert (await client.send("server/discover")).result["supportedVersions"] == ["2026-07-28"]
    assert (await client.call("echo", {"text": "x"})).text == "x"
    assert (await client.call("structured", {"n": 3})).result["structuredContent"]["square"] == 9


@pytest.mark.parametrize("mode", ["py-stateless", "ts-stateless"])
async def test_a_question_of_a_stateless_server_ends_the_call_at_once(modes: Wire, mode: str) -> None:
    error = (await at(modes, mode).call("ask")).error
    assert error["data"]["reason"] == "upstream_cannot_ask"
    assert "Run the server with sessions" in error["message"]


async def test_a_question_that_a_stateless_server_loses_ends_the_call_at_the_idle_timeout(modes: Wire) -> None:
    """Python only: the TypeScript SDK finds no capability of the client in such a session, and sends nothing."""
    error = (await at(modes, "py-stateless").call("ask_get")).error
    assert error["data"]["reason"] == "call_lost"
    assert "timeouts.idle_seconds" in error["message"]
    assert "run the server with sessions" in error["message"]


@pytest.mark.parametrize("mode", ["py-json", "ts-json", "py-both"])
async def test_a_question_that_a_json_server_swallows_ends_the_call_at_the_idle_timeout(
    modes: Wire, mode: str
) -> None:
    error = (await at(modes, mode).call("ask")).error
    assert error["data"]["reason"] == "call_lost"
    assert "timeouts.idle_seconds" in error["message"]
    assert "have the server answer with event streams" in error["message"]


@pytest.mark.parametrize("mode", ["py-json", "ts-json"])
async def test_a_json_server_can_ask_on_its_get_stream(modes: Wire, mode: str) -> None:
    """This is why the gateway does not refuse servers with JSON bodies."""
    client = at(modes, mode)
    asked = await client.call("ask_get")
    assert asked.asks == ["Name"]
    assert (await client.call("ask_get", state=asked.state, answers={"Name": ACCEPT})).text == NAMED


async def test_a_server_that_forgot_its_sessions_is_served_in_new_ones() -> None:
    async with before({name: (name,) for name in FORGETFUL}) as (gw, client, servers):

        async def echo(name: str) -> str:
            words = {"message": "x"} if name == "everything" else {"text": "x"}
            return (await at(client, name).call("echo", words)).text.removeprefix("Echo: ")

        assert [await echo(name) for name in FORGETFUL] == ["x"] * 3
        await asyncio.gather(*(server.restart() for server in servers.values()))
        assert [await echo(name) for name in FORGETFUL] == ["x"] * 3
        for name in FORGETFUL:
            assert await gw.metric("mcp_gateway_sessions_opened_total", route=f"/{name}") == 2


ADA = {"iss": "https://as.example", "sub": "ada", "client_id": "c"}
CHECKED = {
    "py110": ("py110",),
    "py130": ("py130",),
    "fm3": ("fm3",),
    "ts132": ("ts132",),
    "py130-sse": ("py130-sse",),
    "ts132-sse": ("ts132-sse",),
}


async def test_a_fresh_token_is_checked_beside_a_call_that_waits() -> None:
    """With one session per caller, the ping goes to the session of the call."""
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(old_server(*command)) for command in CHECKED.values()]
        servers = dict(zip(CHECKED, await asyncio.gather(*entering), strict=True))
        routes = [{"path": f"/{name}", "upstream": {"url": server.url}} for name, server in servers.items()]
        caps = {"max_per_principal": 1}
        gw = await stack.enter_async_context(gateway("", routes=routes, sessions=caps))
        client = await stack.enter_async_context(wire(gw.base))
        for name, server in servers.items():
            old, new = (at(client, name).on(None, Authorization=jwt(**ADA, jti=jti)) for jti in ("old", "new"))
            asked = await old.call("ask")
            again = await new.call("ask", state=asked.state, answers={})
            assert again.asks == asked.asks, name
            assert (await new.call("ask", state=again.state, answers={"Name": ACCEPT})).text == NAMED, name
            assert len(server.ledger("run", "ask")) == 1, name
            assert await gw.metric("mcp_gateway_sessions_opened_total", route=f"/{name}") == 1, name
