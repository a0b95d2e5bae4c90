"""`x-mcp-header`: tool parameters that clients repeat as `Mcp-Param-*` headers.

Source: specification 2026-07-28 basic/transports/streamable-http, Custom Headers from Tool Parameters.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core import jsonrpc, mcp
from gateway.core.request import HeaderValues, decode_value
from gateway.errors import HeaderMismatch, InvalidParams

_ANNOTATION: Final = "x-mcp-header"
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


class _Hints(msgspec.Struct):
    readOnlyHint: bool = False  # noqa: N815
    idempotentHint: bool = False  # noqa: N815


class Tool(msgspec.Struct, frozen=True):
    """What the gateway needs to know of a tool.

    `mirrored`: its annotated parameters. `ephemeral`: it says of itself that it may run twice (`readOnlyHint` or
    `idempotentHint`; SEP-2322, ephemeral workflow).
    """

    mirrored: tuple[Mirrored, ...] = ()
    ephemeral: bool = False


def of_tools(result: bytes) -> dict[str, Tool]:
    """What a ListToolsResult says of each tool."""
    listed = msgspec.json.decode(result, type=_Tools).tools
    return {tool.name: Tool(_of_schema(tool.inputSchema), _is_ephemeral(tool.annotations)) for tool in listed}


def _is_ephemeral(annotations: Raw) -> bool:
    try:
        hints = msgspec.json.decode(annotations, type=_Hints | None)
    except msgspec.MsgspecError:
        return False
    return hints is not None and (hints.readOnlyHint or hints.idempotentHint)


def _of_schema(schema: Raw) -> tuple[Mirrored, ...]:
    if _ANNOTATION.encode() not in bytes(schema):
        return ()
    return tuple(_walk(jsonrpc.decode(schema), ()))


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


def check(mirrored: tuple[Mirrored, ...], arguments: Raw | None, headers: HeaderValues) -> None:
    """Compare each annotated argument with its header; raises HeaderMismatch."""
    if not mirrored:
        return
    try:
        values = jsonrpc.decode(arguments) if arguments is not None else {}
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.arguments" cannot be read: {exc}') from exc
    for parameter in mirrored:
        _check_one(parameter, _at(values, parameter.path), headers)


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(values, dict):
            return None
        values = values.get(name)
    return values


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
        # Exactly, not as floats: two integers beyond 2**53 can be one float.
        return _NUMBER.fullmatch(header) is not None and Decimal(header) == Decimal(repr(value))
    return isinstance(value, str) and header == value
