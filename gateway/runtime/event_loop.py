"""Runs a coroutine on the fastest event loop there is: uvloop's, or else asyncio's own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_run: Callable[[Coroutine[Any, Any, Any]], Any]
try:
    from uvloop import run as _run
except ImportError:  # it has no wheels for some platforms
    _run = asyncio.run


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end."""
    result: T = _run(work)
    return result
