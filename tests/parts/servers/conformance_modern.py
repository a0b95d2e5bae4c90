"""A modern server (2026-07-28, Python SDK 2.3.0) with what the conformance suite asks of a server of 2025-11-25.

    python conformance_modern.py [--port P] [--ledger FILE]

Only a client of 2026-07-28 can use the tools that ask, since they ask by `InputRequiredResult`. Names, texts and
schemas are the suite's own, but for the tool `touch`, which tells of the watched resource.
"""

import asyncio

import conformance_words as suite
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from modern_py import Context, Json, ToolResult, input_required, responses, sampled, sampling, text
from serving import Ledger, arguments, compact, serve

ARGUMENTS = {"test_sampling": "prompt", "test_elicitation": "message"}
OTHERS = ("test_error_handling", "test_tool_with_logging", "test_tool_with_progress", "test_sampling")
TOOLS = (*suite.CONTENTS, "test_reconnection", *OTHERS, *suite.FORMS, "json_schema_2020_12_tool", "touch")
BUS = InMemorySubscriptionBus()
Paginated = types.PaginatedRequestParams | None


def ask_form(name: str, params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "form")
    if given is None:
        message = (params.arguments or {}).get("message", "Please answer")
        schema = {"type": "object", "properties": suite.FORMS[name]}
        if name == "test_elicitation":
            schema["required"] = list(suite.FORMS[name])
        form = types.ElicitRequestFormParams(message=message, requested_schema=schema)
        return input_required(form=types.ElicitRequest(params=form))
    answer = given["form"]
    assert isinstance(answer, types.ElicitResult)
    words = "User response" if name == "test_elicitation" else "Elicitation completed"
    return text(f"{words}: action={answer.action}, content={compact(answer.content)}")


def ask_model(params: types.CallToolRequestParams) -> ToolResult:
    given = responses(params, "model")
    if given is None:
        return input_required(model=sampling((params.arguments or {})["prompt"]))
    return text(f"LLM response: {sampled(given['model'])}")


async def log(context: Context) -> ToolResult:
    for words in suite.LOGS:
        await context.session.send_log_message("info", words, "test", related_request_id=context.request_id)
        await asyncio.sleep(0.05)
    return text("Tool with logging executed successfully")


async def report(context: Context) -> ToolResult:
    for done in (0, 50, 100):
        await context.session.report_progress(done, 100)
        await asyncio.sleep(0.05)
    return text("Tool with progress executed successfully")


async def call_tool(context: Context, params: types.CallToolRequestParams) -> ToolResult:
    name = params.name
    if name in suite.CONTENTS:
        return types.CallToolResult.model_validate({"content": suite.CONTENTS[name]})
    if name in suite.FORMS:
        return ask_form(name, params)
    match name:
        case "test_error_handling":
            return text(suite.ERROR).model_copy(update={"is_error": True})
        case "test_reconnection":
            return text("Reconnection test completed")
        case "test_tool_with_logging":
            return await log(context)
        case "test_tool_with_progress":
            return await report(context)
        case "test_sampling":
            return ask_model(params)
        case "json_schema_2020_12_tool":
            return text(compact(params.arguments))
        case "touch":
            await BUS.publish(ResourceUpdated(uri="test://watched-resource"))
            return text("touched")
        case _:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {name}")


def described(name: str) -> types.Tool:
    schema: Json = {"type": "object", "properties": {}}
    if name in ARGUMENTS:
        schema = {"type": "object", "properties": {ARGUMENTS[name]: suite.TEXT}, "required": [ARGUMENTS[name]]}
    if name == "json_schema_2020_12_tool":
        schema = suite.SCHEMA_2020_12
    return types.Tool(name=name, description=f"The {name} tool.", input_schema=schema)


async def list_tools(_context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[described(name) for name in TOOLS])


# --- prompts, completion, resources ---


async def list_prompts(_context: Context, _params: Paginated) -> types.ListPromptsResult:
    return types.ListPromptsResult.model_validate({"prompts": suite.PROMPTS})


async def get_prompt(_context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    result = suite.prompt(params.name, params.arguments or {})
    if result is None:
        raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {params.name}")
    return types.GetPromptResult.model_validate(result)


async def complete(_context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
    return types.CompleteResult.model_validate({"completion": suite.completed(params.argument.value)})


async def list_resources(_context: Context, _params: Paginated) -> types.ListResourcesResult:
    return types.ListResourcesResult.model_validate({"resources": suite.RESOURCES})


async def list_templates(_context: Context, _params: Paginated) -> types.ListResourceTemplatesResult:
    return types.ListResourceTemplatesResult.model_validate({"resourceTemplates": [suite.TEMPLATE]})


async def read_resource(_context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    found = suite.contents(str(params.uri))
    if found is None:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": str(params.uri)})
    return types.ReadResourceResult.model_validate({"contents": [found]})


def build(ledger: Ledger) -> Server[Json]:
    async def recorded(context: Context, params: types.CallToolRequestParams) -> ToolResult:
        ledger.write("run", params.name)
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


if __name__ == "__main__":
    flags = arguments()
    serve(build(Ledger(flags.ledger)).streamable_http_app(stateless_http=True), flags)
