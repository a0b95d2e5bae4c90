"""Checks tool parameters that clients repeat as `Mcp-Param-*` headers (`x-mcp-header`).

Source: specification 2026-07-28 basic/transports/streamable-http, Custom Headers from Tool Parameters.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import HeaderMismatch, InvalidParams
from gateway.protocol.header_mismatch import HeaderValues, decode_value, encode_value

_ANNOTATION: Final = "x-mcp-header"
ANNOTATION: Final = _ANNOTATION.encode()
_OF_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_OF_LISTED: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE: Final = (
    "items",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,3})?")
_PRIMITIVE: Final = frozenset({"string", "integer", "boolean"})


class Mirrored(msgspec.Struct, frozen=True):
    """One annotated parameter: its property path, and the header that repeats it."""

    path: tuple[str, ...]
    header: str


class _Tools(msgspec.Struct):
    tools: list["_Tool"]


class _Tool(msgspec.Struct):
    name: str
    inputSchema: Raw = Raw(b"{}")  # noqa: N815  (the wire's spelling)
    annotations: Raw = Raw(b"{}")
    execution: Raw = Raw(b"{}")


class _Hints(msgspec.Struct):
    readOnlyHint: bool = False  # noqa: N815
    idempotentHint: bool = False  # noqa: N815


_decode_tools = msgspec.json.Decoder(_Tools).decode
_decode_hints: Final[msgspec.json.Decoder[_Hints | None]] = msgspec.json.Decoder(_Hints | None)


class Tool(msgspec.Struct, frozen=True):
    """What the gateway needs to know about a tool.

    `mirrored`: its annotated parameters. `ephemeral`: it declares that it may run twice (`readOnlyHint` or
    `idempotentHint`; SEP-2322, ephemeral workflow). `task_support`: `execution.taskSupport`, empty if it has none.
    """

    mirrored: tuple[Mirrored, ...] = ()
    ephemeral: bool = False
    task_support: str = ""


def of_tools(result: bytes) -> dict[str, Tool]:
    """The tools of a ListToolsResult, by name; raises ValueError."""
    try:
        return {tool.name: _known(tool) for tool in jsonrpc.inspect(_decode_tools, result).tools}
    except RecursionError as exc:
        raise ValueError("a tool is nested too deeply") from exc


def _known(tool: _Tool) -> Tool:
    return Tool(_of_schema(tool.inputSchema), _is_ephemeral(tool.annotations), _task_support(tool.execution))


def _task_support(execution: Raw) -> str:
    return jsonrpc.text(jsonrpc.members(execution).get("taskSupport")) or ""


def _is_ephemeral(annotations: Raw) -> bool:
    try:
        hints = jsonrpc.inspect(_decode_hints.decode, annotations)
    except ValueError:
        return False
    return hints is not None and (hints.readOnlyHint or hints.idempotentHint)


def _of_schema(schema: Raw) -> tuple[Mirrored, ...]:
    if ANNOTATION not in bytes(schema):
        return ()
    return tuple(_walk(jsonrpc.value(schema), ()))


def _walk(schema: Any, path: tuple[str, ...]) -> Iterator[Mirrored]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return
    for name, property_ in properties.items():
        if not isinstance(property_, dict):
            continue
        header = property_.get(_ANNOTATION)
        type_ = property_.get("type")
        if isinstance(header, str) and _TOKEN.fullmatch(header) and isinstance(type_, str) and type_ in _PRIMITIVE:
            yield Mirrored((*path, name), mcp.PARAM_HEADER + header)
        yield from _walk(property_, (*path, name))


def flaw(schema: Any) -> str | None:
    """The rule for annotations that an input schema breaks, in words; clients must drop such a tool."""
    seen: set[str] = set()
    for where, annotated, is_reachable in _annotated(schema, "inputSchema", is_reachable=False):
        header = annotated[_ANNOTATION]
        if not is_reachable:
            return f"{where} has {_ANNOTATION}, but the root does not reach it through properties alone"
        if not isinstance(header, str) or not _TOKEN.fullmatch(header):
            return f"{where} has an {_ANNOTATION} that is not a header name"
        if not isinstance(annotated.get("type"), str) or annotated["type"] not in _PRIMITIVE:
            return f"{where} has {_ANNOTATION}, but its type is not string, integer or boolean"
        if header.lower() in seen:
            return f"{where} repeats the {_ANNOTATION} of another property"
        seen.add(header.lower())
    return None


def _annotated(schema: Any, where: str, *, is_reachable: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every annotated schema in a schema: its place, itself, and whether the place may be annotated.

    Only places of schemas are searched: a property may have the annotation's name, or a default value contain it.
    """
    if not isinstance(schema, dict):
        return
    if _ANNOTATION in schema:
        yield where, schema, is_reachable
    is_root = where == "inputSchema"
    for keyword in _OF_NAMED:
        inner = schema.get(keyword)
        for name, each in inner.items() if isinstance(inner, dict) else ():
            reached = keyword == "properties" and (is_root or is_reachable)
            yield from _annotated(each, f"{where}.{name[:40]}", is_reachable=reached)
    for keyword in _OF_LISTED:
        inner = schema.get(keyword)
        for each in inner if isinstance(inner, list) else ():
            yield from _annotated(each, f"{where}.{keyword}", is_reachable=False)
    for keyword in _OF_ONE:
        yield from _annotated(schema.get(keyword), f"{where}.{keyword}", is_reachable=False)


