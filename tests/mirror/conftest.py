"""Fixtures: a fake modern server, and gateways or replicas before it that may leave nothing behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support import workbench
from tests.support.fake_modern import FakeModern
from tests.support.mirrored_client import LegacyClient
from tests.support.replicas import Cluster
from tests.support.stand import leaving_nothing
from tests.support.workbench import Stand, eventually

Begin = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def server() -> AsyncIterator[FakeModern]:
    fake = FakeModern()
    await fake.start()
    yield fake
    await fake.close()


@pytest.fixture
async def cluster(server: FakeModern) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards the living ones hold no call and have counted no bug."""
    async with leaving_nothing(_at_rest, server) as (http, stands):
        found = Cluster(server, http)  # type: ignore[arg-type]  (it uses the URL alone)
        yield found
        stands.extend(found.stands.values())


@pytest.fixture
async def begin(server: FakeModern) -> AsyncIterator[Begin]:
    """Starts gateways, each with one route that mirrors unless a test says otherwise."""
    async with leaving_nothing(_at_rest, server) as (http, stands):

        async def start(**sections: Any) -> Stand:
            sections["route"] = {"era": "mirror", **sections.get("route", {})}
            stands.append(await workbench.start(server.url, http, **sections))
            return stands[-1]

        yield start


async def _at_rest(stand: Stand) -> None:
    mirror = stand.gateway.downstream._legacy.mirror
    await eventually(lambda: stand.gateway.downstream.in_flight == 0, "no request is in flight")
    assert not mirror._shared.running
    assert len(mirror.lot) == 0
    await eventually(lambda: stand.gateway.calls.used == 0, "no call weighs anything")
    assert stand.metric("mcp_gateway_task_failures_total") == stand.planted_bugs


@pytest.fixture
async def client(begin: Begin) -> LegacyClient:
    """A legacy client with a session, before one gateway."""
    stand = await begin()
    found = LegacyClient(stand.http, stand.url)
    _ = await found.initialize()
    return found
