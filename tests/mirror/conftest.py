"""Fixtures: a fake modern server, and gateways or replicas before it that may leave nothing behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.config import InForce
from gateway.mirror.streamable.streamed_call import Shared
from gateway.mirror.streamable.tokens import Tokens
from gateway.seal.keyring import Keys
from tests.support import workbench
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.fake_peer import KEY
from tests.support.legacy_client import LegacyClient
from tests.support.replicas import Cluster
from tests.support.stand import leaving_nothing
from tests.support.workbench import Stand, eventually

Begin = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def server() -> AsyncIterator[FakeModern]:
    """Its tool `ask` asks once, and its result is the answers."""
    async with FakeModern() as fake:
        fake.tools["ask"] = ask
        yield fake


def ask(call: Call) -> Json:
    return call.text(call.answers) if call.answers else call.ask(name=FORM)


@pytest.fixture
async def cluster(server: FakeModern) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards the living ones hold no call and have counted no bug."""
    async with leaving_nothing(_at_rest, server) as (http, stands):
        found = Cluster(server.url, http)
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
    await eventually(lambda: stand.gateway.downstream.in_flight == 0, "no request is in flight")
    assert stand.metric("mcp_gateway_mirrored_calls") == 0
    assert len(mirror_of(stand).lot) == 0
    await eventually(lambda: stand.gateway.calls.used == 0, "no call weighs anything")
    assert stand.metric("mcp_gateway_task_failures_total") == stand.planted_bugs


def mirror_of(stand: Stand) -> Shared:
    """What the calls of the legacy clients of a gateway share."""
    return stand.gateway.downstream.legacy.mirrored


def sealed() -> Tokens:
    """Opens and seals what the gateways of these tests do: their key is the same."""
    return Tokens(InForce(Keys((KEY,), ())))


@pytest.fixture
async def client(begin: Begin) -> LegacyClient:
    """A legacy client with a session, before one gateway."""
    return await LegacyClient(await begin()).initialize()
