"""An old client for the tests: the Python SDK 1.30.0 plays the calls that it is given, in one session.

    python old_py_client.py [--sse] URL < calls.json     [["ask", {"question": "Who?"}], ...]

It speaks streamable HTTP, or HTTP+SSE. It says Ann to every form, and prints a JSON list of the texts that it got.
"""

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession, types
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client


async def elicit(_context: Any, _params: types.ElicitRequestParams) -> types.ElicitResult | types.ErrorData:
    return types.ElicitResult(action="accept", content={"name": "Ann"})


async def main(url: str, calls: list[tuple[str, dict[str, Any]]], *, over_sse: bool) -> None:
    async with (
        (sse_client if over_sse else streamable_http_client)(url) as (reading, writing, *_),
        ClientSession(reading, writing, elicitation_callback=elicit) as session,
    ):
        await session.initialize()
        texts = []
        for name, arguments in calls:
            result = await session.call_tool(name, arguments)
            assert isinstance(result.content[0], types.TextContent)
            texts.append(result.content[0].text)
    print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], json.load(sys.stdin), over_sse="--sse" in sys.argv))
