"""An old server on the low-level API of the Python SDK 1.x; it runs in the environments py130 and py110.

Rule 1: what the two SDKs do differently is named in the block below, and nowhere else.
Rule 2: where the stream that a message takes is open to choice, it is the one that FastMCP of that SDK takes.
"""

import os
import uuid
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import anyio
from mcp import types
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import McpError
from pydantic import AnyUrl
from sdk_1x import (
    BroadcastingServer,
    MemoryEventStore,
    answered,
    ask_late,
    background_tasks,
    is_local,
    local_only,
    mcp_application,
    said,
    seen_of_client,
    serve_stdio,
    sse_application,
)
from serving import JSON, Ledger, arguments, compact, recorded, serve

SDK_VERSION = version("mcp")

# --- what the SDKs do differently ---
OLD_SDK = SDK_VERSION.startswith("1.10.")
HAS_URL_MODE = not OLD_SDK  # url elicitation, and the error -32042
HAS_SAMPLING_TOOLS = not OLD_SDK
CHECKS_HOST = not OLD_SDK  # 421 for a foreign Host header
PROGRESS_IS_RELATED = not OLD_SDK  # else progress goes to the GET stream
IS_MOUNTED = OLD_SDK  # /mcp answers 307 to /mcp/

LEVELS: tuple[types.LoggingLevel, ...] = (
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency",
)  # fmt: skip
options = arguments()
ledger = Ledger(options.ledger)


@dataclass
class SessionState:
    """What the server remembers of one session."""

    counter: int = 0
    level: types.LoggingLevel = "debug"
    url_asked: bool = False
    watched: set[str] = field(default_factory=set)


server = BroadcastingServer("old-py", version=SDK_VERSION, instructions="An old server for the tests.")
sessions: weakref.WeakKeyDictionary[Any, SessionState] = weakref.WeakKeyDictionary()


def state() -> SessionState:
    return sessions.setdefault(server.request_context.session, SessionState())


def session_id() -> str | None:
    request = server.request_context.request
    if request is None:
        return None
    return request.headers.get("mcp-session-id") or request.query_params.get("session_id")


# --- questions to the client ---


answer = partial(answered, ledger)


async def ask_form(tool: str, question: str, title: str | None = None, *, related: bool = True) -> str:
    context = server.request_context
    schema = {
        "type": "object",
        "title": title or "Name",
        "properties": {"name": {"type": "string", "title": "Name"}},
        "required": ["name"],
    }
    request_id = context.request_id if related else None
    return said(await answer(tool, context.session.elicit(question, schema, related_request_id=request_id)))


async def ask_model(tool: str, prompt: str, **extra: Any) -> Any:
    content = types.TextContent(type="text", text=prompt)
    message = types.SamplingMessage(role="user", content=content)
    session = server.request_context.session
    return await answer(tool, session.create_message([message], max_tokens=100, **extra))


async def ask_roots(tool: str) -> list[str]:
    return [str(root.uri) for root in (await answer(tool, server.request_context.session.list_roots())).roots]


async def report(progress: float, total: float) -> None:
    context = server.request_context
    token = context.meta.progressToken if context.meta else None
    if token is not None:
        related = context.request_id if PROGRESS_IS_RELATED else None
        await context.session.send_progress_notification(
            token, progress, total, f"step {progress:g}", related_request_id=related
        )


# --- tools ---

Content = list[Any]
Run = Callable[..., Awaitable[str | Content | tuple[Content, JSON]]]
tools: dict[str, tuple[types.Tool, Run]] = {}

TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def tool(
    required: JSON | None = None,
    optional: JSON | None = None,
    output: JSON | None = None,
    *,
    read_only: bool = False,
) -> Callable[[Run], Run]:
    required = required or {}
    schema = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}

    def register(run: Run) -> Run:
        name = run.__name__.removesuffix("_")
        extra: JSON = {"outputSchema": output} if output else {}
        if read_only:
            extra["annotations"] = types.ToolAnnotations(readOnlyHint=True)
        described = types.Tool(name=name, description=f"The {name} tool.", inputSchema=schema, **extra)
        tools[name] = described, run
        return run

    return register


