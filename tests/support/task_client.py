"""A client of the tasks extension. No reply is checked against the published models, which have no tasks.

task = await TaskClient(client).task("must_confirm", {"filename": "x"})
asked = await task.until("input_required")
await task.answer(asked, {"action": "accept", "content": {"confirm": True}})
done = await task.until("completed")
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gateway.protocol import mcp
from tests.support.workbench import ACCEPT, ALL, Client, Json, Reply

EXTENSION: Final[Json] = {**ALL, "extensions": {mcp.TASKS: {}}}
FIRST_FORM: Final[Json] = {**ALL, "tasks": {}}


class TaskClient(NamedTuple):
    """A client that declares tasks on each request."""

    client: Client
    capabilities: Mapping[str, Any] = EXTENSION

    async def send(self, method: str, params: Json, *, url: str | None = None, **headers: str) -> Reply:
        client = self.client if url is None else self.client.on(url)
        return await client.raw(*client.build(method, params, None, headers, self.capabilities))

    async def call(self, tool: str = "tool", arguments: Json | None = None, **more: Any) -> Reply:
        return await self.send(mcp.TOOLS_CALL, {"name": tool, "arguments": arguments or {}, **more})

    async def task(self, tool: str = "tool", arguments: Json | None = None, **more: Any) -> "Task":
        """Call a tool that becomes a task."""
        result = (await self.call(tool, arguments, **more)).result
        assert result["resultType"] == "task", result
        return Task(self, result["taskId"])

    async def first_form(self, tool: str = "tool", arguments: Json | None = None) -> "Task":
        """Ask for a task as SEP-2322 first had it."""
        return Task(self, (await self.call(tool, arguments, task={})).result["task"]["taskId"])


class Task(NamedTuple):
    """A task as its client knows it."""

    client: TaskClient
    id: str

    def on(self, client: Client) -> "Task":
        """The same task, of a client with another connection."""
        return Task(TaskClient(client, self.client.capabilities), self.id)

    async def send(self, method: str, *, url: str | None = None, **params: Any) -> Reply:
        return await self.client.send(method, {"taskId": self.id, **params}, url=url, **{"Mcp-Name": self.id})

    async def get(self, url: str | None = None) -> Json:
        return (await self.send(mcp.TASKS_GET, url=url)).result

    async def until(self, *statuses: str, url: str | None = None) -> Json:
        """Poll until the task has one of these states."""
        async with asyncio.timeout(self.client.client.seconds):
            while (found := await self.get(url))["status"] not in statuses:
                await asyncio.sleep(0.02)
        return found

    async def text(self, url: str | None = None) -> str:
        """The text of its result, once it is completed."""
        return str((await self.until("completed", url=url))["result"]["content"][0]["text"])

    async def answer(self, asked: Json, answer: Json = ACCEPT, url: str | None = None) -> Reply:
        """Answer every question of a view with the same answer."""
        return await self.send(mcp.TASKS_UPDATE, url=url, inputResponses=dict.fromkeys(asked["inputRequests"], answer))

    async def cancel(self) -> Reply:
        return await self.send(mcp.TASKS_CANCEL)
