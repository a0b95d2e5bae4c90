"""A legacy client on the Python SDK 1.x that subscribes to one resource over streamable HTTP, then listens.

    python subscriber.py URL RESOURCE

Prints `subscribed`, then the URI of each update. Calls the tool `touch` for each line of its input, and ends with it.
"""

import asyncio
import sys
from typing import Any

from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import AnyUrl


async def heard(message: Any) -> None:
    if isinstance(message, types.ServerNotification) and isinstance(message.root, types.ResourceUpdatedNotification):
        print(message.root.params.uri, flush=True)


async def main(url: str, resource: str) -> None:
    async with (
        streamable_http_client(url) as (reading, writing, *_),
        ClientSession(reading, writing, message_handler=heard) as session,
    ):
        await session.initialize()
        await session.subscribe_resource(AnyUrl(resource))
        print("subscribed", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            await session.call_tool("touch", {})


asyncio.run(main(*sys.argv[1:]))
