"""Every real modern client with every real old server through the real gateway: the cases of cases.py.

A pair that cannot play a case is in NOT_APPLICABLE with its reason, is played all the same, and must fail.
The table is printed at the end of the run.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import get_args

import pytest
import pytest_asyncio

from tests.e2e.cases import CASES, Case, Drivers, Stage
from tests.e2e.conftest import FOUND
from tests.gateway_process import Gateway, gateway
from tests.parts.clients.drive import DriverError, Kind, ModernClient, available, modern_client
from tests.parts.launch import OldServer, PartError, old_server

KINDS: tuple[Kind, ...] = get_args(Kind)
PAGED = ("--page-size", "7")
SERVERS = {
    "py130": PAGED,
    "py130-store": PAGED,
    "py110": PAGED,
    "ts132": (),
    "fm3": PAGED,
    "everything": (),
}
ABANDONED_SECONDS = 0.5

NO_URL = "mcp 1.10 has no url elicitation"
NO_TOOL = "server-everything has no such tool"
NOT_APPLICABLE: dict[tuple[str, str, str], str] = {
    ("py110", "*", "url elicitation"): NO_URL,
    ("py110", "*", "-32042 accepted"): NO_URL,
    ("py110", "*", "-32042 declined"): NO_URL,
    ("py110", "*", "sampling with tools"): "mcp 1.10 has no tools in sampling",
    ("fm3", "*", "completion"): "fastmcp 3 has no completion",
    ("ts132", "*", "lists come in pages"): "McpServer of the TypeScript SDK lists everything on one page",
    ("everything", "*", "lists come in pages"): "server-everything lists everything on one page",
    ("everything", "*", "undeclared capability is -32021"): "server-everything offers a tool only to who can answer",
    (
        "everything",
        "*",
        "undeclared: refuse lets the tool go on",
    ): "server-everything offers a tool only to who can answer",
    **{
        ("everything", "*", case): NO_TOOL
        for case in (
            "result of 2 MB",
            "form on the GET stream",
            "three questions in one round",
            "three questions in sequence",
            "sampling as the SDK does it",
            "sampling with tools",
            "question in prompts/get",
            "question in resources/read",
            "the upstream's ping",
            "progress across a question",
            "logs of the level asked",
            "no logs unless asked",
            "upstream gives up its question",
            "headers",
        )
    },
    ("*", "fm", "no logs unless asked"): "fastmcp's client always asks for logs",
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]


def reason(server: str, kind: str, case: str) -> str | None:
    """Why that pair cannot play the case; None when it must."""
    keys = ((server, kind, case), (server, "*", case), ("*", kind, case))
    return next((NOT_APPLICABLE[key] for key in keys if key in NOT_APPLICABLE), None)


@dataclass
class Pair:
    """A server with the gateways before it."""

    server: OldServer
    gw: Gateway
    short: Gateway


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def drivers() -> AsyncIterator[Drivers]:
    async with AsyncExitStack() as stack:

        async def start(kind: Kind) -> tuple[Kind, ModernClient]:
            return kind, await stack.enter_async_context(modern_client(kind))

        yield Drivers(dict([await start(kind) for kind in KINDS]))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=SERVERS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    name: str = request.param
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(old_server(name, *SERVERS[name]))
        route = {"path": "/mcp", "upstream": {"url": server.url}, "forward_headers": ["X-Tenant"]}
        refuse = {**route, "path": "/refuse", "undeclared": "refuse"}
        gw = await stack.enter_async_context(gateway(server.url, routes=[route, refuse]))
        short = await stack.enter_async_context(gateway(server.url, hold={"ttl_seconds": ABANDONED_SECONDS}))
        yield Pair(server, gw, short)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_client_with_a_real_server(
    case: Case, kind: Kind, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    stage = Stage(pair.server, pair.gw, pair.short, drivers, kind, began=len(pair.server.ledger()))
    found = request.config.stash[FOUND].setdefault((case.name, pair.server.name), {})
    why_not = reason(pair.server.name, kind, case.name)
    found[kind] = "FAILED"
    try:
        await play(stage, case)
    except (AssertionError, DriverError, PartError, LookupError, ValueError) as exc:
        if why_not is None:
            exc.add_note(f"the gateway's log ends with:\n{pair.gw.tail()}")
            exc.add_note(f"the server's ledger of this case: {stage.ledger()}")
            raise
        found[kind] = why_not
    else:
        assert why_not is None, f"this was thought impossible: {why_not}"
        found[kind] = "ok"


async def play(stage: Stage, case: Case) -> None:
    """Play a case; afterwards nothing is held or busy, and the server ran what it should and nothing twice."""
    try:
        await case.play(stage)
    finally:
        await stage.gw.settled()
    if not stage.everything:
        assert stage.runs() == Counter(case.runs)


async def test_every_reason_names_a_server_a_client_and_a_case() -> None:
    names = {case.name for case in CASES}
    for server, kind, case in NOT_APPLICABLE:
        assert server in {*SERVERS, "*"}
        assert kind in {*KINDS, "*"}
        assert case in names


async def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
