"""Fixtures: replicas that may leave nothing behind, and a membership with a fake name service."""

from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.cluster import membership
from gateway.cluster.membership import Membership
from gateway.cluster.worker import Address
from gateway.config import InForce, Replica
from gateway.runtime.tasks import Tasks
from gateway.server import peer_listener
from gateway.telemetry import Metrics
from tests.parts.launch import free_port
from tests.support.black_hole import black_hole
from tests.support.fake_name_service import FakeClock, FakeNameService
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.replicas import Cluster
from tests.support.stand import at_rest, leaving_nothing


@pytest.fixture
def upstream(upstream: FakeUpstream) -> FakeUpstream:
    """Its tool asks once, unless a test gives it another one."""
    upstream.tool(ask)
    return upstream


@pytest.fixture
def store(upstream: FakeUpstream) -> FakeStore:
    """Makes the upstream a server with an event store."""
    return FakeStore(upstream)


@pytest.fixture
async def cluster(upstream: FakeUpstream) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards the living ones must come to rest and leave nothing behind."""
    async with leaving_nothing(at_rest, upstream) as (http, stands):
        found = Cluster(upstream.url, http)
        yield found
        stands.extend(found.stands.values())
        for server in found.servers:
            await server.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(membership, "world", found)
    return found


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    metrics = Metrics("0")
    found = Tasks(metrics)
    yield found
    await found.close()
    assert metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total") == 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeNameService:
    found = FakeNameService()
    monkeypatch.setattr(membership, "resolve", found.resolve)
    return found


@pytest.fixture
def replica() -> InForce[Replica]:
    return InForce(Replica(id="gw-1", listen="127.0.0.1:1", peers_dns="peers.example:8081"))


@pytest.fixture
def dns(world: FakeNameService, tasks: Tasks, clock: FakeClock, replica: InForce[Replica]) -> Membership:
    found = Membership(replica, None, world, tasks)
    clock.now += 10  # it is not young any more
    return found


@pytest.fixture
def hole() -> Iterator[Address]:
    """An address where no connection is accepted or refused."""
    address = f"127.0.0.1:{free_port()}"
    with black_hole(address):
        yield address


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is accepted before its reply comes."""
    monkeypatch.setattr(peer_listener, "_ACCEPT_PART", 1000.0)
    monkeypatch.setattr(peer_listener, "_ACCEPT_SECONDS", 1000.0)
