"""The table of eras and transports: any client with any server, through the gateway.

A row is what the client speaks, a column what the server speaks. Each cell plays `scenario.py` or `scenario.mjs`: a
list, a call with progress, a form, three questions at once, sampling, a cancellation, an error, an unknown tool.
Hosts that speak stdio start `mrtr-gateway wrap`; the others call `mrtr-gateway serve`.
"""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pytest

from tests.parts.clients.drive import HERE
from tests.parts.launch import NODE, NODE_MODULES, PARTS, OldServer, old_server, ran, stdio_server
from tests.support.gateway_process import gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
]

Row = Literal["modern HTTP", "modern stdio", "old HTTP", "old HTTP+SSE", "old stdio"]
Column = Literal["old HTTP", "old HTTP+SSE", "old stdio", "modern HTTP", "modern stdio"]
DEADLINE_SECONDS: Final = 90.0
FORM: Final = 'accept:{"name":"Ann"}'
MISSING: Final = {"ask_many", "fail"}
TOOLS: Final = {"ask", "ask_many", "echo", "fail", "hang", "progress", "sample"}


DUAL: Final = {"two at once": "refused", "error": "refused"}
"""These servers have no such tools; what they say of that is up to them."""
EVERYTHING: Final = {"two at once": None, "cancel": None, "error": [True]}
"""server-everything has no such tools, keeps no ledger and has its own words for an error."""
EVERYTHING_TOOLS: Final = {"echo", "trigger-elicitation-request", "trigger-sampling-request"}
SILENT: Final = {"progress", "form", "two at once", "sampling", "cancel"}
"""The Inspector's CLI makes one request and answers no questions."""


class Client(NamedTuple):
    """A published client."""

    row: Row
    command: Sequence[str | Path]
    """Up to the transport."""
    proxy: Sequence[str | Path] = ()
    """A published program between its stdio and the URL of the gateway."""
    lacks: AbstractSet[str] = frozenset()
    """The steps that it cannot play."""


class Server(NamedTuple):
    """A published server, by its name in `parts.launch`."""

    column: Column
    name: str
    flags: Sequence[str] = ()
    era: str | None = None
    """The route's `era`, where `auto` would choose the side of the server that cannot ask."""
    differs: Mapping[str, Any] = {}
    """The outcomes of steps that this server ends in another way; None for one that it cannot play."""
    tools: AbstractSet[str] = TOOLS
    flags_of_clients: Sequence[str] = ()
    """What its clients have to be told."""


def python(environment: str, *flags: str) -> Sequence[str | Path]:
    return PARTS / environment / "bin" / "python", HERE / "scenario.py", *flags


def typescript(*flags: str) -> Sequence[str | Path]:
    return NODE, HERE / "scenario.mjs", *flags


