"""A modern server (2026-07-28, Python SDK 2.3.0) with what the conformance suite asks of a server of 2025-11-25.

    python conformance_modern.py [--port P] [--ledger FILE]

Only a client of 2026-07-28 can use the tools that ask, since they ask by `InputRequiredResult`. Names, texts and
schemas are the suite's own, but for the tool `touch`, which tells of the watched resource.
"""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcp_types as types
from conformance_words import FORMS, PNG, SCHEMA_2020_12, TEXT, WAV
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from modern_py import Context, Json, Ledger, ToolResult, compact, input_required, responses, sampled, sampling
from uvicorn_http import serve_http


def text(words: str) -> types.TextContent:
    return types.TextContent(text=words)


def image() -> types.ImageContent:
    return types.ImageContent(data=PNG, mime_type="image/png")


def embedded(uri: str, mime_type: str, words: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=words))


CONTENTS: dict[str, Callable[[], list[Any]]] = {
    "test_simple_text": lambda: [text("This is a simple text response for testing.")],
    "test_image_content": lambda: [image()],
    "test_audio_content": lambda: [types.AudioContent(data=WAV, mime_type="audio/wav")],
    "test_embedded_resource": lambda: [
        embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    ],
    "test_multiple_content_types": lambda: [
        text("Multiple content types test:"),
        image(),
        embedded("test://mixed-content-resource", "application/json", compact({"test": "data", "value": 123})),
    ],
    "test_reconnection": lambda: [text("Reconnection test completed")],
}
ARGUMENTS = {"test_sampling": "prompt", "test_elicitation": "message"}
OTHERS = ("test_error_handling", "test_tool_with_logging", "test_tool_with_progress", "test_sampling")
TOOLS = (*CONTENTS, *OTHERS, *FORMS, "json_schema_2020_12_tool", "touch")
BUS = InMemorySubscriptionBus()


def said(*contents: Any) -> types.CallToolResult:
    return types.CallToolResult(content=list(contents))


def ask_form(name: str, params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "form")
    if given is None:
        message = (params.arguments or {}).get("message", "Please answer")
        schema = {"type": "object", "properties": FORMS[name]}
        if name == "test_elicitation":
            schema["required"] = list(FORMS[name])
        form = types.ElicitRequestFormParams(message=message, requested_schema=schema)
        return input_required(form=types.ElicitRequest(params=form))
    answer = given["form"]
    assert isinstance(answer, types.ElicitResult)
    words = "User response" if name == "test_elicitation" else "Elicitation completed"
    return said(text(f"{words}: action={answer.action}, content={compact(answer.content)}"))


def ask_model(params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "model")
    if given is None:
        return input_required(model=sampling((params.arguments or {})["prompt"]))
    return said(text(f"LLM response: {sampled(given['model'])}"))


async def log(context: Context) -> ToolResult:
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await context.session.send_log_message("info", words, "test", related_request_id=context.request_id)
        await asyncio.sleep(0.05)
    return said(text("Tool with logging executed successfully"))


async def report(context: Context) -> ToolResult:
    for done in (0, 50, 100):
        await context.session.report_progress(done, 100)
        await asyncio.sleep(0.05)
    return said(text("Tool with progress executed successfully"))


async def call_tool(context: Context, params: types.CallToolRequestParams) -> ToolResult:
    name = params.name
    if name in CONTENTS:
        return said(*CONTENTS[name]())
    if name in FORMS:
        return ask_form(name, params)
    match name:
        case "test_error_handling":
            failed = said(text("This tool intentionally returns an error for testing"))
            return failed.model_copy(update={"is_error": True})
        case "test_tool_with_logging":
            return await log(context)
        case "test_tool_with_progress":
            return await report(context)
        case "test_sampling":
            return ask_model(params)
        case "json_schema_2020_12_tool":
            return said(text(compact(params.arguments)))
        case "touch":
            await BUS.publish(ResourceUpdated(uri="test://watched-resource"))
            return said(text("touched"))
        case _:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {name}")