@tool({"text": TEXT}, read_only=True)
async def echo(text: str) -> str:
    return text


@tool({"bytes": INTEGER})
async def big(bytes: int) -> str:  # noqa: A002 - the tool's argument
    return "x" * bytes


@tool({"message": TEXT})
async def fail(message: str) -> str:
    raise ValueError(message)


SQUARE = {"type": "object", "properties": {"n": INTEGER, "square": INTEGER}, "required": ["n", "square"]}


@tool({"n": INTEGER}, output=SQUARE)
async def structured(n: int) -> tuple[Content, JSON]:
    value = {"n": n, "square": n * n}
    return [types.TextContent(type="text", text=compact(value))], value


@tool(optional={"question": TEXT, "title": TEXT})
async def ask(question: str = "Your name?", title: str | None = None) -> str:
    return await ask_form("ask", question, title)


@tool(optional={"question": TEXT})
async def ask_get(question: str = "Your name?") -> str:
    return await ask_form("ask_get", question, related=False)


async def released(path: str) -> None:
    """Wait until a file is there: a test holds the tool at this point."""
    while path and not os.path.exists(path):  # noqa: ASYNC240, PTH110 - it takes microseconds
        await anyio.sleep(0.01)


async def ask_between(tool: str, question: str, before: str, after: str) -> str:
    await released(before)
    told = await ask_form(tool, question)
    await released(after)
    return told


@tool(optional={"question": TEXT, "before": TEXT, "after": TEXT})
async def ask_slow(question: str = "Your name?", before: str = "", after: str = "") -> str:
    return await ask_between("ask_slow", question, before, after)


@tool(optional={"question": TEXT, "before": TEXT, "after": TEXT}, read_only=True)
async def ask_read(question: str = "Your name?", before: str = "", after: str = "") -> str:
    return await ask_between("ask_read", question, before, after)


@tool({"n": INTEGER})
async def ask_sequence(n: int) -> str:
    return ", ".join([await ask_form("ask_sequence", f"question {i}") for i in range(1, n + 1)])


@tool()
async def ask_many() -> str:
    answers: JSON = {}

    async def form() -> None:
        answers["elicit"] = await ask_form("ask_many", "question of many")

    async def model() -> None:
        answers["sample"] = (await ask_model("ask_many", "prompt of many")).content.text

    async def roots_() -> None:
        answers["roots"] = await ask_roots("ask_many")

    async with anyio.create_task_group() as group:
        for question in (form, model, roots_):
            group.start_soon(question)
    return compact({key: answers[key] for key in ("elicit", "sample", "roots")})


@tool({"prompt": TEXT})
async def sample(prompt: str) -> str:
    return (await ask_model("sample", prompt)).content.text


@tool({"prompt": TEXT})
async def sample_related(prompt: str) -> str:
    related = server.request_context.request_id
    return (await ask_model("sample_related", prompt, related_request_id=related)).content.text


@tool()
async def roots() -> str:
    return compact(await ask_roots("roots"))


@tool()
async def ping_me() -> str:
    await answer("ping_me", server.request_context.session.send_ping())
    return "pong"


@tool({"steps": INTEGER}, {"delay_seconds": NUMBER})
async def progress(steps: int, delay_seconds: float = 0) -> str:
    for i in range(1, steps + 1):
        await report(i, steps)
        await anyio.sleep(delay_seconds)
    return "done"


@tool({"steps": INTEGER})
async def progress_ask(steps: int) -> str:
    for i in range(1, steps + 1):
        await report(i, 2 * steps)
    name = await ask_form("progress_ask", "halfway")
    for i in range(steps + 1, 2 * steps + 1):
        await report(i, 2 * steps)
    return name


