"""Real legacy clients with real legacy servers of another transport; the gateway ends the session on its side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.e2e.test_eras import ANN, ASK, ASK_GET, ECHO, OLD_CLIENTS, SILENT, Calls, mcp_remote
from tests.parts.clients.drive import available
from tests.parts.launch import old_server, stdio_server
from tests.support.gateway_process import Gateway, gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]


async def mcp_remote_sse(drivers: Drivers, url: str, calls: Calls) -> list[str]:
    """The TypeScript SDK's client of HTTP+SSE."""
    return await mcp_remote(drivers, url, calls, "--transport", "sse-only")


SSE: Final = "mcp 1.30, HTTP+SSE"
TS_SSE: Final = "mcp-remote 0.15, HTTP+SSE"
CLIENTS: Final = {**OLD_CLIENTS, TS_SSE: mcp_remote_sse}
HTTP_CLIENTS: Final = tuple(name for name in OLD_CLIENTS if name != SSE)
CLIENT_SESSIONS: Final = "mcp_gateway_client_sessions"


@asynccontextmanager
async def gateway_before(server: str, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway before a server over stdio or HTTP."""
    if server.endswith("-stdio"):
        with stdio_server(server.removesuffix("-stdio")) as (_, upstream):
            async with gateway(upstream, **settings) as gw:
                yield gw
    else:
        async with old_server(server) as old, gateway(old.url, **settings) as gw:
            yield gw


@pytest.mark.parametrize(
    ("server", "clients"),
    [
        ("py130-stdio", (*HTTP_CLIENTS, SSE, TS_SSE)),
        ("ts132-stdio", (*HTTP_CLIENTS, SSE)),
        ("py130-sse", HTTP_CLIENTS),
        ("ts132-sse", HTTP_CLIENTS),
        ("py130", (SSE, TS_SSE)),
        ("ts132", (SSE, TS_SSE)),
    ],
)
async def test_a_legacy_client_plays_with_a_server_of_another_transport(
    server: str, clients: tuple[str, ...], drivers: Drivers
) -> None:
    async with gateway_before(server) as gw:
        for client in clients:  # one after another, because each starts a program, and perhaps a child
            asks = client != SILENT
            texts = await CLIENTS[client](drivers, gw.url, [ECHO, ASK, ASK_GET] if asks else [ECHO])
            assert texts == (["hi", ANN, ANN] if asks else ["hi"]), client
        assert await gw.metric("mcp_gateway_sessions_opened_total") == 0, "nothing of it was bridged"