def described(name: str) -> types.Tool:
    schema: Json = {"type": "object", "properties": {}}
    if name in ARGUMENTS:
        schema = {"type": "object", "properties": {ARGUMENTS[name]: TEXT}, "required": [ARGUMENTS[name]]}
    if name == "json_schema_2020_12_tool":
        schema = SCHEMA_2020_12
    return types.Tool(name=name, description=f"The {name} tool.", input_schema=schema)


async def list_tools(_context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[described(name) for name in TOOLS])


# --- prompts ---


def argument(name: str) -> types.PromptArgument:
    return types.PromptArgument(name=name, description=f"The {name}", required=True)


async def list_prompts(_context: Context, _params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
    names = {
        "test_simple_prompt": [],
        "test_prompt_with_arguments": [argument("arg1"), argument("arg2")],
        "test_prompt_with_embedded_resource": [argument("resourceUri")],
        "test_prompt_with_image": [],
    }
    prompts = [types.Prompt(name=name, description="A prompt.", arguments=given) for name, given in names.items()]
    return types.ListPromptsResult(prompts=prompts)


async def get_prompt(_context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    given = params.arguments or {}
    contents: list[Any]
    match params.name:
        case "test_simple_prompt":
            contents = [text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            contents = [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            resource = embedded(given["resourceUri"], "text/plain", "Embedded resource content for testing.")
            contents = [resource, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            contents = [image(), text("Please analyze the image above.")]
        case name:
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {name}")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content) for content in contents])


async def complete(_context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
    values = [word for word in ("paris", "park", "party") if word.startswith(params.argument.value)]
    return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


# --- resources ---

STATIC = {
    "test://static-text": ("text/plain", "This is the content of the static text resource."),
    "test://static-binary": ("image/png", PNG),
    "test://watched-resource": ("text/plain", "Watched resource content"),
}
TEMPLATE_START, TEMPLATE_END = "test://template/", "/data"


async def list_resources(_context: Context, _params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
    found = [
        types.Resource(uri=uri, name=uri.removeprefix("test://"), description="A resource.", mime_type=mime_type)
        for uri, (mime_type, _) in STATIC.items()
    ]
    return types.ListResourcesResult(resources=found)


async def list_templates(
    _context: Context, _params: types.PaginatedRequestParams | None
) -> types.ListResourceTemplatesResult:
    uri = f"{TEMPLATE_START}{{id}}{TEMPLATE_END}"
    template = types.ResourceTemplate(
        uri_template=uri, name="template", description="Data by id.", mime_type="application/json"
    )
    return types.ListResourceTemplatesResult(resource_templates=[template])


async def read_resource(_context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    uri = str(params.uri)
    contents: types.TextResourceContents | types.BlobResourceContents
    if uri == "test://static-binary":
        contents = types.BlobResourceContents(uri=uri, mime_type="image/png", blob=PNG)
    elif uri in STATIC:
        mime_type, words = STATIC[uri]
        contents = types.TextResourceContents(uri=uri, mime_type=mime_type, text=words)
    elif uri.startswith(TEMPLATE_START) and uri.endswith(TEMPLATE_END):
        item = uri.removeprefix(TEMPLATE_START).removesuffix(TEMPLATE_END)
        data = {"id": item, "templateTest": True, "data": f"Data for ID: {item}"}
        contents = types.TextResourceContents(uri=uri, mime_type="application/json", text=compact(data))
    else:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": uri})
    return types.ReadResourceResult(contents=[contents])


def build(ledger: Ledger) -> Server[Json]:
    async def recorded(context: Context, params: types.CallToolRequestParams) -> ToolResult:
        ledger.record("run", params.name)
        return await call_tool(context, params)

    return Server(
        "modern-conformance",
        version="2.3.0",
        on_list_tools=list_tools,
        on_call_tool=recorded,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_completion=complete,
        on_subscriptions_listen=ListenHandler(BUS),
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ledger", type=Path)
    flags = parser.parse_args()
    app = build(Ledger(flags.ledger)).streamable_http_app(stateless_http=True)
    await serve_http(app, flags.port)


if __name__ == "__main__":
    asyncio.run(main())
