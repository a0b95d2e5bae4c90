"""JSON in the one form that is compared, or digested: equal values have the same bytes."""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc

_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_PLAIN: Final = bytes(
    48 if each in b"0123456789" else 101 if each in b".eE" else each if 32 <= each < 127 and each != 92 else 0
    for each in range(256)
)
"""For `translate`: one digit, one sign behind the digits of a float, and 0 for escapes and all but printable ASCII."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and without white space: values that `jsonrpc.value` reads as equal give equal bytes."""
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
    """As `canonical`, for an object that is open; raises RecursionError, or ValueError if it is malformed.

    A value only loses its white space if it has more than MAX_MEMBERS values in it, or a number that Python cannot
    hold: a client that sends it again writes it the same way.
    """
    try:
        return canonical({key: jsonrpc.value(raw) for key, raw in members.items()})
    except ValueError:  # one of them is such a value
        written = [f"{encode_basestring_ascii(key)}:".encode() + _canonical(members[key]) for key in sorted(members)]
        return b"{%b}" % b",".join(written)


def _canonical(raw: Raw) -> bytes:
    try:
        return canonical(jsonrpc.value(raw))
    except ValueError:
        return msgspec.json.format(bytes(raw), indent=-1)
