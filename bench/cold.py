"""Cold calls: parked calls whose connections are closed until their clients come back."""

import time
from dataclasses import dataclass, field

import uvloop

from bench import modern
from bench.load import Connection, Operation, run
from bench.processes import Process
from bench.scenarios import SETTLE_SECONDS, sample

COLD_GAUGE = "mcp_gateway_cold_calls"
PART = 5_000
"""Calls that are opened in one run of the load generator, whose time is limited."""
COOLING_SECONDS = 120


@dataclass(slots=True)
class ColdOutcome:
    """What cold calls cost, and whether each that was answered got its own result."""

    records: int
    opened: int
    answered: int
    open_cpu_us: float = 0
    answer_cpu_us: float = 0
    rss_kib: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def bytes_per_call(self, before: str, after: str, calls: int) -> float:
        return (self.rss_kib[after] - self.rss_kib[before]) * 1024 / max(calls, 1)


def cool(bare: Process, gateway: Process, outcome: ColdOutcome, clients: int) -> None:
    """Open calls, wait until all are cold, and answer some of them, the oldest and the newest among them.

    `bare` is a gateway like the other one, without records: the difference is what the records take.
    """
    held: list[modern.Parked] = []

    async def open_one(connection: Connection) -> None:
        held.append(await modern.open_ask(connection, "ask_stored"))

    async def answer_one(connection: Connection) -> None:
        await modern.answer_ask(connection, held.pop(), "ask_stored")

    def phase(operation: Operation, count: int) -> float:
        cpu = gateway.cpu_seconds()
        _, wrong = uvloop.run(run(gateway.address, operation, count, clients))
        outcome.wrong.extend(wrong)
        return (gateway.cpu_seconds() - cpu) / max(count, 1) * 1e6

    def look(moment: str, process: Process = gateway) -> None:
        outcome.cold[moment] = sample(process, COLD_GAUGE)
        outcome.rss_kib[moment] = process.rss_kib()
        outcome.descriptors[moment] = process.descriptors()

    look("bare", bare)
    wait_until_cold(gateway, outcome.records)
    look("records")
    parts = []
    left = outcome.opened
    while left > 0:
        parts.append(phase(open_one, min(PART, left)))
        left -= PART
        wait_until_cold(gateway, outcome.records + len(held))
    outcome.open_cpu_us = sum(parts) / max(len(parts), 1)
    look("cold")
    if outcome.cold["cold"] != outcome.records + outcome.opened:
        outcome.wrong.append(f"{outcome.cold['cold']:.0f} calls are cold of {outcome.records + outcome.opened}")
    held = held[:: max(len(held) // outcome.answered, 1)][: outcome.answered]
    outcome.answer_cpu_us = phase(answer_one, len(held))
    wait_until_cold(gateway, 0)
    look("after")


def wait_until_cold(gateway: Process, count: int) -> None:
    """Wait until so many calls are cold, or the last ones have settled."""
    deadline = time.monotonic() + (COOLING_SECONDS if count else SETTLE_SECONDS)
    while sample(gateway, COLD_GAUGE) < count and time.monotonic() < deadline:
        time.sleep(0.2)
