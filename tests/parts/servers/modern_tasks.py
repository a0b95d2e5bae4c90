"""A modern server on fastmcp 4 whose tools run as tasks of the extension; it runs in the environment fm4tasks.

    python modern_tasks.py [--port P] [--ledger FILE]

Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. A tool asks by returning an InputRequiredResult, and is run
again with the answers.
"""

import argparse
import asyncio
import json
import time
from datetime import timedelta
from pathlib import Path

import mcp_types as types
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.utilities.tasks import TaskConfig
from fastmcp_tasks import TasksExtension
from uvicorn_http import serve_http

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--ledger", type=Path)
flags = parser.parse_args()

server: FastMCP[None] = FastMCP("modern-tasks", version="4.0.11")
server.add_extension(TasksExtension(url="memory://"))

REQUIRED = TaskConfig(mode="required", poll_interval=timedelta(milliseconds=200))
OPTIONAL = TaskConfig(mode="optional", poll_interval=timedelta(milliseconds=200))
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def record(event: str, tool: str) -> None:
    if flags.ledger is not None:
        with flags.ledger.open("a") as file:
            file.write(json.dumps({"t": time.time(), "event": event, "tool": tool}) + "\n")


@server.tool
async def echo(text: str) -> str:
    return text


@server.tool(task=OPTIONAL)
async def slow_compute(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "computed"


@server.tool(task=REQUIRED)
async def hang() -> str:
    record("run", "hang")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        record("cancelled", "hang")
        raise
    raise AssertionError


@server.tool(task=REQUIRED)
async def failing_job() -> str:
    raise ToolError("the job failed")


@server.tool(task=REQUIRED)
async def ask(question: str, ctx: Context) -> str | types.InputRequiredResult:
    record("run", "ask")
    answers = ctx.input_responses or {}
    if "name" not in answers:
        form = types.ElicitRequestFormParams(message=question, requested_schema=NAME)
        return types.InputRequiredResult(input_requests={"name": types.ElicitRequest(params=form)})
    given = answers["name"]
    assert isinstance(given, types.ElicitResult)
    return f"accept:{json.dumps(given.content, separators=(',', ':'))}" if given.action == "accept" else given.action


async def main() -> None:
    app = server.http_app(path="/mcp")
    await serve_http(app, flags.port)


if __name__ == "__main__":
    asyncio.run(main())
