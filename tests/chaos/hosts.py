"""What the tests of failing networks share: every program on a host of its own, and clients that come again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import pytest

from tests.chaos.stage import KEY, Call, accept, built
from tests.e2e.wire import Answer, Json, Wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, installed
from tests.support.network import Network, missing, network

REPLICAS: Final = ("gw-1", "gw-2", "gw-3")
HOSTS: Final = ("client", "balancer", "server", *REPLICAS)
TIMEOUTS: Final[dict[str, float]] = {
    "keepalive_seconds": 0.3,
    "peer_connect_seconds": 0.3,
    "peer_accept_seconds": 0.4,
    "answer_seconds": 1.5,
    "cancel_seconds": 0.5,
    "idle_seconds": 3,
    "handshake_seconds": 3,
    "connect_seconds": 1,
}
SECTIONS: Final[dict[str, Any]] = {"timeouts": TIMEOUTS, "hold": {"grace_seconds": 10}}
BUSY_SECONDS: Final = 8
"""More than the gateway promises, for a busy machine; what never ended would end later than that."""
STALLED_SECONDS: Final = 2 * (0.3 + 0.4) + 1 + BUSY_SECONDS
"""docs/continuity.md promises a 503 in twice both peer timeouts and a second."""
SILENT_SECONDS: Final = 2 * 0.3 + 0.4 + BUSY_SECONDS
"""A reply that another replica relays is never silent for longer than twice the keep-alive and peer_accept_seconds."""
UNREACHABLE_SECONDS: Final = 1 + 3 + BUSY_SECONDS
"""connect_seconds and handshake_seconds."""
AGAIN: Final = {"owner_stalled", "busy", "stopping"}
"""Reasons that say: send the same retry again."""

SERVERS: Final = ("py130", "py130-store")
WHY_NOT: Final = missing()
MARKS: Final = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.skipif(not all(map(built, SERVERS)), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("haproxy"), reason="apt install haproxy"),
]


@dataclass(frozen=True)
class Stage:
    """Three replicas, two legacy servers on one host, a balancer and a client, each on a host of its own."""

    net: Network
    c: Cluster
    plain: OldServer
    stored: OldServer
    client: Wire
    """Through the balancer, to the server without an event store."""

    def of(self, name: str) -> OldServer:
        return {"py130": self.plain, "py130-store": self.stored}[name]

    def through_balancer(self, server: OldServer) -> Wire:
        return self.client.on(self.c.base + ("/mcp" if server is self.plain else "/store"))

    def at(self, name: str, server: OldServer) -> Wire:
        """The client, connected to one replica, on the route of that server."""
        path = "/mcp" if server is self.plain else "/store"
        return self.client.on(self.c.replica(name).base + path)


@asynccontextmanager
async def staged(
    sections: Mapping[str, Any] = SECTIONS, prefixes: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[Stage]:
    with network(*HOSTS) as net:
        async with AsyncExitStack() as stack:
            where = {"host": net["server"].address, "prefix": net["server"].prefix}
            plain, stored = [await stack.enter_async_context(old_server(name, **where)) for name in SERVERS]
            routes = [
                {"path": path, "upstream": {"url": server.url}}
                for path, server in (("/mcp", plain), ("/store", stored))
            ]
            c = await stack.enter_async_context(
                cluster(
                    plain.url,
                    balancer="haproxy",
                    network=net,
                    prefixes=prefixes,
                    routes=routes,
                    **sections,
                )
            )
            connector = net["client"].connector(force_close=True)
            timeout = aiohttp.ClientTimeout(total=30)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
            yield Stage(net, c, plain, stored, Wire(http, c.url))


def spawn(work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    return asyncio.get_running_loop().create_task(work)


def open_gate(call: Call) -> None:
    """Let its tool go on after it was answered."""
    assert call.after is not None
    call.after.open()


async def within(seconds: float, work: Awaitable[Answer]) -> Answer:
    """In the promised time."""
    async with asyncio.timeout(seconds):
        return await work


async def insist(call: Call, client: Wire, state: str, seconds: float = 15) -> Answer:
    """Send the same retry again as long as errors ask for that, and answer a question that is asked again."""
    answers: Json | None = accept(call.name)
    async with asyncio.timeout(seconds):
        while True:
            answer = await client.call(call.tool, call.arguments, state=state, answers=answers)
            if "error" in answer.final:
                if call.outcome(answer) not in AGAIN:
                    return answer
                await asyncio.sleep(0.1)
            elif answer.result["resultType"] == "complete":
                return answer
            else:
                state, answers = answer.state, accept(call.name) if answer.asks == [KEY] else None
