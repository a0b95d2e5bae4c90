"""What the two Python drivers share: the command loop on stdin and stdout, and the answers a client gives.

A driver is a `Connection` over its SDK. Commands are JSON lines, each gets one reply with its `id`, and
several may be in progress. `drive.py` speaks the other side; ts_client.mjs follows the same protocol.
"""

import asyncio
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp.shared.dispatcher import ProgressFnT
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

Json = dict[str, Any]
LINE_BYTES = 64 * 1024 * 1024  # an argument of a call may hold megabytes
DEFAULT_ROOTS = [{"uri": "file:///project", "name": "project"}]
LISTS = {
    "list_tools": "tools",
    "list_prompts": "prompts",
    "list_resources": "resources",
    "list_resource_templates": "resourceTemplates",
}
SAMPLING = types.SamplingCapability(tools=types.SamplingToolsCapability())
LOG_LEVEL_KEY = "io.modelcontextprotocol/logLevel"
SAMPLED: Json = {
    "role": "assistant",
    "model": "test-model",
    "content": {"type": "text", "text": "sampled"},
    "stopReason": "endTurn",
}


class RefusedError(Exception):
    """A rule says that the client's callback fails."""


@dataclass
class Call:
    """What one command may answer, and what it saw."""

    answers: list[Json] = field(default_factory=list)
    asked: list[Json] = field(default_factory=list)
    progress: list[Json] = field(default_factory=list)
    logs: list[Json] = field(default_factory=list)

    def seen(self) -> Json:
        return {"asked": self.asked, "progress": self.progress, "logs": self.logs}


CURRENT: ContextVar[Call | None] = ContextVar("CURRENT", default=None)


class Connection(ABC):
    """One client of an SDK. A command is the method of its name, unless it is a call or a list."""

    client: Any
    """The SDK's, which both SDKs made alike."""
    whole = ""
    """How the names of its methods end that give the whole result."""

    def __init__(self, command: Json) -> None:
        self.url: str = command["url"]
        self.headers: dict[str, str] = command["headers"]
        self.declares: bool = command["declares"]
        """Whether it can be asked for anything."""
        self.calls: list[Call] = []

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[None]:
        """Connect; the connection is used inside this context."""

    @abstractmethod
    async def call_tool(self, command: Json, progress: ProgressFnT | None) -> Json: ...

    def describe(self) -> Json:
        """Say who the server is and what was negotiated."""
        client = self.client
        return describe(client.protocol_version, client.server_info, client.server_capabilities, client.instructions)

    def method(self, name: str) -> Callable[..., Awaitable[BaseModel]]:
        """Find the method that gives the whole result."""
        found: Callable[..., Awaitable[BaseModel]] = getattr(self.client, name + self.whole)
        return found

    async def get_prompt(self, command: Json) -> Json:
        return plain(await self.method("get_prompt")(command["name"], {}))

    async def read_resource(self, command: Json) -> Json:
        return plain(await self.method("read_resource")(command["uri"]))

    async def every_page(self, op: str) -> Json:
        """Join all pages; the rest of the result is the last page's."""
        kind = LISTS[op]
        items: list[Any] = []
        cursor = None
        while True:
            page = plain(await self.method(op)(cursor=cursor))
            items += page[kind]
            cursor = page.get("nextCursor")
            if cursor is None:
                return {**page, kind: items}

    async def complete(self, command: Json) -> Json:
        ref = completion_reference(command["ref"])
        return plain(await self.method("complete")(ref, command["argument"]))

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logged(plain(params))

    def call_of_callback(self) -> Call:
        """Find the call that a callback serves.

        On a modern connection callbacks run inside the call. On a legacy one they run in the receive loop,
        which knows no call: then the oldest one is as good a guess as any.
        """
        return CURRENT.get() or (self.calls[0] if self.calls else Call())

    async def answer(self, kind: str, key: object, params: Json) -> Json:
        """Record what was asked; take the first rule that fits, else a default."""
        call = self.call_of_callback()
        call.asked.append({"kind": kind, "key": None if key is None else str(key), "params": params})
        for rule in call.answers:
            if rule["kind"] == kind and rule.get("match", "") in json.dumps(params, ensure_ascii=False):
                call.answers.remove(rule)
                await asyncio.sleep(rule.get("delay_seconds", 0))
                reply: Json | None = rule.get("reply")
                if reply is not None and "error" in reply:
                    raise RefusedError(reply["error"])
                return self.default(kind, params) if reply is None else reply
        return self.default(kind, params)

    def default(self, kind: str, params: Json) -> Json:
        match kind:
            case "sample":
                return SAMPLED
            case "roots":
                return {"roots": DEFAULT_ROOTS}
            case _ if params.get("mode") == "url":
                return {"action": "accept"}
            case _:
                return {"action": "accept", "content": fill(params.get("requestedSchema", {}))}

    def logged(self, message: Json) -> None:
        """Give a log message to every call in progress: the SDKs do not say whose it is."""
        for call in self.calls:
            call.logs.append(message)


