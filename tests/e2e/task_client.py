"""A client of the tasks extension on plain HTTP, each request over its own connection.

task = await client.task("must_confirm", {"filename": "x"})
asked = await task.until("input_required")
await task.answer(asked, {"action": "accept", "content": {"confirm": True}})
done = await task.until("completed")
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.e2e.wire import ALL, Answer, Json, Wire, headers_of, request

EXTENSION: Final = "io.modelcontextprotocol/tasks"
DECLARED: Final[Mapping[str, Any]] = {**ALL, "extensions": {EXTENSION: {}}}
FIRST_FORM: Final[Mapping[str, Any]] = {**ALL, "tasks": {}}
CONFIRM: Final = {"action": "accept", "content": {"confirm": True}}
SECONDS: Final = 15.0


@dataclass(frozen=True)
class TaskClient:
    """A client that declares tasks on each request; `urls` are visited in turn."""

    wire: Wire
    urls: tuple[str, ...] = ()
    capabilities: Mapping[str, Any] = field(default_factory=lambda: DECLARED)

    async def send(self, method: str, params: Json, *, url: str | None = None, **headers: str) -> Answer:
        """Send a request about a task."""
        message = request(method, params, capabilities=self.capabilities)
        named = {"Mcp-Name": params["taskId"]} if "taskId" in params else {}
        client = self.wire.on(url) if url is not None else self.wire
        return await client.raw(json.dumps(message).encode(), {**headers_of(message), **named, **headers})

    async def call(self, tool: str, arguments: Json | None = None, **options: Any) -> Answer:
        message = request(
            "tools/call",
            {"name": tool, "arguments": arguments or {}, **options.pop("more", {})},
            capabilities=self.capabilities,
            **options,
        )
        return await self.wire.raw(json.dumps(message).encode(), headers_of(message))

    async def task(self, tool: str, arguments: Json | None = None, **options: Any) -> "Task":
        """Call a tool that becomes a task."""
        result = (await self.call(tool, arguments, **options)).result
        assert result["resultType"] == "task", result
        return Task(self, result["taskId"])


@dataclass(frozen=True)
class Task:
    """A task as its client knows it."""

    client: TaskClient
    id: str

    async def get(self, **options: Any) -> Json:
        return (await self.client.send("tasks/get", {"taskId": self.id}, **options)).result

    async def until(self, *statuses: str, **options: Any) -> Json:
        """Poll until the task has one of these states."""
        async with asyncio.timeout(SECONDS):
            while (found := await self.get(**options))["status"] not in statuses:
                await asyncio.sleep(0.05)
        return found

    async def answer(self, asked: Json, answer: Json, **options: Any) -> Answer:
        """Answer every question of a view with the same answer."""
        responses = dict.fromkeys(asked["inputRequests"], answer)
        return await self.client.send("tasks/update", {"taskId": self.id, "inputResponses": responses}, **options)

    async def cancel(self) -> Answer:
        return await self.client.send("tasks/cancel", {"taskId": self.id})
