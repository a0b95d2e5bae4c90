"""An old server (2025-11-25) that offers all that the official conformance suite asks a server for.

The suite's scenarios of 2025-11-25 can be run against it directly, and those of 2026-07-28 through the gateway. The
`title` of a form is the key that the gateway gives its question, and the suite insists on "user_name".
Names, texts and schemas are the suite's own.
"""

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import conformance_words as suite
from mcp import types
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import McpError
from pydantic import AnyUrl
from sdk_1x import BroadcastingServer, MemoryEventStore, local_only, mcp_application, serve_stdio
from serving import JSON, Ledger, arguments, compact, recorded, serve

RETRY_MILLISECONDS = 100

options = arguments()
ledger = Ledger(options.ledger)
server = BroadcastingServer("old-conformance", version="1.0.0")

Result = str | list[JSON]
Run = Callable[..., Awaitable[Result]]
tools: dict[str, tuple[types.Tool, Run]] = {}

NO_ARGUMENTS: JSON = {"type": "object", "properties": {}}


def tool(
    description: str, schema: JSON = NO_ARGUMENTS, *, name: str | None = None, **extra: Any
) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        described = types.Tool(name=name or run.__name__, description=description, inputSchema=schema, **extra)
        tools[described.name] = described, run
        return run

    return register


# --- questions to the client ---


async def ask_form(title: str, message: str, properties: JSON, *, required: bool = True) -> types.ElicitResult:
    context = server.request_context
    schema = {"type": "object", "title": title, "properties": properties}
    if required:
        schema["required"] = list(properties)
    return await context.session.elicit_form(message, schema, related_request_id=context.request_id)


async def ask_model(prompt: str, max_tokens: int = 100, *, related_to: str | int | None = None) -> str:
    """Ask without naming the call, which is the SDK's default: the question comes on the GET stream."""
    content = types.TextContent(type="text", text=prompt)
    message = types.SamplingMessage(role="user", content=content)
    session = server.request_context.session
    result = await session.create_message([message], max_tokens=max_tokens, related_request_id=related_to)
    return result.content.text


async def ask_roots() -> list[str]:
    return [str(root.uri) for root in (await server.request_context.session.list_roots()).roots]


# --- tools ---


def says(name: str) -> Run:
    async def run() -> Result:
        return suite.CONTENTS[name]

    return run


for each in suite.CONTENTS:
    tool("Says something.", name=each)(says(each))


@tool("Fails.")
async def test_error_handling() -> Result:
    raise ValueError(suite.ERROR)


@tool("Logs three messages.")
async def test_tool_with_logging() -> Result:
    context = server.request_context
    for words in suite.LOGS:
        await context.session.send_log_message("info", words, related_request_id=context.request_id)
        await anyio.sleep(0.05)
    return "Tool with logging executed successfully"


@tool("Reports progress three times.")
async def test_tool_with_progress() -> Result:
    context = server.request_context
    token = context.meta.progressToken if context.meta else None
    for done in (0, 50, 100):
        if token is not None:
            await context.session.send_progress_notification(token, done, 100, related_request_id=context.request_id)
        await anyio.sleep(0.05)
    return "Tool with progress executed successfully"


@tool("Samples.", {"type": "object", "properties": {"prompt": suite.TEXT}, "required": ["prompt"]})
async def test_sampling(prompt: str) -> Result:
    # The suite's client does not wait for its GET stream before it calls, and the SDK drops what nobody reads yet.
    return f"LLM response: {await ask_model(prompt, related_to=server.request_context.request_id)}"


@tool("Elicits.", {"type": "object", "properties": {"message": suite.TEXT}, "required": ["message"]})
async def test_elicitation(message: str) -> Result:
    result = await ask_form("user", message, suite.FORMS["test_elicitation"])
    return f"User response: action={result.action}, content={compact(result.content)}"


def elicits(name: str) -> Run:
    async def run() -> Result:
        result = await ask_form("form", "Please fill in", suite.FORMS[name], required=False)
        return f"Elicitation completed: action={result.action}, content={compact(result.content)}"

    return run


for each in ("test_elicitation_sep1034_defaults", "test_elicitation_sep1330_enums"):
    tool("Elicits with defaults, or choices.", name=each)(elicits(each))


@tool("Closes its stream before it answers (SEP-1699).")
async def test_reconnection() -> Result:
    context = server.request_context
    if context.close_sse_stream is not None:
        await context.close_sse_stream()
    await anyio.sleep(0.1)
    return "Reconnection test completed"


@tool("Tool with JSON Schema 2020-12 features", suite.SCHEMA_2020_12)
async def json_schema_2020_12_tool(**given: Any) -> Result:
    return compact(given)


REGION: JSON = {"region": {**suite.TEXT, "x-mcp-header": "Region"}}


@tool(
    "Has a parameter that is also a header.",
    {"type": "object", "properties": REGION, "required": ["region"]},
)
async def test_header_parameter(region: str) -> Result:
    return f"region: {region}"


# --- the stateless scenario ---


@tool("Samples, whatever the client can do.")
async def test_missing_capability() -> Result:
    return await ask_model("Can you?")


@tool("Elicits.")
async def test_streaming_elicitation() -> Result:
    return compact((await ask_form("streaming", "Please confirm", {"ok": {"type": "boolean"}})).content)


@tool("Logs, whatever the client wants to read.")
async def test_logging_tool() -> Result:
    context = server.request_context
    await context.session.send_log_message("info", "logged", related_request_id=context.request_id)
    return "Logged"


