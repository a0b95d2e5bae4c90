"""An old client for the tests: the Python SDK 1.10 or 1.30 plays the calls that it is given, in one session.

    python old_py_client.py [--sse] [--gate FILE] URL < calls.json     [["ask", {"question": "Who?"}], ...]

It speaks streamable HTTP, or HTTP+SSE. It says Ann to every form, and prints a JSON list of the texts that it got; an
error is a text that begins with its code. With a gate, it creates FILE.asked when it is asked, and answers when FILE
exists; it creates FILE.progressed at the first progress of a call.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from mcp import ClientSession, McpError, types
from mcp.client import streamable_http
from mcp.client.sse import sse_client

GATE = Path(sys.argv[sys.argv.index("--gate") + 1]) if "--gate" in sys.argv else None


async def elicit(_context: Any, _params: types.ElicitRequestParams) -> types.ElicitResult | types.ErrorData:
    if GATE is not None:
        Path(f"{GATE}.asked").touch()  # noqa: ASYNC240 - it takes microseconds
        while not GATE.exists():
            await asyncio.sleep(0.02)
    return types.ElicitResult(action="accept", content={"name": "Ann"})


async def progressed(*_: Any) -> None:
    if GATE is not None:
        Path(f"{GATE}.progressed").touch()  # noqa: ASYNC240 - it takes microseconds


def over_http(url: str) -> Any:
    newest = getattr(streamable_http, "streamable_http_client", None)
    return (newest or streamable_http.streamablehttp_client)(url)


async def main(url: str, calls: list[tuple[str, dict[str, Any]]], *, over_sse: bool) -> None:
    async with (
        (sse_client if over_sse else over_http)(url) as (reading, writing, *_),
        ClientSession(reading, writing, elicitation_callback=elicit) as session,
    ):
        await session.initialize()
        texts = []
        for name, arguments in calls:
            try:
                result = await session.call_tool(name, arguments, progress_callback=progressed)
            except McpError as exc:
                texts.append(f"{exc.error.code} {exc.error.message}")
                continue
            assert isinstance(result.content[0], types.TextContent)
            texts.append(result.content[0].text)
    print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1], json.load(sys.stdin), over_sse="--sse" in sys.argv))
