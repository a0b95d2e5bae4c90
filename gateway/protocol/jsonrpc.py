"""Shallow decoding of JSON-RPC messages, with helpers to write them.

Rule 1: `params`, `result` and `error` stay bytes (`msgspec.Raw`) until one of their fields is needed, so a 100 KB tool
result is spliced, not rebuilt. Rule 2: ids keep their JSON type; an id is compared and sent as its own bytes (mcp 1.23
ignores an answer whose integer id comes back as a string). Rule 3: text with unpaired surrogates is read as if it had
U+FFFD in their place (`unpaired_surrogates`).
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.protocol import mcp
from gateway.protocol.errors import DownstreamError, InvalidRequest
from gateway.protocol.json_text.json_bounds import MAX_MEMBERS, TooMany, check_items, check_members, check_values
from gateway.protocol.json_text.unpaired_surrogates import well_formed

T = TypeVar("T")

EMPTY: Final = Raw(b"{}")
NULL: Final = b"null"
_METHODS: Final = {method: f'"{method}"'.encode() for method in mcp.METHODS}
_COPIED_BYTES: Final = 4096
_ID_FIRST: Final = b'{"jsonrpc":"2.0","id":'
_RESULT: Final = b',"result":'
_RESULT_FIRST: Final = b'{"result":{'
"""How responses of the TypeScript SDK begin."""

_INTEGER: Final = re.compile(rb"-?[0-9]{1,300}")
_LONG_KEY: Final = 64
_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")


class Message(msgspec.Struct, gc=False):
    """Any JSON-RPC message; its kind follows from the fields that are set."""

    jsonrpc: str = ""
    id: Raw | UnsetType = UNSET
    method: str | None = None
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET

    @property
    def rpc_id(self) -> "RequestId | None":
        """The id of the request that this is, or that it answers; None for a message without one."""
        return request_id(self.id) if isinstance(self.id, Raw) else None

    @property
    def failure(self) -> "Error | None":
        """The error that this reports; None if it is no error response."""
        return error(self.error) if isinstance(self.error, Raw) else None


class Error(msgspec.Struct):
    """The `error` member of an error response; `message` is written even if empty, because it is required."""

    code: int
    message: str = ""
    data: Raw | UnsetType = UNSET


RequestId = bytes
"""JSON of a request's id, as `request_id` writes it: `1` and `"1"` are different ids."""

Fields = dict[str, Raw]
"""A JSON object opened one level deep."""

_decode_message = msgspec.json.Decoder(Message).decode
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_number = msgspec.json.Decoder(float).decode
_decode_any = msgspec.json.Decoder().decode
_decode_code = msgspec.json.Decoder(int).decode
encode = msgspec.json.encode
"""Of values that may contain `Raw`."""
decode = msgspec.json.decode


def message(data: bytes) -> Message:
    """Decode one message; raises ValueError (also for nesting that exhausts the decoder, and for bad UTF-8)."""
    if not data.isascii():
        _ = data.decode()  # parts are spliced without decoding, so the whole must be valid UTF-8
    return inspect(_decode_message, data)


def inspect(decode: Callable[[Raw | bytes], T], raw: Raw | bytes) -> T:
    """Decode JSON with a decoder of msgspec; raises its errors, and ValueError for nesting that exhausts it."""
    try:
        try:
            return decode(raw)
        except msgspec.DecodeError:
            if (text := well_formed(bytes(raw))) is None:
                raise
            return decode(text)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def fields(raw: Raw | bytes) -> Fields:
    """Open an object one level; raises ValueError if it is not an object."""
    if len(raw) > MAX_MEMBERS:  # a shorter text has fewer members
        check_members(raw)
    return inspect(_decode_fields, raw)


def members(raw: object) -> Fields:
    """As `fields`, but empty for anything that is not an object in JSON."""
    try:
        return fields(raw) if isinstance(raw, Raw | bytes) else {}
    except ValueError:
        return {}


def items(raw: Raw | bytes) -> list[Raw]:
    """Open an array one level; raises ValueError if it is not an array."""
    check_items(raw)
    return inspect(_decode_items, raw)


