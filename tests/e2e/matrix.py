"""Plays a case of cases.py before a server, and knows which pairs cannot play which case.

In front of the server is one gateway or a cluster: a test passes any context manager that opens a `Front`.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

from tests.e2e.cases import Case, Drivers, Stage
from tests.parts.clients.drive import DriverError, Kind
from tests.parts.launch import OldServer, PartError, old_server, stdio_server
from tests.support.cluster import Front

KINDS: tuple[Kind, ...] = get_args(Kind)
PAGED = ("--page-size", "7")
SERVERS = {
    "py130": PAGED,
    "py130-store": PAGED,
    "py110": PAGED,
    "ts132": (),
    "fm3": PAGED,
}
HTTP_SSE = {"py130-sse": PAGED, "ts132-sse": ()}
"""The same servers over HTTP+SSE (2024-11-05), for test_http_sse.py."""
ABANDONED_SECONDS = 0.5

NO_URL = "mcp 1.10 has no url elicitation"
NOT_APPLICABLE: dict[tuple[str, str, str], str] = {
    ("py110", "*", "url elicitation"): NO_URL,
    ("py110", "*", "-32042 accepted"): NO_URL,
    ("py110", "*", "-32042 declined"): NO_URL,
    ("py110", "*", "sampling with tools"): "mcp 1.10 has no tools in sampling",
    ("fm3", "*", "completion"): "fastmcp 3 has no completion",
    ("ts132", "*", "lists come in pages"): "McpServer of the TypeScript SDK lists everything on one page",
    ("*", "fm", "no logs unless asked"): "fastmcp's client always asks for logs",
}


@dataclass
class Pair:
    """A server with the gateway or cluster in front of it."""

    server: OldServer
    gw: Front
    short: Front


OpenFront = Callable[..., AbstractAsyncContextManager[Front]]
"""`gateway`, `cluster` or a partial of it: takes the upstream's URL and sections of the configuration."""


@asynccontextmanager
async def pair_behind(name: str, front: OpenFront) -> AsyncIterator[Pair]:
    """Start the server of that name and a front for the cases; with `-stdio` the server is the gateway's child."""
    async with AsyncExitStack() as stack:
        upstream: dict[str, Any]
        if name.endswith("-stdio"):
            name = name.removesuffix("-stdio")
            server, upstream = stack.enter_context(stdio_server(name, *SERVERS[name]))
        else:
            server = await stack.enter_async_context(old_server(name, *{**SERVERS, **HTTP_SSE}[name]))
            upstream = {"url": server.url}
        route = {"path": "/mcp", "upstream": upstream, "forward_headers": ["X-Tenant"]}
        refuse = {**route, "path": "/refuse", "undeclared": "refuse"}
        gw = await stack.enter_async_context(front(upstream, routes=[route, refuse]))
        short = await stack.enter_async_context(front(upstream, hold={"ttl_seconds": ABANDONED_SECONDS}))
        yield Pair(server, gw, short)


def reason(
    server: str, kind: str, case: str, table: Mapping[tuple[str, str, str], str] = NOT_APPLICABLE
) -> str | None:
    """Why that pair cannot play the case; None if it must."""
    keys = ((server, kind, case), (server, "*", case), ("*", kind, case), ("*", "*", case))
    return next((table[key] for key in keys if key in table), None)


async def judge(
    case: Case, kind: Kind, pair: Pair, drivers: Drivers, why_not: str | None, found: dict[str, Any]
) -> None:
    """Play a case and record its outcome in `found`; a case with a reason against it must fail."""
    stage = Stage(pair.server, pair.gw, pair.short, drivers, kind, began=len(pair.server.ledger()))
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
    """Play a case; afterwards no call is held, no session busy, and the server ran the expected tools, none twice."""
    try:
        await case.play(stage)
    finally:
        await stage.gw.settled()
    assert stage.runs() == Counter(case.runs)
