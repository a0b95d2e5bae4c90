"""An old server on fastmcp 3, with the tools of old_py.py; it runs in the environment fm3.

Where fastmcp's own `Context` can do a thing it is used, since that is what people's servers do: its form,
sampling and progress messages go on the stream of the call. `ctx.session` is the SDK's session below it.
"""

import uuid
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.prompts import Message
from fastmcp.server.dependencies import get_http_headers
from fastmcp.server.elicitation import AcceptedElicitation
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from mcp import types
from mcp.server.session import ServerSession
from mcp.shared.exceptions import UrlElicitationRequiredError
from mcp.types import ToolAnnotations
from pydantic import create_model
from sdk_1x import MemoryEventStore, answered, ask_late, background_tasks, said, seen_of_client
from serving import JSON, Ledger, arguments, compact, recorded, serve

options = arguments()
ledger = Ledger(options.ledger)


@dataclass
class SessionState:
    """What the server remembers of one session."""

    counter: int = 0
    url_asked: bool = False


sessions: weakref.WeakKeyDictionary[ServerSession, SessionState] = weakref.WeakKeyDictionary()


@asynccontextmanager
async def lifespan(_server: Any) -> AsyncIterator[JSON]:
    async with background_tasks():
        yield {}


class UrlErrors(Middleware):
    """Lets -32042 through: fastmcp makes a ToolError of what a tool raises, not of what is raised here."""

    async def on_call_tool(self, context: MiddlewareContext[Any], call_next: CallNext[Any, Any]) -> Any:
        try:
            return await call_next(context)
        except ToolError as exc:
            if isinstance(exc.__cause__, UrlElicitationRequiredError):
                raise exc.__cause__ from exc
            raise


class Recorder(Middleware):
    """Writes to the ledger what runs, and how it ends."""

    async def on_call_tool(self, context: MiddlewareContext[Any], call_next: CallNext[Any, Any]) -> Any:
        return await self._record(context.message.name, context, call_next, arguments=context.message.arguments)

    async def on_get_prompt(self, context: MiddlewareContext[Any], call_next: CallNext[Any, Any]) -> Any:
        return await self._record(context.message.name, context, call_next, arguments=context.message.arguments)

    async def on_read_resource(self, context: MiddlewareContext[Any], call_next: CallNext[Any, Any]) -> Any:
        return await self._record(str(context.message.uri), context, call_next)

    async def _record(
        self, name: str, context: MiddlewareContext[Any], call_next: CallNext[Any, Any], **detail: Any
    ) -> Any:
        async with recorded(ledger, name, session=session_id(), **detail):
            return await call_next(context)


server: FastMCP[Any] = FastMCP(
    "old-fastmcp",
    instructions="An old server for the tests.",
    lifespan=lifespan,
    middleware=[UrlErrors(), Recorder()],
    list_page_size=options.page_size or None,
)


def state(ctx: Context) -> SessionState:
    return sessions.setdefault(ctx.session, SessionState())


def session_id() -> str | None:
    return get_http_headers(include_all=True).get("mcp-session-id")


# --- questions to the client ---


answer = partial(answered, ledger)


def form(title: str | None) -> Any:
    return create_model(title or "Name", name=(str, ...))


async def ask_form(ctx: Context, tool: str, question: str, title: str | None = None) -> str:
    result = await answer(tool, ctx.elicit(question, form(title)))
    if isinstance(result, AcceptedElicitation):
        return f"accept:{compact(result.data.model_dump())}"
    return result.action


async def ask_form_unrelated(session: ServerSession, tool: str, question: str) -> str:
    return said(await answer(tool, session.elicit_form(question, form(None).model_json_schema())))


async def ask_model(ctx: Context, tool: str, prompt: str, **extra: Any) -> Any:
    content = types.TextContent(type="text", text=prompt)
    message = types.SamplingMessage(role="user", content=content)
    return await answer(tool, ctx.session.create_message([message], max_tokens=100, **extra))


# --- tools ---


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def echo(text: str) -> str:
    return text


@server.tool
async def big(bytes: int) -> str:  # noqa: A002 - the tool's argument
    return "x" * bytes


@server.tool
async def fail(message: str) -> str:
    raise ToolError(message)


@dataclass
class Square:
    """The output of `structured`."""

    n: int
    square: int


@server.tool
async def structured(n: int) -> Square:
    return Square(n, n * n)


@server.tool
async def ask(ctx: Context, question: str = "Your name?", title: str | None = None) -> str:
    return await ask_form(ctx, "ask", question, title)


@server.tool
async def ask_get(ctx: Context, question: str = "Your name?") -> str:
    return await ask_form_unrelated(ctx.session, "ask_get", question)


@server.tool
async def ask_url(ctx: Context, url: str) -> str:
    question = ctx.session.elicit_url("Please open the page", url, uuid.uuid4().hex, related_request_id=ctx.request_id)
    return said(await answer("ask_url", question))


@server.tool
async def ask_sequence(ctx: Context, n: int) -> str:
    return ", ".join([await ask_form(ctx, "ask_sequence", f"question {i}") for i in range(1, n + 1)])