CLIENTS: Final[dict[str, Client]] = {
    "mcp 2.3, HTTP": Client("modern HTTP", python("modern")),
    "mcp 2.3, stdio": Client("modern stdio", python("modern")),
    "mcp 1.30, HTTP": Client("old HTTP", python("py130")),
    "mcp 1.30, HTTP+SSE": Client("old HTTP+SSE", python("py130")),
    "mcp 1.30, stdio": Client("old stdio", python("py130")),
}
"""One for each row; these play with every server."""
MORE_CLIENTS: Final[dict[str, Client]] = {
    "client 2.4, HTTP": Client("modern HTTP", typescript("--sdk", "2")),
    "client 2.4, stdio": Client("modern stdio", typescript("--sdk", "2")),
    "mcp 1.10, HTTP": Client("old HTTP", python("py110")),
    "mcp 2.3 legacy, HTTP": Client("old HTTP", python("modern", "--era", "legacy")),
    "sdk 1.32, HTTP": Client("old HTTP", typescript()),
    "client 2.4 legacy, HTTP": Client("old HTTP", typescript("--sdk", "2", "--era", "legacy")),
    "sdk 1.20, HTTP": Client("old HTTP", typescript("--modules", str(PARTS / "ts120" / "node_modules"))),
    "mcp-remote 0.15": Client("old HTTP", python("py130"), (NODE, NODE_MODULES / ".bin" / "mcp-remote")),
    "inspector 2.12 --cli, HTTP": Client("old HTTP", (sys.executable, HERE / "inspector.py"), lacks=SILENT),
    "sdk 1.32, HTTP+SSE": Client("old HTTP+SSE", typescript()),
    "mcp 1.10, stdio": Client("old stdio", python("py110")),
    "mcp 2.3 legacy, stdio": Client("old stdio", python("modern", "--era", "legacy")),
    "sdk 1.20, stdio": Client("old stdio", typescript("--modules", str(PARTS / "ts120" / "node_modules"))),
    "sdk 1.32, stdio": Client("old stdio", typescript()),
    "client 2.4 legacy, stdio": Client("old stdio", typescript("--sdk", "2", "--era", "legacy")),
}
"""These play with a legacy and with a modern server."""
SERVERS: Final[dict[str, Server]] = {
    "mcp 1.30, HTTP": Server("old HTTP", "py130"),
    "mcp 1.30, HTTP+SSE": Server("old HTTP+SSE", "py130-sse"),
    "mcp 1.30, stdio": Server("old stdio", "py130"),
    "server 2.4, HTTP": Server("modern HTTP", "modern-ts"),
    "server 2.4, stdio": Server("modern stdio", "modern-ts"),
}
"""One for each column; these play with every client of a row."""
MORE_SERVERS: Final[dict[str, Server]] = {
    "sdk 1.32, HTTP": Server("old HTTP", "ts132"),
    "fastmcp 3, HTTP": Server("old HTTP", "fm3"),
    "sdk 1.32, HTTP+SSE": Server("old HTTP+SSE", "ts132-sse"),
    "sdk 1.32, stdio": Server("old stdio", "ts132"),
    "fastmcp 3, stdio": Server("old stdio", "fm3"),
    "mcp 2.3 stateless, HTTP": Server("modern HTTP", "modern-py", era="mirror"),
    "mcp 2.3, stdio": Server("modern stdio", "modern-py", era="mirror"),
    "server 2.4 stateless, HTTP": Server("modern HTTP", "modern-ts-both", era="mirror"),
    "everything, HTTP": Server("old HTTP", "everything", (), None, EVERYTHING, EVERYTHING_TOOLS, ("--everything",)),
    "everything, stdio": Server("old stdio", "everything", (), None, EVERYTHING, EVERYTHING_TOOLS, ("--everything",)),
    "mcp 2.3 dual, HTTP": Server("old HTTP", "dual-py", era="bridge", differs=DUAL, tools=TOOLS - MISSING),
    "mcp 2.3 dual, stdio": Server("old stdio", "dual-py", era="bridge", differs=DUAL, tools=TOOLS - MISSING),
    "fastmcp 4 dual, HTTP": Server("old HTTP", "dual-fm4", era="bridge", differs=DUAL, tools=TOOLS - MISSING),
    "server 2.4 dual, stdio": Server("modern stdio", "modern-ts", ("--legacy",), era="mirror"),
}
"""These play with a modern and with a legacy client, over stdio and over HTTP."""
TRANSPORTS: Final[dict[Row, str]] = {
    "modern HTTP": "http",
    "modern stdio": "stdio",
    "old HTTP": "http",
    "old HTTP+SSE": "sse",
    "old stdio": "stdio",
}
ALL_CLIENTS: Final = CLIENTS | MORE_CLIENTS
ALL_SERVERS: Final = SERVERS | MORE_SERVERS
SMOKE: Final = {
    *(("mcp 2.3, HTTP", server) for server in SERVERS),
    *((client, "server 2.4, HTTP") for client in ("mcp 1.30, HTTP", "mcp 1.30, HTTP+SSE", "mcp 1.30, stdio")),
    ("mcp 2.3, stdio", "mcp 1.30, stdio"),
    ("mcp 1.30, HTTP", "mcp 1.30, stdio"),
}
"""What `make smoke` plays: each face and each link, and each way that a call can take."""


