"""Many clients, hostile ones too, and many faults at once, for MRTR_SOAK_SECONDS (40); nothing is left behind.

MRTR_SOAK_SEED throws other dice. `make soak` does the same for MINUTES.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import pytest

from tests.chaos.soak import PEOPLE, Operator, Person, World, inhabited, judge, quiet
from tests.chaos.stage import steps
from tests.chaos.strangers import SECRET, Stranger
from tests.support.cluster import needs

SECONDS: Final = float(os.environ.get("MRTR_SOAK_SECONDS", "40"))
SEED: Final = int(os.environ.get("MRTR_SOAK_SEED", "1"))
STRANGERS: Final = 6
WARM_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 90.0
PEAK_MIB: Final = 64.0
"""The most that hostile clients may add to the memory of an idle replica, at any time."""
LEFT_MIB: Final = 32.0
"""The most that may stay of it: an allocator returns freed memory late, and in part."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(SECONDS + 300),
    needs("haproxy"),
]


class Used(NamedTuple):
    """What a process has of its host."""

    descriptors: int
    threads: int
    children: int


def used(pid: int) -> Used:
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    children = sum(len((thread / "children").read_text().split()) for thread in threads)
    return Used(len(list(Path(f"/proc/{pid}/fd").iterdir())), len(threads), children)


def memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def live(world: World, seconds: float, *, hostile: bool) -> None:
    """People call for so long; with strangers and faults if `hostile`."""
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(PEOPLE):
            group.create_task(Person(world).live(until))
        if hostile:
            group.create_task(Operator(world).work(until))
            for number in range(STRANGERS):
                group.create_task(Stranger(world, Random(number)).live(until))
    for replica in world.c.replicas:
        await replica.until(partial(quiet, replica), "nothing held, no session", QUIET_SECONDS)


async def watch(pid: int, samples: list[float]) -> None:
    while True:
        samples.append(memory_mib(pid))
        await asyncio.sleep(LOOK_SECONDS)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with inhabited(tmp_path, SEED) as found:
        yield found


async def test_many_faults_leave_nothing_behind(world: World) -> None:
    survivor = world.c.replicas[-1]
    assert survivor.process is not None
    pid = survivor.process.pid
    before = used(pid)
    await live(world, WARM_SECONDS, hostile=False)
    idle = memory_mib(pid)
    samples: list[float] = []
    watching = asyncio.get_running_loop().create_task(watch(pid, samples))
    try:
        await live(world, SECONDS, hostile=True)
        judge(world)
        assert world.outcomes["result"] > len(world.calls) / 2
        taken = await steps([survivor])
        # Clients whose connections would count are closed first.
        await world.c.balancer.kill()
        for replica in world.c.replicas[:-1]:
            replica.terminate()
            assert await replica.exited() == 0
        await survivor.until(
            lambda: all(now <= was for now, was in zip(used(pid), before, strict=True)),
            f"no more than {before}",
            QUIET_SECONDS,
        )
        most = idle + LEFT_MIB
        await survivor.until(lambda: memory_mib(pid) <= most, f"at most {most:g} MiB", QUIET_SECONDS)
        assert max(samples) <= idle + PEAK_MIB
        assert not any(SECRET in replica.stderr for replica in world.c.replicas)
    except BaseException as exc:
        exc.add_note(f"MRTR_SOAK_SEED={SEED}: {dict(world.faults)} {dict(world.outcomes)}")
        raise
    finally:
        watching.cancel()
    figures = f"{used(pid)}, memory {idle:.0f} idle, {max(samples):.0f} at most, {memory_mib(pid):.0f} after"
    print(f"\nseed {SEED}, {SECONDS:g} s, {world.numbers} calls; {before} and {figures}")
    for what in (world.faults, world.outcomes, taken):
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(what.items())))
