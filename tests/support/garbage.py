"""Finds cycles of references, which keep memory until the next garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cycles() -> Iterator[set[str]]:
    """Give the types of all objects that only the garbage collector freed: known at the end of the block."""
    found: set[str] = set()
    _ = gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        _ = gc.collect()
        found.update(f"{type(kept).__module__}.{type(kept).__qualname__}" for kept in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
