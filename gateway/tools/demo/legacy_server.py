"""An ordinary MCP server of 2025, written for the 1.x SDK: one of its tools asks the user questions.

The tool is the example of SEP-2322: resolving a work item, where the rules of the tracker require more details.
Nothing in this file is specific to the gateway or to the 2026 protocol. It runs in its own environment (mcp 1.30).
"""

# The SDK is not in the environment that is type-checked.
# mypy: disable-error-code="import-not-found,untyped-decorator"

import socket
from typing import Any

import uvicorn
from mcp.server.fastmcp import Context, FastMCP
from pydantic import BaseModel, Field

WORK_ITEMS = {4301: "Bug", 4522: "Bug"}

server = FastMCP("work-items")


class Resolution(BaseModel):
    """Rule 1: a resolved work item must have a resolution."""

    resolution: str = Field(
        description="Resolution type for this bug",
        json_schema_extra={"enum": ["Fixed", "Won't Fix", "Duplicate", "By Design"]},
    )


class DuplicateOf(BaseModel):
    """Rule 2: a duplicate must name its original."""

    duplicateOfId: int = Field(description="Work item ID of the original bug")  # noqa: N815 - the SEP's name


@server.tool()
async def update_work_item(
    workItemId: int,  # noqa: N803 - the SEP's name
    fields: dict[str, str],
    ctx: Context[Any, Any, Any],
) -> str:
    """Change fields of a work item."""
    item = f"{WORK_ITEMS[workItemId]} #{workItemId}"
    if fields.get("System.State") != "Resolved":
        return f"{item} updated."

    how = await ctx.elicit(f"Resolving {item} requires a resolution. How was this bug resolved?", schema=Resolution)
    if how.action != "accept":
        return f"{item} was not changed: no resolution was given."
    if how.data.resolution != "Duplicate":
        return f"{item} resolved as {how.data.resolution}. State set to Resolved."

    original = await ctx.elicit("Since this is a duplicate, which work item is the original?", schema=DuplicateOf)
    if original.action != "accept":
        return f"{item} was not changed: the original was not named."
    return (
        f"{item} resolved as Duplicate of Bug #{original.data.duplicateOfId}. "
        "State set to Resolved and duplicate link created."
    )


def main() -> None:
    """Serve on a free port, and print it."""
    listener = socket.create_server(("127.0.0.1", 0))
    # The socket listens already, so a client that connects now waits for the server.
    print(f"READY http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
