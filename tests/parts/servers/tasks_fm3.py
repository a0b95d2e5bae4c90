"""An old server on fastmcp 3 whose tools are tasks; it runs in the environment fm3tasks.

fastmcp runs a task in a worker, whose questions come on the standalone GET stream and name no task.
"""

import anyio
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.tasks import TaskConfig
from pydantic import BaseModel
from serving import Ledger, arguments, serve

options = arguments()
ledger = Ledger(options.ledger)
server: FastMCP[None] = FastMCP("old-tasks-fm3", version="1.0.0")

OPTIONAL = TaskConfig(mode="optional")
REQUIRED = TaskConfig(mode="required")


class Confirm(BaseModel):
    confirm: bool


@server.tool
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@server.tool(task=OPTIONAL)
async def slow_compute(seconds: float, label: str = "") -> str:
    ledger.write("run", "slow_compute")
    await anyio.sleep(seconds)
    return f"computed {label}"


@server.tool(task=REQUIRED)
async def failing_job() -> str:
    await anyio.sleep(0.3)
    raise ToolError("the job failed")


@server.tool(task=OPTIONAL)
async def protocol_error_job() -> str:
    await anyio.sleep(0.1)
    raise RuntimeError("the job broke")


async def confirm(context: Context, filename: str) -> str:
    answer = await context.elicit(f"Delete {filename}?", Confirm)
    ledger.write("answered", "confirm_delete", result=str(answer))
    sure = answer.action == "accept" and answer.data.confirm
    return f"{'deleted' if sure else 'kept'} {filename}"


@server.tool(task=OPTIONAL)
async def confirm_delete(context: Context, filename: str) -> str:
    ledger.write("run", "confirm_delete")
    return await confirm(context, filename)


@server.tool(task=REQUIRED)
async def confirm_later(context: Context, filename: str) -> str:
    """Ask while nobody asks about the task: between two of a client's polls."""
    await anyio.sleep(0.8)
    return await confirm(context, filename)


@server.tool(task=REQUIRED)
async def must_confirm(context: Context, filename: str) -> str:
    ledger.write("run", "must_confirm")
    return await confirm(context, filename)


if __name__ == "__main__":
    serve(server.http_app(path="/mcp"), options)
