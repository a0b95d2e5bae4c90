"""Runs a coroutine on the fastest event loop there is: uvloop's, or else asyncio's own."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from gateway import world

T = TypeVar("T")

_run: Callable[[Coroutine[Any, Any, Any]], Any]
try:
    import uvloop
except ImportError:  # it has no wheels for some platforms
    _run = asyncio.run
else:

    class _Loop(uvloop.Loop):
        async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
            """Look a name up, for a stream unless asked otherwise.

            uvloop looks the address up to which a socket is to be connected, in a thread even if it is in numbers,
            because it does not say what kind of socket that is.
            """
            return await super().getaddrinfo(host, port, **{"type": world.STREAM, **options})

    _run = partial(uvloop.run, loop_factory=_Loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end."""
    result: T = _run(work)
    return result
