"""An old server on the Python SDK 1.30 whose tools are tasks.

Its tools are those that the official suite asks for in its scenarios tasks-*, and a few for the traps that real
servers set. One server serves all sessions, as the SDK's session manager does, and so they share its task group.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from mcp import types
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from sdk_1x import mcp_application
from serving import JSON, Ledger, arguments, serve

Work = Callable[[ServerTaskContext, JSON, Any], Awaitable[types.CallToolResult]]

options = arguments()
ledger = Ledger(options.ledger)
server: Server[Any, Any] = Server("old-tasks-py", version="1.0.0")
_ = server.experimental.enable_tasks()
works: dict[str, tuple[types.Tool, Work]] = {}

CONFIRM: JSON = {"confirm": {"type": "boolean", "title": "Confirm"}}
NAME: JSON = {"name": {"type": "string", "title": "Name"}}


def text(words: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=words)], isError=is_error)


def form(title: str, properties: JSON) -> JSON:
    return {"type": "object", "title": title, "properties": properties, "required": list(properties)}


def task(name: str, support: str, **properties: str) -> Callable[[Work], Work]:
    def register(work: Work) -> Work:
        schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
        execution = types.ToolExecution(taskSupport=support)  # type: ignore[arg-type]
        works[name] = types.Tool(name=name, inputSchema=schema, execution=execution), work
        return work

    return register


@task("slow_compute", "optional", seconds="number", label="string")
async def slow_compute(context: ServerTaskContext, given: JSON, _early: Any) -> types.CallToolResult:
    await anyio.sleep(given["seconds"])
    return text(f"computed {given.get('label', '')}")


@task("failing_job", "required")
async def failing_job(context: ServerTaskContext, _given: JSON, _early: Any) -> types.CallToolResult:
    await anyio.sleep(0.3)
    return text("the job failed", is_error=True)


@task("protocol_error_job", "optional")
async def protocol_error_job(context: ServerTaskContext, _given: JSON, _early: Any) -> types.CallToolResult:
    await anyio.sleep(0.1)
    raise RuntimeError("the job broke")


@task("confirm_delete", "optional", filename="string")
@task("must_confirm", "required", filename="string")
async def confirm_delete(context: ServerTaskContext, given: JSON, _early: Any) -> types.CallToolResult:
    answer = await context.elicit(f"Delete {given['filename']}?", form("Confirm", CONFIRM))
    ledger.write("answered", "confirm_delete", result=answer.model_dump())
    return text(f"{'deleted' if (answer.content or {}).get('confirm') else 'kept'} {given['filename']}")


@task("multi_input", "optional")
async def multi_input(context: ServerTaskContext, _given: JSON, _early: Any) -> types.CallToolResult:
    answers: JSON = {}
    asked: list[types.ElicitRequestFormParams] = []

    class Kept(types.ElicitRequestFormParams):
        """The SDK makes the id of a question from the address of its params, and then forgets these.

        So it may give both questions one id, and then only the later one is ever answered.
        """

        def model_post_init(self, _context: Any) -> None:
            asked.append(self)

    async def ask(message: str, title: str, properties: JSON) -> None:
        answers[title] = (await context.elicit(message, form(title, properties))).content or {}

    params, types.ElicitRequestFormParams = types.ElicitRequestFormParams, Kept  # type: ignore[misc]
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, "Who?", "Name", NAME)
            group.start_soon(ask, "Sure?", "Sure", CONFIRM)
    finally:
        types.ElicitRequestFormParams = params  # type: ignore[misc]
    return text(f"{answers['Name'].get('name')}: {answers['Sure'].get('confirm')}")


@task("ask_twice", "required")
async def ask_twice(context: ServerTaskContext, _given: JSON, _early: Any) -> types.CallToolResult:
    first = await context.elicit("First?", form("First", NAME))
    second = await context.elicit("Second?", form("Second", NAME))
    return text(f"{(first.content or {}).get('name')}, {(second.content or {}).get('name')}")


@task("ask_often", "required", times="number")
async def ask_often(context: ServerTaskContext, given: JSON, _early: Any) -> types.CallToolResult:
    """Asks the same question again and again. The SDK gives it an id with an address in it, which soon comes again."""
    names = [(await context.elicit("Next?", form("Name", NAME))).content or {} for _ in range(int(given["times"]))]
    return text(", ".join(str(each.get("name")) for each in names))


@task("test_tool_with_task", "required")
async def asks_before(context: ServerTaskContext, _given: JSON, early: Any) -> types.CallToolResult:
    await anyio.sleep(0.05)
    return text(f"Hello, {early}!")


@server.list_tools()
async def list_tools() -> list[types.Tool]:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    return [types.Tool(name="greet", inputSchema=schema), *(tool for tool, _ in works.values())]


@server.call_tool(validate_input=False)
async def call_tool(name: str, given: JSON) -> types.CallToolResult | types.CreateTaskResult:
    context = server.request_context
    if name == "greet":
        return text(f"Hello, {given['name']}!")
    tool, work = works[name]
    context.experimental.validate_for_tool(tool)
    early = None
    if name == "test_tool_with_task":
        asked = await context.session.elicit_form(
            "What is your name?", form("user_name", NAME), related_request_id=context.request_id
        )
        early = (asked.content or {}).get("name")

    async def run(task_context: ServerTaskContext) -> types.CallToolResult:
        ledger.write("run", name, task=task_context.task_id, arguments=given)
        try:
            result = await work(task_context, given, early)
        except BaseException as exc:
            ledger.write("failed", name, task=task_context.task_id, message=repr(exc))
            raise
        ledger.write("finished", name, task=task_context.task_id)
        return result

    if not context.experimental.is_task:
        if name != "slow_compute":
            return text("this tool runs as a task only", is_error=True)
        await anyio.sleep(given["seconds"])
        return text(f"computed {given.get('label', '')}")
    return await context.experimental.run_task(run)


if __name__ == "__main__":
    manager = StreamableHTTPSessionManager(server)
    serve(mcp_application(manager), options)
