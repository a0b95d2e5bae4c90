"""A dead owner against a silent one: its address refuses connections, or does not react."""

import asyncio
import errno
import itertools
import json
import os
import resource
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gateway.protocol import sse
from tests.chaos.stage import Call, Gate, accept, built, prompt, steps
from tests.e2e.wire import Wire, wire
from tests.parts.launch import OldServer, old_server
from tests.support.black_hole import black_hole
from tests.support.cluster import Cluster, cluster, installed
from tests.support.gateway_process import Gateway

SERVERS = ("py130", "py130-store")

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(built, SERVERS)), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]


Stage = tuple[OldServer, Cluster]


@asynccontextmanager
async def staged(name: str) -> AsyncIterator[Stage]:
    sections: dict[str, Any] = {"timeouts": {"keepalive_seconds": 0.5}, "hold": {"grace_seconds": 10}}
    async with old_server(name) as server, cluster(server.url, **sections) as c:
        yield server, c


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def everybody() -> AsyncIterator[Stage]:
    async with staged("py130") as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def stage(everybody: Stage) -> AsyncIterator[Stage]:
    """All replicas live again after each test."""
    yield everybody
    for replica in everybody[1].replicas:
        if replica.stopped:
            replica.cont()
        if not replica.alive:
            await replica.start()


