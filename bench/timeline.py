"""What three replicas answer in each half second while one of them is killed under load, and started again later.

Some clients call a tool that answers at once, as often as `CALL_SECONDS` lets them. Others are asked, and take
`THINK_SECONDS` on average to answer, so that each replica holds calls at any time. With the tool of cluster.py, whose
server has event ids, another replica resumes the calls that the dead one held. With a tool without, they are lost.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import uvloop

from bench import modern
from bench.cluster import Balanced, Client, Replicas, executions
from bench.load import Wrong
from bench.processes import Fleet, Process
from bench.scenarios import held_calls

PART_SECONDS = 0.5
KILL_SECONDS = 5.0
RESTART_SECONDS = 10.0
END_SECONDS = 15.0
CALLERS = 16
CALL_SECONDS = 0.05
ASKERS = 64
THINK_SECONDS = 1.0
CALLED = "calls answered"
BROKEN = "calls broken off"


@dataclass(slots=True)
class TimelineOutcome:
    """What became of the calls, in each part of the time."""

    part_seconds: float = PART_SECONDS
    killed_seconds: float = 0
    restarted_seconds: float = 0
    """When the replica was ready again."""
    held: float = 0
    """The calls that the replica held when it was killed."""
    parts: list[dict[str, int]] = field(default_factory=list)
    doubles: int = 0
    wrong: list[str] = field(default_factory=list)

    def totals(self) -> dict[str, int]:
        return dict(sum(map(Counter, self.parts), Counter[str]()))


def measure_timeline(fleet: Fleet, command: str, upstream: Process, tool: str) -> TimelineOutcome:
    outcome = TimelineOutcome()
    replicas = Replicas(tuple(fleet.replicas(command, upstream, 3)))
    uvloop.run(load(fleet, replicas, tool, outcome))
    _, outcome.doubles = executions(upstream)
    if outcome.doubles:
        outcome.wrong.append(f"{outcome.doubles} calls were executed twice")
    return outcome


async def load(fleet: Fleet, replicas: Replicas, tool: str, outcome: TimelineOutcome) -> None:
    addresses, turn = [each.address for each in replicas.each], random.Random(1)
    fates: Counter[str] = Counter()
    over = asyncio.Event()
    clock = asyncio.get_running_loop().time

    async def call_on() -> None:
        connection, echo = Balanced(addresses, turn), modern.echo("echo")
        while not over.is_set():
            await asyncio.sleep(CALL_SECONDS)
            try:
                await echo(connection)
                fates[CALLED] += 1
            except ConnectionError:
                fates[BROKEN] += 1
            except Wrong as exc:
                outcome.wrong.append(str(exc))
        connection.close()

    async def ask_on() -> None:
        client = Client(Balanced(addresses, turn), tool, fates, outcome.wrong)
        await asyncio.sleep(turn.random() * THINK_SECONDS)
        while not over.is_set():
            parked = await client.begin()
            if parked is not None:
                await asyncio.sleep((0.5 + turn.random()) * THINK_SECONDS)
                await client.finish(parked)
        client.connection.close()

    async def count() -> None:
        before: Counter[str] = Counter()
        for number in range(1, round(END_SECONDS / PART_SECONDS) + 1):
            await asyncio.sleep(start + number * PART_SECONDS - clock())
            outcome.parts.append(dict(fates - before))
            before = fates.copy()
        over.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            _ = group.create_task(call_on())
        for _ in range(ASKERS):
            _ = group.create_task(ask_on())
        await asyncio.sleep(2 * THINK_SECONDS)  # until connections and sessions are open
        fates.clear()
        start = clock()
        _ = group.create_task(count())
        await asyncio.sleep(start + KILL_SECONDS - clock())
        victim = replicas.each[-1]
        outcome.held = await asyncio.to_thread(held_calls, victim)
        fleet.kill(victim)
        outcome.killed_seconds = clock() - start
        await asyncio.sleep(start + RESTART_SECONDS - clock())
        _ = await asyncio.to_thread(fleet.restart, victim)
        outcome.restarted_seconds = clock() - start
