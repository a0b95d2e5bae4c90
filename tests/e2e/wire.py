"""A modern client of a gateway that is a program, or of a balancer: each request goes over its own connection.

async with wire(gw.url) as client:
    asked = await client.call("ask", {"question": "Who?"})
    assert (await client.answer(asked, ACCEPT)).text == NAMED
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from tests.support.workbench import Client

ACCEPT: Final = {"action": "accept", "content": {"name": "Ann"}}
NAMED: Final = 'accept:{"name":"Ann"}'
SECONDS: Final = 20.0


@asynccontextmanager
async def wire(url: str, **headers: str) -> AsyncIterator[Client]:
    """Open a client."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Client(http, url, headers=headers, seconds=SECONDS)
