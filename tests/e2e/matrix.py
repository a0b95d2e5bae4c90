"""Plays a case of cases.py before a server, and knows which pairs cannot play which case."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args

from tests.e2e.cases import Case, Drivers, Stage
from tests.parts.clients.drive import DriverError, Kind
from tests.parts.launch import OldServer, PartError, old_server, stdio_server
from tests.support.cluster import FILES, cluster
from tests.support.gateway_process import Front, gateway

KINDS: tuple[Kind, ...] = get_args(Kind)
PAGED = ("--page-size", "7")
SERVERS = {
    "py130": PAGED,
    "py130-store": PAGED,
    "py110": PAGED,
    "ts132": (),
    "fm3": PAGED,
}
OTHERS: Final[dict[str, Kind]] = {
    "py130 sse": "py",
    "ts132 sse": "ts",
    "py130 stdio": "ts",
    "ts132 stdio": "ts",
    "py130 nginx": "py",
    "ts132 nginx": "ts",
    "py130 haproxy": "fm",
}
"""A server over HTTP+SSE (2024-11-05), as a child of the gateway, or behind three gateways and a balancer; its client.

Nothing is sticky in a balancer: the second round of a call reaches a replica that knows nothing of the first.
"""
TELLING: Final = {
    "discover",
    "lists are complete",
    "result of 2 MB",
    "form on the POST stream: accept",
    "form on the GET stream",
    "three questions at once",
    "three questions in sequence",
    "sampling on the POST stream",
    "roots",
    "question in prompts/get",
    "question in resources/read",
    "-32042 accepted",
    "the upstream's ping",
    "progress across a question",
    "logs of the level asked",
    "question after its call",
    "upstream gives up its question",
    "client cancels a running call",
    "client abandons a question",
    "calls at once never mix",
    "headers",
    "sessions are used again",
}
"""Cases that a transport or a balancer could break."""
ABANDONED_SECONDS = 0.5

NO_URL = "mcp 1.10 has no url elicitation"
SESSIONS = "each replica has sessions of its own"
NOT_APPLICABLE: dict[tuple[str, str, str], str] = {
    ("py110", "*", "url elicitation"): NO_URL,
    ("py110", "*", "-32042 accepted"): NO_URL,
    ("py110", "*", "-32042 declined"): NO_URL,
    ("py110", "*", "sampling with tools"): "mcp 1.10 has no tools in sampling",
    ("fm3", "*", "completion"): "fastmcp 3 has no completion",
    ("ts132", "*", "lists come in pages"): "McpServer of the TypeScript SDK lists everything on one page",
    ("*", "fm", "no logs unless asked"): "fastmcp's client always asks for logs",
    ("stdio", "*", "headers"): "a child has no headers",
    ("nginx", "*", "sessions are used again"): SESSIONS,
    ("haproxy", "*", "sessions are used again"): SESSIONS,
}


@dataclass
class Pair:
    """A server with the gateway or cluster in front of it."""

    server: OldServer
    gw: Front
    short: Front


@asynccontextmanager
async def pair_behind(name: str) -> AsyncIterator[Pair]:
    """Start a server of SERVERS or OTHERS, and two fronts for the cases."""
    async with AsyncExitStack() as stack:
        front: Callable[..., AbstractAsyncContextManager[Front]] = gateway
        upstream: dict[str, Any]
        server_name, _, link = name.partition(" ")
        flags = SERVERS[server_name]
        if link == "stdio":
            server, upstream = stack.enter_context(stdio_server(server_name, *flags))
        else:
            transport = "-sse" if link == "sse" else ""
            server = await stack.enter_async_context(old_server(server_name + transport, *flags))
            upstream = {"url": server.url}  # `transport` is not configured: it is found out
        if link in FILES:
            front = partial(cluster, balancer=link)
        route = {"path": "/mcp", "upstream": upstream, "forward_headers": ["X-Tenant"]}
        refuse = {**route, "path": "/refuse", "undeclared": "refuse"}
        gw = await stack.enter_async_context(front(upstream, routes=[route, refuse]))
        short = await stack.enter_async_context(front(upstream, hold={"ttl_seconds": ABANDONED_SECONDS}))
        yield Pair(server, gw, short)


def reason(name: str, kind: str, case: str) -> str | None:
    """Why that client cannot play the case with a server of SERVERS or OTHERS; None if it must."""
    keys = ((part, who, case) for part in (*name.split(), "*") for who in (kind, "*"))
    return next((NOT_APPLICABLE[key] for key in keys if key in NOT_APPLICABLE), None)


async def judge(case: Case, kind: Kind, pair: Pair, drivers: Drivers, why_not: str | None) -> None:
    """Play a case; one with a reason against it must fail."""
    stage = Stage(pair.server, pair.gw, pair.short, drivers, kind, began=len(pair.server.ledger()))
    try:
        await play(stage, case)
    except (AssertionError, DriverError, PartError, LookupError, ValueError) as exc:
        if why_not is None:
            exc.add_note(f"the gateway's log ends with:\n{pair.gw.tail()}")
            exc.add_note(f"the server's ledger of this case: {stage.ledger()}")
            raise
    else:
        assert why_not is None, f"this was thought impossible: {why_not}"


async def play(stage: Stage, case: Case) -> None:
    """Play a case; afterwards no call is held, no session busy, and the server ran the expected tools, none twice."""
    try:
        await case.play(stage)
    finally:
        await stage.gw.settled()
    assert stage.runs() == Counter(case.runs)
