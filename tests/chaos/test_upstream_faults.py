"""The legacy server dies, stops, or loses its connections while calls wait behind a living gateway."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.fault_proxy import FaultProxy, fault_proxy
from tests.chaos.stage import Call, Gate, built
from tests.e2e.wire import Answer, Wire, wire
from tests.parts.launch import OldServer, old_server
from tests.support.gateway_process import HELD, Gateway, gateway

STORES = ("py130-store", "ts132-store")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not all(map(built, ("py130", *STORES))), reason="scripts/parts has not been run"),
]


@asynccontextmanager
async def behind_proxy(name: str) -> AsyncIterator[tuple[OldServer, FaultProxy, Gateway, Wire]]:
    """A server whose connections can be cut."""
    async with (
        old_server(name) as server,
        fault_proxy(server.port) as proxy,
        gateway(proxy.url) as gw,
        wire(gw.url) as client,
    ):
        yield server, proxy, gw, client


async def taken(gw: Gateway, held: float = 0) -> None:
    """Wait until no more than so many calls wait for their clients."""

    async def few() -> bool:
        return await gw.metric(HELD) <= held

    await gw.until(few, f"no more than {held} held")


@pytest.mark.parametrize("name", STORES)
async def test_a_cut_call_of_a_server_with_an_event_store_continues_unnoticed(name: str, tmp_path: Path) -> None:
    async with behind_proxy(name) as (server, proxy, gw, client):
        after = Gate(tmp_path / "after")
        parked, working = Call(server, "ask_slow", "parked"), Call(server, "ask_slow", "working", after=after)
        states = [await call.begin(client) for call in (parked, working)]
        before = proxy.accepted
        waiting = asyncio.get_running_loop().create_task(working.retry(client, states[1]))
        await working.answered()
        await proxy.accepts(before)
        assert proxy.cut(b"POST") >= 2
        after.open()
        assert working.outcome(await waiting) == "result"
        assert parked.outcome(await parked.retry(client, states[0])) == "result"
        for call in (parked, working):
            assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])
        await gw.settled()


async def test_a_cut_call_of_a_server_without_an_event_store_is_one_error(tmp_path: Path) -> None:
    async with behind_proxy("py130") as (server, proxy, gw, client):
        after = Gate(tmp_path / "after")
        parked, working = Call(server, "ask_slow", "parked"), Call(server, "ask_slow", "working", after=after)
        again = Call(server, "ask_read", "again")
        states = [await call.begin(client) for call in (parked, working, again)]
        before = proxy.accepted
        waiting = asyncio.get_running_loop().create_task(working.retry(client, states[1]))
        await working.answered()
        await proxy.accepts(before)
        assert proxy.cut(b"POST") >= 3
        assert working.outcome(await waiting) == "call_lost"
        assert parked.outcome(await parked.retry(client, states[0])) == "call_lost"
        assert again.outcome(await again.retry(client, states[2])) == "result"
        assert [(call.runs, call.answers) for call in (parked, working, again)] == [(1, 0), (1, 1), (2, 1)]
        after.open()
        assert (await client.call("echo", {"text": "on"})).text == "on"
        await gw.settled()


@pytest.mark.parametrize("name", ["py130", "py130-store", "ts132-store"])
@pytest.mark.parametrize("fate", ["restarted", "dead"])
async def test_parked_calls_of_a_killed_server_end_as_promised(name: str, fate: str) -> None:
    async with old_server(name) as server, gateway(server.url) as gw, wire(gw.url) as client:
        once, twice = Call(server, "ask_slow", "once"), Call(server, "ask_read", "twice")
        states = [await call.begin(client) for call in (once, twice)]
        await server.kill()
        if fate == "restarted":
            await server.start()
        lost = await once.retry(client, states[0])
        if once.outcome(lost) == "upstream_unreachable":
            assert "The answers were not sent" in lost.error["message"]
        else:
            assert once.outcome(lost) in {"session_lost", "call_lost"}
            assert "may have had effects" in lost.error["message"]
        assert (once.runs, once.answers) == (1, 0)
        other = await twice.retry(client, states[1])
        if fate == "restarted":
            assert twice.outcome(other) == "result"
            assert (twice.runs, twice.answers) == (2, 1)
        else:
            assert twice.outcome(other) == "upstream_unreachable"
            await server.start()
            assert twice.outcome(await twice.retry(client, states[1])) == "result", "it may run twice, and waited"
        assert (await client.call("echo", {"text": "on"})).text == "on"
        await gw.settled()


async def test_a_call_survives_a_short_stop_of_its_server() -> None:
    async with old_server("py130") as server, gateway(server.url) as gw, wire(gw.url) as client:
        call = Call(server, "ask_slow", "patience")
        state = await call.begin(client)
        server.send(signal.SIGSTOP)
        waiting = asyncio.get_running_loop().create_task(call.retry(client, state))
        await taken(gw)
        server.send(signal.SIGCONT)
        assert call.outcome(await waiting) == "result"
        assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])
        await gw.settled()


async def test_a_call_ends_when_its_server_stops_for_too_long() -> None:
    timeouts = {"answer_seconds": 0.5, "cancel_seconds": 0.5}
    async with old_server("py130") as server, gateway(server.url, timeouts=timeouts) as gw, wire(gw.url) as client:
        call = Call(server, "ask_slow", "no patience")
        state = await call.begin(client)
        server.send(signal.SIGSTOP)
        lost: Answer = await call.retry(client, state)
        assert call.outcome(lost) == "call_lost"
        assert "may have had effects" in lost.error["message"]
        again = await call.retry(client, state)
        assert again.error == lost.error
        server.send(signal.SIGCONT)
        assert (await client.call("echo", {"text": "on"})).text == "on"
        await call.wait(lambda call: bool(call.ends), "ended")
        assert call.runs == 1
        assert call.answers <= 1  # it may have read what was sent while it was stopped
        await gw.settled()