def value(raw: Raw | bytes) -> Any:
    """The whole value; raises ValueError, also for a number that Python cannot hold.

    Raises TooMany for a value with more than MAX_MEMBERS values in it.
    """
    if len(data := bytes(raw)) > MAX_MEMBERS:  # a shorter text has fewer members
        check_values((data,))
    return inspect(_decode_any, raw)


def error(raw: Raw) -> Error:
    """Read an `error` member; a malformed one becomes an internal error that keeps its `data`, and raises nothing."""
    data: Raw | UnsetType = UNSET
    with suppress(ValueError, KeyError):
        opened = fields(raw)
        data = opened.get("data", UNSET)
        if (said := text(opened.get("message", Raw(b'""')))) is not None:
            return Error(_decode_code(opened["code"]), said, data)
    return Error(mcp.INTERNAL_ERROR, "the upstream answered with a malformed JSON-RPC error", data)


def text(raw: Raw | None) -> str | None:
    """The string in `raw`, or None if it is not a string."""
    if raw is None:
        return None
    data = bytes(raw)
    if data[:1] != b'"':
        return None
    if data.isascii() and data.find(b"\\") < 0:
        return data[1:-1].decode()
    try:
        return inspect(_decode_text, data)
    except ValueError:
        return None


def number(raw: Raw | None) -> float | None:
    """The number in `raw`, or None if it is not a number, or not one that a float can hold."""
    try:
        return None if raw is None else inspect(_decode_number, raw)
    except ValueError:
        return None


def exact(encoded: bytes) -> bytes:
    """The same text for keeping: behind what msgspec has encoded, it leaves up to half as much memory unused."""
    return bytes(memoryview(encoded))


def is_id(raw: Raw | UnsetType) -> bool:
    """Whether `raw` is an id as MCP allows it: a string or an integer (basic/index, Requests)."""
    if not isinstance(raw, Raw):
        return False
    return _INTEGER.fullmatch(bytes(raw)) is not None or text(raw) is not None


def id_of(members: Fields) -> bytes | None:
    """JSON of the id of a message, if it has one that MCP allows."""
    id_ = members.get("id")
    return bytes(id_) if id_ is not None and is_id(id_) else None


def request_id(id_: Raw) -> RequestId:
    """An id for comparison: servers and clients may escape the characters of a string in another way."""
    said = text(id_)
    return bytes(id_) if said is None else encode(said)


def is_null(raw: Raw) -> bool:
    """Whether `raw` is JSON null."""
    return bytes(raw).strip() == NULL


def request(id_: bytes, method: str, params: Mapping[str, Any] | bytes | Raw) -> bytes:
    """A request; `id_` is JSON, and so are `params` if they are bytes."""
    named = _METHODS.get(method) or encode(method)
    text = params if type(params) is bytes else encode(params)
    return b"".join((_ID_FIRST, id_, b',"method":', named, b',"params":', text, b"}"))


