"""Counts the copies of a large text that the gateway keeps."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gateway

TEXT = "x" * 200_000
LARGE = {"text": TEXT}
"""Arguments of a call."""


@contextmanager
def counted() -> Iterator[Callable[[], float]]:
    """Yield a function that returns how much the gateway has allocated in blocks of this size, in units of TEXT."""
    package, least = gateway.__path__[0], len(TEXT) // 2

    def copies() -> float:
        gc.collect()
        traces = tracemalloc.take_snapshot().traces
        return sum(each.size for each in traces if each.size > least and _is_of(each, package)) / len(TEXT)

    tracemalloc.start()
    try:
        yield copies
    finally:
        tracemalloc.stop()


def _is_of(trace: tracemalloc.Trace, package: str) -> bool:
    return trace.traceback[-1].filename.startswith(package)
