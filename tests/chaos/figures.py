"""Figures of the soak: what each replica uses over time, as CSV and as a plot, and whether all of it returns."""

import asyncio
import csv
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import linear_regression
from typing import Final

import aiohttp

from tests.support.gateway_process import HELD, SESSIONS, Gateway

MIB: Final = 1_048_576
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
SCRAPE_SECONDS: Final = 1.0
PEAK_MIB: Final = 64.0
"""The most that hostile clients may add to the memory of an idle replica, at any time."""
LEFT_MIB: Final = 32.0
"""The most that may stay of it: an allocator returns freed memory late, and in part."""
BLOCKS_LEFT: Final = 1.1
"""How many times as many blocks of memory as before may stay: caches and counters of a longer life."""
GROWTH_MIB_PER_HOUR: Final = 32.0
SHORTEST_TREND_SECONDS: Final = 600.0
"""The second half must be this long for a trend to mean something."""


@dataclass(frozen=True)
class Sample:
    """What one replica uses at one time; None where it could not be asked."""

    seconds: float
    replica: str
    pid: int
    rss_mib: float
    descriptors: int
    threads: int
    children: int
    tasks: int | None = None
    blocks: int | None = None
    """Memory that Python has allocated, in blocks: what is freed leaves it at once, unlike RSS."""
    sessions: int | None = None
    held: int | None = None


def children_of(pid: int) -> int:
    """How many child processes it has that have not ended."""
    with suppress(OSError):
        return sum(
            len(Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            for thread in os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        )
    return 0


async def sampled(replica: Gateway, started: float, counts: Path) -> Sample | None:
    """Look at a replica; None if it does not run."""
    process = replica.process
    if process is None or process.returncode is not None:
        return None
    try:
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])  # noqa: ASYNC240
        descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208
        threads = len(os.listdir(f"/proc/{process.pid}/task"))  # noqa: PTH208
    except OSError:
        return None
    tasks = blocks = sessions = held = None
    with suppress(OSError, ValueError):
        tasks, blocks = map(int, (counts / str(process.pid)).read_text().split())
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(SCRAPE_SECONDS):
            values = await replica.metrics()
        sessions = int(sum(value for (name, _), value in values.items() if name == SESSIONS))
        held = int(sum(value for (name, _), value in values.items() if name == HELD))
    seconds, memory = round(time.monotonic() - started, 1), round(resident * PAGE_BYTES / MIB, 1)
    name = str(replica.config["replica"]["id"])
    return Sample(
        *(seconds, name, process.pid, memory, descriptors, threads, children_of(process.pid)),
        *(tasks, blocks, sessions, held),
    )


def write_csv(samples: Sequence[Sample], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples)


def plot(samples: Sequence[Sample], faults: Sequence[tuple[float, str]], path: Path) -> None:
    """Draw memory and the rest over time; a process that was replaced begins a new line."""
    import matplotlib as mpl  # noqa: PLC0415  (only `make soak` installs it)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = (
        *(("rss_mib", "RSS, MiB"), ("blocks", "blocks of memory")),
        *(("descriptors", "descriptors"), ("tasks", "tasks"), ("sessions", "sessions")),
    )
    figure, axes = plt.subplots(len(rows), sharex=True, figsize=(12, 14), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(sorted({sample.replica for sample in samples}))}
    for axis, (key, title) in zip(axes, rows, strict=True):
        labelled = set[str]()
        for pid in sorted({sample.pid for sample in samples}):
            own = [sample for sample in samples if sample.pid == pid and getattr(sample, key) is not None]
            if not own:
                continue
            name = own[0].replica
            label = name if name not in labelled else None
            labelled.add(name)
            times, values = [sample.seconds / 60 for sample in own], [getattr(sample, key) for sample in own]
            axis.plot(times, values, color=colours[name], label=label, linewidth=1)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    for seconds, fault in faults:
        if fault in {"crash", "roll"}:
            axes[0].axvline(seconds / 60, color="0.85", linewidth=0.5, zorder=0)
    axes[0].legend()
    axes[0].set_title("grey: a replica was killed or restarted")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


COUNTS: Final = ("descriptors", "threads", "children", "tasks", "sessions", "held")
Finding = tuple[bool, str]
"""Whether something is as it must be, and its figures."""


def not_returned(before: Sample, after: Sample) -> Iterator[str]:
    """What of a replica is more than it was before."""
    limits = dict.fromkeys(COUNTS, 1.0) | {"blocks": BLOCKS_LEFT}
    for key, times in limits.items():
        was, now = getattr(before, key), getattr(after, key)
        if was is None or now is None or now > was * times:
            yield key


def verdict(samples: Sequence[Sample], idle: Sample, last: Sample) -> Iterator[Finding]:
    """What must be true of the one replica that lived through all of it, which `idle` saw before."""
    own = [sample for sample in samples if sample.pid == idle.pid]
    wrong = [*not_returned(idle, last)]
    for key in (*COUNTS, "blocks"):
        most = max((value for sample in own if (value := getattr(sample, key)) is not None), default=0)
        yield key not in wrong, f"{key}: {getattr(idle, key)} before, {most} at most, {getattr(last, key)} after"
    peak = max(sample.rss_mib for sample in own)
    over = f"{idle.rss_mib:g} MiB idle, {peak:g} at most, {last.rss_mib:g} after"
    yield peak - idle.rss_mib <= PEAK_MIB, f"memory: {over}; at most {PEAK_MIB:g} over idle"
    yield last.rss_mib - idle.rss_mib <= LEFT_MIB, f"memory that stays: {over}; at most {LEFT_MIB:g} over idle"
    late = [sample for sample in own if sample.seconds > own[-1].seconds / 2]
    slope = linear_regression([s.seconds for s in late], [s.rss_mib for s in late]).slope * 3600
    long_enough = late[-1].seconds - late[0].seconds >= SHORTEST_TREND_SECONDS
    judged = f"at most {GROWTH_MIB_PER_HOUR:g}" if long_enough else "too short to be judged"
    yield (
        not long_enough or slope <= GROWTH_MIB_PER_HOUR,
        f"growth of memory in the second half: {slope:.1f} MiB an hour; {judged}",
    )
