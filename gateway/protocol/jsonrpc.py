"""Shallow decoding of JSON-RPC messages, with helpers to write them.

Rule 1: `params`, `result` and `error` stay bytes (`msgspec.Raw`) until one of their fields is needed, so a 100 KB tool
result is spliced, not rebuilt. Rule 2: ids keep their JSON type; an id is compared and sent as its own bytes (mcp 1.23
ignores an answer whose integer id comes back as a string). Rule 3: text with unpaired surrogates
(`unpaired_surrogates`) is read, and forwarded unchanged.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from operator import add
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.protocol import unpaired_surrogates

T = TypeVar("T")

EMPTY: Final = Raw(b"{}")
NULL: Final = b"null"
_RESULT_FIRST: Final = b'{"result":{'
"""How responses of the TypeScript SDK begin."""

_DIGITS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_MANY_DIGITS: Final = b"0" * 300
_INTEGER: Final = re.compile(rb"-?[0-9]{1,300}")
_LONG_KEY: Final = 64
_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")
_LEVELS: Final = bytes.maketrans(b"[]{}", b"1010")
_BRACKETS: Final = b"[]{}"
MAX_MEMBERS: Final = 50_000
"""The largest number of values that are taken out of one message, since each of them becomes a Python object."""


class Message(msgspec.Struct, gc=False):
    """Any JSON-RPC message; its kind follows from the fields that are set."""

    jsonrpc: str = ""
    id: Raw | UnsetType = UNSET
    method: str | None = None
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class Error(msgspec.Struct):
    """The `error` member of an error response; `message` is written even if empty, because it is required."""

    code: int
    message: str = ""
    data: Raw | UnsetType = UNSET


Fields = dict[str, Raw]
"""A JSON object opened one level deep."""

_decode_message = msgspec.json.Decoder(Message).decode
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode
_decode_code = msgspec.json.Decoder(int).decode
_encode = msgspec.json.encode
decode = msgspec.json.decode


def message(data: bytes) -> Message:
    """Decode one message; raises ValueError (also for nesting that exhausts the decoder, and for bad UTF-8)."""
    if not data.isascii():
        _ = data.decode()  # parts are spliced without decoding, so the whole must be valid UTF-8
    try:
        return _decode_message(data)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        return _odd_message(_odd_fields(_hidden(data, exc)))


def _hidden(raw: Raw | bytes, refused: msgspec.DecodeError) -> bytes:
    """JSON that msgspec refused, with its unpaired surrogates hidden; raises `refused` if they are not the cause."""
    if isinstance(refused, msgspec.ValidationError) or (hidden := unpaired_surrogates.hidden(bytes(raw))) is None:
        try:
            raise refused
        finally:
            del refused  # its traceback refers to this frame, and the cycle would keep the message
    return hidden


def _odd_message(opened: Fields) -> Message:
    """As `_decode_message`, for a message with an unpaired surrogate."""
    version, method = text(opened.get("jsonrpc", Raw(b'""'))), opened.get("method")
    named = text(method)
    if version is None or (named is None and method is not None and not is_null(method)):
        raise ValueError("`jsonrpc` and `method` must be strings")
    id_, params = opened.get("id", UNSET), opened.get("params", UNSET)
    return Message(version, id_, named, params, opened.get("result", UNSET), opened.get("error", UNSET))


def fields(raw: Raw | bytes) -> Fields:
    """Open an object one level; raises ValueError if it is not an object."""
    return _open(raw)[0]


def members(raw: object) -> Fields:
    """As `fields`, but empty for anything that is not an object in JSON."""
    try:
        return fields(raw) if isinstance(raw, Raw | bytes) else {}
    except ValueError:
        return {}


def _open(raw: Raw | bytes) -> tuple[Fields, bytes | None]:
    """The members of an object, and the object with its unpaired surrogates hidden, if it has any."""
    _check_members(raw)
    try:
        return _decode_fields(raw), None
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        hidden = _hidden(raw, exc)
        return _odd_fields(hidden), hidden


def _odd_fields(hidden: bytes) -> Fields:
    """As `_decode_fields`, for an object with an unpaired surrogate."""
    try:
        opened = _decode_fields(hidden)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    except UnicodeDecodeError:
        opened = _decode_fields(unpaired_surrogates.escaped(hidden))
        values = (Raw(unpaired_surrogates.unescaped(bytes(value))) for value in opened.values())
        return dict(zip(unpaired_surrogates.strings(opened), values, strict=True))
    return {key: Raw(unpaired_surrogates.shown(bytes(value))) for key, value in opened.items()}


def items(raw: Raw | bytes) -> list[Raw]:
    """Open an array one level; raises ValueError if it is not an array."""
    check_items(raw)
    try:
        return _decode_items(raw)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        return [Raw(unpaired_surrogates.shown(bytes(item))) for item in items(_hidden(raw, exc))]


def inspect(decode: Callable[[Raw | bytes], T], raw: Raw | bytes) -> T:
    """Decode JSON that is inspected but not passed on; unpaired surrogates become U+FFFD.

    `decode` is a msgspec decoder; its errors are raised unchanged, but nesting that exhausts it is a ValueError.
    """
    try:
        return decode(raw)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        return decode(unpaired_surrogates.replaced(_hidden(raw, exc)))


def value(raw: Raw | bytes) -> Any:
    """The whole value; raises RecursionError, or ValueError, also for a number that Python cannot hold.

    Raises TooMany for a value with more than MAX_MEMBERS values in it.
    """
    if len(data := bytes(raw)) > MAX_MEMBERS:  # a shorter text has fewer members
        check_values((data,))
    try:
        return _decode_any(raw)
    except msgspec.DecodeError as exc:
        _ = _hidden(raw, exc)
        return json.loads(bytes(raw).decode(), parse_float=_finite, parse_constant=_finite)


def check_numbers(raw: Raw | bytes) -> None:
    """Raise ValueError for a number that Python cannot hold and so cannot compare.

    Such a number has an exponent of two digits or more, or 300 digits. Most JSON has neither, and is not decoded.
    """
    plain = bytes(raw).translate(_DIGITS, b"+")
    if plain.find(b"0e00") < 0 and plain.find(_MANY_DIGITS) < 0:  # `in` costs CPython an exception
        return
    try:
        _ = value(raw)
    except TooMany:
        return  # `canonical_members` does not compare them either
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError("Number out of range")
    return found


_MALFORMED: Final = "the upstream answered with a malformed JSON-RPC error"


def error(raw: Raw) -> Error:
    """Read an `error` member; a malformed one becomes an internal error that keeps its `data`, and raises nothing."""
    try:
        opened = _error_fields(raw)
    except ValueError:
        return Error(-32603, _MALFORMED)
    data = opened.get("data", UNSET)
    try:
        code, said = _decode_code(opened["code"]), text(opened.get("message", Raw(b'""')))
    except (ValueError, KeyError):
        return Error(-32603, _MALFORMED, data)
    return Error(code, said, data) if said is not None else Error(-32603, _MALFORMED, data)


class _ErrorParts(msgspec.Struct):
    code: Raw | UnsetType = UNSET
    message: Raw | UnsetType = UNSET
    data: Raw | UnsetType = UNSET


_decode_error = msgspec.json.Decoder(_ErrorParts).decode


def _error_fields(raw: Raw) -> Mapping[str, Raw]:
    """The members that an error has, however large its data is."""
    try:
        parts = msgspec.structs.asdict(_decode_error(raw))
    except (msgspec.DecodeError, RecursionError):
        return fields(raw)
    return {name: value for name, value in parts.items() if value is not UNSET}


def text(raw: Raw | None) -> str | None:
    """The string in `raw`, or None if it is not a string; an unpaired surrogate is a character."""
    if raw is None:
        return None
    data = bytes(raw)
    if data[:1] != b'"':
        return None
    if data.isascii() and data.find(b"\\") < 0:
        return data[1:-1].decode()
    try:
        return _decode_text(data)
    except msgspec.DecodeError:
        return _odd_text(data)
    except ValueError:
        return None


def _odd_text(data: bytes) -> str | None:
    try:
        found = json.loads(data.decode())
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def encode(value: Any) -> bytes:
    """Encode a value as JSON; it may contain `Raw`."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode_odd(value)


