"""Compares `MCP-Protocol-Version`, `Mcp-Method` or `Mcp-Name` with the body, which they repeat.

Sources: specification 2026-07-28 basic/transports/streamable-http (Server Validation, Value Encoding).
"""

import base64
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from multidict import MultiMapping

from gateway.protocol import mcp
from gateway.protocol.errors import HeaderMismatch

HeaderValues = MultiMapping[str]
"""Headers, of which each may come several times."""

_BASE64_OPEN: Final = "=?base64?"
_BASE64_CLOSE: Final = "?="


class Repeated(NamedTuple):
    """What a body says that agrees with its headers, as far as a comparison of texts shows."""

    version: str
    method: str
    name: bytes
    """JSON of `target`."""
    target: str


class KnownValues(dict[str, Sequence[str]]):
    """The values of the headers of a head that comes again and again, looked up once."""

    def __init__(self, headers: HeaderValues) -> None:
        super().__init__()
        self._headers = headers
        repeated = None
        versions, methods, names = self[mcp.PROTOCOL_VERSION], self[mcp.METHOD_HEADER], self[mcp.NAME_HEADER]
        if len(versions) == len(methods) == len(names) == 1:
            target = names[0]
            is_plain = target.isascii() and target.isprintable() and target[:2] != "=?"
            if is_plain and '"' not in target and "\\" not in target:
                repeated = Repeated(versions[0], methods[0], f'"{target}"'.encode(), target)
        self.repeated = repeated
        """None if it takes `check` to compare them."""
        self.is_bare = not any(map(self.__getitem__, ("Authorization", *mcp.TRACE_KEYS)))
        """Whether it has neither `Authorization` nor the context of a trace."""
        self.caller: Any = None
        """Who sends such a request, under the present configuration: a reload forgets all heads."""
        self.call: Any = None
        """The form of the bodies that came with it, once one was a plain call."""
        self.passing: Any = None
        """The route on which its headers have passed through, with the lines that have."""
        self.way: Any = None
        """What holds for further such calls (`downstream.direct_calls`)."""
        self.sender: Any = None
        """What else is known of the caller's requests with the same `_meta`."""

    def __missing__(self, name: str) -> Sequence[str]:
        values = self[name] = self._headers.getall(name, ())
        return values


def check(method: str, target: str | None, version: str, headers: HeaderValues) -> None:
    """Compare the mirrored headers with the body, which has `target` for `Mcp-Name`; raises HeaderMismatch."""
    for header, body in ((mcp.PROTOCOL_VERSION, version), (mcp.METHOD_HEADER, method)):
        sent = headers.getall(header, ())
        if len(sent) != 1 or sent[0] != body:
            _equal(header, _one(sent, header), body)
    if method in mcp.ASKING:
        name = _one(headers.getall(mcp.NAME_HEADER, ()), mcp.NAME_HEADER)
        if target is not None:
            _equal(mcp.NAME_HEADER, decode_value(mcp.NAME_HEADER, name), target)
    elif method.startswith("tasks/") and (named := headers.getall(mcp.NAME_HEADER, ())):
        # A client of the tasks extension must send it, but fastmcp 4 does not.
        _equal(mcp.NAME_HEADER, decode_value(mcp.NAME_HEADER, _one(named, mcp.NAME_HEADER)), target or "")


def _one(values: Sequence[str], name: str) -> str:
    if not values:
        raise HeaderMismatch(f"Header mismatch: the header {name} is missing; it must repeat the body's value")
    if len(values) > 1:
        raise HeaderMismatch(f"Header mismatch: the header {name} came {len(values)} times; send it once")
    return values[0].strip(" \t")


def _equal(name: str, header: str, body: str) -> None:
    if header != body:
        raise HeaderMismatch(
            f"Header mismatch: {name} header value {header[:80]!r} does not match body value {body[:80]!r}"
        )


def decode_value(name: str, value: str) -> str:
    """Decode a header value that may be in Base64 form; raises HeaderMismatch when it is malformed."""
    if not (value.startswith(_BASE64_OPEN) and value.endswith(_BASE64_CLOSE)):
        if not value.isascii() or not value.replace("\t", " ").isprintable():
            raise HeaderMismatch(f"Header mismatch: {name} has characters that need the {_BASE64_OPEN}…?= form")
        return value
    try:
        encoded = value[len(_BASE64_OPEN) : -len(_BASE64_CLOSE)]
        return base64.b64decode(encoded, validate=True).decode()
    except ValueError as exc:  # bad Base64, characters beyond ASCII in it, bad UTF-8 below it
        raise HeaderMismatch(f"Header mismatch: {name} has invalid Base64 in its {_BASE64_OPEN}…?= form") from exc


def encode_value(value: str) -> str:
    """A value as a header carries it: in Base64 form if it is not plain, or could be taken for that form."""
    is_plain = value.isascii() and value.isprintable() and value == value.strip() and value != ""
    if is_plain and not value.startswith(_BASE64_OPEN):
        return value
    return _BASE64_OPEN + base64.b64encode(value.encode("utf-8", "replace")).decode() + _BASE64_CLOSE
