"""What is prepared when a drain begins."""

import asyncio

import pytest

from gateway.cluster.draining import Draining


async def test_a_preparation_that_ends_before_the_drain_is_complete() -> None:
    draining = Draining()
    assert await draining.has_prepared(asyncio.sleep(0))
    draining.begin(None)
    assert draining.has_begun


async def test_a_drain_gives_up_what_is_being_prepared() -> None:
    draining = Draining()
    preparing = asyncio.ensure_future(draining.has_prepared(asyncio.sleep(60.0)))
    await asyncio.sleep(0)
    draining.begin(None)
    assert not await asyncio.wait_for(preparing, 1.0)


async def test_a_preparation_that_itself_takes_too_long_is_no_drain() -> None:
    async def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        _ = await Draining().has_prepared(late())