def _encode_odd(value: Any) -> bytes:
    """As `_encode`, for a value with an unpaired surrogate."""
    match value:
        case str():
            return unpaired_surrogates.written(value)
        case Mapping():
            return merge((key, _encode_odd(item)) for key, item in value.items())
        case list() | tuple():
            return b"[%b]" % b",".join(map(_encode_odd, value))
        case Error():
            data = {"data": value.data} if value.data is not UNSET else {}
            return _encode_odd({"code": value.code, "message": value.message, **data})
        case _:
            return _encode(value)


def is_id(raw: Raw | UnsetType) -> bool:
    """Whether `raw` is an id as MCP allows it: a string or an integer (basic/index, Requests)."""
    if not isinstance(raw, Raw):
        return False
    return text(raw) is not None or _INTEGER.fullmatch(bytes(raw)) is not None


def is_null(raw: Raw) -> bool:
    """Whether `raw` is JSON null."""
    return bytes(raw).strip() == NULL


def request(id_: bytes, method: str, params: Mapping[str, Any] | Raw) -> bytes:
    """A request; `id_` is JSON."""
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (id_, encode(method), encode(params))


def notification(method: str, params: Mapping[str, Any] | Raw | None = None) -> bytes:
    """A notification; `params` is omitted if None."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % encode(method)
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (encode(method), encode(params))


def result(id_: bytes | Raw, *body: bytes | Raw | memoryview) -> bytes:
    """A result response; `id_` and the parts of `body` are JSON."""
    # Not formatted: a join copies a large body once.
    return b"".join((b'{"jsonrpc":"2.0","id":', id_, b',"result":', *body, b"}"))


def unchecked_result(data: bytes, id_: bytes) -> Raw | None:
    """The result of a response in the form that the SDKs write: one with this id and nothing else.

    If what is returned is one JSON value, then the response is valid. Until this is checked, it may be anything that
    begins with a brace, as `Raw` from a decoder does: its readers expect no white space in front.
    """
    begin = b'{"jsonrpc":"2.0","id":%b,"result":{' % id_
    if data.startswith(begin):
        return Raw(memoryview(data)[len(begin) - 1 : -1]) if data.endswith(b"}") else None
    if data.startswith(_RESULT_FIRST) and data.endswith(end := b',"jsonrpc":"2.0","id":%b}' % id_):
        return Raw(memoryview(data)[len(_RESULT_FIRST) - 1 : -len(end)])
    return None


def answer(id_: bytes | Raw, body: Raw | Error) -> bytes:
    """A response: a failure if its body is an error, else a result."""
    return failure(id_, body) if isinstance(body, Error) else result(id_, body)


def failure(id_: bytes | Raw | None, body: Error) -> bytes:
    """An error response; it has no id if none could be read (basic/index, Error Responses)."""
    if id_ is None:
        return b'{"jsonrpc":"2.0","error":%b}' % encode(body)
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (bytes(id_), encode(body))


def check_bounds(data: bytes, max_depth: int) -> None:
    """Raise ValueError for faults that a shallow decode misses: bad UTF-8 or too deep nesting."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"not UTF-8 at byte {exc.start}") from exc
    if data.count(b"{") + data.count(b"[") > max_depth and _depth(data) > max_depth:
        raise ValueError(f"nested deeper than {max_depth} levels")


