"""The scenarios with calls: four interleaved with their anchors, and one that parks many calls at once."""

import math
import time
from dataclasses import dataclass, field

import uvloop

from bench import modern
from bench.load import Connection, Measured, Operation, Slice, measure, run
from bench.processes import Pair, Process, ephemeral_ports, raise_file_limit

FORWARDER = "aiohttp forwarder"
LOCAL = "local retry"
FORWARDED = "forwarded retry"
ONE_WORKER = "one worker"
TWO_WORKERS = "two workers"
HELD_GAUGE = "mcp_gateway_held_calls"
SERVED_BY_PEER = 'mcp_gateway_peer_requests_total{outcome="served"}'
# A held call has two upstream connections, the call's stream and its session's GET stream.
CONNECTIONS_PER_CALL = 2
SPARE_FILES = 512
# What a gateway looks like while it holds so many calls, before it holds all of them.
STEPS = (1_000, 2_000, 5_000)
# The last calls may be let go, and counted, just after their replies went out.
SETTLE_SECONDS = 5
# After this, the gateway has let go of idle sessions and kept results, and has noticed that it is quiet.
QUIET_SECONDS = 25


@dataclass(frozen=True, slots=True)
class Target:
    """One row of a table: a process, and what is one operation on it."""

    process: Measured
    operation: Operation
    name: str
    clients: int = 1
    """How many times the connections of the other rows it has."""
    part: float = 1
    """How many of the operations of the other rows it has, if one takes it so much longer."""


@dataclass(slots=True)
class Interleaved:
    """Slices by row; slice n of every row was taken in round n."""

    title: str
    slices: dict[str, list[Slice]]
    anchor: str = FORWARDER
    # Of the run as a whole; what was wrong in a slice is there.
    wrong: list[str] = field(default_factory=list)


def warm_up(count: int, clients: int) -> int:
    return max(clients, count // 10)


async def interleave(
    title: str, targets: list[Target], rounds: int, count: int, clients: int, anchor: str = FORWARDER
) -> Interleaved:
    """A B C A B C ...: what else the machine does falls on all rows alike."""
    outcome = Interleaved(title, {target.name: [] for target in targets}, anchor)
    counts = [round(count * target.part) for target in targets]
    for target, own in zip(targets, counts, strict=True):
        await run(target.process.address, target.operation, warm_up(own, clients), clients * target.clients)
    for _ in range(rounds):
        for target, own in zip(targets, counts, strict=True):
            taken = await measure(target.process, target.operation, own, clients * target.clients)
            outcome.slices[target.name].append(taken)
    return outcome


def forward(pair: Pair, rounds: int, count: int, clients: int) -> Interleaved:
    """Ask at the first gateway and retry at one of the two, each on its own connection: only the address differs."""
    title = "forwarded: ask at one gateway, retry there or at its peer; latency of both legs, CPU of both gateways"
    targets = [
        Target(pair, modern.ask_answered_at(pair.first.address), LOCAL),
        Target(pair, modern.ask_answered_at(pair.second.address), FORWARDED),
    ]
    outcome = uvloop.run(interleave(title, targets, rounds, count, clients, anchor=LOCAL))
    # Right replies do not show which way they came.
    expected = rounds * count + warm_up(count, clients)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (served := sample(pair.second, SERVED_BY_PEER)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    if served != expected:
        outcome.wrong.append(f"{served:.0f} retries were served by the peer, expected {expected}")
    return outcome


@dataclass(slots=True)
class EndedOutcome:
    """What stays of the memory of held calls after their end, by the name of a gateway."""

    calls: int
    rows: dict[str, "ParkedOutcome"] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ParkedOutcome:
    """What it costs to hold calls, and whether each got its own answer."""

    wanted: int
    calls: int
    limit: str
    open_seconds: float = 0
    answer_seconds: float = 0
    open_cpu_us: float = 0
    answer_cpu_us: float = 0
    rss_kib: dict[str, int] = field(default_factory=dict)
    rss_kib_holding: dict[int, int] = field(default_factory=dict)
    """By the number of calls held."""
    held: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def kib_per_call(self) -> float:
        return (self.rss_kib["parked"] - self.rss_kib["before"]) / max(self.calls, 1)


def most_calls(wanted: int, clients: int) -> tuple[int, str]:
    """How many calls one gateway process can hold here, and the reason when it is fewer than wanted."""
    files = raise_file_limit(wanted * CONNECTIONS_PER_CALL + clients + SPARE_FILES)
    by_files = (files - clients - SPARE_FILES) // CONNECTIONS_PER_CALL
    by_ports = (ephemeral_ports() - clients - SPARE_FILES) // CONNECTIONS_PER_CALL
    if wanted <= min(by_files, by_ports):
        return wanted, ""
    if by_files < by_ports:
        return by_files, f"the hard limit of open files is {files}, and a held call has two connections"
    return by_ports, f"one address takes {ephemeral_ports()} local ports, and a held call has two connections"


def sample(gateway: Process, name: str) -> float:
    """A metric, with its labels or over all of them; not a number when there is none."""
    lines = gateway.get("/metrics")[1].splitlines()
    samples = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples) if samples else math.nan


def held_calls(gateway: Process) -> float:
    return sample(gateway, HELD_GAUGE)


def end_all(gateway: Process, calls: int, clients: int) -> ParkedOutcome:
    """Hold calls, answer all of them, and look at the gateway again when sessions and results are gone too."""
    outcome = ParkedOutcome(calls, calls, "")
    park(gateway, outcome, clients)
    time.sleep(QUIET_SECONDS)
    outcome.rss_kib["quiet"] = gateway.rss_kib()
    return outcome


def park(gateway: Process, outcome: ParkedOutcome, clients: int) -> None:
    """Open all calls, look at the gateway while it holds them, and answer all of them."""
    held: list[modern.Parked] = []

    async def open_one(connection: Connection) -> None:
        held.append(await modern.open_ask(connection))

    async def answer_one(connection: Connection) -> None:
        await modern.answer_ask(connection, held.pop())

    def phase(operation: Operation, count: int) -> tuple[float, float]:
        cpu = gateway.cpu_seconds()
        start = time.perf_counter()
        _, wrong = uvloop.run(run(gateway.address, operation, count, clients))
        outcome.wrong.extend(wrong)
        return time.perf_counter() - start, (gateway.cpu_seconds() - cpu) / max(count, 1) * 1e6

    def look(moment: str) -> None:
        outcome.held[moment] = held_calls(gateway)
        outcome.rss_kib[moment] = gateway.rss_kib()

    # Imports, pools and caches of the first calls are not the price of a held one.
    phase(modern.ask, 2 * clients)
    look("before")
    outcome.rss_kib_holding[0] = outcome.rss_kib["before"]
    opened = 0
    for step in (*(each for each in STEPS if each < outcome.calls), outcome.calls):
        seconds, cpu_us = phase(open_one, step - opened)
        outcome.open_seconds += seconds
        outcome.open_cpu_us += cpu_us * (step - opened) / max(outcome.calls, 1)
        outcome.rss_kib_holding[step] = gateway.rss_kib()
        opened = step
    look("parked")
    outcome.answer_seconds, outcome.answer_cpu_us = phase(answer_one, len(held))
    deadline = time.monotonic() + SETTLE_SECONDS
    while held_calls(gateway) > outcome.held["before"] and time.monotonic() < deadline:
        time.sleep(0.1)
    look("after")
