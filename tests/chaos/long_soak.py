"""`make soak`: the soak for minutes, with hostile clients too, and what it uses meanwhile.

    python -m tests.chaos.long_soak 30

It writes samples.csv and, if matplotlib is installed, soak.png into build/soak. It fails unless each call had an end
that is allowed, and unless memory, descriptors, tasks, sessions, held calls and child processes return.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from tests.chaos.figures import Finding, Sample, not_returned, plot, sampled, verdict, write_csv
from tests.chaos.soak import PEOPLE, Operator, Person, World, inhabited, judge, quiet
from tests.chaos.stage import steps
from tests.chaos.strangers import SECRET, Stranger
from tests.parts.launch import REPOSITORY
from tests.support.gateway_process import FAILURES, Gateway, GatewayError

OUTPUT: Final = REPOSITORY / "build" / "soak"
COUNTED: Final = Path(__file__).parent / "counted"
STRANGERS: Final = 6
SAMPLE_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 90.0
WARM_SECONDS: Final = 10.0


class Soak:
    """One run and its figures."""

    def __init__(self, world: World, counts: Path) -> None:
        self.world = world
        self.counts = counts
        self.started = time.monotonic()
        self.samples: list[Sample] = []
        self.faults: list[tuple[float, str]] = []

    @property
    def survivor(self) -> Gateway:
        """The replica that is never ended."""
        return self.world.c.replicas[-1]

    async def look(self) -> None:
        """Take one sample of each replica."""
        found = [await sampled(replica, self.started, self.counts) for replica in self.world.c.replicas]
        self.samples += [sample for sample in found if sample is not None]

    async def watch(self) -> None:
        seen = Counter[str]()
        while True:
            await self.look()
            new = self.world.faults - seen
            self.faults += [(time.monotonic() - self.started, fault) for fault in new.elements()]
            seen = self.world.faults.copy()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def live(self, seconds: float, *, hostile: bool) -> None:
        """People call for so long; with strangers and faults if `hostile`."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(PEOPLE):
                group.create_task(Person(self.world).live(until))
            if hostile:
                group.create_task(Operator(self.world).work(until))
                for number in range(STRANGERS):
                    group.create_task(Stranger(self.world, Random(number)).live(until))

    async def settle(self) -> Sample:
        """Wait until nothing of anybody is left; what the survivor uses then."""
        for replica in self.world.c.replicas:
            await replica.until(partial(quiet, replica), "nothing held, no session", QUIET_SECONDS)
        await asyncio.sleep(SAMPLE_SECONDS)  # for the next count of the tasks
        await self.look()
        return self.samples[-1]

    async def run(self, seconds: float) -> Iterator[Finding]:
        """Warm up, live, settle; the verdict."""
        start = await self.started_up()
        await self.live(WARM_SECONDS, hostile=False)
        idle = await self.settle()
        # Connections that are kept from the warm-up must not count as usual; its memory does.
        idle = replace(idle, descriptors=start.descriptors, tasks=start.tasks)
        self.started, self.samples = time.monotonic(), []
        watching = asyncio.get_running_loop().create_task(self.watch())
        try:
            await self.live(seconds, hostile=True)
        finally:
            watching.cancel()
        _ = await self.settle()
        # The connections of the other replicas and of the balancer would count.
        await self.world.c.balancer.kill()
        for replica in self.world.c.replicas[:-1]:
            replica.terminate()
            _ = await replica.exited()
        last = await self.returned(idle)
        return verdict(self.samples, idle, last)

    async def started_up(self) -> Sample:
        """The survivor's first sample with a count of its tasks."""
        while True:
            await self.look()
            if self.samples[-1].tasks:
                return self.samples[-1]
            await asyncio.sleep(SAMPLE_SECONDS)

    async def returned(self, idle: Sample) -> Sample:
        """The survivor's last sample: when all of it has returned, kept results included, or when time is up."""
        until = time.monotonic() + QUIET_SECONDS
        while True:
            await self.look()
            last = self.samples[-1]
            if time.monotonic() > until or not [*not_returned(idle, last)]:
                return last
            await asyncio.sleep(SAMPLE_SECONDS)

    async def logs(self) -> Iterator[Finding]:
        """What the logs and the metrics of all replicas must not have."""
        replicas = self.world.c.replicas
        errors = Counter(str(line["event"]) for replica in replicas for line in replica.errors())
        quoted = sum(replica.stderr.count(SECRET) for replica in replicas)
        failures = await self.survivor.metric(FAILURES)
        return iter(
            (
                (not errors, f"errors in the logs: {dict(errors) or 'none'}"),
                (not quoted, f"secrets of clients in the logs: {quoted}"),
                (not failures, f"failed tasks of the survivor: {failures:g}"),
            )
        )

    def outcome(self) -> Finding:
        """What the ledgers say."""
        try:
            judge(self.world)
        except AssertionError as exc:
            return False, f"the ledgers: {exc}"
        return True, f"the ledgers agree with the ends of {len(self.world.calls)} calls"

    def write(self) -> None:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        write_csv(self.samples, OUTPUT / "samples.csv")
        for replica in self.world.c.replicas:
            (OUTPUT / f"{replica.config['replica']['id']}.log").write_text(replica.stderr)
        try:
            plot(self.samples, self.faults, OUTPUT / "soak.png")
        except ImportError as exc:
            print(f"no plot: {exc}; `pip install --group soak` installs matplotlib")


async def soak(minutes: float, seed: int) -> bool:
    """Run it, and print what came of it; whether all is as it must be."""
    with tempfile.TemporaryDirectory(prefix="mrtr-soak-") as directory:
        folder, counts = Path(directory), Path(directory) / "counts"
        counts.mkdir()
        environment = {"PYTHONPATH": str(COUNTED), "MRTR_COUNTS": str(counts)}
        async with inhabited(folder, seed, check=False, environment=environment) as world:
            run = Soak(world, counts)
            try:
                findings = [*await run.run(minutes * 60)]
            except GatewayError as exc:
                findings = [(False, str(exc).partition("\n")[0])]
            findings += [run.outcome(), *await run.logs()]
            run.write()
            taken = await steps([run.survivor])
    print(f"seed {seed}, {minutes:g} minutes, {world.numbers} calls of people; figures in {OUTPUT}")
    for what in (world.faults, world.outcomes, taken):
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(what.items())))
    for is_right, text in findings:
        print(f"{'ok  ' if is_right else 'FAIL'} {text}")
    return all(is_right for is_right, _ in findings)


if __name__ == "__main__":
    wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    sys.exit(not asyncio.run(soak(wanted, int(os.environ.get("MRTR_SOAK_SEED", "1")))))