@tool()
async def logs() -> str:
    context = server.request_context
    for level in ("debug", "info", "warning", "error"):
        if LEVELS.index(level) >= LEVELS.index(state().level):
            await context.session.send_log_message(
                level, f"a {level} message", logger="old-py", related_request_id=context.request_id
            )
    return "done"


@tool({"seconds": NUMBER})
async def give_up(seconds: float) -> str:
    with anyio.move_on_after(seconds):
        return await ask_form("give_up", "hurry")
    return "gave up"


@tool()
async def hang() -> str:
    await anyio.sleep_forever()
    raise AssertionError  # pragma: no cover


@tool({"seconds": NUMBER})
async def sleep(seconds: float) -> str:
    await anyio.sleep(seconds)
    return f"slept {seconds:g}"


@tool({"delay_seconds": NUMBER})
async def late(delay_seconds: float) -> str:
    ask_late(ledger, delay_seconds, lambda: ask_form("late", "a late question", related=False))
    return "done"


@tool(read_only=True)
async def whoami() -> str:
    context = server.request_context
    headers = context.request.headers.items() if context.request is not None else ()
    return seen_of_client(context.session, headers, session_id())


@tool()
async def counter() -> str:
    state().counter += 1
    return str(state().counter)


@tool({"uri": TEXT})
async def touch(uri: str) -> str:
    """Tell every session that watches the resource."""
    for session, remembered in list(sessions.items()):
        if uri in remembered.watched:
            await session.send_resource_updated(AnyUrl(uri))
    return "done"


@tool()
async def change_tools() -> str:
    await server.broadcast("notifications/tools/list_changed")
    return "done"


if HAS_URL_MODE:

    @tool({"url": TEXT})
    async def ask_url(url: str) -> str:
        context = server.request_context
        question = context.session.elicit_url(
            "Please open the page", url, uuid.uuid4().hex, related_request_id=context.request_id
        )
        return said(await answer("ask_url", question))

    @tool({"url": TEXT})
    async def url_required(url: str) -> str:
        if state().url_asked:
            return "done"
        state().url_asked = True
        from mcp.shared.exceptions import UrlElicitationRequiredError  # noqa: PLC0415 - not in 1.10

        raise UrlElicitationRequiredError(
            [
                types.ElicitRequestURLParams(
                    mode="url", message="Please authorise", url=url, elicitationId=uuid.uuid4().hex
                )
            ]
        )


if HAS_SAMPLING_TOOLS:

    @tool({"prompt": TEXT})
    async def sample_tools(prompt: str) -> str:
        schema = {"type": "object", "properties": {"city": TEXT}}
        weather = types.Tool(name="weather", description="The weather in a city.", inputSchema=schema)
        result = await ask_model(
            "sample_tools",
            prompt,
            tools=[weather],
            tool_choice=types.ToolChoice(mode="auto"),
            related_request_id=server.request_context.request_id,
        )
        blocks = result.content if isinstance(result.content, list) else [result.content]
        return compact([block.type for block in blocks])


async def list_tools(request: types.ListToolsRequest | None) -> types.ServerResult:
    described = [entry[0] for entry in tools.values()]
    server._tool_cache.update((entry.name, entry) for entry in described)
    # The SDK itself passes None, to fill its cache before a call.
    if request is None or not options.page_size:
        return types.ServerResult(types.ListToolsResult(tools=described))
    cursor = request.params.cursor if request.params else None
    if cursor is not None and not cursor.isdecimal():
        raise McpError(types.ErrorData(code=types.INVALID_PARAMS, message="Invalid cursor"))
    start = int(cursor or 0)
    end = start + options.page_size
    more = str(end) if end < len(described) else None
    return types.ServerResult(types.ListToolsResult(tools=described[start:end], nextCursor=more))


server.request_handlers[types.ListToolsRequest] = list_tools


@server.call_tool()
async def call_tool(name: str, given: JSON) -> Content | tuple[Content, JSON]:
    if name not in tools:
        raise ValueError(f"Unknown tool: {name}")
    async with recorded(ledger, name, session=session_id(), arguments=given):
        result = await tools[name][1](**given)
    return [types.TextContent(type="text", text=result)] if isinstance(result, str) else result


