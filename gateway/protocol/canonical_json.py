"""JSON in the one form that is compared, or digested: equal values have the same bytes."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc

canonical: Final = msgspec.json.Encoder(order="sorted").encode
"""JSON with sorted keys and without white space: values that `jsonrpc.value` reads as equal give equal bytes."""


def canonical_members(members: Mapping[str, Raw]) -> bytes:
    """As `canonical`, for an object that is open; raises RecursionError, or ValueError if it is malformed.

    A value only loses its white space if it has more than MAX_MEMBERS values in it, or a number that Python cannot
    hold: a client that sends it again writes it the same way.
    """
    try:
        return canonical({key: jsonrpc.value(raw) for key, raw in members.items()})
    except ValueError:  # one of them is such a value
        return jsonrpc.merge({key: _canonical(members[key]) for key in sorted(members)})


def _canonical(raw: Raw) -> bytes:
    try:
        return canonical(jsonrpc.value(raw))
    except ValueError:
        return msgspec.json.format(bytes(raw), indent=-1)