def fill(schema: Json) -> Json:
    """Fill a form: Ann for a name, else the least that is valid for each required field."""
    fields: Json = schema.get("properties", {})
    wanted = dict.fromkeys(schema.get("required", []))
    if fields.get("name", {}).get("type") == "string":
        wanted["name"] = None
    return {name: "Ann" if name == "name" else least(fields.get(name, {})) for name in wanted}


def least(field_schema: Json) -> Any:
    choices = field_schema.get("enum") or [option["const"] for option in field_schema.get("oneOf", [])]
    if choices:
        return choices[0]
    match field_schema.get("type"):
        case "boolean":
            return True
        case "integer" | "number":
            return field_schema.get("minimum", 1)
        case "array":
            items = field_schema.get("items", {})
            options = items.get("enum") or [option["const"] for option in items.get("anyOf", [])]
            return options[: field_schema.get("minItems", 1)]
        case _:
            samples = {"email": "ann@example.com", "uri": "https://example.com/", "date": "2026-11-21"}
            samples["date-time"] = "2026-11-21T00:00:00Z"
            text = samples.get(field_schema.get("format", ""), "text")
            return text.ljust(field_schema.get("minLength", 0), "x")


def plain(model: BaseModel) -> Json:
    dumped: Json = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped


def describe(
    version: str | None,
    server: types.Implementation | None,
    capabilities: types.ServerCapabilities | None,
    instructions: str | None,
) -> Json:
    """Say what a connection negotiated, in the words of the reply to `connect`."""
    return {
        "protocolVersion": version,
        "era": "modern" if version in MODERN_PROTOCOL_VERSIONS else "legacy",
        "serverInfo": None if server is None else plain(server),
        "capabilities": None if capabilities is None else plain(capabilities),
        "instructions": instructions,
    }


def request_meta(command: Json) -> Any:
    """Give the request's own `_meta`, with the log level: the SDKs have a setting for a whole client only."""
    return {LOG_LEVEL_KEY: command["log_level"]} if "log_level" in command else None


def completion_reference(ref: Json) -> types.PromptReference | types.ResourceTemplateReference:
    if ref["type"] == "ref/prompt":
        return types.PromptReference.model_validate(ref)
    return types.ResourceTemplateReference.model_validate(ref)


def sampling_result(reply: Json) -> types.CreateMessageResult | types.CreateMessageResultWithTools:
    if isinstance(reply["content"], list):
        return types.CreateMessageResultWithTools.model_validate(reply)
    return types.CreateMessageResult.model_validate(reply)