def _depth(data: bytes) -> int:
    """How deep the brackets of a JSON text nest; all in C code, because a body may consist of brackets only."""
    levels = _outside_strings(data, _BRACKETS).translate(_LEVELS)
    # Eight brackets make a byte: tables give what it adds to the depth, and its highest point.
    levels += b"0" * (8 - len(levels) % 8)
    packed = int(levels, 2).to_bytes(len(levels) // 8)
    before = accumulate(map(_RISES.__getitem__, packed), initial=0)
    deepest: int = max(map(add, before, map(_PEAKS.__getitem__, packed)))
    return deepest


@cache
def _all_but(kept: bytes) -> bytes:
    return bytes(set(range(256)) - set(kept))


def _outside_strings(data: bytes, kept: bytes) -> bytes:
    """The bytes of a JSON text that are in `kept`, without those in its strings."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = data.translate(None, _all_but(kept + b'"')).replace(b'""', b"")
    if b'"' in found:  # some strings have such bytes in them
        found = b"".join(found.split(b'"')[::2])
    return found


def _peak(brackets: int) -> int:
    """The highest depth within a byte of brackets, relative to the depth before it."""
    bits = f"{brackets:08b}"
    return max(2 * bits.count("1", 0, end) - end for end in range(9))


_RISES: Final[list[int]] = [2 * brackets.bit_count() - 8 for brackets in range(256)]
_PEAKS: Final[list[int]] = [_peak(brackets) for brackets in range(256)]


class TooMany(ValueError):
    """A message has more values than are taken out of one."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_MEMBERS} values in one object or array")