@tool("Tells every session that the tools have changed.")
async def test_trigger_tool_change() -> Result:
    await server.broadcast("notifications/tools/list_changed")
    return "Tool change triggered"


@tool("Tells every session that the prompts have changed.")
async def test_trigger_prompt_change() -> Result:
    await server.broadcast("notifications/prompts/list_changed")
    return "Prompt change triggered"


# --- multi round-trip requests (SEP-2322), asked as an old server asks ---

NAME: JSON = {"name": suite.TEXT}
OK: JSON = {"ok": {"type": "boolean"}}


@tool("Asks for a name.")
async def test_input_required_result_elicitation() -> Result:
    result = await ask_form("user_name", "What is your name?", NAME)
    return f"Hello, {(result.content or {}).get('name', 'stranger')}!"


@tool("Asks the model.")
async def test_input_required_result_sampling() -> Result:
    return await ask_model("What is the capital of France?")


@tool("Asks for the roots.")
async def test_input_required_result_list_roots() -> Result:
    return compact(await ask_roots())


@tool("Asks for a confirmation.", name="test_input_required_result_request_state")
@tool("Asks for a confirmation, too.", name="test_input_required_result_tampered_state")
async def confirm() -> Result:
    return f"state-ok: {(await ask_form('confirm', 'Please confirm', OK)).action}"


@tool("Asks three questions at once.")
async def test_input_required_result_multiple_inputs() -> Result:
    answers: JSON = {}

    async def form() -> None:
        answers["user_name"] = (await ask_form("user_name", "What is your name?", NAME)).content

    async def model() -> None:
        answers["greeting"] = await ask_model("Generate a greeting", 50)

    async def roots() -> None:
        answers["client_roots"] = await ask_roots()

    async with anyio.create_task_group() as group:
        for question in (form, model, roots):
            group.start_soon(question)
    return compact(answers)


@tool("Asks twice.")
async def test_input_required_result_multi_round() -> Result:
    name = (await ask_form("step1", "Step 1: What is your name?", NAME)).content
    color = (await ask_form("step2", "Step 2: What is your favorite color?", {"color": suite.TEXT})).content
    return compact({"step1": name, "step2": color})


@tool("Asks only what the client can answer.")
async def test_input_required_result_capabilities() -> Result:
    session = server.request_context.session
    answers: JSON = {}
    if session.check_client_capability(types.ClientCapabilities(elicitation=types.ElicitationCapability())):
        answers["form"] = (await ask_form("user_name", "What is your name?", NAME)).content
    if session.check_client_capability(types.ClientCapabilities(sampling=types.SamplingCapability())):
        answers["model"] = await ask_model("What is the capital of France?")
    return compact(answers)


@server.list_tools()
async def list_tools() -> list[types.Tool]:
    return [entry[0] for entry in tools.values()]


@server.call_tool()
async def call_tool(name: str, given: JSON) -> types.CallToolResult:
    if name not in tools:
        raise ValueError(f"Unknown tool: {name}")
    async with recorded(ledger, name, arguments=given):
        result = await tools[name][1](**given)
    return types.CallToolResult.model_validate(
        {"content": [suite.text(result)] if isinstance(result, str) else result}
    )


# --- prompts, completion, resources ---

ASKING_PROMPT: JSON = {"name": "test_input_required_result_prompt", "description": "Asks first."}


@server.list_prompts()
async def list_prompts() -> list[types.Prompt]:
    return [types.Prompt.model_validate(each) for each in (*suite.PROMPTS, ASKING_PROMPT)]


@server.get_prompt()
async def get_prompt(name: str, given: dict[str, str] | None) -> types.GetPromptResult:
    result = suite.prompt(name, given or {})
    if name == ASKING_PROMPT["name"]:
        answer = await ask_form("user_context", "What context should the prompt use?", {"context": suite.TEXT})
        result = {"messages": [{"role": "user", "content": suite.text(f"Context: {compact(answer.content)}")}]}
    if result is None:
        raise ValueError(f"Unknown prompt: {name}")
    return types.GetPromptResult.model_validate(result)


@server.completion()
async def complete(_ref: Any, argument: types.CompletionArgument, _context: Any) -> types.Completion:
    return types.Completion.model_validate(suite.completed(argument.value))


@server.list_resources()
async def list_resources() -> list[types.Resource]:
    return [types.Resource.model_validate(each) for each in suite.RESOURCES]


@server.list_resource_templates()
async def list_resource_templates() -> list[types.ResourceTemplate]:
    return [types.ResourceTemplate.model_validate(suite.TEMPLATE)]


@server.read_resource()
async def read_resource(uri: AnyUrl) -> list[ReadResourceContents]:
    found = suite.contents(str(uri))
    if found is None:
        raise McpError(types.ErrorData(code=-32002, message="Resource not found", data={"uri": str(uri)}))
    words = found["text"] if "text" in found else base64.b64decode(found["blob"])
    return [ReadResourceContents(words, found["mimeType"])]


@server.subscribe_resource()
async def subscribe(_uri: AnyUrl) -> None:
    pass


@server.unsubscribe_resource()
async def unsubscribe(_uri: AnyUrl) -> None:
    pass


@server.set_logging_level()
async def set_level(_level: types.LoggingLevel) -> None:
    pass


if __name__ == "__main__":
    if options.stdio:
        serve_stdio(server)
    else:
        # The polling scenario needs a store and a retry time.
        manager = StreamableHTTPSessionManager(
            server,
            event_store=MemoryEventStore(),
            retry_interval=RETRY_MILLISECONDS,
            json_response=options.json,
            stateless=options.stateless,
            security_settings=local_only(),
        )
        serve(mcp_application(manager), options)
