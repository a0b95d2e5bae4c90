"""Starts the clients once for all files."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio

from tests.e2e.cases import Drivers
from tests.e2e.matrix import KINDS
from tests.parts.clients.drive import Kind, ModernClient, modern_client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def drivers() -> AsyncIterator[Drivers]:
    async with AsyncExitStack() as stack:

        async def start(kind: Kind) -> tuple[Kind, ModernClient]:
            return kind, await stack.enter_async_context(modern_client(kind))

        yield Drivers(dict([await start(kind) for kind in KINDS]))
