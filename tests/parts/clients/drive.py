"""Drives the real modern clients: each is a child process that takes one command a line.

    async with modern_client("py") as client:
        await client.connect(url)
        reply = await client.call_tool("ask", {"question": "Who?"}, answers=[elicit({"action": "decline"})])
        assert reply.text == "decline"

A child ends with its stdin, so it cannot outlive this process. What scripts/parts builds is below .parts/.
"""

import asyncio
import itertools
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tests.parts.launch import NODE, NODE_MODULES, PARTS

Kind = Literal["py", "fm", "ts"]
Json = dict[str, Any]

PYTHON: Final = PARTS / "modern" / "bin" / "python"
HERE: Final = Path(__file__).parent
COMMANDS: Final[Mapping[Kind, tuple[Path, Path]]] = {
    "py": (PYTHON, HERE / "py_client.py"),
    "fm": (PYTHON, HERE / "fm_client.py"),
    "ts": (NODE, HERE / "ts_client.mjs"),
}
DEADLINE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 5.0


class DriverError(Exception):
    """A driver gave no reply: it died, or the deadline passed. The message ends with its stderr."""


@dataclass(frozen=True)
class CallError:
    """What the client's user would have caught. `code` is the JSON-RPC code if there was one."""

    type: str
    message: str
    code: int | None
    data: Any


@dataclass(frozen=True)
class Reply:
    """What one command came to, and what the client was asked and told meanwhile."""

    ok: bool
    result: Json | None = None
    error: CallError | None = None
    cancelled: bool | None = None
    asked: list[Json] = field(default_factory=list)
    progress: list[Json] = field(default_factory=list)
    logs: list[Json] = field(default_factory=list)
    many: list["Reply"] = field(default_factory=list)

    @property
    def value(self) -> Json:
        """The result; an AssertionError that shows the whole reply if there is none."""
        assert self.result is not None, self
        return self.result

    @property
    def text(self) -> str:
        """The text of a tool result's first block."""
        text: str = self.value["content"][0]["text"]
        return text

    @property
    def kinds(self) -> list[str]:
        """What was asked, in order: elicit, sample, roots."""
        return [asked["kind"] for asked in self.asked]


def read_reply(message: Json) -> Reply:
    fields = {name: value for name, value in message.items() if name != "id"}
    if "error" in fields:
        fields["error"] = CallError(**fields["error"])
    if isinstance(fields.get("result"), list):
        fields["many"] = [read_reply({"ok": "error" not in one, **one}) for one in fields.pop("result")]
    return Reply(**fields)


def rule(kind: str, reply: Json | None, match: str, delay_seconds: float) -> Json:
    fields: Json = {"kind": kind, "match": match, "delay_seconds": delay_seconds}
    return fields if reply is None else fields | {"reply": reply}


def elicit(reply: Json | None = None, *, match: str = "", delay_seconds: float = 0) -> Json:
    """Answer one elicitation. None gives the default answer, {"error": "..."} makes the callback fail."""
    return rule("elicit", reply, match, delay_seconds)


def sample(reply: Json | None = None, *, match: str = "") -> Json:
    return rule("sample", reply, match, 0)


def roots(reply: Json | None = None) -> Json:
    return rule("roots", reply, "", 0)


