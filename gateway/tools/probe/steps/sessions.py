"""Examines legacy sessions, opened in the same way as the gateway opens them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from msgspec import Raw

from gateway import __version__, world
from gateway.exchange import handshake
from gateway.exchange.handshake import Handshake
from gateway.protocol import jsonrpc, mcp, tool_list
from gateway.protocol.errors import GatewayError, NoHandshake, Refused, Unreachable, clean
from gateway.runtime.own_ids import new_id
from gateway.sessions.pool.tool_schemas import read_pages
from gateway.tools.probe.steps.context import ProbeContext, ProbeStopped
from gateway.upstream.channel import Answer, Channel, SideListener

VERSIONS: Final = tuple(sorted(mcp.LEGACY_VERSIONS, reverse=True))
_CLIENT: Final = Raw(jsonrpc.encode({"name": "mrtr-gateway", "version": __version__}))
_CAPABILITIES: Final = Raw(b'{"elicitation":{"form":{},"url":{}},"sampling":{"tools":{}},"roots":{}}')
"""Everything a client can declare: some servers offer a tool only to clients that can answer its questions."""
_NAMED: Final = 5
_NOT_HEARD: Final = SideListener()

Connect = Callable[[], Channel]


class ProbedSession(NamedTuple):
    """One open session."""

    channel: Channel
    shaken: Handshake
    seconds: float
    """The duration of the handshake."""


@asynccontextmanager
async def session(exam: ProbeContext, connect: Connect, version: str) -> AsyncIterator[ProbedSession]:
    """Open a session with a complete handshake, because half of one crashes some servers.

    Raises GatewayError, ValueError or TimeoutError.
    """
    channel, headers = connect(), exam.subject.headers
    params = {**handshake.initialize_params(_CLIENT, _CAPABILITIES), "protocolVersion": version}
    began = world.monotonic()
    try:
        async with asyncio.timeout(exam.timeouts.handshake_seconds):
            channel, result = await channel.open(jsonrpc.request(new_id(), mcp.INITIALIZE, params), headers)
        seconds = world.monotonic() - began
        shaken = handshake.handshake(bytes(result))
        # Before `initialized`: server-everything 2025.11.25 asks at once, and without a GET stream that is lost.
        await channel.listen(shaken.version, headers, _NOT_HEARD)
        await channel.send(jsonrpc.notification(mcp.INITIALIZED), headers)
        yield ProbedSession(channel, shaken, seconds)
    finally:
        await channel.close(end_session=True)


def explain(exam: ProbeContext, exc: GatewayError | ValueError | TimeoutError) -> ProbeStopped:
    """Explain a failed handshake; the caller raises the result."""
    name, found = "session", clean(exc.message) if isinstance(exc, GatewayError) else ""
    match exc:
        case Refused():
            name = "authorization"
            why = "The server requires a credential, or rejects the one that was sent."
            fix = "Pass one that is good for it: --bearer-file FILE, or --header 'NAME: VALUE'."
        case NoHandshake() if exam.server.era == "modern":
            name = "era"
            why = (
                "The route has era: bridge, which needs the legacy side of the server, but the server is modern only."
            )
            fix = "Set era: auto on the route: modern clients can use the server without a bridge."
        case NoHandshake():
            why = "The server answers, but refuses the handshake: it is not an MCP server, or not at this path."
            fix = "Check the path of the URL: usually /mcp, or /sse for HTTP+SSE."
        case Unreachable():
            name, why = "connection", "Nothing can be sent to the server."
            fix = "Check that the server runs, and on which address it listens."
        case GatewayError():
            why = "Without a session, no request can be served."
            fix = "Look in the server's log for its answer to `initialize`."
        case TimeoutError():
            found = f"`initialize` was not answered within {exam.timeouts.handshake_seconds:g} s"
            why = "The server accepts connections but does not answer: it may be hung or overloaded."
            fix = (
                "Look into the server's log and at its load, and restart it if it hangs. If it is only slow, raise "
                "--timeout here and timeouts.handshake_seconds. Otherwise check that it is an MCP server."
            )
        case _:
            found = f"the answer is not MCP: {clean(str(exc), 200)}"
            why = "The gateway supports the protocol versions 2024-11-05 to 2025-11-25, and 2026-07-28."
            fix = "Check that it is an MCP server, and which version it supports."
    return exam.notes.failed(name, found, why, fix)


async def list_tools(exam: ProbeContext, opened: ProbedSession) -> None:
    """Count the tools, and those that need attention."""
    if not opened.shaken.offers("tools"):
        return
    tools: list[tool_list.Tool] = []
    left_out: list[str] = []

    def take(page: Raw) -> None:
        listed = tool_list.read(page)
        if listed.tools is None:
            raise ValueError("no list of tools")
        tools.extend(listed.tools.values())
        left_out.extend(f"{clean(tool.name, 60) or 'unnamed'} ({clean(tool.reason, 100)})" for tool in listed.left_out)

    is_complete = await read_pages(lambda params: _tools_page(exam, opened.channel, params), take)
    exam.learn(
        tools=len(tools),
        ephemeral_tools=sum(tool.ephemeral for tool in tools),
        task_tools=sum(tool.task_support == "required" for tool in tools),
        optional_task_tools=sum(tool.task_support == "optional" for tool in tools),
        left_out_tools=tuple(left_out[:100]),
    )
    if not is_complete:
        exam.notes.warn(
            "tools",
            "tools/list was refused, or its result is malformed",
            "Clients cannot see which tools there are.",
            "Look in the server's log for its answer to tools/list.",
        )
        return
    server = exam.server
    found = f"{server.tools}, of which {server.ephemeral_tools} declare that they may run twice"
    if left_out:
        exam.notes.warn(
            "tools",
            f"{found}; left out: {'; '.join(left_out[:_NAMED])}",
            "One such tool makes modern clients reject the whole list, so the gateway leaves them out.",
            "Correct their schemas in the server.",
        )
    else:
        exam.notes.ok("tools", found)
    if server.task_tools or server.optional_task_tools:
        exam.notes.ok(
            "tasks",
            f"{server.task_tools} of the tools require a task, {server.optional_task_tools} support one",
            "The gateway runs required ones as tasks, whatever the client declares. If one that only supports tasks "
            "asks its user and fails after 60 s, as with the TypeScript SDK, set `tasks: {optional: drive}`.",
        )
    elif any(name.partition(".")[0] == "tasks" for name in server.capabilities):
        exam.notes.ok("tasks", "offered, but no tool supports them")


async def _tools_page(exam: ProbeContext, channel: Channel, params: dict[str, object]) -> Raw | None:
    """Return the result of one tools/list; None for an error or a timeout."""
    message = jsonrpc.request(new_id(), mcp.TOOLS_LIST, params)
    answer = Answer(message)
    try:
        async with asyncio.timeout(exam.timeouts.handshake_seconds):
            _ = await channel.request(message, exam.subject.headers, answer)
    except (GatewayError, ValueError, TimeoutError):
        return None
    return answer.found if isinstance(answer.found, Raw) else None
