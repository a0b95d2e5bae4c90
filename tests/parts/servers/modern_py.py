"""A modern server (protocol 2026-07-28) on the Python SDK 2.3.0.

    python modern_py.py [--port P | --stdio] [--ledger FILE]

Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. Its tools are named as the old servers' are, it asks
by `InputRequiredResult`, and its list has two tools a page.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from serving import Ledger, arguments, compact, recorded, serve

Json = dict[str, Any]
Context = ServerRequestContext[Json]
ToolResult = types.CallToolResult | types.InputRequiredResult
ToolFunction = Callable[[Context, types.CallToolRequestParams], Awaitable[ToolResult]]
PAGE = 2
NAME_SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "title": "Name"}},
    "required": ["name"],
}


def text(value: object) -> types.CallToolResult:
    words = value if isinstance(value, str) else compact(value)
    return types.CallToolResult(content=[types.TextContent(text=words)])


def form(message: str) -> types.ElicitRequest:
    params = types.ElicitRequestFormParams(message=message, requested_schema=NAME_SCHEMA)
    return types.ElicitRequest(params=params)


def sampling(prompt: str) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=prompt))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[message], max_tokens=100))


def input_required(**requests: types.InputRequest) -> types.InputRequiredResult:
    # The state is not sealed: nothing here depends on it, the tests look whether it comes back.
    return types.InputRequiredResult(input_requests=requests, request_state=json.dumps(sorted(requests)))


def answered(response: object) -> str:
    assert isinstance(response, types.ElicitResult)
    return response.action if response.content is None else f"accept:{compact(response.content)}"


def sampled(response: object) -> str:
    assert isinstance(response, types.CreateMessageResult | types.CreateMessageResultWithTools)
    blocks = response.content if isinstance(response.content, list) else [response.content]
    return "".join(block.text for block in blocks if isinstance(block, types.TextContent))


def listed(response: object) -> list[str]:
    assert isinstance(response, types.ListRootsResult)
    return [str(root.uri) for root in response.roots]


def responses(params: types.InputResponseRequestParams, *keys: str) -> types.InputResponses | None:
    """Give the answers when all are there and the state came back as it was sent."""
    given = params.input_responses
    if given is None or not set(keys) <= given.keys():
        return None
    if params.request_state != json.dumps(sorted(keys)):
        raise MCPError(types.INVALID_PARAMS, "requestState was not echoed", {"got": params.request_state})
    return given


async def echo(_context: Context, params: types.CallToolRequestParams) -> ToolResult:
    return text((params.arguments or {})["text"])


async def fail(_context: Context, params: types.CallToolRequestParams) -> ToolResult:
    return text((params.arguments or {})["message"]).model_copy(update={"is_error": True})


async def ask(_context: Context, params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "name")
    if given is None:
        return input_required(name=form((params.arguments or {})["question"]))
    return text(answered(given["name"]))


async def ask_many(_context: Context, params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "elicit", "sample", "roots")
    if given is None:
        return input_required(
            elicit=form("question of many"), sample=sampling("prompt of many"), roots=types.ListRootsRequest()
        )
    summary = {"elicit": answered(given["elicit"]), "sample": sampled(given["sample"])}
    return text({**summary, "roots": listed(given["roots"])})


async def sample(_context: Context, params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "sample")
    if given is None:
        return input_required(sample=sampling((params.arguments or {})["prompt"]))
    return text(sampled(given["sample"]))


async def progress(context: Context, params: types.CallToolRequestParams) -> ToolResult:
    arguments = params.arguments or {}
    steps = arguments["steps"]
    for step in range(1, steps + 1):
        await context.session.report_progress(step, steps, f"step {step}")
        await asyncio.sleep(arguments.get("delay_seconds", 0))
    return text("done")


async def hang(_context: Context, _params: types.CallToolRequestParams) -> ToolResult:
    await anyio.sleep_forever()
    raise AssertionError


TOOLS: dict[str, tuple[ToolFunction, Json]] = {
    "echo": (echo, {"text": {"type": "string"}}),
    "fail": (fail, {"message": {"type": "string"}}),
    "ask": (ask, {"question": {"type": "string"}}),
    "ask_many": (ask_many, {}),
    "sample": (sample, {"prompt": {"type": "string"}}),
    "progress": (progress, {"steps": {"type": "integer"}, "delay_seconds": {"type": "number", "default": 0}}),
    "hang": (hang, {}),
}


def describe_tool(name: str, properties: Json) -> types.Tool:
    required = [key for key, schema in properties.items() if "default" not in schema]
    schema = {"type": "object", "properties": properties, "required": required}
    return types.Tool(name=name, description=f"The {name} tool.", input_schema=schema)


async def list_tools(_context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    """Give one page; the cursor is the number of its first item."""
    tools = [describe_tool(name, properties) for name, (_, properties) in TOOLS.items()]
    start = int(params.cursor) if params is not None and params.cursor is not None else 0
    more = str(start + PAGE) if start + PAGE < len(tools) else None
    return types.ListToolsResult(tools=tools[start : start + PAGE], next_cursor=more)


def build(ledger: Ledger) -> Server[Json]:
    async def call_tool(context: Context, params: types.CallToolRequestParams) -> ToolResult:
        if params.name not in TOOLS:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")
        async with recorded(ledger, params.name):
            return await TOOLS[params.name][0](context, params)

    return Server(
        "modern-py",
        version="2.3.0",
        instructions="A modern server for the tests.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(server: Server[Json]) -> None:
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    flags = arguments()
    built = build(Ledger(flags.ledger))
    if flags.stdio:
        asyncio.run(serve_stdio(built))
    else:
        serve(built.streamable_http_app(stateless_http=True), flags)
