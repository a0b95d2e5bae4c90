"""An old client for the tests: the Python SDK 1.10 or 1.30 sends requests side by side, in one session.

    python old_py_beside.py [--sse] URL     {"id": 1, "tool": "echo", "arguments": {}}, {"id": 2, "subscribe": "a://b"}

It reads one request a line, and prints one line for each that is answered, with its id and its text; an error is a
text that begins with its code. The line 0 says that the session has begun; it ends when there is nothing more to read.
"""

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession, McpError, types
from mcp.client import streamable_http
from mcp.client.sse import sse_client
from pydantic import AnyUrl

LINE_BYTES = 16 * 1024 * 1024


def over_http(url: str) -> Any:
    newest = getattr(streamable_http, "streamable_http_client", None)
    return (newest or streamable_http.streamablehttp_client)(url)


async def lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def asked(session: ClientSession, wanted: dict[str, Any]) -> str:
    if "subscribe" in wanted:
        await session.subscribe_resource(AnyUrl(wanted["subscribe"]))
        return "subscribed"
    result = await session.call_tool(wanted["tool"], wanted["arguments"])
    assert isinstance(result.content[0], types.TextContent)
    return result.content[0].text


async def play(session: ClientSession, wanted: dict[str, Any]) -> None:
    try:
        text = await asked(session, wanted)
    except McpError as exc:
        text = f"{exc.error.code} {exc.error.message}"
    print(json.dumps({"id": wanted["id"], "text": text}), flush=True)


async def main(url: str, *, over_sse: bool) -> None:
    reader = await lines()
    async with (
        (sse_client if over_sse else over_http)(url) as (reading, writing, *_),
        ClientSession(reading, writing) as session,
        asyncio.TaskGroup() as group,
    ):
        await session.initialize()
        print(json.dumps({"id": 0, "text": "initialized"}), flush=True)
        while line := await reader.readline():
            group.create_task(play(session, json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], over_sse="--sse" in sys.argv))
