"""Reads a list of tools, without those for which modern clients reject it as a whole.

The checks are those for which `mcp` 2.3, fastmcp 4.0 and `@modelcontextprotocol/client` 2.4 were measured to reject a
list, and the rules for `x-mcp-header`, for which each of them drops the tool. Nothing else is checked: all three
accept names with spaces or 200 characters, odd schemas inside `properties`, and unknown members.
"""

from contextlib import suppress
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, param_headers
from gateway.protocol.json_text.json_bounds import check_items, check_values
from gateway.protocol.param_headers import Mirrored

_MAX_NAME: Final = 200


class Tool(msgspec.Struct, frozen=True):
    """What the gateway needs to know about a tool.

    `mirrored`: its annotated parameters. `ephemeral`: it declares that it may run twice (`readOnlyHint` or
    `idempotentHint`; SEP-2322, ephemeral workflow). `task_support`: `execution.taskSupport`, empty if it has none.
    """

    mirrored: tuple[Mirrored, ...] = ()
    ephemeral: bool = False
    task_support: str = ""


class OmittedTool(NamedTuple):
    """One tool removed from the list; its name is empty if it has none."""

    name: str
    reason: str


class ToolList(NamedTuple):
    """A ListToolsResult as it was read."""

    result: Raw
    """The result without the tools that were left out; the bytes of the others stay unchanged."""
    tools: dict[str, Tool] | None = None
    """By name; None if it has no list of tools."""
    left_out: tuple[OmittedTool, ...] = ()
    is_last: bool = True
    """Whether no other page follows."""


class _InputSchema(msgspec.Struct):
    type: Literal["object"]
    dialect: str = msgspec.field(name="$schema", default="")


class _OutputSchema(msgspec.Struct):
    dialect: str = msgspec.field(name="$schema", default="")


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


class _Listed(msgspec.Struct):
    name: str
    inputSchema: _InputSchema  # noqa: N815
    title: str | None = None
    description: str | None = None
    outputSchema: _OutputSchema | None = None  # noqa: N815
    annotations: _Hints | None = None
    icons: list[_Icon] | None = None
    execution: _Execution | None = None
    meta: dict[str, Raw] | None = msgspec.field(name="_meta", default=None)

    def tool(self, mirrored: tuple[Mirrored, ...] = ()) -> Tool:
        """What is to know about it."""
        hints, execution = self.annotations, self.execution
        is_ephemeral = hints is not None and bool(hints.readOnlyHint or hints.idempotentHint)
        return Tool(mirrored, is_ephemeral, "" if execution is None else execution.taskSupport or "")


_decode_all = msgspec.json.Decoder(list[_Listed]).decode
_decode_one = msgspec.json.Decoder(_Listed).decode


def read(result: Raw) -> ToolList:
    """Read a ListToolsResult; without a list of tools, it is returned unchanged.

    Raises ValueError if it is not an object, or if it has more than MAX_MEMBERS tools, or more values than that in the
    tools with annotations.
    """
    opened = jsonrpc.fields(result)
    is_last = jsonrpc.is_null(opened.get("nextCursor", Raw(jsonrpc.NULL)))
    listed = opened.get("tools")
    if listed is None:
        return ToolList(result)
    check_items(listed)
    if param_headers.ANNOTATION not in bytes(listed):
        with suppress(ValueError):
            tools = {each.name: each.tool() for each in jsonrpc.inspect(_decode_all, listed)}
            return ToolList(result, tools, is_last=is_last)
    try:
        items = jsonrpc.items(listed)
    except ValueError:
        return ToolList(result)
    check_values(item for item in items if param_headers.ANNOTATION in bytes(item))
    kept: list[bytes] = []
    left_out: list[OmittedTool] = []
    tools = {}
    for item in items:
        try:
            one = jsonrpc.inspect(_decode_one, item)
            tools[one.name] = one.tool(_mirrored(item))
            kept.append(bytes(item))
        except ValueError as exc:
            name = jsonrpc.text(jsonrpc.members(item).get("name")) or ""
            left_out.append(OmittedTool(name[:_MAX_NAME], str(exc)[:_MAX_NAME]))
    if left_out:
        result = Raw(jsonrpc.merge(opened | {"tools": Raw(b"[%b]" % b",".join(kept))}))
    return ToolList(result, tools, tuple(left_out), is_last)


def _mirrored(tool: Raw) -> tuple[Mirrored, ...]:
    """The annotated parameters of a tool; raises ValueError for its flaw."""
    if param_headers.ANNOTATION not in bytes(tool):
        return ()
    try:
        return param_headers.mirrored(jsonrpc.value(jsonrpc.fields(tool)["inputSchema"]))
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def without_execution(result: Raw) -> Raw:
    """Remove `execution` from the tools of a ListToolsResult: 2026-07-28 does not have it."""
    if b'"execution"' not in bytes(result):
        return result
    opened = jsonrpc.fields(result)
    try:
        kept = [jsonrpc.without(tool, "execution") for tool in jsonrpc.items(opened["tools"])]
    except (KeyError, ValueError):
        return result
    return Raw(jsonrpc.merge(opened | {"tools": Raw(b"[%b]" % b",".join(kept))}))
