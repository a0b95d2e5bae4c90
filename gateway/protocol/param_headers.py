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
_OF_OTHERS: Final = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "contains", "additionalProperties", "unevaluatedProperties"),
    *("unevaluatedItems", "propertyNames", "not", "if", "then", "else"),
)
"""Keywords whose value is a schema, or a list of schemas."""
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,3})?")
_PRIMITIVE: Final = frozenset({"string", "integer", "boolean"})


class Mirrored(msgspec.Struct, frozen=True):
    """One annotated parameter: its property path, and the header that repeats it."""

    path: tuple[str, ...]
    header: str


def mirrored(schema: Any) -> tuple[Mirrored, ...]:
    """The annotated parameters of an input schema; raises ValueError for one for which clients must drop the tool."""
    found: dict[str, Mirrored] = {}
    for where, annotated, path in _annotated(schema, "inputSchema", ()):
        header = annotated[_ANNOTATION]
        if not path:
            raise ValueError(f"{where} has {_ANNOTATION}, but the root does not reach it through properties alone")
        if not isinstance(header, str) or not _TOKEN.fullmatch(header):
            raise ValueError(f"{where} has an {_ANNOTATION} that is not a header name")
        if not isinstance(annotated.get("type"), str) or annotated["type"] not in _PRIMITIVE:
            raise ValueError(f"{where} has {_ANNOTATION}, but its type is not string, integer or boolean")
        if header.lower() in found:
            raise ValueError(f"{where} repeats the {_ANNOTATION} of another property")
        found[header.lower()] = Mirrored(path, mcp.PARAM_HEADER + header)
    return tuple(found.values())


def _annotated(
    schema: Any, where: str, path: tuple[str, ...] | None
) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...] | None]]:
    """Every annotated schema in a schema: its place, itself, its path if properties alone lead to it from the root.

    Only places of schemas are searched: a property may have the annotation's name, or a default value contain it.
    """
    if not isinstance(schema, dict):
        return
    if _ANNOTATION in schema:
        yield where, schema, path
    for keyword in _OF_NAMED:
        inner = schema.get(keyword)
        for name, each in inner.items() if isinstance(inner, dict) else ():
            below = (*path, name) if keyword == "properties" and path is not None else None
            yield from _annotated(each, f"{where}.{name[:40]}", below)
    for keyword in _OF_OTHERS:
        inner = schema.get(keyword)
        for each in inner if isinstance(inner, list) else (inner,):
            yield from _annotated(each, f"{where}.{keyword}", None)


def check(mirrored: tuple[Mirrored, ...], arguments: Raw | None, headers: HeaderValues) -> None:
    """Compare each annotated argument with its header; raises HeaderMismatch."""
    opened: dict[tuple[str, ...], jsonrpc.Fields] = {}
    for parameter in mirrored:
        value = _at(arguments, parameter.path, opened)
        name, where, sent = parameter.header, ".".join(parameter.path), headers.getall(parameter.header, ())
        if value is None and sent:
            raise HeaderMismatch(f"Header mismatch: {name} was sent, but the argument {where} is absent or null")
        if value is None:
            continue
        if not sent:
            raise HeaderMismatch(f"Header mismatch: {name} is missing; it must repeat the argument {where}")
        if len(sent) > 1:
            raise HeaderMismatch(f"Header mismatch: {name} came {len(sent)} times; send it once")
        said = decode_value(name, sent[0].strip(" \t"))
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Compared exactly: as floats, two different integers beyond 2**53 can be equal.
            is_same = _NUMBER.fullmatch(said) is not None and Decimal(said) == Decimal(repr(value))
        else:
            is_same = isinstance(value, str | bool) and said == _text(value)
        if not is_same:
            raise HeaderMismatch(f"Header mismatch: {name} header value does not match the argument {where}")


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
