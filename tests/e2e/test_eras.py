"""Real clients of both eras with real servers of both eras, through one URL; a table is printed at the end.

A legacy client must see the same as without the gateway, including questions on both of its streams, and also if
no two of its requests reach the same replica. A modern server's own rounds pass through unchanged.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.parts.clients.drive import HERE, Kind, available
from tests.parts.launch import NODE, NODE_MODULES, PARTS, old_server
from tests.support import tables
from tests.support.cluster import cluster, installed
from tests.support.gateway_process import gateway
from tests.support.legacy_client import LegacyClient

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]

Calls = list[tuple[str, dict[str, Any]]]
ANN: Final = 'accept:{"name":"Ann"}'
ECHO: Final = ("echo", {"text": "hi"})
ASK: Final = ("ask", {"question": "Who?"})
ASK_GET: Final = ("ask_get", {"question": "Who?"})
DEADLINE_SECONDS: Final = 45.0
PASSED: Final = "mcp_gateway_passed_through_total"
PROBES: Final = "mcp_gateway_era_probes_total"
SESSIONS: Final = "mcp_gateway_sessions_opened_total"
NESTED: Final = "mcp_gateway_nested_requests_total"
MIRRORED_CALLS: Final = "mcp_gateway_mirrored_calls"


# --- the clients: each plays calls in one connection, answers Ann, and gives the texts ---


async def driven(drivers: Drivers, kind: Kind, era: str, url: str, calls: Calls) -> list[str]:
    client = drivers.clients[kind]
    drivers.connected.pop(kind, None)
    connected = await client.connect(url, era=era)  # type: ignore[arg-type]
    assert connected.ok, connected
    try:
        return [(await client.call_tool(name, arguments)).text for name, arguments in calls]
    finally:
        await client.close()


async def program(*command: str | Path, stdin: bytes = b"", environment: dict[str, str] | None = None) -> bytes:
    """The output of a program, which must exit with 0."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out + err
    return out


async def mcp_1(_: Drivers, url: str, calls: Calls, *flags: str) -> list[str]:
    script = HERE / "old_py_client.py"
    texts: list[str] = json.loads(
        await program(PARTS / "py130" / "bin" / "python", script, *flags, url, stdin=json.dumps(calls).encode())
    )
    return texts


async def mcp_1_10(_: Drivers, url: str, calls: Calls) -> list[str]:
    script = HERE / "old_py_client.py"
    texts: list[str] = json.loads(
        await program(PARTS / "py110" / "bin" / "python", script, url, stdin=json.dumps(calls).encode())
    )
    return texts


async def sdk_1(_: Drivers, url: str, calls: Calls) -> list[str]:
    modules = {"MRTR_NODE_MODULES": str(NODE_MODULES)}
    script = HERE / "old_ts_client.mjs"
    texts: list[str] = json.loads(
        await program(NODE, script, url, stdin=json.dumps(calls).encode(), environment=modules)
    )
    return texts


async def mcp_1_sse(drivers: Drivers, url: str, calls: Calls) -> list[str]:
    return await mcp_1(drivers, url, calls, "--sse")


async def inspector(_: Drivers, url: str, calls: Calls) -> list[str]:
    """The CLI cannot answer questions, so it plays only calls that do not ask."""
    cli = NODE_MODULES / ".bin" / "mcp-inspector"
    texts = []
    with tempfile.TemporaryDirectory(prefix="mrtr-inspector-") as home:
        for name, arguments in calls:
            given = [f"{key}={value}" for key, value in arguments.items()]
            command = ("--cli", url, "--transport", "http", "--method", "tools/call", "--tool-name", name)
            out = await program(NODE, cli, *command, "--tool-arg", *given, environment={"HOME": home})
            texts.append(json.loads(out)["content"][0]["text"])
    return texts


async def mcp_remote(_: Drivers, url: str, calls: Calls, *flags: str) -> list[str]:
    """A proxy from stdio: this is the stdio side."""
    with tempfile.TemporaryDirectory(prefix="mrtr-remote-") as home:
        process = await asyncio.create_subprocess_exec(
            *(NODE, NODE_MODULES / ".bin" / "mcp-remote", url, "--allow-http", *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"MCP_REMOTE_CONFIG_DIR": home},
        )
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await _speak(process, calls)
        finally:
            process.kill()
            await process.wait()


