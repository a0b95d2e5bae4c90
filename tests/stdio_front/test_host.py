"""The lines of a host as they come."""

import asyncio
import os

import pytest

from gateway.config import InForce
from gateway.runtime.budget import Budget
from gateway.stdio_front.host import Host
from tests.support.turns import Turns

LINES = 32_000
"""Of two bytes each: less than a pipe holds."""


@pytest.mark.usefixtures("busy_clock")
@pytest.mark.parametrize("line", [b"x", b""])
async def test_a_host_that_floods_lets_others_run(line: bytes) -> None:
    host = Host(4096, Budget("x", InForce(1 << 20)))
    (reading, writing), (sink, out) = os.pipe(), os.pipe()
    os.write(writing, (line + b"\n") * LINES + b"last\n")
    os.close(writing)
    await host.open(reading, out)
    got = []
    with Turns() as turns:
        async with asyncio.timeout(20):
            async for each in host.lines():
                got.append(each)
                turns.note()
        assert turns.now > 7
    assert got == [line] * (LINES if line else 0) + [b"last"]
    await host.close(1)
    os.close(sink)
