"""Many clients and many faults at once, for MRTR_SOAK_SECONDS (40); afterwards nothing is left behind.

MRTR_SOAK_SEED throws other dice. `make soak` does the same for longer, with hostile clients, and keeps the figures.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.soak import PEOPLE, Operator, Person, World, inhabited, judge, quiet
from tests.chaos.stage import built, steps
from tests.support.cluster import installed

SECONDS: Final = float(os.environ.get("MRTR_SOAK_SECONDS", "40"))
SEED: Final = int(os.environ.get("MRTR_SOAK_SEED", "1"))
FDS: Final = "process_open_fds"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(SECONDS + 120),
    pytest.mark.skipif(not all(map(built, ("py130", "py130-store"))), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("haproxy"), reason="apt install haproxy"),
]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with inhabited(tmp_path, SEED) as found:
        yield found


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
