"""A fixture: each kind of event loop that the gateway runs on."""

import asyncio
from collections.abc import Iterator

import pytest
import uvloop


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Runs coroutines on an event loop of this kind."""
    with asyncio.Runner(loop_factory=request.param) as found:
        yield found
