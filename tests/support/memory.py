"""Measures the memory that some work leaves behind."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def measured() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes that were allocated since, and are still in use."""

    def left() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    gc.collect()
    tracemalloc.start()
    try:
        yield left
    finally:
        tracemalloc.stop()


def left_by(work: Callable[[], object]) -> int:
    """The bytes that `work` has allocated and that are still in use after it."""
    with measured() as left:
        work()
        return left()


def alive(*kinds: type) -> int:
    """How many objects of these classes there are in the process."""
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())