async def data(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The rest of an SSE stream, without comments."""
    async for line in reply.content:
        if line.startswith(b"data: "):
            yield line


def peer_address(replica: Gateway) -> str:
    return str(replica.config["replica"]["listen"])


@pytest.mark.parametrize(("tool", "step"), [("ask_slow", "lost"), ("ask_read", "replayed")])
async def test_two_concurrent_retries_reach_the_same_replica(stage: Stage, tool: str, step: str) -> None:
    await two_retries(stage, tool, step)


async def test_two_concurrent_retries_resume_a_call_once() -> None:
    async with staged("py130-store") as stage:
        await two_retries(stage, "ask_slow", "resumed")


async def two_retries(stage: Stage, tool: str, step: str) -> None:
    server, c = stage
    owner, *survivors = c.replicas
    calls = [Call(server, tool, f"{tool} twice {number}") for number in range(4)]
    async with wire(owner.url) as client:
        states = [await call.begin(client) for call in calls]
        await owner.kill()
        before = await steps(survivors)
        for call, state in zip(calls, states, strict=True):
            retries = [call.retry(client.on(replica.url), state) for replica in survivors]
            first, second = await asyncio.gather(*retries)
            assert call.outcome(first) == call.outcome(second) == ("owner_lost" if step == "lost" else "result")
            assert first.final == second.final
            assert call.runs == (2 if step == "replayed" else 1)
            assert call.answers == (0 if step == "lost" else 1)
        taken = await steps(survivors) - before
        assert {each: taken[each] for each in ("resumed", "replayed", "lost") if taken[each]} == {step: len(calls)}
    await c.settled()


async def test_a_replica_that_came_back_counts_as_alive(stage: Stage) -> None:
    """What is known of its predecessor does not apply to it, as an owner or as a candidate."""
    server, c = stage
    owner, second, third = c.replicas
    old, new = Call(server, "ask_slow", "of the predecessor"), Call(server, "ask_slow", "of the successor")
    inherited = [Call(server, "ask_slow", f"inherited {number}") for number in range(8)]
    async with wire(owner.url) as client:
        state = await old.begin(client)
        states = [await call.begin(client.on(second.url)) for call in inherited]
        await owner.kill()
        for replica in (second, third):
            assert old.outcome(await old.retry(client.on(replica.url), state)) == "owner_lost"
        await owner.start()
        state = await new.begin(client)
        assert new.outcome(await new.retry(client.on(second.url), state)) == "result"
        await second.kill()
        before = await steps(c.living)
        for call, left in zip(inherited, states, strict=True):
            told = await asyncio.gather(*(call.retry(client.on(replica.url), left) for replica in (owner, third)))
            assert [call.outcome(answer) for answer in told] == ["owner_lost"] * 2
        assert (await steps(c.living) - before)["lost"] == len(inherited)
    assert [(call.runs, call.answers) for call in (old, new)] == [(1, 0), (1, 1)]
    await c.settled()


async def test_a_stopped_owner_does_not_count_as_dead(stage: Stage) -> None:
    server, c = stage
    owner, *survivors = c.replicas
    call = Call(server, "ask_slow", "while the owner sleeps")
    before = await steps(survivors)
    async with wire(owner.url) as client:
        state = await call.begin(client)
        owner.stop()
        for replica in survivors:
            # peer_connect_seconds and peer_accept_seconds are 1.5 s together, and as much for the witness.
            refused = await prompt(call.retry(client.on(replica.url), state), 5)
            assert (refused.status, call.outcome(refused)) == (503, "owner_stalled")
            assert refused.headers["Retry-After"] == "1"
        owner.cont()
        assert call.outcome(await call.retry(client.on(survivors[0].url), state)) == "result"
    taken = await steps(survivors) - before
    assert taken.keys() == {"forwarded"}
    assert (call.runs, call.answers) == (1, 1)
    await c.settled()


async def test_an_owner_that_stops_during_its_reply_keeps_its_call(stage: Stage, tmp_path: Path) -> None:
    server, c = stage
    owner, *survivors = c.replicas
    after = Gate(tmp_path / "after")
    call = Call(server, "ask_slow", "half a reply", after=after)
    loop = asyncio.get_running_loop()
    async with wire(owner.url) as client:
        state = await call.begin(client)
        async with client.on(survivors[0].url).open(
            call.tool, call.arguments, state=state, answers=accept(call.name)
        ) as reply:
            assert await reply.content.readany() == sse.KEEP_ALIVE
            owner.stop()
            # A peer is never silent for longer than twice the keep-alive and peer_accept_seconds: 2 s.
            async with asyncio.timeout(10):
                (message,) = [json.loads(each.removeprefix(b"data: ")) async for each in data(reply)]
            assert message["error"]["data"]["reason"] == "owner_stalled"
            owner.cont()
        again = loop.create_task(call.retry(client.on(survivors[1].url), state))
        after.open()
        assert call.outcome(await again) == "result"
    assert (call.runs, call.answers) == (1, 1)
    await c.settled()


@pytest.mark.parametrize("dead", [1, 2])
async def test_an_owner_whose_address_is_a_black_hole_is_not_declared_lost(stage: Stage, dead: int) -> None:
    """A host that lost its power and one that lost only its network look the same."""
    server, c = stage
    owner, survivors = c.replicas[0], c.replicas[dead:]
    async with wire(owner.url) as client:
        call = Call(server, "ask_slow", f"{dead} black holes")
        state = await call.begin(client)
        before = await steps(survivors)
        with ExitStack() as stack:
            for replica in c.replicas[:dead]:
                await replica.kill()
                stack.enter_context(black_hole(peer_address(replica)))
            for replica in survivors:
                told = await prompt(call.retry(client.on(replica.url), state), 5)
                assert (told.status, call.outcome(told)) == (503, "owner_stalled")
        assert (await steps(survivors) - before).keys() <= {"forwarded"}, "to an heir, which could not help either"
        assert (call.runs, call.answers) == (1, 0)
        assert "cancelled" not in call.ends
        await owner.start()
        told = await prompt(call.retry(client.on(survivors[-1].url), state), 5)
        assert call.outcome(told) == "owner_lost", "another process in its name is a proof"
        await call.ended("cancelled")


async def test_a_replica_out_of_descriptors_does_not_take_the_owner_for_dead(stage: Stage) -> None:
    """EMFILE: it cannot open a connection to any replica, and the fault is its own."""
    server, c = stage
    owner, other, _ = c.replicas
    call = Call(server, "ask_read", "without descriptors")
    before = await steps(c.replicas)
    connector = aiohttp.TCPConnector(keepalive_timeout=60, limit=1)
    async with wire(owner.url) as client, aiohttp.ClientSession(connector=connector) as http:
        state = await call.begin(client)
        kept = Wire(http, other.url)
        assert (await kept.send("server/discover")).status == 200  # its connection is kept
        assert other.process is not None
        limits = resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE)
        opened = {int(each) for each in os.listdir(f"/proc/{other.process.pid}/fd")}  # noqa: PTH208
        free = next(number for number in itertools.count() if number not in opened)
        resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            refused = await prompt(call.retry(kept, state), 5)
        finally:
            resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE, limits)
        assert (refused.status, call.outcome(refused)) == (503, "owner_stalled")
        assert os.strerror(errno.EMFILE) in refused.error["message"]
        assert (call.runs, call.answers) == (1, 0)
        assert "cancelled" not in call.ends
        assert call.outcome(await call.retry(kept, state)) == "result"
    assert await steps(c.replicas) - before == {"forwarded": 1, "held": 1}
    assert (call.runs, call.answers) == (1, 1)
    await c.settled()


async def test_a_stopped_owners_call_is_resumed_if_there_is_a_witness() -> None:
    async with staged("py130-store") as (server, c):
        owner, *survivors = c.replicas
        call = Call(server, "ask_slow", "while the owner sleeps, with a witness")
        async with wire(owner.url) as client:
            state = await call.begin(client)
            owner.stop()
            assert call.outcome(await prompt(call.retry(client.on(survivors[0].url), state), 8)) == "result"
            owner.cont()
            assert (await steps(survivors))["resumed"] == 1
            # The owner wakes up and still holds the call. It got the result too, and runs or cancels nothing.
            await call.ended("finished")
            assert call.outcome(await call.retry(client, state)) == "result"
        assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])
        await c.settled()


async def test_a_stopped_owners_call_waits_for_it_without_a_witness() -> None:
    sections: dict[str, Any] = {"timeouts": {"keepalive_seconds": 0.5}}
    async with old_server("py130-store") as server, cluster(server.url, replicas=2, **sections) as c:
        owner, other = c.replicas
        call = Call(server, "ask_slow", "while the owner sleeps, without a witness")
        async with wire(owner.url) as client:
            state = await call.begin(client)
            owner.stop()
            refused = await prompt(call.retry(client.on(other.url), state), 5)
            assert (refused.status, call.outcome(refused)) == (503, "owner_stalled")
            owner.cont()
            assert call.outcome(await call.retry(client.on(other.url), state)) == "result"
        assert await steps([other]) == {"forwarded": 1}
        assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])
        await c.settled()
