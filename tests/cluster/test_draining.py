"""What is prepared when a drain begins."""

import asyncio

import pytest

from gateway.cluster.draining import Draining
from gateway.config import InForce
from gateway.protocol.errors import ShuttingDown


async def prepare(draining: Draining, seconds: float | None = None) -> None:
    """Something that is not here in time."""
    async with draining.preparing(seconds):
        await asyncio.sleep(60.0)


async def test_a_preparation_that_ends_before_the_drain_is_complete() -> None:
    draining = Draining(InForce(value=True))
    async with draining.preparing():
        await asyncio.sleep(0)
    draining.begin(None)
    assert draining.has_begun


async def test_a_drain_gives_up_what_is_being_prepared() -> None:
    draining = Draining(InForce(value=True))
    preparing = asyncio.ensure_future(prepare(draining))
    await asyncio.sleep(0)
    draining.begin(None)
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(preparing, 1.0)


async def test_a_preparation_is_given_up_once_its_time_is_over() -> None:
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(prepare(Draining(InForce(value=True)), 0.01), 1.0)


async def test_a_drain_waits_for_nothing_and_has_what_is_here() -> None:
    draining = Draining(InForce(value=True))
    draining.begin(None)
    async with draining.preparing():
        pass
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(prepare(draining), 1.0)


async def test_a_preparation_that_itself_takes_too_long_is_no_drain() -> None:
    with pytest.raises(TimeoutError):
        async with Draining(InForce(value=True)).preparing():
            raise TimeoutError
