"""An old server (2025-11-25) that offers all that the official conformance suite asks a server for.

The suite's scenarios of 2025-11-25 can be run against it directly, and those of 2026-07-28 through the gateway. The
`title` of a form is the key that the gateway gives its question, and the suite insists on "user_name".
Names, texts and schemas are the suite's own.
"""

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from conformance_words import FORMS, PNG, SCHEMA_2020_12, TEXT, WAV
from mcp import types
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import McpError
from pydantic import AnyUrl
from serving import (
    JSON,
    BroadcastingServer,
    Ledger,
    MemoryEventStore,
    arguments,
    compact,
    local_only,
    mcp_application,
    recorded,
    serve,
    serve_stdio,
)

RETRY_MILLISECONDS = 100

options = arguments()
ledger = Ledger(options.ledger)
server = BroadcastingServer("old-conformance", version="1.0.0")

Result = str | list[Any]
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


def text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


def image() -> types.ImageContent:
    return types.ImageContent(type="image", data=PNG, mimeType="image/png")


def embedded(uri: str, mime_type: str, words: str) -> types.EmbeddedResource:
    resource = types.TextResourceContents(uri=AnyUrl(uri), mimeType=mime_type, text=words)
    return types.EmbeddedResource(type="resource", resource=resource)


# --- tools; the first one listed is also called with no arguments, and must succeed ---


@tool("Returns a text.")
async def test_simple_text() -> Result:
    return "This is a simple text response for testing."


@tool("Returns an image.")
async def test_image_content() -> Result:
    return [image()]


@tool("Returns a sound.")
async def test_audio_content() -> Result:
    return [types.AudioContent(type="audio", data=WAV, mimeType="audio/wav")]


@tool("Returns a resource.")
async def test_embedded_resource() -> Result:
    return [embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]


@tool("Returns three kinds of content.")
async def test_multiple_content_types() -> Result:
    json_text = compact({"test": "data", "value": 123})
    resource = embedded("test://mixed-content-resource", "application/json", json_text)
    return [text("Multiple content types test:"), image(), resource]


@tool("Fails.")
async def test_error_handling() -> Result:
    raise ValueError("This tool intentionally returns an error for testing")


@tool("Logs three messages.")
async def test_tool_with_logging() -> Result:
    context = server.request_context
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
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


@tool("Samples.", {"type": "object", "properties": {"prompt": TEXT}, "required": ["prompt"]})
async def test_sampling(prompt: str) -> Result:
    # The suite's client does not wait for its GET stream before it calls, and the SDK drops what nobody reads yet.
    return f"LLM response: {await ask_model(prompt, related_to=server.request_context.request_id)}"


@tool("Elicits.", {"type": "object", "properties": {"message": TEXT}, "required": ["message"]})
async def test_elicitation(message: str) -> Result:
    result = await ask_form("user", message, FORMS["test_elicitation"])
    return f"User response: action={result.action}, content={compact(result.content)}"


@tool("Elicits with defaults (SEP-1034).")
async def test_elicitation_sep1034_defaults() -> Result:
    properties = FORMS["test_elicitation_sep1034_defaults"]
    result = await ask_form("defaults", "Please check the defaults", properties, required=False)
    return f"Elicitation completed: action={result.action}, content={compact(result.content)}"


@tool("Elicits choices (SEP-1330).")
async def test_elicitation_sep1330_enums() -> Result:
    properties = FORMS["test_elicitation_sep1330_enums"]
    result = await ask_form("choices", "Please choose", properties, required=False)
    return f"Elicitation completed: action={result.action}, content={compact(result.content)}"


@tool("Closes its stream before it answers (SEP-1699).")
async def test_reconnection() -> Result:
    context = server.request_context
    if context.close_sse_stream is not None:
        await context.close_sse_stream()
    await anyio.sleep(0.1)
    return "Reconnection test completed"


@tool("Tool with JSON Schema 2020-12 features", SCHEMA_2020_12)
async def json_schema_2020_12_tool(**given: Any) -> Result:
    return compact(given)


REGION: JSON = {"region": {**TEXT, "x-mcp-header": "Region"}}


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

NAME: JSON = {"name": TEXT}
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