CELLS: Final = [
    *((client, server) for client in CLIENTS for server in SERVERS),
    *((client, server) for client in MORE_CLIENTS for server in ("mcp 1.30, HTTP", "server 2.4, stdio")),
    *((client, server) for client in ("mcp 2.3, stdio", "mcp 1.30, HTTP") for server in MORE_SERVERS),
]


@pytest.mark.parametrize(
    ("client", "server"),
    [pytest.param(*names, marks=pytest.mark.smoke if names in SMOKE else (), id=" - ".join(names)) for names in CELLS],
)
async def test_any_client_plays_the_scenario_with_any_server(client: str, server: str) -> None:
    who, what = ALL_CLIENTS[client], ALL_SERVERS[server]
    async with serving(what) as (running, upstream):
        outcomes = await played(who, what, running, upstream)
    wanted = {**expected(outcomes), **what.differs, **dict.fromkeys(who.lacks)}
    vague = {step: said for step, said in what.differs.items() if said == "refused"}
    assert {step: outcomes.get(step) for step in wanted} | vague == wanted
    assert what.tools.issubset(outcomes["list"])
    assert len(running.ledger("cancelled", "hang")) <= 1
    assert len(running.ledger("run", "hang")) <= 1


def expected(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """What every step gives; the list differs from server to server."""
    many = {"elicit": FORM, "sample": "sampled", "roots": ["file:///project"]}
    return {
        "list": outcomes.get("list"),
        "progress": ["done", [1.0, 2.0, 3.0]],
        "form": FORM,
        "two at once": json.dumps(many, separators=(",", ":")),
        "sampling": "sampled",
        "cancel": "cancelled",
        "error": [True, "bad luck"],
        "unknown tool": "refused",
    }


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[tuple[OldServer, dict[str, Any]]]:
    """Run a server, or prepare it for the gateway to run; give the `upstream` of a route."""
    if server.column.endswith("stdio"):
        with stdio_server(server.name, *server.flags) as (running, upstream):
            yield running, upstream
    else:
        async with old_server(server.name, *server.flags) as running:
            yield running, {"url": running.url}


async def played(client: Client, server: Server, running: OldServer, upstream: dict[str, Any]) -> dict[str, Any]:
    """The outcomes of the steps."""
    transport = TRANSPORTS[client.row]
    ledger = ("--ledger", running.directory / "ledger", *server.flags_of_clients)
    route = {"era": server.era} if server.era else {}
    if transport != "stdio":
        async with gateway(upstream, route=route) as gw:
            if client.proxy:
                with tempfile.TemporaryDirectory(prefix="mrtr-remote-") as home:
                    kept = {"MCP_REMOTE_CONFIG_DIR": home}
                    program = (*client.proxy, gw.url, "--allow-http")
                    return await outcomes_of(*client.command, *ledger, "stdio", *program, environment=kept)
            return await outcomes_of(*client.command, *ledger, transport, gw.url)
    with tempfile.TemporaryDirectory(prefix="mrtr-wrap-") as directory:
        config = Path(directory) / "wrap.yaml"
        config.write_text(json.dumps({"routes": [{"upstream": upstream, **route}], "log": {"format": "json"}}))
        wrap = (sys.executable, "-m", "gateway", "wrap", "--config", config)
        return await outcomes_of(*client.command, *ledger, transport, *wrap)


async def outcomes_of(*command: str | Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a client; it must end by itself, and the gateway's log, if it is in its stderr, must have no error."""
    done = await ran(*command, environment=environment, seconds=DEADLINE_SECONDS)
    assert done.code == 0, done
    assert '"level": "error"' not in done.err, done.err
    outcomes: dict[str, Any] = json.loads(done.out.strip().split("\n")[-1])
    return outcomes
