"""Fixtures: the gateway, its fake upstream, and the checks after every test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
import pytest

from gateway.bridge import subscription, upstream_call
from gateway.cluster import membership, witness
from gateway.server import drain
from gateway.sessions.pool import pool
from gateway.telemetry import SessionState
from gateway.upstream.http import era_probe, reply_reader, standalone_stream
from tests.support import workbench
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream
from tests.support.logs import Lines, captured
from tests.support.workbench import Client, Stand, eventually

Start = Callable[..., Awaitable[Stand]]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that no configuration shortens."""
    monkeypatch.setattr(pool, "_SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(subscription, "_PAUSES", (0.0, 0.01))
    # As in the gateway, a session's quarantine ends before the last pause.
    monkeypatch.setattr(upstream_call, "_CANCEL_PAUSES", (0.0, 0.05, 0.4))
    monkeypatch.setattr(reply_reader, "DRAIN_SECONDS", 0.1)
    monkeypatch.setattr(standalone_stream, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(standalone_stream, "REOPEN_SECONDS", (0.0, 0.01, 0.01, 0.01))
    monkeypatch.setattr(era_probe, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(drain, "_POLL_SECONDS", 0.005)
    monkeypatch.setattr(membership, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(witness, "ASK_AGAIN_SECONDS", (0.02, 0.05))


@pytest.fixture
def log_lines() -> Lines:
    """The log; request it before a fixture that logs at its start."""
    return captured()


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as fake:
        yield fake


@pytest.fixture
async def old() -> AsyncIterator[FakeSse]:
    """A server of HTTP+SSE."""
    async with FakeSse() as fake:
        yield fake


@pytest.fixture
async def begin(upstream: FakeUpstream) -> AsyncIterator[Start]:
    """Starts gateways; afterwards they must come to rest and leave nothing behind."""
    async with leaving_nothing(at_rest, upstream) as (http, stands):

        async def start(**sections: Any) -> Stand:
            stand = await workbench.start(sections.pop("url", upstream.url), http, **sections)
            stands.append(stand)
            return stand

        yield start


class Closable(Protocol):
    """A server of a test."""

    async def close(self) -> None: ...


@asynccontextmanager
async def leaving_nothing(
    at_rest: Callable[[Stand], Awaitable[None]], *servers: Closable
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[Stand]]]:
    """Connections for gateways that are put into the list: at the end they are `at_rest`, and no task is left."""
    before = asyncio.all_tasks()
    stands: list[Stand] = []
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    yield http, stands
    try:
        for stand in stands:
            await at_rest(stand)
    finally:
        for stand in stands:
            await stand.gateway.close()
        await http.close()
        for server in servers:
            await server.close()
    known = {*before, asyncio.current_task()}
    await eventually(lambda: not asyncio.all_tasks() - known, "no task is left")


async def at_rest(stand: Stand) -> None:
    """Check that nothing runs but tasks, no call is held, no session is left and no bug was counted."""
    gateway = stand.gateway
    gateway.task_table.leave(is_resumable=False)
    await eventually(lambda: not stand.busy_tasks(), "no task runs but the known background ones")
    await eventually(lambda: len(gateway.lot) == 0, "no call is held")
    assert stand.held == 0
    assert not gateway.downstream.legs.running
    await eventually(lambda: gateway.downstream.in_flight == 0, "no request is in flight")
    await eventually(lambda: gateway.calls.used == 0, "no call weighs anything")
    await gateway.close()
    assert [stand.sessions(state) for state in SessionState] == [0, 0, 0]
    assert stand.metric("mcp_gateway_task_failures_total") == stand.planted_bugs


@pytest.fixture
async def stand(begin: Start) -> Stand:
    """A gateway with the usual configuration."""
    return await begin()


@pytest.fixture
def client(stand: Stand) -> Client:
    return stand.client()