def explain(exc: BaseException) -> Json:
    """Give an exception as JSON, with the JSON-RPC code and data if it carries them."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    code = getattr(exc, "code", None)
    return {
        "type": type(exc).__name__,
        "message": str(exc) or repr(exc),
        "code": code if isinstance(code, int) else None,
        "data": getattr(exc, "data", None),
    }


class Driver:
    """Reads commands and answers them; holds at most one connection."""

    def __init__(self, connection_type: type[Connection]) -> None:
        self.connection_type = connection_type
        self.connection: Connection | None = None
        self.life: asyncio.Task[BaseException | None] | None = None
        self.closing = asyncio.Event()
        self.tasks = asyncio.TaskGroup()
        self.out = sys.stdout
        sys.stdout = sys.stderr  # a library that prints must not break the protocol

    async def run(self) -> None:
        lines = asyncio.StreamReader(limit=LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with self.tasks:
            while line := await lines.readline():
                self.tasks.create_task(self.reply(json.loads(line)))
            # The parent has closed stdin or is dead. No clean-up: whatever hangs would keep this process.
            os._exit(0)

    async def reply(self, command: Json) -> None:
        try:
            answer = await self.obey(command)
        except Exception as exc:  # noqa: BLE001 - whatever an SDK raises is the observation
            answer = {"error": explain(exc)}
        line = {"id": command["id"], "ok": "error" not in answer, **answer}
        print(json.dumps(line, default=str), file=self.out, flush=True)

    async def obey(self, command: Json) -> Json:
        match command["op"]:
            case "connect":
                return await self.connect(command)
            case "close":
                return await self.close()
            case "cancel_call":
                return await self.cancel_call(command)
            case "call_many":
                calls = [self.tasks.create_task(self.outcome(call | {"op": "call_tool"})) for call in command["calls"]]
                return {"result": [await call for call in calls]}
            case _:
                return await self.outcome(command)

    async def connect(self, command: Json) -> Json:
        await self.close()
        self.closing.clear()
        self.connection = connection = self.connection_type(command)
        ready = asyncio.Event()
        self.life = life = self.tasks.create_task(self.live(connection, ready))
        waiting = self.tasks.create_task(ready.wait())
        await asyncio.wait({life, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if life.done():
            return {"error": explain(life.result() or ConnectionError("closed while it connected"))}
        return {"result": connection.describe()}

    async def live(self, connection: Connection, ready: asyncio.Event) -> BaseException | None:
        """Hold the connection open. It must be closed by the task that opened it; the calls run in others."""
        try:
            async with connection.open():
                ready.set()
                await self.closing.wait()
        except Exception as exc:  # noqa: BLE001 - the reason is given to whoever calls next
            return exc
        return None

    async def close(self) -> Json:
        self.closing.set()
        failed = await self.life if self.life is not None else None
        self.life = self.connection = None
        return {"error": explain(failed)} if failed is not None else {"result": {}}

    async def outcome(self, command: Json) -> Json:
        """Run one command while the connection lives; say what came of it and what it saw. Never raises."""
        connection, life = self.connection, self.life
        if connection is None or life is None:
            return {"error": explain(ConnectionError("not connected"))}
        call = Call(command.get("answers", []))
        work = self.tasks.create_task(self.attempt(connection, command, call))
        try:
            await asyncio.wait({work, life}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({work}, timeout=1)  # when the connection died, it is given time to fail its calls
            if not work.done():
                lost = life.result() or ConnectionError("closed")
                return {"error": explain(lost), **call.seen()}
            return {**work.result(), **call.seen()}
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=1)

    async def attempt(self, connection: Connection, command: Json, call: Call) -> Json:
        CURRENT.set(call)
        connection.calls.append(call)
        try:
            result = await self.ask(connection, command, call)
            if command.get("log_level") or command.get("progress"):
                # The SDKs deliver notifications from a queue, so that the last may come after the result.
                await asyncio.sleep(0.02)
        except Exception as exc:  # noqa: BLE001 - whatever an SDK raises is the observation
            return {"error": explain(exc)}
        else:
            return {"result": result}
        finally:
            connection.calls.remove(call)

    async def ask(self, connection: Connection, command: Json, call: Call) -> Json:
        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            call.progress.append({"progress": progress, "total": total, "message": message})

        op: str = command["op"]
        if op in {"call_tool", "cancel_call"}:
            return await connection.call_tool(command, progressed if command.get("progress") else None)
        if op in LISTS:
            return await connection.every_page(op)
        found: Json = await getattr(connection, op)(command)
        return found

    async def cancel_call(self, command: Json) -> Json:
        """Start a call and cancel its task, as a user of the SDK would."""
        work = self.tasks.create_task(self.outcome(command | {"progress": True}))
        await asyncio.wait({work}, timeout=command["after_seconds"])
        if work.done():
            return {**work.result(), "cancelled": False}
        work.cancel()
        await asyncio.wait({work})
        return {"result": {}, "cancelled": True}


async def serve(connection_type: type[Connection]) -> None:
    await Driver(connection_type).run()


def main(connection_type: type[Connection]) -> None:
    asyncio.run(serve(connection_type))
