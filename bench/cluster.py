"""Questions over three replicas, without sticky sessions or a store: how many, how late, in how much memory.

Each request of a client goes to any replica, as behind a balancer with many clients, so two retries of three are
forwarded. At the end one replica is killed under load. The server of that part has event ids, so that another replica
can resume the calls of the dead one.
"""

import asyncio
import http.client
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from bench import modern
from bench.http1 import Message
from bench.load import Connection, Operation, Slice, Wrong, measure, run
from bench.processes import Fleet, Process
from bench.scenarios import SERVED_BY_PEER, ParkedOutcome, held_calls, sample, warm_up

STORED = "ask_stored"
TRIES = 30
RETRY_AFTER_SECONDS = 1
LOAD_SECONDS = 4.0
"""How long the load goes on before and after the kill."""
CUT_OFF = "cut off before the question"
ANSWERED = "answered"
ANSWERED_LATE = "answered after a 503"
LOST = "lost, and said so"


class Balanced(Connection):
    """One client's connections to all replicas, one of which is chosen for each request."""

    def __init__(self, addresses: Sequence[str], turn: random.Random) -> None:
        super().__init__(addresses[0])
        self._addresses = addresses
        self._turn = turn
        self.sends_again = False
        """Whether a request that broke off is sent once more: right for a retry, which may be repeated."""

    async def request(self, data: bytes) -> Message:
        for _ in range(TRIES):
            try:
                return await self.beside(self._turn.choice(self._addresses)).request(data)
            except ConnectionRefusedError:
                continue  # nothing was sent, so a balancer tries another replica
            except ConnectionError:
                if not self.sends_again:
                    raise
        raise Wrong("no replica accepts a connection")


@dataclass(frozen=True, slots=True)
class Replicas:
    """All replicas, accounted for as one."""

    each: tuple[Process, ...]

    @property
    def address(self) -> str:
        return self.each[0].address

    def cpu_seconds(self) -> float:
        return sum(process.cpu_seconds() for process in self.each)

    def rss_kib(self) -> int:
        return sum(process.rss_kib() for process in self.each)

    def total(self, read: Callable[[Process], float]) -> float:
        return sum(map(read, self.each))


@dataclass(slots=True)
class ClusterOutcome:
    """What three replicas did together."""

    slices: list[Slice] = field(default_factory=list)
    forwarded: float = 0
    """The part of the retries that another replica served than the one that got them."""
    held: ParkedOutcome = field(default_factory=lambda: ParkedOutcome(0, 0, ""))
    killed: dict[str, int] = field(default_factory=dict)
    """The calls around the kill, by what became of them."""
    executions: int = 0
    doubles: int = 0
    """Executions of a call beyond its first, over the whole run."""
    wrong: list[str] = field(default_factory=list)


def balanced(replicas: Replicas, work: Callable[[Balanced], Awaitable[None]]) -> Operation:
    """An operation on connections to all replicas, which the load generator keeps beside its own one."""
    addresses, turn = [each.address for each in replicas.each], random.Random(1)

    async def operation(connection: Connection) -> None:
        own = connection.kept("balanced", lambda: Balanced(addresses, turn))
        assert isinstance(own, Balanced)
        await work(own)

    return operation


async def ask(connection: Balanced) -> None:
    await modern.answer_ask(connection, await modern.open_ask(connection))


def measure_asks(replicas: Replicas, outcome: ClusterOutcome, rounds: int, count: int, clients: int) -> None:
    """Asks per second, their latency, and the CPU of all replicas together."""

    async def all_rounds() -> None:
        operation = balanced(replicas, ask)
        _ = await run(replicas.address, operation, warm_up(count, clients), clients)
        before = replicas.total(lambda each: sample(each, SERVED_BY_PEER) or 0)
        for _ in range(rounds):
            outcome.slices.append(await measure(replicas, operation, count, clients))
        served = replicas.total(lambda each: sample(each, SERVED_BY_PEER)) - before
        outcome.forwarded = served / (rounds * count)

    uvloop.run(all_rounds())
    outcome.wrong += [text for each in outcome.slices for text in each.wrong]