# --- prompts, resources, completion, logging ---


@server.list_prompts()
async def list_prompts() -> list[types.Prompt]:
    name = types.PromptArgument(name="name", description="Whom to greet.", required=True)
    return [
        types.Prompt(name="greet", description="A greeting.", arguments=[name]),
        types.Prompt(name="ask_prompt", description="A prompt that asks."),
    ]


@server.get_prompt()
async def get_prompt(name: str, given: dict[str, str] | None) -> types.GetPromptResult:
    async with recorded(ledger, name, session=session_id(), arguments=given):
        if name == "greet":
            words = f"Hello, {(given or {})['name']}!"
        elif name == "ask_prompt":
            words = await ask_form("ask_prompt", "for the prompt")
        else:
            raise ValueError(f"Unknown prompt: {name}")
    content = types.TextContent(type="text", text=words)
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content)])


@server.completion()
async def complete(
    ref: types.PromptReference | types.ResourceTemplateReference,
    argument: types.CompletionArgument,
    *_context: Any,
) -> types.Completion:
    names = ["Ann", "Anna", "Bob"] if isinstance(ref, types.PromptReference) and ref.name == "greet" else []
    found = [name for name in names if name.startswith(argument.value)]
    return types.Completion(values=found, total=len(found), hasMore=False)


@server.list_resources()
async def list_resources() -> list[types.Resource]:
    return [
        types.Resource(uri=AnyUrl("note://static"), name="static", description="A text.", mimeType="text/plain"),
        types.Resource(
            uri=AnyUrl("note://blob"), name="blob", description="Bytes.", mimeType="application/octet-stream"
        ),
        types.Resource(uri=AnyUrl("ask://form"), name="form", description="Asks first.", mimeType="text/plain"),
    ]


@server.list_resource_templates()
async def list_resource_templates() -> list[types.ResourceTemplate]:
    return [
        types.ResourceTemplate(
            uriTemplate="note://{id}", name="note", description="A note by its id.", mimeType="text/plain"
        )
    ]


@server.read_resource()
async def read_resource(uri: AnyUrl) -> list[ReadResourceContents]:
    name = str(uri)
    async with recorded(ledger, name, session=session_id()):
        if name == "note://blob":
            return [ReadResourceContents(b"\x00\x01\x02\xff", "application/octet-stream")]
        if name == "note://static":
            text = "a static note"
        elif name == "ask://form":
            text = await ask_form("ask://form", "for the resource")
        elif name.startswith("note://"):
            text = f"note {name.removeprefix('note://')}"
        else:
            # Not in the list of constants of either SDK, but in the specification of their time.
            raise McpError(types.ErrorData(code=-32002, message="Resource not found", data={"uri": name}))
        return [ReadResourceContents(text, "text/plain")]


@server.subscribe_resource()
async def subscribe(uri: AnyUrl) -> None:
    state().watched.add(str(uri))


@server.unsubscribe_resource()
async def unsubscribe(uri: AnyUrl) -> None:
    state().watched.discard(str(uri))


@server.set_logging_level()
async def set_level(level: types.LoggingLevel) -> None:
    ledger.write("level", "logging/setLevel", level=level, session=session_id())
    state().level = level


# --- HTTP ---


if __name__ == "__main__":
    if options.stdio:
        serve_stdio(server, background_tasks)
    elif options.sse:
        security = local_only() if CHECKS_HOST and is_local(options.host) else None
        serve(sse_application(server, security, lifespan=background_tasks), options)
    else:
        manager = StreamableHTTPSessionManager(
            server,
            event_store=MemoryEventStore() if options.event_store else None,
            json_response=options.json,
            stateless=options.stateless,
            security_settings=local_only() if CHECKS_HOST and is_local(options.host) else None,
        )
        serve(mcp_application(manager, mounted=IS_MOUNTED, lifespan=background_tasks), options)
