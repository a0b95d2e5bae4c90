"""What is prepared when a drain begins."""

import asyncio

import pytest

from gateway.cluster.draining import Draining
from gateway.config import InForce
from gateway.protocol.errors import ShuttingDown


async def here() -> str:
    """Something that is here without a wait."""
    return "here"


async def test_a_preparation_that_ends_before_the_drain_is_complete() -> None:
    draining = Draining(InForce(value=True))
    assert await draining.prepared(asyncio.sleep(0, "here")) == "here"
    draining.begin(None)
    assert draining.has_begun


async def test_a_drain_gives_up_what_is_being_prepared() -> None:
    draining = Draining(InForce(value=True))
    preparing = asyncio.ensure_future(draining.prepared(asyncio.sleep(60.0)))
    await asyncio.sleep(0)
    draining.begin(None)
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(preparing, 1.0)


async def test_a_preparation_is_given_up_once_its_time_is_over() -> None:
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(Draining(InForce(value=True)).prepared(asyncio.sleep(60.0), 0.01), 1.0)


async def test_a_drain_waits_for_nothing_and_has_what_is_here() -> None:
    draining = Draining(InForce(value=True))
    draining.begin(None)
    assert await draining.prepared(here()) == "here"
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(draining.prepared(asyncio.sleep(60.0)), 1.0)


async def test_a_preparation_that_itself_takes_too_long_is_no_drain() -> None:
    async def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        _ = await Draining(InForce(value=True)).prepared(late())
