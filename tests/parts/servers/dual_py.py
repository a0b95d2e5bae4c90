"""A dual-era server whose tools ask with `ctx.elicit`, on the Python SDK 2.3.0 or on fastmcp 4.0.11.

    python dual_py.py [--port P | --stdio] [--fastmcp] [--stateless] [--ledger FILE]

Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. Clients of both eras can call its tools, but only legacy
clients are asked: for modern clients the SDK refuses `ctx.elicit`. The ledger has one JSON object a line: what the
tools did.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import fastmcp
import mcp_types as types
from mcp.server import mcpserver
from pydantic import create_model
from uvicorn_http import serve_http

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--fastmcp", action="store_true", help="fastmcp instead of the SDK's own MCPServer")
parser.add_argument("--stateless", action="store_true", help="no sessions for legacy clients")
parser.add_argument("--stdio", action="store_true", help="speak on stdin and stdout instead of HTTP")
parser.add_argument("--ledger", type=Path)
flags = parser.parse_args()

Name = create_model("Name", name=(str, ...))
if flags.fastmcp:
    server: Any = fastmcp.FastMCP("dual-fm4", version="4.0.11")
    from fastmcp import Context
else:
    server = mcpserver.MCPServer("dual-py", version="2.3.0")
    from mcp.server.mcpserver import Context


def record(event: str, tool: str) -> None:
    if flags.ledger is not None:
        with flags.ledger.open("a") as file:
            file.write(json.dumps({"t": time.time(), "event": event, "tool": tool}) + "\n")


@asynccontextmanager
async def recorded(tool: str) -> AsyncIterator[None]:
    record("run", tool)
    try:
        yield
    except asyncio.CancelledError:
        record("cancelled", tool)
        raise
    except Exception:
        record("failed", tool)
        raise
    record("finished", tool)


async def answer(ctx: Context, question: str) -> str:
    result = await ctx.elicit(question, Name)
    if result.action != "accept":
        return str(result.action)
    return f"accept:{json.dumps(result.data.model_dump(), separators=(',', ':'))}"


async def spoken(ctx: Context, prompt: str) -> str:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=prompt))
    related = {} if flags.fastmcp else {"related_request_id": ctx.request_id}
    result = await ctx.session.create_message([message], max_tokens=100, **related)
    return str(result.content.text)


@server.tool()
async def echo(text: str) -> str:
    async with recorded("echo"):
        return text


@server.tool()
async def ask(question: str, ctx: Context) -> str:
    async with recorded("ask"):
        return await answer(ctx, question)


@server.tool()
async def sample(prompt: str, ctx: Context) -> str:
    async with recorded("sample"):
        return await spoken(ctx, prompt)


@server.tool()
async def progress(steps: int, ctx: Context) -> str:
    async with recorded("progress"):
        for step in range(1, steps + 1):
            await ctx.report_progress(step, steps)
        return "done"


@server.tool()
async def hang() -> str:
    async with recorded("hang"):
        await anyio.sleep_forever()
        raise AssertionError


async def main() -> None:
    if flags.stdio:
        await server.run_stdio_async()
        return
    if flags.fastmcp:
        app = server.http_app(path="/mcp", stateless_http=flags.stateless)
    else:
        app = server.streamable_http_app(stateless_http=flags.stateless)
    await serve_http(app, flags.port)


if __name__ == "__main__":
    asyncio.run(main())