@server.tool
async def ask_many(ctx: Context) -> str:
    answers: JSON = {}

    async def person() -> None:
        answers["elicit"] = await ask_form(ctx, "ask_many", "question of many")

    async def model() -> None:
        answers["sample"] = (await answer("ask_many", ctx.sample("prompt of many"))).text

    async def roots_() -> None:
        answers["roots"] = [str(root.uri) for root in await answer("ask_many", ctx.list_roots())]

    async with anyio.create_task_group() as group:
        for question in (person, model, roots_):
            group.start_soon(question)
    return compact({key: answers[key] for key in ("elicit", "sample", "roots")})


@server.tool
async def sample(ctx: Context, prompt: str) -> str:
    return (await answer("sample", ctx.sample(prompt))).text


@server.tool
async def sample_related(ctx: Context, prompt: str) -> str:
    return (await ask_model(ctx, "sample_related", prompt, related_request_id=ctx.request_id)).content.text


@server.tool
async def sample_tools(ctx: Context, prompt: str) -> str:
    """The sample_tools tool. `ctx.sample` would run the tools itself and ask again."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    result = await ask_model(
        ctx,
        "sample_tools",
        prompt,
        tools=[types.Tool(name="weather", description="The weather in a city.", inputSchema=schema)],
        tool_choice=types.ToolChoice(mode="auto"),
        related_request_id=ctx.request_id,
    )
    blocks = result.content if isinstance(result.content, list) else [result.content]
    return compact([block.type for block in blocks])


@server.tool
async def roots(ctx: Context) -> str:
    return compact([str(root.uri) for root in await answer("roots", ctx.list_roots())])


@server.tool
async def ping_me(ctx: Context) -> str:
    await answer("ping_me", ctx.session.send_ping())
    return "pong"


@server.tool
async def url_required(ctx: Context, url: str) -> str:
    if state(ctx).url_asked:
        return "done"
    state(ctx).url_asked = True
    raise UrlElicitationRequiredError(
        [types.ElicitRequestURLParams(mode="url", message="Please authorise", url=url, elicitationId=uuid.uuid4().hex)]
    )


@server.tool
async def progress(ctx: Context, steps: int, delay_seconds: float = 0) -> str:
    for i in range(1, steps + 1):
        await ctx.report_progress(i, steps, f"step {i}")
        await anyio.sleep(delay_seconds)
    return "done"


@server.tool
async def progress_ask(ctx: Context, steps: int) -> str:
    for i in range(1, steps + 1):
        await ctx.report_progress(i, 2 * steps, f"step {i}")
    name = await ask_form(ctx, "progress_ask", "halfway")
    for i in range(steps + 1, 2 * steps + 1):
        await ctx.report_progress(i, 2 * steps, f"step {i}")
    return name


@server.tool
async def logs(ctx: Context) -> str:
    for level in ("debug", "info", "warning", "error"):
        await ctx.log(f"a {level} message", level=level, logger_name="old-fastmcp")
    return "done"


@server.tool
async def give_up(ctx: Context, seconds: float) -> str:
    with anyio.move_on_after(seconds):
        return await ask_form(ctx, "give_up", "hurry")
    return "gave up"


@server.tool
async def hang() -> str:
    await anyio.sleep_forever()
    raise AssertionError


@server.tool
async def sleep(seconds: float) -> str:
    await anyio.sleep(seconds)
    return f"slept {seconds:g}"


@server.tool
async def late(ctx: Context, delay_seconds: float) -> str:
    session = ctx.session
    ask_late(ledger, delay_seconds, lambda: ask_form_unrelated(session, "late", "a late question"))
    return "done"


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def whoami(ctx: Context) -> str:
    return seen_of_client(ctx.session, get_http_headers(include_all=True).items(), session_id())


@server.tool
async def counter(ctx: Context) -> str:
    state(ctx).counter += 1
    return str(state(ctx).counter)


# --- prompts and resources; fastmcp 3 has no completion ---


@server.prompt
async def greet(name: str) -> str:
    """A greeting."""
    return f"Hello, {name}!"


@server.prompt
async def ask_prompt(ctx: Context) -> list[Message]:
    """A prompt that asks."""
    return [Message(await ask_form(ctx, "ask_prompt", "for the prompt"))]


@server.resource("note://static", mime_type="text/plain")
async def static() -> str:
    """A text."""
    return "a static note"


@server.resource("note://blob", mime_type="application/octet-stream")
async def blob() -> bytes:
    """Bytes."""
    return b"\x00\x01\x02\xff"


@server.resource("note://{id}", mime_type="text/plain")
async def note(id: str) -> str:  # noqa: A002 - the name in the template
    """A note by its id."""
    return f"note {id}"


@server.resource("ask://form", mime_type="text/plain")
async def form_resource(ctx: Context) -> str:
    """Asks first."""
    return await ask_form(ctx, "ask://form", "for the resource")


if __name__ == "__main__" and options.stdio:
    server.run("stdio", show_banner=False)
elif __name__ == "__main__":
    application = server.http_app(
        path="/mcp",
        event_store=MemoryEventStore() if options.event_store else None,
        json_response=options.json,
        stateless_http=options.stateless,
    )
    serve(application, options)
