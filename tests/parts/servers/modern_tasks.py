"""A modern server on fastmcp 4 whose tools run as tasks of the extension; it runs in the environment fm4tasks.

    python modern_tasks.py [--port P] [--ledger FILE]

Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. A tool asks by returning an InputRequiredResult, and is run
again with the answers.
"""

import asyncio
from datetime import timedelta

import mcp_types as types
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.utilities.tasks import TaskConfig
from fastmcp_tasks import TasksExtension
from serving import Ledger, arguments, compact, recorded, serve

options = arguments()
ledger = Ledger(options.ledger)
server: FastMCP[None] = FastMCP("modern-tasks", version="4.0.11")
server.add_extension(TasksExtension(url="memory://"))

REQUIRED = TaskConfig(mode="required", poll_interval=timedelta(milliseconds=200))
OPTIONAL = TaskConfig(mode="optional", poll_interval=timedelta(milliseconds=200))
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@server.tool
async def echo(text: str) -> str:
    return text


@server.tool(task=OPTIONAL)
async def slow_compute(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "computed"


@server.tool(task=REQUIRED)
async def hang() -> str:
    async with recorded(ledger, "hang"):
        await asyncio.Event().wait()
    raise AssertionError


@server.tool(task=REQUIRED)
async def failing_job() -> str:
    raise ToolError("the job failed")


@server.tool(task=REQUIRED)
async def ask(question: str, ctx: Context) -> str | types.InputRequiredResult:
    ledger.write("run", "ask")
    answers = ctx.input_responses or {}
    if "name" not in answers:
        form = types.ElicitRequestFormParams(message=question, requested_schema=NAME)
        return types.InputRequiredResult(input_requests={"name": types.ElicitRequest(params=form)})
    given = answers["name"]
    assert isinstance(given, types.ElicitResult)
    return f"accept:{compact(given.content)}" if given.action == "accept" else given.action


if __name__ == "__main__":
    serve(server.http_app(path="/mcp"), options)