def hold(replicas: Replicas, outcome: ClusterOutcome, calls: int, clients: int) -> None:
    """Hold calls in all replicas, look at their memory, and answer all calls, each at any replica."""
    held: list[modern.Parked] = []
    parked = outcome.held = ParkedOutcome(calls, calls, "")

    async def open_one(connection: Balanced) -> None:
        held.append(await modern.open_ask(connection))

    async def answer_one(connection: Balanced) -> None:
        await modern.answer_ask(connection, held.pop())

    def look(moment: str) -> None:
        parked.held[moment] = replicas.total(held_calls)
        parked.rss_kib[moment] = replicas.rss_kib()

    look("before")
    outcome.wrong += uvloop.run(run(replicas.address, balanced(replicas, open_one), calls, clients))[1]
    look("parked")
    outcome.wrong += uvloop.run(run(replicas.address, balanced(replicas, answer_one), len(held), clients))[1]


@dataclass(slots=True)
class Client:
    """A client whose requests go to any replica, and what became of its calls that ask."""

    connection: Balanced
    tool: str
    fates: Counter[str]
    wrong: list[str]

    async def begin(self) -> modern.Parked | None:
        try:
            return await modern.open_ask(self.connection, self.tool)
        except ConnectionError:
            self.fates[CUT_OFF] += 1  # its client knows; nobody sends it again
        except Wrong as exc:
            self.fates["wrong"] += 1
            self.wrong.append(str(exc))
        return None

    async def finish(self, parked: modern.Parked) -> None:
        self.connection.sends_again = True
        fate = ANSWERED
        for _ in range(TRIES):
            try:
                await modern.answer_ask(self.connection, parked, self.tool)
            except Wrong as exc:
                if "owner_stalled" in str(exc):  # HTTP 503 with Retry-After
                    fate = ANSWERED_LATE
                    await asyncio.sleep(RETRY_AFTER_SECONDS)
                    continue
                fate = LOST if "owner_lost" in str(exc) else "wrong"
                if fate == "wrong":
                    self.wrong.append(str(exc))
            break
        self.fates[fate] += 1
        self.connection.sends_again = False


def kill(replicas: Replicas, outcome: ClusterOutcome, fleet: Fleet, calls: int, clients: int) -> None:
    """Kill the last replica under load while calls wait in all of them, then answer every call."""
    addresses, turn = [each.address for each in replicas.each], random.Random(1)
    fates: Counter[str] = Counter()
    held: list[modern.Parked] = []

    def new_client() -> Client:
        return Client(Balanced(addresses, turn), STORED, fates, outcome.wrong)

    async def ask_on(over: asyncio.Event) -> None:
        client = new_client()
        while not over.is_set():
            parked = await client.begin()
            if parked is not None:
                await client.finish(parked)
        client.connection.close()

    async def answer_held() -> None:
        client = new_client()
        while held:
            await client.finish(held.pop())
        client.connection.close()

    async def whole() -> None:
        first = new_client()
        for _ in range(calls):
            parked = await first.begin()
            if parked is not None:
                held.append(parked)
        first.connection.close()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                _ = group.create_task(ask_on(over))
            await asyncio.sleep(LOAD_SECONDS)
            fleet.kill(replicas.each[-1])
            for _ in range(clients):
                _ = group.create_task(answer_held())
            await asyncio.sleep(LOAD_SECONDS)
            over.set()

    uvloop.run(whole())
    outcome.killed = dict(fates)


def executions(upstream: Process) -> tuple[int, int]:
    """How many calls that ask the upstream began, and how many of them it had begun before."""
    connection = http.client.HTTPConnection(upstream.address, timeout=30)
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "executions", "arguments": {}}}
    connection.request("POST", "/mcp", json.dumps(body))
    text = json.loads(connection.getresponse().read())["result"]["content"][0]["text"]
    connection.close()
    began, distinct = map(int, text.split())
    return began, began - distinct


def measure_cluster(
    fleet: Fleet, command: str, upstream: Process, rounds: int, asks: int, clients: int, calls: int
) -> ClusterOutcome:
    """All parts, one after the other, on the same replicas."""
    outcome = ClusterOutcome()
    replicas = Replicas(tuple(fleet.replicas(command, upstream, 3)))
    measure_asks(replicas, outcome, rounds, asks, clients)
    hold(replicas, outcome, calls, clients)
    kill(replicas, outcome, fleet, min(calls, asks), clients)
    outcome.executions, outcome.doubles = executions(upstream)
    if outcome.doubles:
        outcome.wrong.append(f"{outcome.doubles} calls were executed twice")
    return outcome
