"""One JSON-RPC message in or out, decoded once and shallowly.

Rule 1: `params`, `result` and `error` stay bytes (`msgspec.Raw`) until somebody needs a field of them, so a 100 KB
tool result is spliced, not rebuilt. Rule 2: ids keep their JSON type; an id is compared and sent as its own bytes
(mcp 1.23 ignores an answer whose integer id comes back as a string).
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

EMPTY: Final = Raw(b"{}")
NULL: Final = b"null"

# Possessive, and an unterminated string is one token too: searching again after each of its quotes is quadratic.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_INTEGER: Final = re.compile(rb"-?[0-9]{1,300}")
_LEVELS: Final = bytes.maketrans(b"[]{}", b"()()")
_NO_LEVELS: Final = bytes(set(range(256)) - set(b"[]{}"))


class Message(msgspec.Struct, gc=False):
    """Any JSON-RPC message; which fields are set says what it is."""

    jsonrpc: str = ""
    id: Raw | UnsetType = UNSET
    method: str | None = None
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class Error(msgspec.Struct):
    """The `error` member of an error response; an empty `message` is written, for the member is required."""

    code: int
    message: str = ""
    data: Raw | UnsetType = UNSET


Fields = dict[str, Raw]
"""A JSON object opened one level deep."""

_decode_message = msgspec.json.Decoder(Message).decode
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_error = msgspec.json.Decoder(Error).decode
encode = msgspec.json.encode
decode = msgspec.json.decode


def message(data: bytes) -> Message:
    """Decode one message; raises ValueError (also for nesting that exhausts the decoder, and for bad UTF-8)."""
    if not data.isascii():
        _ = data.decode()  # what is spliced unread must be text
    try:
        return _decode_message(data)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def fields(raw: Raw | bytes) -> Fields:
    """Open an object one level; raises ValueError when it is none."""
    try:
        return _decode_fields(raw)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def error(raw: Raw) -> Error:
    """Decode an `error` member; a malformed one becomes an internal error rather than a crash."""
    try:
        return _decode_error(raw)
    except (ValueError, RecursionError):
        return Error(-32603, "the upstream answered with a malformed JSON-RPC error", _data(raw))


def _data(raw: Raw) -> Raw | UnsetType:
    """The `data` of an error whose other members are malformed."""
    try:
        return fields(raw).get("data", UNSET)
    except ValueError:
        return UNSET


def text(raw: Raw | None) -> str | None:
    """The string in `raw`, or None when it is something else."""
    if raw is None:
        return None
    data = bytes(raw)
    if data[:1] != b'"':
        return None
    if b"\\" not in data and data.isascii():
        return data[1:-1].decode()
    try:
        return _decode_text(data)
    except ValueError:
        return None


def is_id(raw: Raw | UnsetType) -> bool:
    """Whether `raw` is an id as MCP allows it: a string or an integer (basic/index, Requests)."""
    if not isinstance(raw, Raw):
        return False
    return text(raw) is not None or _INTEGER.fullmatch(bytes(raw)) is not None


def is_null(raw: Raw) -> bool:
    """Whether `raw` is JSON null."""
    return bytes(raw).strip() == NULL


def request(id_: bytes, method: str, params: Mapping[str, Any]) -> bytes:
    """A request; `id_` is JSON."""
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (id_, encode(method), encode(params))


def notification(method: str, params: Mapping[str, Any] | None = None) -> bytes:
    """A notification; `params` is left out when None."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % encode(method)
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (encode(method), encode(params))


def result(id_: bytes | Raw, body: bytes | Raw) -> bytes:
    """A result response; `id_` and `body` are JSON."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (bytes(id_), bytes(body))


def failure(id_: bytes | Raw | None, body: Error) -> bytes:
    """An error response; without an id where none could be read (basic/index, Error Responses)."""
    if id_ is None:
        return b'{"jsonrpc":"2.0","error":%b}' % encode(body)
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (bytes(id_), encode(body))


def check_bounds(data: bytes, max_depth: int) -> None:
    """Refuse what a shallow decode lets through: bad UTF-8 and too deep nesting. Raises ValueError."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"not UTF-8 at byte {exc.start}") from exc
    if data.count(b"{") + data.count(b"[") > max_depth and _deeper_than(data, max_depth):
        raise ValueError(f"nested deeper than {max_depth} levels")


def _deeper_than(data: bytes, max_depth: int) -> bool:
    """Peel one level per pass, in C: a loop over millions of brackets would hold up everybody else."""
    levels = _STRING.sub(b"", data).translate(_LEVELS, _NO_LEVELS)
    for _ in range(max_depth):
        if not levels:
            return False
        levels = levels.replace(b"()", b"")
    return bool(levels)


def has_duplicate_keys(raw: Raw | bytes, opened: Fields) -> bool:
    """Whether the object `raw`, whose one-level form is `opened`, repeats a key at that level.

    The gateway reads some keys and splices the rest; a duplicate key is read one way here and perhaps another way
    upstream (request smuggling in JSON), so callers refuse it rather than resolve it. Most clients send compact JSON:
    then the lengths add up exactly and nothing is decoded twice.
    """
    data = bytes(raw)
    if len(data) == max(1 + sum(map(len, opened)) + len(b"".join(opened.values())) + 4 * len(opened), 2):
        return False
    # Only keys matter: numbers stay text, for Python refuses to convert an integer of more than 4300 digits.
    pairs = json.loads(data, object_pairs_hook=_Pairs, parse_int=str, parse_float=str)
    return isinstance(pairs, _Pairs) and len(dict(pairs)) != len(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The members of one object in order, duplicates included."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def merge(parts: Iterable[tuple[str, bytes | Raw]]) -> bytes:
    """An object from keys and JSON values."""
    return b"{%b}" % b",".join(b"%b:%b" % (encode(key), bytes(value)) for key, value in parts)
