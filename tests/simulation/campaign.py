"""Runs many histories in several processes, and tells what they met."""

import gc
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

from tests.simulation import coverage
from tests.simulation.coverage import Met
from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import draw

_CHUNK = 25
_TELL_SECONDS = 60.0
_ENOUGH = 10_000
"""So many histories meet every row of the exchange's table."""
Failure = tuple[int, list[str]]


def many(first: int, end: int, processes: int) -> int:
    """Run many histories; print the failures, then what was met. A row that enough of them never meet is a failure."""
    began, met, failed, count, told = time.monotonic(), Met(), 0, end - first, 0.0
    for failures, part in _results(first, end, processes):
        met.add(part)
        for seed, found in failures:
            failed += 1
            print(f"seed {seed}: make simulate SEED={seed}")
            print("\n".join(f"    {each[:300]}" for each in found[:6]), flush=True)
        seconds = time.monotonic() - began
        if seconds - told > _TELL_SECONDS:
            told = seconds
            print(f"{met.histories} of {count} in {seconds:.0f} s, {failed} went wrong", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print("\n".join(coverage.report(met)))
    print(f"{count} histories in {seconds:.0f} s ({count / seconds:.1f} a second), {failed} went wrong")
    never = [" ".join(row) for row in coverage.all_rows() if not met.rows[row]]
    lacks_rows = count >= _ENOUGH and bool(never)
    if lacks_rows:
        print(f"never met, so either unreachable or untested: {', '.join(never)}")
    return bool(failed or lacks_rows)


def _results(first: int, end: int, processes: int) -> Iterator[tuple[list[Failure], Met]]:
    coverage.watch()
    if processes == 1:
        yield from (_run(start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK))
        return
    # To collect what a history leaves takes a tenth of its time. A process that ends after a chunk, which leaves it
    # 30 MB, need not; another one is forked from this one, whose caches a history has filled.
    _ = complaints(History(draw(0)).run())
    context = multiprocessing.get_context("fork")
    running: list[Connection] = []
    while first < end or running:
        while first < end and len(running) < processes:
            start, first = first, first + max(5, min(_CHUNK, (end - first) // (2 * processes)))  # all end together
            first = min(first, end)
            here, there = context.Pipe(duplex=False)
            context.Process(target=_send, args=(there, start, first)).start()  # which lets go of those that have ended
            there.close()
            running.append(here)
        for done in wait(running):
            assert isinstance(done, Connection)
            yield done.recv()
            running.remove(done)


def _send(to: Connection, first: int, end: int) -> None:
    gc.disable()
    # Some of what a history leaves is let go of after its end, and not where `History` hides what that prints.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    to.send(_run(first, end))


def _run(first: int, end: int) -> tuple[list[Failure], Met]:
    coverage.met.__init__()  # type: ignore[misc]
    failures = []
    for seed in range(first, end):
        plan = draw(seed)
        found = complaints(History(plan).run())
        coverage.met.note(plan)
        if found:
            failures.append((seed, found))
    return failures, coverage.met