class _Spliced(msgspec.Struct):
    """Members that may hold any number of values, because they are spliced, or checked before they are opened."""

    structuredContent: Raw = Raw(b"")  # noqa: N815  (the wire's spelling)
    content: Raw = Raw(b"")
    contents: Raw = Raw(b"")
    tools: Raw = Raw(b"")
    prompts: Raw = Raw(b"")
    resources: Raw = Raw(b"")
    resourceTemplates: Raw = Raw(b"")  # noqa: N815
    messages: Raw = Raw(b"")
    arguments: Raw = Raw(b"")
    inputResponses: Raw = Raw(b"")  # noqa: N815
    params: Raw = Raw(b"")
    result: Raw = Raw(b"")
    data: Raw = Raw(b"")


class _AnyObject(msgspec.Struct, gc=False):
    pass


_decode_spliced = msgspec.json.Decoder(_Spliced).decode
_decode_objects = msgspec.json.Decoder(list[_AnyObject]).decode


def _separators(data: bytes, which: bytes = b",") -> int:
    """The number of these bytes outside strings; exact only if it may exceed MAX_MEMBERS."""
    if (most := sum(map(data.count, _singly(which)))) <= MAX_MEMBERS:
        return most
    return len(_outside_strings(data, which))


@cache
def _singly(which: bytes) -> tuple[bytes, ...]:
    return tuple(bytes((each,)) for each in which)


def check_values(raws: Iterable[Raw | bytes]) -> None:
    """Raise TooMany for more than MAX_MEMBERS values, in all of `raws` together and on all levels."""
    if sum(_separators(bytes(raw), b",[{") for raw in raws) > MAX_MEMBERS:
        raise TooMany


def _check_members(raw: Raw | bytes) -> None:
    """Raise TooMany for an object that may have more than MAX_MEMBERS members.

    It costs memory to count members, so their values' commas count too, but for values that are spliced.
    """
    data = bytes(raw)
    if (commas := _separators(data)) < MAX_MEMBERS:
        return
    try:
        spliced = _decode_spliced(data)
    except (ValueError, RecursionError):
        raise TooMany from None
    if commas - sum(_separators(bytes(getattr(spliced, name))) for name in spliced.__struct_fields__) >= MAX_MEMBERS:
        raise TooMany


def check_items(raw: Raw | bytes) -> None:
    """Raise TooMany for an array with more than MAX_MEMBERS items; only objects are counted without their commas."""
    data = bytes(raw)
    if (commas := _separators(data)) < MAX_MEMBERS:
        return
    try:
        if commas < 20 * MAX_MEMBERS and len(_decode_objects(data)) <= MAX_MEMBERS:
            return
    except (ValueError, RecursionError):
        pass
    raise TooMany


class RepeatedKey(ValueError):
    """An object has the same key twice."""


