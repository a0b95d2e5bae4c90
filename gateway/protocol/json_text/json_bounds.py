"""Bounds for JSON texts, checked in C code before anything in them is decoded."""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from operator import add
from typing import Final

import msgspec
from msgspec import Raw

_LEVELS: Final = bytes.maketrans(b"[]{}", b"1010")
_BRACKETS: Final = b"[]{}"
_COUNTED_BYTES: Final = 4096
MAX_DEPTH: Final = 64
"""How deep the objects and arrays of a client's message may nest. No known message needs 20, and the JSON parsers of
some servers fail beyond 100."""
MAX_MEMBERS: Final = 50_000
"""The largest number of values that are taken out of one message, since each of them becomes a Python object."""


def check_bounds(data: bytes, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError for faults that a shallow decode misses: bad UTF-8 or too deep nesting."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"not UTF-8 at byte {exc.start}") from exc
    if not may_nest_deeper(data, max_depth):
        return
    # All in C code, because a body may consist of brackets only. Eight of them make a byte: tables give what it adds
    # to the depth, and its highest point.
    levels = _outside_strings(data, _BRACKETS).translate(_LEVELS)
    levels += b"0" * (8 - len(levels) % 8)  # closing brackets raise no peak, and `int` needs a digit
    packed = int(levels, 2).to_bytes(len(levels) // 8)
    before = accumulate(map(_RISES.__getitem__, packed), initial=0)
    if max(map(add, before, map(_PEAKS.__getitem__, packed))) > max_depth:
        raise ValueError(f"nested deeper than {max_depth} levels")


def may_nest_deeper(data: bytes, depth: int) -> bool:
    """Whether a JSON text has more opening brackets than this, be it in strings."""
    if len(data) < _COUNTED_BYTES:
        return data.count(b"{") + data.count(b"[") > depth
    for bracket in (b"{", b"["):  # to look for few of them takes a tenth of the time
        at = data.find(bracket)
        while at >= 0 and depth >= 0:
            depth -= 1
            at = data.find(bracket, at + 1)
    return depth < 0


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


_RISES: Final[list[int]] = [2 * brackets.bit_count() - 8 for brackets in range(256)]
_PEAKS: Final[list[int]] = [
    max(2 * f"{brackets:08b}".count("1", 0, end) - end for end in range(9)) for brackets in range(256)
]
"""The highest depth within a byte of brackets, relative to the depth before it."""


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
    if (most := sum(map(data.count, which))) <= MAX_MEMBERS:
        return most
    return len(_outside_strings(data, which))


def check_values(raws: Iterable[Raw | bytes]) -> None:
    """Raise TooMany for more than MAX_MEMBERS values, in all of `raws` together and on all levels."""
    if sum(_separators(bytes(raw), b",[{") for raw in raws) > MAX_MEMBERS:
        raise TooMany


def check_members(raw: Raw | bytes) -> None:
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
        # To count a million objects takes 60 ms, in which nothing else runs.
        if commas < 20 * MAX_MEMBERS and len(_decode_objects(data)) <= MAX_MEMBERS:
            return
    except (ValueError, RecursionError):
        pass
    raise TooMany
