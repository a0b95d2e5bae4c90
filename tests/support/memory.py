"""Measures the memory that some work leaves behind."""

import gc
import tracemalloc
from collections.abc import Callable


def left_by(work: Callable[[], object]) -> int:
    """The bytes that `work` has allocated and that are still in use after it."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