async def _speak(process: asyncio.subprocess.Process, calls: Calls) -> list[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    reading, writing = process.stdout, process.stdin

    def write(**message: Any) -> None:
        writing.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def answer_to(id_: int) -> dict[str, Any]:
        while True:
            message = json.loads(await reading.readline())
            if message.get("method") == "elicitation/create":
                write(id=message["id"], result={"action": "accept", "content": {"name": "Ann"}})
            elif message.get("id") == id_ and "method" not in message:
                assert "result" in message, message
                result: dict[str, Any] = message["result"]
                return result

    info = {"name": "host", "version": "1"}
    params = {"protocolVersion": "2025-11-25", "capabilities": {"elicitation": {"form": {}}}, "clientInfo": info}
    write(id=0, method="initialize", params=params)
    _ = await answer_to(0)
    write(method="notifications/initialized")
    texts = []
    for number, (name, arguments) in enumerate(calls, 1):
        write(id=number, method="tools/call", params={"name": name, "arguments": arguments})
        texts.append((await answer_to(number))["content"][0]["text"])
    return texts


def of_kind(kind: Kind, era: str) -> Callable[[Drivers, str, Calls], Awaitable[list[str]]]:
    async def play(drivers: Drivers, url: str, calls: Calls) -> list[str]:
        return await driven(drivers, kind, era, url, calls)

    return play


OLD_CLIENTS: Final = {
    "mcp 1.10": mcp_1_10,
    "mcp 1.30": mcp_1,
    "sdk 1.32": sdk_1,
    "mcp 2.3, legacy": of_kind("py", "legacy"),
    "client 2.4, legacy": of_kind("ts", "legacy"),
    "mcp-remote 0.15": mcp_remote,
    "inspector 2.12 --cli": inspector,
    "mcp 1.30, HTTP+SSE": mcp_1_sse,
}
SSE_CLIENTS: Final = ("mcp 1.30, HTTP+SSE", "mcp-remote 0.15")
MODERN_CLIENTS: Final = {
    "mcp 2.3": of_kind("py", "auto"),
    "fastmcp 4.0": of_kind("fm", "auto"),
    "client 2.4": of_kind("ts", "auto"),
}
OLD_SERVERS: Final = {
    "py130": ("mcp 1.30", "mcp 2.3, legacy", "client 2.4, legacy", "mcp-remote 0.15", "inspector 2.12 --cli"),
    "py110": ("mcp 2.3, legacy", "client 2.4, legacy"),
    "ts132": ("mcp 2.3, legacy", "client 2.4, legacy", "mcp-remote 0.15"),
}
"""The legacy clients for each server, all at once, because starting a program costs seconds.

No server with an event store: theirs mix up the streams of clients that use the same request ids.
"""
MODERN_SERVERS: Final = {
    "modern-py": ("mcp 2.3, legacy", "client 2.4, legacy", "mcp-remote 0.15"),
    "modern-ts-both": ("mcp 2.3, legacy", "client 2.4, legacy"),
    "modern-ts": (),
}
SILENT: Final = "inspector 2.12 --cli"
PLAIN: Final = "plain calls: the client answers no questions by itself"
NO_SESSION: Final = "plain calls: the server has no session in which to ask an old client"
MIRRORED: Final = {"modern-py": "mirror", "modern-ts-both": "mirror", "modern-ts": "auto"}
"""The `era` of the route with which legacy clients get the questions of a modern server."""
MIRRORED_CLIENTS: Final = (
    "mcp 1.10",
    "mcp 1.30",
    "sdk 1.32",
    "mcp 2.3, legacy",
    "client 2.4, legacy",
    "inspector 2.12 --cli",
)


# --- one gateway before each server ---


async def all_of(*plays: Awaitable[list[str]]) -> list[list[str]]:
    async with asyncio.timeout(2 * DEADLINE_SECONDS):
        return list(await asyncio.gather(*plays))


@pytest.mark.parametrize("name", OLD_SERVERS)
async def test_a_legacy_server_serves_legacy_and_modern_clients(
    name: str, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    """Legacy clients get its questions on both streams; the first modern client causes the detection of its era."""
    clients = OLD_SERVERS[name]
    async with old_server(name) as server, gateway(server.url) as gw:
        calls = {client: [ECHO] if client == SILENT else [ECHO, ASK, ASK_GET] for client in clients}
        texts = await all_of(*(OLD_CLIENTS[client](drivers, gw.url, calls[client]) for client in clients))
        assert texts == [["hi"] if client == SILENT else ["hi", ANN, ANN] for client in clients]
        assert await gw.metric(PASSED, era="legacy", outcome="answered") > 0
        assert await gw.metric(SESSIONS) == await gw.metric(PROBES) == 0, "nothing of it was bridged"
        passed = await gw.metric(PASSED)
        assert await MODERN_CLIENTS["client 2.4"](drivers, gw.url, [ECHO, ASK]) == ["hi", ANN]
        assert await gw.metric(PROBES, era="legacy") == await gw.metric(PROBES) == 1
        assert await gw.metric(PASSED) == passed, "nothing of it was passed through"
    note(request, name, {client: PLAIN if client == SILENT else "ok" for client in clients})
    note(request, name, {"client 2.4": "ok, bridged"})


@pytest.mark.parametrize("name", ["py130-sse", "ts132-sse"])
async def test_an_http_sse_server_serves_legacy_and_modern_clients(
    name: str, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    """Clients of its own time reach it through the gateway, even those that try Streamable HTTP first."""
    async with old_server(name) as server, gateway(server.url) as gw:
        calls = [ECHO, ASK, ASK_GET]
        texts = await all_of(*(OLD_CLIENTS[client](drivers, gw.url, calls) for client in SSE_CLIENTS))
        assert texts == [["hi", ANN, ANN] for _ in SSE_CLIENTS]
        assert await gw.metric(SESSIONS) == 0, "nothing of it was bridged"
        assert await MODERN_CLIENTS["client 2.4"](drivers, gw.url, [ECHO, ASK]) == ["hi", ANN]
    note(request, name, dict.fromkeys(SSE_CLIENTS, "ok") | {"client 2.4": "ok, bridged"})


@pytest.mark.parametrize("name", MODERN_SERVERS)
async def test_a_modern_server_serves_legacy_and_modern_clients(
    name: str, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    """Modern clients play its rounds with it; legacy ones get its legacy half, if it has one."""
    clients = MODERN_SERVERS[name]
    async with old_server(name) as server, gateway(server.url) as gw:
        texts = await all_of(*(OLD_CLIENTS[client](drivers, gw.url, [ECHO]) for client in clients))
        assert texts == [["hi"] for _ in clients]
        texts = await all_of(*(play(drivers, gw.url, [ECHO, ASK]) for play in MODERN_CLIENTS.values()))
        assert texts == [["hi", ANN] for _ in MODERN_CLIENTS]
        assert len(server.ledger("run", "ask")) == 2 * len(MODERN_CLIENTS), "it runs once for each of its own rounds"
        assert await gw.metric(PROBES, era="modern") == await gw.metric(PROBES) == 1
        assert await gw.metric(PASSED, era="modern", outcome="answered") >= 4 * len(MODERN_CLIENTS)
        assert await gw.metric(SESSIONS) == 0, "nothing was bridged"
    note(request, name, dict.fromkeys(clients, NO_SESSION))
    note(request, name, dict.fromkeys(MODERN_CLIENTS, "ok"))


async def test_a_session_that_no_gateway_sealed_is_gone_before_a_server_that_is_modern_only() -> None:
    """A client whose session id has outlived the keys is the first that a new gateway meets."""
    async with old_server("modern-ts") as server, gateway(server.url) as gw:
        client = LegacyClient(gw)
        client.headers[mcp.SESSION_ID] = "mrtr1.00000000.AAAA"
        client.headers[mcp.PROTOCOL_VERSION] = mcp.LEGACY
        assert (await client.post(client.call_message("echo", {"text": "hi"})))[0] == 404
        assert (await client.listen()).status == 404
        assert not server.ledger("run", "echo")


@pytest.mark.parametrize("name", MIRRORED)
async def test_legacy_clients_get_the_questions_of_a_modern_server_from_the_mirror(
    name: str, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    async with old_server(name) as server, gateway(server.url, route={"era": MIRRORED[name]}) as gw:
        calls = {client: [ECHO] if client == SILENT else [ECHO, ASK] for client in MIRRORED_CLIENTS}
        texts = await all_of(*(OLD_CLIENTS[client](drivers, gw.url, calls[client]) for client in calls))
        assert texts == [["hi"] if client == SILENT else ["hi", ANN] for client in calls]
        asked = len(MIRRORED_CLIENTS) - 1
        assert len(server.ledger("run", "ask")) == 2 * asked, "each of its rounds runs once"
        assert await gw.metric(NESTED, method="elicitation/create", outcome="answered") == asked
        assert await gw.metric(MIRRORED_CALLS) == 0
    mirrored = {client: PLAIN if client == SILENT else "ok" for client in calls}
    note(request, f"{name}, {MIRRORED[name]}", mirrored)


def note(request: pytest.FixtureRequest, server: str, outcomes: dict[str, str]) -> None:
    """For the table."""
    for client, outcome in outcomes.items():
        tables.words(request.config, tables.ERAS, client, server)["*"] = outcome


# --- three replicas ---


@pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light")
async def test_no_two_requests_of_a_session_need_the_same_replica(drivers: Drivers) -> None:
    async with AsyncExitStack() as stack:
        names = {"/mcp": "ts132", "/new": "modern-py", "/sse": "py130-sse"}
        servers = {path: await stack.enter_async_context(old_server(name)) for path, name in names.items()}
        routes = [{"path": path, "upstream": {"url": server.url}} for path, server in servers.items()]
        front = await stack.enter_async_context(cluster(servers["/mcp"].url, routes=routes))
        clients = OLD_SERVERS["ts132"]
        plays = [OLD_CLIENTS[client](drivers, front.url, [ECHO, ASK, ASK_GET]) for client in clients]
        plays.append(mcp_1_sse(drivers, f"{front.base}/sse", [ECHO, ASK, ASK_GET]))
        assert await all_of(*plays) == [["hi", ANN, ANN] for _ in plays]
        plays = [play(drivers, f"{front.base}/new", [ECHO, ASK]) for play in MODERN_CLIENTS.values()]
        assert await all_of(*plays) == [["hi", ANN] for _ in MODERN_CLIENTS]
        for replica in front.replicas:
            for era in ("legacy", "modern"):
                assert await replica.metric(PASSED, era=era, outcome="answered") > 0
