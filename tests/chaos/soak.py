"""Many clients and many faults at once: what they do, and what the ledgers must say afterwards.

Clients think, vanish, repeat themselves and never come back. Two of three replicas are killed and restarted, and all
three are stopped for a while. So are two legacy servers, one of them with an event store, and their connections are
cut; a third server is a child of each replica. `test_soak.py` does this for seconds, `make soak` for as long as it is
told to. The pauses here are what people and operators do; nothing is concluded from their length.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp

from tests.chaos.stage import KEY, Call, Gate, accept
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server, stdio_server
from tests.support.cluster import Cluster, cluster
from tests.support.fake_http import Proxy
from tests.support.gateway_process import HELD, SESSIONS, Gateway
from tests.support.workbench import Client, Json, Reply

PEOPLE: Final = 12
ATTEMPT_SECONDS: Final = 6.0
PATIENCE_SECONDS: Final = 30.0
"""A retry has its end in this time, whatever happens."""
BROKEN: Final = (aiohttp.ClientError, TimeoutError, JSONDecodeError)
"""What a client sees of a connection that breaks; the balancer says it with a page of HTML."""
AGAIN: Final = {"owner_stalled", "stopping", "busy"}
"""Reasons that say: come again with the same retry."""
FINAL: Final = {"owner_lost", "session_lost", "call_lost", "upstream_unreachable", "invalid_request_state"}
"""Reasons with which a call may end."""
PATHS: Final = ("/mcp", "/store")
Retry = tuple[str, Json | None]
"""A state, and the answers that go with it."""
SECTIONS: Final[dict[str, Any]] = {
    "hold": {"ttl_seconds": 5, "grace_seconds": 4, "drain_delay_seconds": 0.2, "drain_seconds": 0.8},
    "timeouts": {"keepalive_seconds": 1, "answer_seconds": 3, "cancel_seconds": 1, "handshake_seconds": 3},
    "sessions": {"idle_seconds": 2, "quarantine_seconds": 3},
}


@dataclass
class World:
    """What there is, and what has come of it."""

    c: Cluster
    servers: dict[str, OldServer]
    """By the path of their route."""
    proxies: list[Proxy]
    """Before those servers that are no children."""
    client: Client
    dice: Random
    folder: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    calls: list[tuple[Call, str]] = field(default_factory=list)
    """All that were followed to their end, with it."""
    asked: set[str] = field(default_factory=set)
    """The names of calls whose question was seen."""
    numbers: int = 0

    def url(self, path: str) -> str:
        return self.c.base + path

    @property
    def hosts(self) -> list[OldServer]:
        """The servers that are no children."""
        return [server for server in self.servers.values() if server.port]


class Person:
    """Makes one call after the other."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def live(self, until: float) -> None:
        dice = self.world.dice
        habits = [self.attend, self.attend, self.attend, self.repeat, self.reconnect, self.abandon, self.vanish]
        while time.monotonic() < until:
            await dice.choice(habits)()

    def call(self) -> tuple[Call, Client]:
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
        """Be asked, think, answer."""
        _ = await self.answer(*self.call())

    async def answer(self, call: Call, client: Client) -> Retry | None:
        """Be asked, think, answer; the last retry if it had a result."""
        state = await self.begin(call, client)
        if state is None:
            return None
        await self.think()
        assert call.after is not None
        call.after.open()
        return await self.finish(call, client, state)

    async def finish(self, call: Call, client: Client, state: str) -> Retry | None:
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

    async def begin(self, call: Call, client: Client) -> str | None:
        """Call once, as nobody may call twice; the state, unless that was all."""
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

    async def insist(self, call: Call, client: Client, state: str, answers: Json | None) -> Reply:
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
        """Send a retry again whose result came already."""
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
        """Vanish in the middle of the retry, and come back at once."""
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
        """Be asked, and never come back."""
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
    """Makes one fault after the other; the last replica is never ended."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def work(self, until: float) -> None:
        dice = self.world.dice
        faults = [self.crash, self.crash, self.roll, self.roll, self.stall, self.restart_server, self.stop_server]
        faults += [self.cut_streams]
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
        return self.world.dice.choice(self.world.hosts)

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

    async def cut_streams(self) -> None:
        self.world.dice.choice(self.world.proxies).cut(self.world.dice.choice((b"GET", b"POST")))


async def quiet(replica: Gateway) -> bool:
    """Whether it has nothing of anybody's any more."""
    values = await replica.metrics()
    return not any(value for (name, _), value in values.items() if name in {HELD, SESSIONS})


def judge(world: World) -> None:
    """What the ledgers must say of the calls that had their end."""
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
            # A server that stood still had not begun to reply: there was no event yet to go on from.
            assert call.server.name != "py130-store" or call.name not in world.asked, told


@asynccontextmanager
async def inhabited(folder: Path, seed: int, **options: Any) -> AsyncIterator[World]:
    """Three replicas with three routes, and nobody who calls them yet; `options` are those of `cluster`."""
    async with AsyncExitStack() as stack:
        plain, stored = [await stack.enter_async_context(old_server(name)) for name in ("py130", "py130-store")]
        child, command = stack.enter_context(stdio_server("py130"))
        addresses = [f"127.0.0.1:{server.port}" for server in (plain, stored)]
        proxies = [await stack.enter_async_context(Proxy(each)) for each in addresses]
        routes = [{"path": path, "upstream": {"url": proxy.url}} for path, proxy in zip(PATHS, proxies, strict=True)]
        routes.append({"path": "/child", "upstream": command})
        options = {**SECTIONS, **options}
        c = await stack.enter_async_context(cluster(plain.url, balancer="haproxy", routes=routes, **options))
        client = await stack.enter_async_context(wire(c.url))
        servers = {**dict(zip(PATHS, (plain, stored), strict=True)), "/child": child}
        yield World(c, servers, proxies, client, Random(seed), folder)
