"""Runs many histories in several processes, and tells what they met."""

import gc
import multiprocessing
import time
import warnings
from collections.abc import Iterator

from tests.simulation import coverage
from tests.simulation.coverage import Met
from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import draw

_CHUNK = 25
_ENOUGH = 10_000
"""So many histories meet every row of the exchange's table."""
Failure = tuple[int, list[str]]


def many(first: int, end: int, processes: int) -> int:
    """Run many histories; print the failures, then what was met. A row that enough of them never meet is a failure."""
    began, met, failed = time.monotonic(), Met(), 0
    for failures, part in _results(first, end, processes):
        met.add(part)
        for seed, found in failures:
            failed += 1
            print(f"seed {seed}: make simulate SEED={seed}")
            print("\n".join(f"    {each[:300]}" for each in found[:6]), flush=True)
    seconds = time.monotonic() - began
    print("\n".join(coverage.report(met)))
    count = end - first
    print(f"{count} histories in {seconds:.0f} s ({count / seconds:.1f} a second), {failed} went wrong")
    never = [" ".join(row) for row in coverage.all_rows() if not met.rows[row]]
    lacks_rows = count >= _ENOUGH and bool(never)
    if lacks_rows:
        print(f"never met, so either unreachable or untested: {', '.join(never)}")
    return bool(failed or lacks_rows)


def _results(first: int, end: int, processes: int) -> Iterator[tuple[list[Failure], Met]]:
    chunks = [(start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK)]
    if processes == 1:
        coverage.watch()
        yield from map(_run, chunks)
        return
    # To collect what a history leaves takes a tenth of its time. A process that ends after a chunk, which leaves it
    # 60 MB, need not; another one is forked from one that has imported everything, and has run a history.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.warm"])
    with context.Pool(processes, initializer=_begin, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_run, chunks)


def _begin() -> None:
    coverage.watch()
    gc.disable()
    # Some of what a history leaves is let go of after its end, and not where `History` hides what that prints.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")


def _run(chunk: tuple[int, int]) -> tuple[list[Failure], Met]:
    coverage.met.__init__()  # type: ignore[misc]
    failures = []
    for seed in range(*chunk):
        plan = draw(seed)
        found = complaints(History(plan).run())
        coverage.met.note(plan)
        if found:
            failures.append((seed, found))
    return failures, coverage.met