class ModernClient(asyncio.SubprocessProtocol):
    """The parent's side of one driver process. Commands may be sent concurrently."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.transport: asyncio.SubprocessTransport | None = None
        self.ids = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[Json]] = {}
        self.partial = b""
        self.stderr: deque[str] = deque(maxlen=200)
        self.lost = asyncio.Event()

    async def connect(self, url: str, *, declares: bool = True, headers: Mapping[str, str] | None = None) -> Reply:
        """Connect, or connect anew; without capabilities unless it `declares` them.

        Result: protocolVersion, era, serverInfo, capabilities, instructions.
        """
        return await self.command("connect", url=url, declares=declares, headers=dict(headers or {}))

    async def call_tool(
        self,
        name: str,
        arguments: Json | None = None,
        *,
        answers: Sequence[Json] = (),
        progress: bool = False,
        log_level: str | None = None,
    ) -> Reply:
        given = tool_call(name, arguments, answers) | {"progress": progress}
        return await self.command("call_tool", log_level=log_level, **given)

    async def call_many(self, calls: Sequence[Json]) -> list[Reply]:
        """Run several calls at once on this connection; each is made with `tool_call`."""
        reply = await self.command("call_many", calls=list(calls))
        assert reply.ok, reply
        return reply.many

    async def cancel_call(self, name: str, arguments: Json, *, after_seconds: float) -> Reply:
        """Start a call and cancel it so much later. `cancelled` is False if it ended before."""
        return await self.command("cancel_call", after_seconds=after_seconds, **tool_call(name, arguments))

    async def get_prompt(self, name: str) -> Reply:
        return await self.command("get_prompt", name=name)

    async def read_resource(self, uri: str) -> Reply:
        return await self.command("read_resource", uri=uri)

    async def list_all(self, what: Literal["tools", "prompts", "resources", "resource_templates"]) -> Reply:
        """List every page."""
        return await self.command(f"list_{what}")

    async def complete(self, ref: Json, argument: Json) -> Reply:
        return await self.command("complete", ref=ref, argument=argument)

    async def listen(self, notifications: Json) -> Json:
        """Subscribe (py and ts); what the server honours. A connection has one subscription in these drivers."""
        return (await self.command("listen", notifications=notifications)).value

    async def heard(self, count: int | None = None) -> tuple[list[list[str]], str | None]:
        """The next so many events, each a name of the Python SDK and a URI; fewer, and how, when it ended before."""
        value = (await self.command("heard", count=count)).value
        return value["events"], value["ended"]

    async def command(self, op: str, deadline_seconds: float = DEADLINE_SECONDS, **fields: Any) -> Reply:
        """Send one command and wait for its reply. Fields that are None are left out."""
        number = next(self.ids)
        given = {name: value for name, value in fields.items() if value is not None}
        self.write({"id": number, "op": op, **given})
        reply = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return read_reply(await asyncio.wait_for(reply, deadline_seconds))
        except TimeoutError:
            raise self.failure(f"no reply to {op} {fields.get('name', '')} in {deadline_seconds} s") from None
        finally:
            del self.waiting[number]

    def write(self, message: Json) -> None:
        stdin = None if self.transport is None else self.transport.get_pipe_transport(0)
        if self.lost.is_set() or not isinstance(stdin, asyncio.WriteTransport):
            raise self.failure("the driver has ended")
        stdin.write(json.dumps(message).encode() + b"\n")

    def failure(self, why: str) -> DriverError:
        return DriverError(f"{self.kind} client: {why}; its stderr:\n{''.join(self.stderr) or '(nothing)'}")

    async def end(self) -> None:
        """End the process: with a clean close if it still answers, else by force."""
        if self.transport is not None:
            # What failed before this is what the test reports; the process is killed below.
            with suppress(DriverError):
                await self.command("close", CLOSE_SECONDS)
            self.transport.close()
            await self.lost.wait()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.stderr.append(data.decode(errors="replace"))
            return
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            reply = self.waiting.get(message["id"])
            if reply is not None and not reply.done():  # else its deadline has passed
                reply.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        for reply in self.waiting.values():
            if not reply.done():
                reply.set_exception(self.failure("the driver ended"))


def tool_call(name: str, arguments: Json | None = None, answers: Sequence[Json] = ()) -> Json:
    """Describe one call for `call_many`."""
    return {"name": name, "arguments": arguments or {}, "answers": list(answers)}


@asynccontextmanager
async def modern_client(kind: Kind) -> AsyncIterator[ModernClient]:
    """Start a driver; it is ended with the context."""
    loop = asyncio.get_running_loop()
    environment = os.environ | {"MRTR_NODE_MODULES": str(NODE_MODULES), "PYTHONUNBUFFERED": "1"}
    _, client = await loop.subprocess_exec(lambda: ModernClient(kind), *COMMANDS[kind], env=environment)
    try:
        yield client
    finally:
        await client.end()
