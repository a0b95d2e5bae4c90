"""Filters a tool list for modern clients, which reject a whole list for one malformed tool.

The checks are those for which `mcp` 2.3, fastmcp 4.0 and `@modelcontextprotocol/client` 2.4 were measured to reject a
list, and the rules for `x-mcp-header`, for which each of them drops the tool. Nothing else is checked: all three
accept names with spaces or 200 characters, odd schemas inside `properties`, and unknown members.
"""

from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, param_headers
from gateway.protocol.json_text.json_bounds import check_items, check_values

_MAX_NAME: Final = 200


class OmittedTool(NamedTuple):
    """One tool removed from the list; its name is empty if it has none."""

    name: str
    reason: str


class _Schema(msgspec.Struct):
    dialect: str = msgspec.field(name="$schema", default="")


class _InputSchema(_Schema, kw_only=True):
    type: Literal["object"]


# `exchange.results` removes null members of a tool, its annotations and its execution, but not those of icons and
# schemas.
class _Hints(msgspec.Struct):
    title: str | None = None
    readOnlyHint: bool | None = None  # noqa: N815  (the wire's spelling)
    destructiveHint: bool | None = None  # noqa: N815
    idempotentHint: bool | None = None  # noqa: N815
    openWorldHint: bool | None = None  # noqa: N815


class _Icon(msgspec.Struct):
    src: str
    mimeType: str = ""  # noqa: N815
    sizes: list[str] = []
    theme: Literal["light", "dark"] = "light"


class _Execution(msgspec.Struct):
    taskSupport: Literal["forbidden", "optional", "required"] | None = None  # noqa: N815


class _Tool(msgspec.Struct):
    name: str
    inputSchema: _InputSchema  # noqa: N815
    title: str | None = None
    description: str | None = None
    outputSchema: _Schema | None = None  # noqa: N815
    annotations: _Hints | None = None
    icons: list[_Icon] | None = None
    execution: _Execution | None = None
    meta: dict[str, Raw] | None = msgspec.field(name="_meta", default=None)


class _Named(msgspec.Struct):
    name: str
    inputSchema: Raw = Raw(b"{}")  # noqa: N815


_decode_all = msgspec.json.Decoder(list[_Tool]).decode
_decode_tool = msgspec.json.Decoder(_Tool).decode
_decode_named = msgspec.json.Decoder(_Named).decode


def usable(result: Raw) -> tuple[Raw, tuple[OmittedTool, ...]]:
    """Remove the tools that clients reject from a ListToolsResult; the bytes of the others stay unchanged.

    A result without a list of tools is returned unchanged. Raises ValueError if it is not an object, or if it has more
    than MAX_MEMBERS tools, or more values than that in the tools with annotations.
    """
    opened = jsonrpc.fields(result)
    tools = opened.get("tools")
    if tools is not None:
        check_items(tools)
    if tools is None or (param_headers.ANNOTATION not in bytes(tools) and _all_good(tools)):
        return result, ()
    try:
        items = jsonrpc.items(tools)
    except (ValueError, RecursionError):
        return result, ()
    check_values(item for item in items if param_headers.ANNOTATION in bytes(item))
    found = [(item, _flaw(item)) for item in items]
    left_out = tuple(OmittedTool(_name(item), flaw) for item, flaw in found if flaw is not None)
    if not left_out:
        return result, ()
    kept = b"[%b]" % b",".join(bytes(item) for item, flaw in found if flaw is None)
    return Raw(jsonrpc.merge((opened | {"tools": Raw(kept)}).items())), left_out


def _all_good(tools: Raw) -> bool:
    try:
        _ = jsonrpc.inspect(_decode_all, tools)
    except (ValueError, RecursionError):
        return False
    return True


def _flaw(tool: Raw) -> str | None:
    """Why a client would reject this tool; None if it would not."""
    try:
        _ = jsonrpc.inspect(_decode_tool, tool)
        if param_headers.ANNOTATION not in bytes(tool):
            return None
        return param_headers.flaw(jsonrpc.value(jsonrpc.inspect(_decode_named, tool).inputSchema))
    except ValueError as exc:
        return str(exc)[:_MAX_NAME]
    except RecursionError:
        return "JSON is nested too deeply"


def _name(tool: Raw) -> str:
    try:
        return jsonrpc.inspect(_decode_named, tool).name[:_MAX_NAME]
    except (ValueError, RecursionError):
        return ""


def without_execution(result: Raw) -> Raw:
    """Remove `execution` from the tools of a ListToolsResult: 2026-07-28 does not have it."""
    if b'"execution"' not in bytes(result):
        return result
    opened = jsonrpc.fields(result)
    try:
        tools = [jsonrpc.fields(tool) for tool in jsonrpc.items(opened["tools"])]
    except (KeyError, ValueError, RecursionError):
        return result
    kept = [jsonrpc.merge((key, raw) for key, raw in tool.items() if key != "execution") for tool in tools]
    return Raw(jsonrpc.merge((opened | {"tools": Raw(b"[%b]" % b",".join(kept))}).items()))
