"""One scenario of the table of eras, played by the Python SDK 1.x or 2.x over any transport.

    python scenario.py [--era auto|legacy] [--ledger FILE] [--everything] http URL | sse URL | stdio COMMAND...

Prints a JSON object with the outcome of each step. `--ledger` is that of the server: it tells when `hang` runs.
`--everything` puts the calls into the words of server-everything, which lacks some. With the SDK 1.x, in its place:

    --calls JSON [--gate FILE]  plays [["ask", {"question": "Who?"}], ...], and prints a list of the texts; an error is
                                a text that begins with its code. With a gate, it creates FILE.asked when it is asked,
                                and answers when FILE exists; at the first progress it creates FILE.progressed
    --subscribe RESOURCE        prints `subscribed`, then the URI of each update. For each line of its input it calls
                                the tool `touch`, and prints `touched`; it ends with its input
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import AnyUrl

OLD = version("mcp").startswith("1.")
if OLD:
    from mcp import ClientSession, McpError, StdioServerParameters, stdio_client, types
    from mcp.client import streamable_http
    from mcp.client.sse import sse_client

    connect_http = getattr(streamable_http, "streamable_http_client", None) or streamable_http.streamablehttp_client
else:
    import mcp_types as types
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.exceptions import MCPError as McpError

STEP_SECONDS = 25.0
POLL_SECONDS = 0.02
GIVEN_UP: list[asyncio.Task[Any]] = []
"""Calls that the server was told to cancel; the SDK 1.x ends its session if it gets a response as its task ends."""

parser = argparse.ArgumentParser()
parser.add_argument("--era", default="auto")
parser.add_argument("--ledger", type=Path)
parser.add_argument("--everything", action="store_true")
parser.add_argument("--calls", type=json.loads)
parser.add_argument("--gate", type=Path)
parser.add_argument("--subscribe")
parser.add_argument("transport", choices=("http", "sse", "stdio"))
parser.add_argument("where", nargs=argparse.REMAINDER)
flags = parser.parse_args()


def note(what: str) -> None:
    if flags.gate is not None:
        Path(f"{flags.gate}.{what}").touch()


async def elicit(_context: Any, _params: Any) -> types.ElicitResult:
    note("asked")
    while flags.gate is not None and not flags.gate.exists():
        await asyncio.sleep(POLL_SECONDS)
    return types.ElicitResult(action="accept", content={"name": "Ann"})


async def sample(_context: Any, _params: Any) -> types.CreateMessageResult:
    said = types.TextContent(type="text", text="sampled")
    return types.CreateMessageResult(role="assistant", model="test-model", content=said)


async def roots(_context: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///project")])


async def updated(message: Any) -> None:
    """Hear of a resource."""
    if isinstance(message, types.ServerNotification) and isinstance(message.root, types.ResourceUpdatedNotification):
        print(message.root.params.uri, flush=True)


def parameters() -> StdioServerParameters:
    return StdioServerParameters(command=flags.where[0], args=flags.where[1:], env=dict(os.environ))


@asynccontextmanager
async def connected() -> AsyncIterator[Any]:
    answers = {"elicitation_callback": elicit, "sampling_callback": sample, "list_roots_callback": roots}
    if OLD:
        transports = {"http": connect_http, "sse": sse_client}
        opening = (
            stdio_client(parameters()) if flags.transport == "stdio" else transports[flags.transport](flags.where[0])
        )
        hears = {"message_handler": updated} if flags.subscribe else {}
        async with opening as (reading, writing, *_), ClientSession(reading, writing, **answers, **hears) as session:
            await session.initialize()
            yield session
        return
    transport = stdio_client(parameters()) if flags.transport == "stdio" else streamable_http_client(flags.where[0])
    async with Client(transport, mode=flags.era, **answers) as client:
        yield client


def text(result: Any) -> str:
    return "".join(block.text for block in result.content if block.type == "text")


def is_error(result: Any) -> bool:
    return bool(result.isError if OLD else result.is_error)


async def names(client: Any) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await (client.list_tools(cursor) if OLD else client.list_tools(cursor=cursor))
        found += [tool.name for tool in page.tools]
        cursor = page.nextCursor if OLD else page.next_cursor
        if cursor is None:
            return found


async def reported(client: Any, tool: str, **arguments: Any) -> tuple[str, list[float]]:
    """The text of a call, and its progress."""
    seen: list[float] = []

    async def report(done: float, _total: float | None, _message: str | None) -> None:
        seen.append(done)

    result = await client.call_tool(tool, arguments, progress_callback=report)
    return text(result), sorted(seen)


def runs(event: str) -> int:
    if flags.ledger is None or not flags.ledger.exists():
        return 0
    lines = [json.loads(line) for line in flags.ledger.read_text().split("\n")[:-1]]
    return sum((line["event"], line["tool"]) == (event, "hang") for line in lines)


async def happened(event: str) -> None:
    while not runs(event):
        await asyncio.sleep(POLL_SECONDS)


async def cancel(client: Any) -> str:
    """Cancel a call that runs; the server has to hear of it."""
    call = asyncio.get_running_loop().create_task(client.call_tool("hang", {}))
    await happened("run")
    if OLD:  # this SDK does not tell the server when its caller gives up
        params = types.CancelledNotificationParams(requestId=client._request_id - 1, reason="enough")
        notice = types.CancelledNotification(method="notifications/cancelled", params=params)
        await client.send_notification(types.ClientNotification(notice))
        GIVEN_UP.append(call)
    else:
        call.cancel()
        await asyncio.wait((call,))
    await happened("cancelled")
    return "cancelled"


async def failing(client: Any) -> list[Any]:
    result = await client.call_tool("fail", {"message": "bad luck"})
    return [is_error(result), text(result)]


async def unknown(client: Any) -> str:
    """Servers refuse an unknown tool by an error, or by a result that is one."""
    try:
        result = await client.call_tool("no_such_tool", {})
    except McpError:
        return "refused"
    return "refused" if is_error(result) else text(result)


async def answered(client: Any, tool: str, **arguments: Any) -> str:
    return text(await client.call_tool(tool, arguments))


STEPS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "list": names,
    "progress": lambda client: reported(client, "progress", steps=3),
    "form": lambda client: answered(client, "ask", question="Who?"),
    "two at once": lambda client: answered(client, "ask_many"),
    "sampling": lambda client: answered(client, "sample", prompt="Say it"),
    "cancel": cancel,
    "error": failing,
    "unknown tool": unknown,
}


async def everything_progress(client: Any) -> tuple[str, list[float]]:
    said, seen = await reported(client, "trigger-long-running-operation", steps=3, duration=0.15)
    return "done" if "completed" in said else said, seen


async def everything_form(client: Any) -> str:
    result = json.loads((await answered(client, "trigger-elicitation-request")).partition("Raw result:")[2])
    return f"{result['action']}:{json.dumps(result['content'], separators=(',', ':'))}"


async def everything_sampling(client: Any) -> str:
    sampled = await answered(client, "trigger-sampling-request", prompt="Say it", maxTokens=9)
    return str(json.loads(sampled.partition(":")[2])["content"]["text"])


async def everything_error(client: Any) -> list[Any]:
    return [is_error(await client.call_tool("echo", {}))]


EVERYTHING: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "list": names,
    "progress": everything_progress,
    "form": everything_form,
    "sampling": everything_sampling,
    "error": everything_error,
    "unknown tool": unknown,
}


async def play_calls(client: Any) -> None:
    texts = []
    for name, arguments in flags.calls:
        try:
            texts.append(text(await client.call_tool(name, arguments, progress_callback=progressed)))
        except McpError as exc:
            texts.append(f"{exc.error.code} {exc.error.message}")
    print(json.dumps(texts), flush=True)


async def progressed(*_: Any) -> None:
    note("progressed")


async def watch(client: Any) -> None:
    await client.subscribe_resource(AnyUrl(flags.subscribe))
    print("subscribed", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await client.call_tool("touch", {})
        print("touched", flush=True)


async def play_scenario(client: Any) -> None:
    outcomes: dict[str, Any] = {}
    for name, step in (EVERYTHING if flags.everything else STEPS).items():
        try:
            async with asyncio.timeout(STEP_SECONDS):
                outcomes[name] = await step(client)
        except Exception as exc:  # noqa: BLE001  (it is the outcome)
            outcomes[name] = f"{type(exc).__name__}: {exc}"
        print(json.dumps(outcomes), flush=True)
    for call in GIVEN_UP:
        call.cancel()
    await asyncio.gather(*GIVEN_UP, return_exceptions=True)


async def main() -> None:
    async with connected() as client:
        await (play_calls if flags.calls else watch if flags.subscribe else play_scenario)(client)


asyncio.run(main())
