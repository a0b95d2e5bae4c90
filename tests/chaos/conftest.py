"""The stage of the tests of failing networks, which each of their files builds once."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.hosts import Stage, staged


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts() -> AsyncIterator[Stage]:
    async with staged() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def stage(hosts: Stage, request: pytest.FixtureRequest) -> Stage:
    """The one stage, for a caller of this test only: it has upstream sessions of its own."""
    client = hosts.client.on(Authorization=f"Bearer {request.node.name}".replace(" ", "-"))
    return dataclasses.replace(hosts, client=client)