def notification(method: str, params: Mapping[str, Any] | Raw | None = None) -> bytes:
    """A notification; `params` is omitted if None."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % encode(method)
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (encode(method), encode(params))


def result(id_: bytes | Raw, body: bytes | Raw, rest: bytes | memoryview = b"") -> bytes:
    """A result response; `id_` is JSON, and so is `body` with its `rest`."""
    # Not formatted: a join copies a large body once.
    return b"".join((_ID_FIRST, id_, _RESULT, body, rest, b"}"))


def unchecked_result(data: bytes, id_: bytes) -> bytes | Raw | None:
    """The result of a response in the form that the SDKs write: one with this id and nothing else.

    If what is returned is one JSON value, then the response is valid. Until this is checked, it may be anything that
    begins with a brace, as `Raw` from a decoder does: its readers expect no white space in front.
    """
    begin = _ID_FIRST + id_ + _RESULT  # not formatted, which would take three times as long
    if len(data) < _COPIED_BYTES:  # a part is copied if that takes less than a view of it
        part = data.removeprefix(begin).removesuffix(b"}")
        if len(begin) + len(part) + 1 == len(data) and part[:1] == b"{":
            return part
    elif data.startswith(b"%b{" % begin):
        return Raw(memoryview(data)[len(begin) : -1]) if data.endswith(b"}") else None
    if data.startswith(_RESULT_FIRST) and data.endswith(end := b',"jsonrpc":"2.0","id":%b}' % id_):
        first, last = len(_RESULT_FIRST) - 1, -len(end)
        return data[first:last] if len(data) < _COPIED_BYTES else Raw(memoryview(data)[first:last])
    return None


def answer(id_: bytes | Raw, body: Raw | Error) -> bytes:
    """A response: a failure if its body is an error, else a result."""
    return failure(id_, body) if isinstance(body, Error) else result(id_, body)


def failure(id_: bytes | Raw | None, body: Error) -> bytes:
    """An error response; it has no id if none could be read (basic/index, Error Responses)."""
    if id_ is None:
        return b'{"jsonrpc":"2.0","error":%b}' % encode(body)
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (bytes(id_), encode(body))


class RepeatedKey(ValueError):
    """An object has the same key twice; `opened` has one value of each."""

    def __init__(self, opened: Fields) -> None:
        super().__init__("a key comes twice")
        self.opened = opened


def distinct(raw: Raw | bytes) -> Fields:
    """Open an object one level, as `fields` does; raises RepeatedKey.

    The gateway reads some keys and splices the rest; the upstream may resolve a duplicate key differently (request
    smuggling in JSON), so it is refused. Detection compares lengths: in compact JSON, which most clients send, the
    members add up to the object. Other JSON is compacted first.
    """
    return compact(raw)[0]


def compact(raw: Raw | bytes) -> tuple[Fields, Raw | bytes]:
    """As `distinct`, with the text: `raw` itself, or without white space that of which all members are views."""
    opened = fields(raw)
    keys, size = "".join(opened), sum(map(len, opened.values()))
    # Each member has two quotes, a colon, and a comma or the closing brace.
    if len(raw) == max(2, 1 + 4 * len(opened) + len(keys) + size):
        return opened, raw
    written = exact(inspect(lambda text: msgspec.json.format(bytes(text), indent=-1), raw))
    opened = fields(written)
    values = b"".join(opened.values())
    if _units(written) != max(2, 1 + 4 * len(opened) + _utf16_units(keys) + _units(values)):
        raise RepeatedKey(opened)
    return opened, written


def object_of(
    raw: Raw, name: str, error: type[DownstreamError], repeated: type[DownstreamError] = InvalidRequest
) -> Fields:
    """Open an object one level; raises `repeated` if it has a key twice, or else `error` if it cannot be read."""
    try:
        return distinct(raw)
    except RepeatedKey as exc:
        raise repeated(f"{name} repeats a key; send each key once") from exc
    except TooMany as exc:
        raise error(f"{name} has {exc}; send fewer in one request") from exc
    except ValueError as exc:
        raise error(f"{name} must be an object") from exc


def _units(data: bytes) -> int:
    """The length of a JSON text in UTF-16 code units; an escape counts as the unit that it denotes."""
    units = _utf16_units(data.decode())
    backslashes = data.count(b"\\")
    if not backslashes:
        return units
    escapes = backslashes - data.count(b"\\\\")
    return units - escapes - 4 * data.replace(b"\\\\", b"").count(b"\\u")


def _utf16_units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def merge(members: Mapping[str, bytes | Raw]) -> bytes:
    """An object with these members, whose values are JSON."""
    return b"{%b}" % b",".join(
        [b"%b:%b" % (_key(key) if len(key) < _LONG_KEY else encode(key), bytes(raw)) for key, raw in members.items()]
    )


def without(raw: Raw, *names: str) -> Raw:
    """An object without these members; raises ValueError if it is not an object."""
    return Raw(merge({key: value for key, value in fields(raw).items() if key not in names}))


def with_meta(members: Mapping[str, bytes | Raw], meta: Mapping[str, bytes | Raw]) -> Raw:
    """An object with this `_meta` in place of its own; without one if it is empty."""
    parts = {key: value for key, value in members.items() if key != "_meta"}
    if meta:
        parts["_meta"] = merge(meta)
    return Raw(merge(parts))


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    """Cached, because the keys of messages are few; long ones are not kept."""
    return encode(key)


def without_line_ends(message: bytes) -> bytes:
    """The same JSON with line ends replaced by spaces; they occur only between tokens, never inside strings."""
    if message.find(b"\n") >= 0 or message.find(b"\r") >= 0:
        return message.translate(_LINE_ENDS)
    return message