@tool("Asks for a confirmation.")
async def test_input_required_result_request_state() -> Result:
    return f"state-ok: {(await ask_form('confirm', 'Please confirm', OK)).action}"


@tool("Asks for a confirmation, too.")
async def test_input_required_result_tampered_state() -> Result:
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
    color = (await ask_form("step2", "Step 2: What is your favorite color?", {"color": TEXT})).content
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
async def call_tool(name: str, given: JSON) -> list[Any]:
    if name not in tools:
        raise ValueError(f"Unknown tool: {name}")
    async with recorded(ledger, name, arguments=given):
        result = await tools[name][1](**given)
    return [text(result)] if isinstance(result, str) else result


# --- prompts ---


def argument(name: str, description: str) -> types.PromptArgument:
    return types.PromptArgument(name=name, description=description, required=True)


@server.list_prompts()
async def list_prompts() -> list[types.Prompt]:
    arguments_ = [argument("arg1", "First test argument"), argument("arg2", "Second test argument")]
    uri = [argument("resourceUri", "URI of the resource to embed")]
    return [
        types.Prompt(name="test_simple_prompt", description="A text."),
        types.Prompt(name="test_prompt_with_arguments", description="Two arguments.", arguments=arguments_),
        types.Prompt(name="test_prompt_with_embedded_resource", description="A resource.", arguments=uri),
        types.Prompt(name="test_prompt_with_image", description="An image."),
        types.Prompt(name="test_input_required_result_prompt", description="Asks first."),
    ]


@server.get_prompt()
async def get_prompt(name: str, given: dict[str, str] | None) -> types.GetPromptResult:
    given = given or {}
    contents: list[Any]
    match name:
        case "test_simple_prompt":
            contents = [text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            contents = [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            words = "Embedded resource content for testing."
            resource = embedded(given["resourceUri"], "text/plain", words)
            contents = [resource, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            contents = [image(), text("Please analyze the image above.")]
        case "test_input_required_result_prompt":
            question = "What context should the prompt use?"
            result = await ask_form("user_context", question, {"context": TEXT})
            contents = [text(f"Context: {compact(result.content)}")]
        case _:
            raise ValueError(f"Unknown prompt: {name}")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content) for content in contents])


@server.completion()
async def complete(_ref: Any, argument: types.CompletionArgument, _context: Any) -> types.Completion:
    values = [word for word in ("paris", "park", "party") if word.startswith(argument.value)]
    return types.Completion(values=values, total=len(values), hasMore=False)


# --- resources ---

RESOURCES = [
    ("test://static-text", "static-text", "A text.", "text/plain"),
    ("test://static-binary", "static-binary", "An image.", "image/png"),
    ("test://watched-resource", "watched-resource", "A text that may change.", "text/plain"),
]
TEMPLATE_START, TEMPLATE_END = "test://template/", "/data"


@server.list_resources()
async def list_resources() -> list[types.Resource]:
    return [
        types.Resource(uri=AnyUrl(uri), name=name, description=description, mimeType=mime_type)
        for uri, name, description, mime_type in RESOURCES
    ]


@server.list_resource_templates()
async def list_resource_templates() -> list[types.ResourceTemplate]:
    uri = f"{TEMPLATE_START}{{id}}{TEMPLATE_END}"
    return [
        types.ResourceTemplate(
            uriTemplate=uri, name="template", description="Data by id.", mimeType="application/json"
        )
    ]


@server.read_resource()
async def read_resource(uri: AnyUrl) -> list[ReadResourceContents]:
    name = str(uri)
    if name == "test://static-text":
        return [ReadResourceContents("This is the content of the static text resource.", "text/plain")]
    if name == "test://static-binary":
        return [ReadResourceContents(base64.b64decode(PNG), "image/png")]
    if name == "test://watched-resource":
        return [ReadResourceContents("Watched resource content", "text/plain")]
    if name.startswith(TEMPLATE_START) and name.endswith(TEMPLATE_END):
        item = name.removeprefix(TEMPLATE_START).removesuffix(TEMPLATE_END)
        data = {"id": item, "templateTest": True, "data": f"Data for ID: {item}"}
        return [ReadResourceContents(compact(data), "application/json")]
    raise McpError(types.ErrorData(code=-32002, message="Resource not found", data={"uri": name}))


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
