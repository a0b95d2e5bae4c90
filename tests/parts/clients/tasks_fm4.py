"""A client of the tasks extension: fastmcp 4 with fastmcp-tasks, which turns each task into an ordinary call.

    tasks_fm4.py URL TOOL ARGUMENTS

It prints the text of the result, and answers every form with `confirm: true` and `name: Ann`.
"""

import asyncio
import json
import sys
from typing import Any

import fastmcp_tasks  # noqa: F401 - the import turns tasks on
from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult

ANSWERS = {"confirm": True, "name": "Ann"}


async def elicit(message: str, _type: Any, params: Any, _context: Any) -> ElicitResult[Any]:
    print(f"asked: {message}", flush=True)
    return ElicitResult(action="accept", content={key: ANSWERS[key] for key in params.requested_schema["properties"]})


async def main(url: str, tool: str, arguments: str) -> None:
    async with Client(url, elicitation_handler=elicit) as client:
        result = await client.call_tool(tool, json.loads(arguments), raise_on_error=False)
        print(f"error: {result.is_error}")
        print(result.content[0].text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
