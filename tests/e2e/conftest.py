"""Starts the clients once for all files, and prints what the cases came to, as a table."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Final

import pytest
import pytest_asyncio

from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.parts.clients.drive import Kind, ModernClient, modern_client

Found = dict[tuple[str, str], dict[str, str]]
"""By (case, server): by client, `ok`, `FAILED` or the reason why it is not applicable."""

FOUND: Final = pytest.StashKey[Found]()
ERAS: Final = pytest.StashKey[Found]()
"""The same by (client, server)."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def drivers() -> AsyncIterator[Drivers]:
    async with AsyncExitStack() as stack:

        async def start(kind: Kind) -> tuple[Kind, ModernClient]:
            return kind, await stack.enter_async_context(modern_client(kind))

        yield Drivers(dict([await start(kind) for kind in KINDS]))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}
    config.stash[ERAS] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    titles = {"servers behind the gateway": FOUND, "clients and servers of both eras": ERAS}
    for title, key in titles.items():
        if config.stash[key]:
            terminalreporter.section(title)
            for line in table(config.stash[key]):
                terminalreporter.write_line(line)


def table(found: Found) -> Iterator[str]:
    cases = list(dict.fromkeys(case for case, _ in found))
    servers = list(dict.fromkeys(server for _, server in found))
    reasons: list[str] = []
    widths = [max(len(case) for case in cases), *(max(len(server), 12) for server in servers)]
    yield "  ".join(text.ljust(width) for text, width in zip(["", *servers], widths, strict=True))
    for case in cases:
        cells = [cell(found.get((case, server), {}), reasons) for server in servers]
        yield "  ".join(text.ljust(width) for text, width in zip([case, *cells], widths, strict=True)).rstrip()
    for number, reason in enumerate(reasons, 1):
        yield f"n.a. {number}: {reason}"


def cell(by_client: dict[str, str], reasons: list[str]) -> str:
    """Say `ok` when all clients agree, else each client's word."""
    words = {}
    for client, outcome in by_client.items():
        if outcome in {"ok", "ok, bridged", "FAILED"}:
            words[client] = outcome
            continue
        if outcome not in reasons:
            reasons.append(outcome)
        words[client] = f"n.a. {reasons.index(outcome) + 1}"
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return " ".join(f"{client}:{word}" for client, word in words.items())
