"""Many clients and many faults at once, for MRTR_SOAK_SECONDS (40); afterwards nothing is left behind.

Clients think, vanish, repeat themselves and never come back. Two of three replicas are killed and restarted, all three
stopped for a while, and two legacy servers (one with an event store) too. MRTR_SOAK_SEED throws other dice. The pauses
here are what people and operators do; nothing is concluded from their length.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import pytest

from tests.chaos.stage import KEY, Call, Gate, accept, built, steps
from tests.e2e.wire import Answer, Json, Wire, wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, installed
from tests.support.gateway_process import HELD, SESSIONS, Gateway

SECONDS: Final = float(os.environ.get("MRTR_SOAK_SECONDS", "40"))
SEED: Final = int(os.environ.get("MRTR_SOAK_SEED", "1"))
PEOPLE: Final = 12
ATTEMPT_SECONDS: Final = 6.0
PATIENCE_SECONDS: Final = 30.0
"""Every retry ends within this time."""
FDS: Final = "process_open_fds"
BROKEN: Final = (aiohttp.ClientError, TimeoutError, JSONDecodeError)
"""What a client sees when a connection breaks; the balancer sends a page of HTML."""
AGAIN: Final = {"owner_stalled", "stopping", "busy"}
"""Reasons that ask for the same retry again."""
FINAL: Final = {"owner_lost", "session_lost", "call_lost", "upstream_unreachable", "invalid_request_state"}
"""Reasons with which a call may end."""
Retry = tuple[str, Json | None]
"""A state, and the answers that go with it."""
SECTIONS: Final[dict[str, Any]] = {
    "hold": {"ttl_seconds": 5, "grace_seconds": 4, "drain_delay_seconds": 0.2, "drain_seconds": 0.8},
    "timeouts": {"keepalive_seconds": 1, "answer_seconds": 3, "cancel_seconds": 1, "handshake_seconds": 3},
    "sessions": {"idle_seconds": 2, "quarantine_seconds": 3},
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(SECONDS + 120),
    pytest.mark.skipif(not all(map(built, ("py130", "py130-store"))), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("haproxy"), reason="apt install haproxy"),
]


@dataclass
class World:
    """The running parts, and the outcomes so far."""

    c: Cluster
    servers: dict[str, OldServer]
    """The servers, by the path of their route."""
    client: Wire
    dice: Random
    folder: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    calls: list[tuple[Call, str]] = field(default_factory=list)
    """All calls that were followed to their end, with their outcome."""
    asked: set[str] = field(default_factory=set)
    """The names of calls whose question was seen."""
    numbers: int = 0

    def url(self, path: str) -> str:
        return self.c.base + path


class Person:
    """A client that makes one call after another."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def live(self, until: float) -> None:
        dice = self.world.dice
        habits = [self.attend, self.attend, self.attend, self.repeat, self.reconnect, self.abandon, self.vanish]
        while time.monotonic() < until:
            await dice.choice(habits)()

    def call(self) -> tuple[Call, Wire]:
        world = self.world
        world.numbers += 1
        path = world.dice.choice(list(world.servers))
        tool = world.dice.choice(["ask_slow", "ask_read"])
        gate = Gate(world.folder / str(world.numbers))
        call = Call(world.servers[path], tool, f"call {world.numbers}", after=gate)
        return call, world.client.on(world.url(path))

    async def think(self) -> None:
        await asyncio.sleep(self.world.dice.uniform(0, 3))

    async def attend(self) -> None:
        """Call, think, answer."""
        _ = await self.answer(*self.call())

    async def answer(self, call: Call, client: Wire) -> Retry | None:
        """Call, think, answer; return the last retry if it had a result."""
        state = await self.begin(call, client)
        if state is None:
            return None
        await self.think()
        assert call.after is not None
        call.after.open()
        return await self.finish(call, client, state)

    async def finish(self, call: Call, client: Wire, state: str) -> Retry | None:
        answers: Json | None = accept(call.name)
        while True:
            answer = await self.insist(call, client, state, answers)
            if "error" in answer.final or answer.result["resultType"] == "complete":
                break
            if answer.asks:
                self.world.asked.add(call.name)
            state, answers = answer.state, accept(call.name) if answer.asks == [KEY] else None
        outcome = call.outcome(answer)
        self.world.outcomes[outcome] += 1
        self.world.calls.append((call, outcome))
        if outcome == "result":
            return state, answers
        assert outcome in FINAL, answer
        return None

    async def begin(self, call: Call, client: Wire) -> str | None:
        """Call once, because a repeated call would run twice; return the state, or None if the call ended."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                answer = await client.call(call.tool, call.arguments)
        except BROKEN as exc:
            outcome = f"first round: {type(exc).__name__}"
        else:
            if "error" not in answer.final:
                if answer.asks:
                    self.world.asked.add(call.name)
                return answer.state
            outcome = f"first round: {call.outcome(answer)}"
        self.world.outcomes[outcome] += 1
        self.world.calls.append((call, outcome))
        return None

    async def insist(self, call: Call, client: Wire, state: str, answers: Json | None) -> Answer:
        """Send one retry until it is served."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(*BROKEN):
                    async with asyncio.timeout(ATTEMPT_SECONDS):
                        answer = await client.call(call.tool, call.arguments, state=state, answers=answers)
                    if "error" not in answer.final or call.outcome(answer) not in AGAIN:
                        return answer
                await asyncio.sleep(0.2)

    async def repeat(self) -> None:
        """Repeat a retry that already has its result."""
        call, client = self.call()
        again = await self.answer(call, client)
        if again is None:
            return
        answer = await self.insist(call, client, *again)
        if "error" not in answer.final and answer.result["resultType"] == "input_required":
            return  # sent on to another replica
        outcome = call.outcome(answer)
        assert outcome in FINAL | {"result"}, answer
        self.world.outcomes[f"repeat: {outcome}"] += 1

    async def reconnect(self) -> None:
        """Disconnect during the retry, and come back at once."""
        call, client = self.call()
        state = await self.begin(call, client)
        if state is None:
            return
        with suppress(*BROKEN):
            async with asyncio.timeout(self.world.dice.uniform(0.01, 0.3)):
                await call.retry(client, state)
        assert call.after is not None
        call.after.open()
        _ = await self.finish(call, client, state)

    async def abandon(self) -> None:
        """Call, and never answer."""
        call, client = self.call()
        if await self.begin(call, client) is not None:
            self.world.outcomes["abandoned"] += 1

    async def vanish(self) -> None:
        """Close the connection while the tool works."""
        _, client = self.call()
        with suppress(*BROKEN):
            async with asyncio.timeout(self.world.dice.uniform(0.05, 0.5)):
                await client.call("hang")
        self.world.outcomes["vanished"] += 1