def check(mirrored: tuple[Mirrored, ...], arguments: Raw | None, headers: HeaderValues) -> None:
    """Compare each annotated argument with its header; raises HeaderMismatch."""
    opened: dict[tuple[str, ...], jsonrpc.Fields] = {}
    for parameter in mirrored:
        _check_one(parameter, _at(arguments, parameter.path, opened), headers)


def headers_for(mirrored: tuple[Mirrored, ...], arguments: Raw | None) -> dict[str, str]:
    """The headers that repeat the annotated arguments of a call; raises InvalidParams."""
    opened: dict[tuple[str, ...], jsonrpc.Fields] = {}
    found = {parameter.header: _at(arguments, parameter.path, opened) for parameter in mirrored}
    return {header: encode_value(_text(value)) for header, value in found.items() if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _at(arguments: Raw | None, path: tuple[str, ...], opened: dict[tuple[str, ...], jsonrpc.Fields]) -> Any:
    """The value at a path; `opened` caches the objects on the way, by path. Raises InvalidParams."""
    raw = arguments
    for depth, name in enumerate(path):
        if raw is None or not bytes(raw).startswith(b"{"):
            return None
        place = path[:depth]
        try:
            if place not in opened:
                opened[place] = jsonrpc.distinct(raw)
        except jsonrpc.RepeatedKey as exc:
            # The upstream might read the other one, which the header does not repeat.
            raise InvalidParams(
                f'"{".".join(("params.arguments", *place))}" repeats a key; send each key once'
            ) from exc
        except ValueError as exc:
            raise InvalidParams(f'"params.arguments" cannot be read: {exc}') from exc
        raw = opened[place].get(name)
    try:
        return jsonrpc.value(raw) if raw is not None else None
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.arguments.{".".join(path)}" cannot be read: {exc}') from exc


def _check_one(parameter: Mirrored, value: Any, headers: HeaderValues) -> None:
    name, sent = parameter.header, headers(parameter.header)
    where = ".".join(parameter.path)
    if value is None:
        if sent:
            raise HeaderMismatch(f"Header mismatch: {name} was sent, but the argument {where} is absent or null")
        return
    if not sent:
        raise HeaderMismatch(f"Header mismatch: {name} is missing; it must repeat the argument {where}")
    if len(sent) > 1:
        raise HeaderMismatch(f"Header mismatch: {name} came {len(sent)} times; send it once")
    header = decode_value(name, sent[0].strip(" \t"))
    if not _same(header, value):
        raise HeaderMismatch(f"Header mismatch: {name} header value does not match the argument {where}")


def _same(header: str, value: Any) -> bool:
    if isinstance(value, bool):
        return header == ("true" if value else "false")
    if isinstance(value, int | float):
        # Compared exactly: as floats, two different integers beyond 2**53 can be equal.
        return _NUMBER.fullmatch(header) is not None and Decimal(header) == Decimal(repr(value))
    return isinstance(value, str) and header == value