def distinct(raw: Raw | bytes) -> Fields:
    """Open an object one level, as `fields` does; raises RepeatedKey.

    The gateway reads some keys and splices the rest; the upstream may resolve a duplicate key differently (request
    smuggling in JSON), so it is refused. Detection compares lengths: in compact JSON, which most clients send, the
    members add up to the object. Other JSON is compacted first.
    """
    data = bytes(raw)
    if len(data) <= MAX_MEMBERS:  # it has fewer members, so the usual case needs no other check
        try:
            opened = _decode_fields(data)
        except (msgspec.DecodeError, RecursionError):
            pass  # `_open` knows why
        else:
            if len(data) == 1 + len("".join(opened)) + len(b"".join(opened.values())) + 4 * len(opened):
                return opened
    opened, hidden = _open(raw)
    if hidden is None and len(data) == _compact_length(opened, len("".join(opened))):
        return opened
    if hidden is None:
        written = msgspec.json.format(bytes(raw), indent=-1)
        opened = _decode_fields(written)
    else:
        written = msgspec.json.format(hidden, indent=-1)
        opened, written = _odd_fields(written), unpaired_surrogates.shown(written)
    values = b"".join(opened.values())
    if _units(written) != _compact_length(opened, _utf16_units("".join(opened))) + _units(values) - len(values):
        raise RepeatedKey("a key comes twice")
    return opened


def _compact_length(opened: Fields, keys: int) -> int:
    """The length of an object without white space; `keys` is the total length of its keys."""
    return max(1 + keys + len(b"".join(opened.values())) + 4 * len(opened), 2)


def _units(data: bytes) -> int:
    """The length of a JSON text in UTF-16 code units; an escape counts as the unit that it denotes."""
    units = _utf16_units(data.decode())
    backslashes = data.count(b"\\")
    if not backslashes:
        return units
    escapes = backslashes - data.count(b"\\\\")
    return units - escapes - 4 * data.replace(b"\\\\", b"").count(b"\\u")


def _utf16_units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_PLAIN: Final = bytes(
    48 if each in b"0123456789" else 101 if each in b".eE" else each if 32 <= each < 127 and each != 92 else 0
    for each in range(256)
)
"""For `translate`: one digit, one sign behind the digits of a float, and 0 for escapes and all but printable ASCII."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and without white space: values that `value` reads as equal give equal bytes."""
    try:
        written = _encode_sorted(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    else:
        plain = written.translate(_PLAIN)
        if plain.find(b"\0") < 0 and plain.find(b"0e") < 0:
            return written  # no float and no escape, which the encoder below writes in another way
    return _CANONICAL.encode(value).encode()


def canonical_members(members: Mapping[str, Raw]) -> bytes:
    """As `canonical`, for an object that is open; raises RecursionError or ValueError.

    A value with more than MAX_MEMBERS values in it only loses its white space: a client that sends it again writes it
    the same way.
    """
    written = [f"{encode_basestring_ascii(key)}:".encode() + _canonical(members[key]) for key in sorted(members)]
    return b"{%b}" % b",".join(written)


def _canonical(raw: Raw) -> bytes:
    data = bytes(raw)
    if data[:1] == b'"' and data.isascii() and data.find(b"\\") < 0 and data.decode().isprintable():
        return data  # `canonical` escapes all other characters
    try:
        return canonical(value(raw))
    except TooMany:
        return msgspec.json.format(bytes(raw), indent=-1)


def merge(parts: Iterable[tuple[str, bytes | Raw]]) -> bytes:
    """An object from keys and JSON values."""
    return b"{%b}" % b",".join(
        [b"%b:%b" % (_key(key) if len(key) < _LONG_KEY else encode(key), bytes(value)) for key, value in parts]
    )


def with_meta(members: Fields, meta: Fields) -> Fields:
    """The members of an object with this `_meta` in place of their own; without one if it is empty."""
    others = {key: value for key, value in members.items() if key != "_meta"}
    return others | {"_meta": Raw(merge(meta.items()))} if meta else others


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    """Cached, because the keys of messages are few; long ones are not kept."""
    return encode(key)


def without_line_ends(message: bytes) -> bytes:
    """The same JSON with line ends replaced by spaces; they occur only between tokens, never inside strings."""
    if message.find(b"\n") >= 0 or message.find(b"\r") >= 0:
        return message.translate(_LINE_ENDS)
    return message
