"""Real clients that listen, through the gateway, to real legacy servers that change, are killed and come back."""

import asyncio
import os
from typing import Any, Final

import pytest

from tests.e2e.cases import Drivers
from tests.parts.clients.drive import HERE, Kind, ModernClient
from tests.parts.launch import NODE, NODE_MODULES, PARTS, old_server, running, stdio_server
from tests.support.cluster import cluster, needs
from tests.support.gateway_process import gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
]

LISTENERS: Final[tuple[Kind, ...]] = ("py", "ts")
URI: Final = "note://static"
CHOSEN: Final[dict[str, Any]] = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": [URI],
}
MIRRORED: Final[dict[str, Any]] = {"route": {"era": "mirror"}, "check": False}
"""`check`: the log of a replica that is killed tells of its peers' errors."""
DEADLINE_SECONDS: Final = 60.0
EVENTS: Final = {
    "toolsListChanged": ["ToolsListChanged", ""],
    "promptsListChanged": ["PromptsListChanged", ""],
    "resourcesListChanged": ["ResourcesListChanged", ""],
    "resourceSubscriptions": ["ResourceUpdated", URI],
}


async def each_hears(clients: list[ModernClient], *events: list[str]) -> None:
    """Each client hears these, and perhaps others between them."""

    async def hear(client: ModernClient) -> None:
        left = list(events)
        while left:
            (event,), _ = await client.heard(1)
            if event in left:
                left.remove(event)

    await asyncio.gather(*map(hear, clients))


async def all_hear(clients: list[ModernClient], *events: list[str]) -> None:
    """Each client hears exactly these next, in whichever order."""
    for found, ended in await asyncio.gather(*(client.heard(len(events)) for client in clients)):
        assert sorted(found) == sorted(events), ended


@pytest.mark.parametrize("name", ["py130", "everything"])
async def test_changes_arrive_and_none_is_missed_when_the_server_is_killed(drivers: Drivers, name: str) -> None:
    async with old_server(name) as server, gateway(server.url) as gw:
        clients = [await drivers.connect(kind, gw.url) for kind in LISTENERS]
        for client in clients:
            assert await client.listen(CHOSEN) == CHOSEN, name
        caller = clients[0]
        if name == "py130":
            await caller.call_tool("change_tools")
            await all_hear(clients, EVENTS["toolsListChanged"])
            await caller.call_tool("touch", {"uri": URI})
            await all_hear(clients, EVENTS["resourceSubscriptions"])
        await server.restart()
        # `everything` changes its tools by itself, shortly after each handshake.
        hear = each_hears if name == "everything" else all_hear
        await hear(clients, *EVENTS.values())
        if name == "py130":
            await caller.call_tool("touch", {"uri": URI})
            await all_hear(clients, EVENTS["resourceSubscriptions"])
        await gw.end()
        ends = [await client.heard() for client in clients]
        assert [how for _, how in ends] == ["graceful"] * len(clients)
        assert name == "everything" or not any(events for events, _ in ends)


@pytest.mark.parametrize("affinity", ["none", "principal"])
async def test_an_update_reaches_all_subscriptions_whichever_child_said_it(drivers: Drivers, affinity: str) -> None:
    """This server tells only who subscribed, and each session is a process: calls run in other ones."""
    chosen = {"resourceSubscriptions": [URI]}
    route = {"sessions": {"affinity": affinity}}
    with stdio_server("py130") as (_, upstream):
        async with gateway(upstream, route=route) as gw:
            clients = [await drivers.connect(kind, gw.url) for kind in LISTENERS]
            for client in clients:
                assert await client.listen(chosen) == chosen
            for caller in (*clients, clients[0]):
                await caller.call_tool("touch", {"uri": URI})
                await all_hear(clients, EVENTS["resourceSubscriptions"])
            await gw.end()
            assert [await client.heard() for client in clients] == [([], "graceful")] * len(clients)


WATCHED: Final = "test://watched-resource"
SUBSCRIBERS: Final = {
    "mcp 1.30": (PARTS / "py130" / "bin" / "python", HERE / "scenario.py"),
    "sdk 1.32": (NODE, HERE / "scenario.mjs"),
}
STREAMS: Final = "mcp_gateway_subscriptions"


@needs("nginx")
@pytest.mark.parametrize("name", SUBSCRIBERS)
async def test_the_subscriptions_of_a_mirrored_client_outlive_the_replica_that_has_its_stream(name: str) -> None:
    """The client comes back by itself with the last event id; the next replica says that everything has changed."""
    async with old_server("conformance-modern") as server, cluster(server.url, **MIRRORED) as c:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        environment = os.environ | {"MRTR_NODE_MODULES": str(NODE_MODULES)}
        command = (*SUBSCRIBERS[name], "--subscribe", WATCHED, "http", c.url)
        async with asyncio.timeout(DEADLINE_SECONDS), running(*command, **pipes, env=environment) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            assert await client.stdout.readline() == b"subscribed\n"
            homes = []
            while not homes:
                homes = [replica for replica in c.replicas if await replica.metric(STREAMS)]
            (home,) = homes
            client.stdin.write(b"\n")
            told = {await client.stdout.readline() for _ in range(2)}
            assert told == {b"touched\n", f"{WATCHED}\n".encode()}, "nothing of it is on its way any more"
            await home.kill()
            assert await client.stdout.readline() == f"{WATCHED}\n".encode()
            client.stdin.close()
            assert await client.wait() == 0
