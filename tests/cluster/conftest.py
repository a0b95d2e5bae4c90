"""The replicas of one cluster; afterwards none of them may leave anything behind."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import Cluster
from tests.support.stand import _at_rest
from tests.support.workbench import eventually


@pytest.fixture
async def cluster(upstream: FakeUpstream) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards those that live must come to rest and leave nothing behind."""
    before = asyncio.all_tasks()
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    found = Cluster(upstream, http)
    yield found
    try:
        for stand in found.stands.values():
            await _at_rest(stand)
    finally:
        for server in found.servers:
            await server.close()
        for stand in found.stands.values():
            await stand.gateway.close()
        await http.close()
        await upstream.close()
    known = {*before, asyncio.current_task()}
    await eventually(lambda: not asyncio.all_tasks() - known, "no task is left")