class Operator:
    """Injects one fault after another; never stops the last replica."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def work(self, until: float) -> None:
        dice = self.world.dice
        faults = [self.crash, self.crash, self.roll, self.roll, self.stall, self.restart_server, self.stop_server]
        while time.monotonic() < until:
            await self.pause(1.0)
            fault = dice.choice(faults)
            await fault()
            self.world.faults[fault.__name__] += 1

    async def pause(self, most: float) -> None:
        await asyncio.sleep(self.world.dice.uniform(0, most))

    def mortal(self) -> Gateway:
        return self.world.dice.choice(self.world.c.replicas[:-1])

    def server(self) -> OldServer:
        return self.world.dice.choice(list(self.world.servers.values()))

    async def crash(self) -> None:
        replica = self.mortal()
        await replica.kill()
        await self.pause(1.0)
        await replica.start()

    async def roll(self) -> None:
        replica = self.mortal()
        replica.terminate()
        assert await replica.exited() == 0
        await self.pause(1.0)
        await replica.start()

    async def stall(self) -> None:
        replica = self.world.dice.choice(self.world.c.replicas)
        replica.stop()
        await self.pause(1.5)
        replica.cont()

    async def restart_server(self) -> None:
        await self.server().restart()

    async def stop_server(self) -> None:
        server = self.server()
        server.send(signal.SIGSTOP)
        await self.pause(1.0)
        server.send(signal.SIGCONT)


async def quiet(replica: Gateway) -> bool:
    """Whether it holds no call and no session any more."""
    values = await replica.metrics()
    return not any(value for (name, _), value in values.items() if name in {HELD, SESSIONS})


def judge(world: World) -> None:
    """Check the ledgers' entries of all calls that ended."""
    runs, answers = Counter[str | None](), Counter[str | None]()
    for server in world.servers.values():
        runs.update(entry["arguments"].get("question") for entry in server.ledger("run"))
        answers.update((entry["result"].get("content") or {}).get("name") for entry in server.ledger("answered"))
    for call, outcome in world.calls:
        told = f"{call.name}, {call.tool} of {call.server.name}: {outcome}"
        if call.tool == "ask_slow":
            assert runs[call.name] <= 1, told
        assert answers[call.name] <= runs[call.name], told
        if outcome == "result":
            assert answers[call.name], told
        if outcome == "owner_lost":
            assert call.tool == "ask_slow", told
            # A stopped server had not begun to reply, so no event existed from which to resume.
            assert call.server.name == "py130" or call.name not in world.asked, told


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with old_server("py130") as plain, old_server("py130-store") as stored:
        servers = {"/mcp": plain, "/store": stored}
        routes = [{"path": path, "upstream": {"url": server.url}} for path, server in servers.items()]
        async with (
            cluster(plain.url, balancer="haproxy", routes=routes, **SECTIONS) as c,
            wire(c.url) as client,
        ):
            yield World(c, servers, client, Random(SEED), tmp_path)


async def test_many_faults_leave_nothing_behind(world: World) -> None:
    survivor = world.c.replicas[-1]
    before = await survivor.metric(FDS)
    until = time.monotonic() + SECONDS
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(Operator(world).work(until))
            for _ in range(PEOPLE):
                group.create_task(Person(world).live(until))
        for replica in world.c.replicas:
            await replica.until(partial(quiet, replica), "nothing held, no session", 30)
        judge(world)
        assert world.outcomes["result"] > len(world.calls) / 2
        taken = await steps([survivor])
        # Clients whose connections would count are closed first.
        await world.c.balancer.kill()
        for replica in world.c.replicas[:-1]:
            replica.terminate()
            assert await replica.exited() == 0

        async def closed() -> bool:
            return await survivor.metric(FDS) <= before

        await survivor.until(closed, f"as few open files as before ({before:g})", 30)
    except BaseException as exc:
        exc.add_note(f"MRTR_SOAK_SEED={SEED}: {dict(world.faults)} {dict(world.outcomes)}")
        raise
    after = await survivor.metric(FDS)
    print(f"\nseed {SEED}, {SECONDS:g} s, {world.numbers} calls; open files {before:g} and {after:g}")
    for what in (world.faults, world.outcomes, taken):
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(what.items())))
