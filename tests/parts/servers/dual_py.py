"""A dual-era server whose tools ask with `ctx.elicit`, on the Python SDK 2.3.0 or on fastmcp 4.0.11.

    python dual_py.py [--port P | --stdio] [--fastmcp] [--stateless] [--ledger FILE]

Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. Clients of both eras can call its tools, but only legacy
clients are asked: for modern clients the SDK refuses `ctx.elicit`.
"""

import asyncio
from typing import Any

import anyio
import fastmcp
import mcp_types as types
from mcp.server import mcpserver
from pydantic import create_model
from serving import Ledger, arguments, compact, recorded, serve

flags = arguments("--fastmcp")  # instead of the SDK's own MCPServer
ledger = Ledger(flags.ledger)

Name = create_model("Name", name=(str, ...))
if flags.fastmcp:
    server: Any = fastmcp.FastMCP("dual-fm4", version="4.0.11")
    from fastmcp import Context
else:
    server = mcpserver.MCPServer("dual-py", version="2.3.0")
    from mcp.server.mcpserver import Context


async def answer(ctx: Context, question: str) -> str:
    result = await ctx.elicit(question, Name)
    if result.action != "accept":
        return str(result.action)
    return f"accept:{compact(result.data.model_dump())}"


async def spoken(ctx: Context, prompt: str) -> str:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=prompt))
    related = {} if flags.fastmcp else {"related_request_id": ctx.request_id}
    result = await ctx.session.create_message([message], max_tokens=100, **related)
    return str(result.content.text)


@server.tool()
async def echo(text: str) -> str:
    async with recorded(ledger, "echo"):
        return text


@server.tool()
async def ask(question: str, ctx: Context) -> str:
    async with recorded(ledger, "ask"):
        return await answer(ctx, question)


@server.tool()
async def sample(prompt: str, ctx: Context) -> str:
    async with recorded(ledger, "sample"):
        return await spoken(ctx, prompt)


@server.tool()
async def progress(steps: int, ctx: Context) -> str:
    async with recorded(ledger, "progress"):
        for step in range(1, steps + 1):
            await ctx.report_progress(step, steps)
        return "done"


@server.tool()
async def hang() -> str:
    async with recorded(ledger, "hang"):
        await anyio.sleep_forever()
        raise AssertionError


if __name__ == "__main__":
    if flags.stdio:
        asyncio.run(server.run_stdio_async())
    elif flags.fastmcp:
        serve(server.http_app(path="/mcp", stateless_http=flags.stateless), flags)
    else:
        serve(server.streamable_http_app(stateless_http=flags.stateless), flags)
