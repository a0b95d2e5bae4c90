"""Sessions of the old era: opened as the gateway opens them, looked at, and each of them ended."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway import __version__
from gateway.core import jsonrpc, mcp, negotiate, toolcheck, toolparams
from gateway.core.negotiate import Handshake
from gateway.errors import GatewayError, NoHandshake, Refused
from gateway.net.upstream import Channel
from gateway.probe.discreet import clean
from gateway.probe.examination import Examination, Stopped
from gateway.probe.greeting import capability_names, described

VERSIONS: Final = tuple(sorted(mcp.LEGACY_VERSIONS, reverse=True))
_CLIENT: Final = Raw(jsonrpc.encode({"name": "mrtr-gateway", "version": __version__}))
_CAPABILITIES: Final = Raw(b'{"elicitation":{"form":{},"url":{}},"sampling":{"tools":{}},"roots":{}}')
"""All that a client can declare: some servers offer a tool only to who can answer it."""
_PAGES: Final = 50
_NAMED: Final = 5

Connect = Callable[[], Channel]


class Session(NamedTuple):
    """One session that is open."""

    channel: Channel
    shaken: Handshake
    seconds: float
    """How long the handshake took."""


def initialize(version: str) -> bytes:
    """The request that asks for a session."""
    params = {**negotiate.initialize_params(_CLIENT, _CAPABILITIES), "protocolVersion": version}
    return jsonrpc.request(b'"init"', mcp.INITIALIZE, params)


@asynccontextmanager
async def session(exam: Examination, connect: Connect, version: str) -> AsyncIterator[Session]:
    """One session, whole: some servers die of half a handshake. Raises GatewayError, ValueError or TimeoutError."""
    channel, headers = connect(), exam.subject.headers
    began = time.monotonic()
    try:
        async with asyncio.timeout(exam.timeouts.handshake_seconds):
            channel, result = await channel.open(initialize(version), headers)
        seconds = time.monotonic() - began
        shaken = negotiate.handshake(result)
        await channel.listen(shaken.version, headers, lambda _: False, lambda: None)
        await channel.send(jsonrpc.notification(mcp.INITIALIZED), headers)
        yield Session(channel, shaken, seconds)
    finally:
        await channel.close(end_session=True)


def explain(exam: Examination, exc: GatewayError | ValueError | TimeoutError) -> Stopped:
    """What a handshake that failed means; to be raised."""
    match exc:
        case Refused():
            return exam.failed(
                "authorization",
                clean(exc.message),
                "The server does not accept the credential that was sent, or wants one.",
                "Pass one that is good for it: --bearer-file FILE, or --header 'NAME: VALUE'.",
            )
        case NoHandshake():
            return exam.failed(
                "session",
                clean(exc.message),
                "It answers, and refuses to begin: it is no MCP server, or not at this path."
                + (" The first answer was a web page." if exam.met_page else ""),
                "Check the path of the URL: mostly /mcp, for HTTP+SSE /sse.",
            )
        case GatewayError():
            return exam.failed(
                "session",
                clean(exc.message),
                "No session can be opened, so no request can be served.",
                "Look at the server's own log for what it says of `initialize`.",
            )
        case TimeoutError():
            return exam.failed(
                "session",
                f"`initialize` was not answered within {exam.timeouts.handshake_seconds:g} s",
                "Clients get an error after that time (timeouts.handshake_seconds).",
                "If it starts slowly, raise --timeout here and timeouts.handshake_seconds there; else check that it "
                "is an MCP server.",
            )
        case _:
            return exam.failed(
                "session",
                f"what it answers is not MCP: {clean(str(exc), 200)}",
                "The gateway speaks the protocol versions 2024-11-05 to 2025-11-25 and 2026-07-28.",
                "Check that it is an MCP server, and which version it speaks.",
            )


def introduce(exam: Examination, opened: Session) -> None:
    """Take over what the handshake says."""
    server, shaken = exam.server, opened.shaken
    server.name = described(shaken.server_info)
    server.versions = (shaken.version,)
    server.sessions = opened.channel.can_ask
    server.side_stream = opened.channel.hears_side
    server.handshake_seconds = round(opened.seconds, 3)
    server.capabilities = capability_names(shaken.capabilities)
    exam.spoken = True


async def list_tools(exam: Examination, opened: Session) -> None:
    """Count the tools, page by page, and those that need a word."""
    if not opened.shaken.offers("tools"):
        return
    params: dict[str, object] = {}
    left_out: list[str] = []
    server = exam.server
    for _ in range(_PAGES):
        page = await _ask(exam, opened.channel, mcp.TOOLS_LIST, params)
        if page is None:
            exam.warn(
                "tools",
                "tools/list was refused, or is no list",
                "Clients cannot see what there is to call.",
                "Look at the server's own log for what it says of tools/list.",
            )
            return
        try:
            kept, dropped = toolcheck.usable(page)
            tools = toolparams.of_tools(bytes(kept)).values()
            cursor = jsonrpc.text(jsonrpc.fields(kept).get("nextCursor"))
            server.task_tools += _need_tasks(kept)
        except ValueError:
            break
        left_out += (f"{clean(tool.name, 60) or 'one without a name'} ({clean(tool.reason, 100)})" for tool in dropped)
        server.tools += len(tools)
        server.ephemeral_tools += sum(tool.ephemeral for tool in tools)
        if cursor is None:
            break
        params = {"cursor": cursor}
    server.left_out_tools = tuple(left_out[:100])
    _tell_tools(exam)


def _tell_tools(exam: Examination) -> None:
    server = exam.server
    found = f"{server.tools}, of which {server.ephemeral_tools} say that they may run twice"
    if server.left_out_tools:
        shown = "; ".join(server.left_out_tools[:_NAMED])
        exam.warn(
            "tools",
            f"{found}; left out: {shown}",
            "Modern clients refuse the whole list for these, so the gateway leaves them out of it.",
            "Correct their schemas in the server.",
        )
    else:
        exam.ok("tools", found)
    if server.task_tools:
        exam.warn(
            "tasks",
            f"tools that can only be called as a task: {server.task_tools}",
            "Tasks of 2025-11-25 are not translated: a modern client's call of such a tool fails.",
            'Have the server offer them with taskSupport "optional".',
        )
    elif any(name.partition(".")[0] == "tasks" for name in server.capabilities):
        exam.ok("tasks", "offered, and needed by no tool", "Tasks of 2025-11-25 are not translated.")


class _Execution(msgspec.Struct):
    taskSupport: str | None = None  # noqa: N815  (the wire's spelling)


class _Tool(msgspec.Struct):
    execution: _Execution | None = None


class _Tools(msgspec.Struct):
    tools: list[_Tool]


def _need_tasks(result: Raw) -> int:
    listed = msgspec.json.decode(result, type=_Tools).tools
    return sum(tool.execution is not None and tool.execution.taskSupport == "required" for tool in listed)


async def _ask(exam: Examination, channel: Channel, method: str, params: dict[str, object]) -> Raw | None:
    """The result of one request; None for an error or silence."""
    results: list[Raw] = []

    def receive(data: bytes) -> bool:
        said = jsonrpc.message(data)
        if said.method is not None:
            return False
        if isinstance(said.result, Raw):
            results.append(said.result)
        return True

    try:
        async with asyncio.timeout(exam.timeouts.handshake_seconds):
            _ = await channel.request(jsonrpc.request(b'"probe"', method, params), exam.subject.headers, receive)
    except (GatewayError, ValueError, TimeoutError):
        return None
    return results[0] if results else None
