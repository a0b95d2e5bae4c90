"""The body of a request, as it arrives."""

import asyncio
from typing import Any, cast

import pytest

from gateway.http.server.request import BodyBroken, RequestBody
from tests.support.workbench import later


class FakeWire:
    """A wire that notes whether it is read."""

    def __init__(self) -> None:
        self.pauses = 0

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        self.pauses -= 1


async def test_a_body_that_nobody_reads_is_not_received_any_further() -> None:
    wire = FakeWire()
    body = RequestBody(cast("Any", wire))
    body.feed(b"x" * 131_072)
    assert wire.pauses == 0
    body.feed(b"y")
    body.feed(b"z")
    assert wire.pauses == 1
    assert await body.read() == b"x" * 131_072 + b"yz"
    assert wire.pauses == 0


async def test_a_reader_hears_of_each_part_and_of_the_end() -> None:
    body = RequestBody()
    reading = later(body.read())
    await asyncio.sleep(0)
    body.feed(b"a")
    body.feed(b"b")
    assert await reading == b"ab"
    reading = later(body.read())
    await asyncio.sleep(0)
    body.finish()
    assert await reading == b""
    assert await body.read() == b""


async def test_a_reader_gets_what_came_before_a_body_broke() -> None:
    body = RequestBody()
    body.feed(b"a")
    body.fail()
    assert body.is_broken
    assert await body.read() == b"a"
    with pytest.raises(BodyBroken):
        await body.read()


async def test_a_reader_that_leaves_is_not_woken() -> None:
    body = RequestBody()
    reading = later(body.read())
    await asyncio.sleep(0)
    _ = reading.cancel()
    _ = await asyncio.wait((reading,))
    body.feed(b"a")
    assert body.read_now() == b"a"
