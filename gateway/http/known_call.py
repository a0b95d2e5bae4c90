"""Bodies that call a tool as an earlier one did: nothing is read of them but what differs, an id with arguments.

Whatever deviates by a byte is read as any other body (`protocol.request`), so what is refused there is not accepted.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import mcp
from gateway.protocol.json_text.json_bounds import MAX_DEPTH, may_nest_deeper
from gateway.protocol.request import Request, TextParams, decode_usual
from gateway.protocol.request_meta import Declarations

_LARGEST: Final = 32_768
"""A larger body is not copied so often: it is read as a whole, and its parts are views."""
_DEPTH: Final = MAX_DEPTH - 2
_FLAT: Final = 2 * _DEPTH
"""A shorter text that is JSON cannot nest deeper than that."""
_PLAIN_ID: Final = re.compile(rb'0|[1-9][0-9]{0,19}|"[0-9A-Za-z._:-]{1,64}"')
"""The ids that clients give: a number, a UUID, or a name with a number."""
_ID: Final = b"98765432198765432"
_ARGUMENTS: Final = b'["98765432198765432"]'
"""What a form is tried with."""
_decode_raw = msgspec.json.Decoder(Raw).decode


class KnownCall(msgspec.Struct, frozen=True):
    """The text around the id and the arguments, and what it says."""

    begin: bytes
    middle: bytes
    end: bytes
    is_id_first: bool
    target: str
    params: bytes
    """The params as far as the arguments."""
    said: Declarations
    size: int
    """How many bytes have to be as they are here."""

    def read(self, body: bytes) -> Request | None:
        """Return the request of a body of this form."""
        if len(body) > _LARGEST:
            return None
        if self.is_id_first:
            one, _, other = body.partition(self.middle)
            id_, arguments = one.removeprefix(self.begin), other.removesuffix(self.end)
        else:
            one, _, other = body.rpartition(self.middle)
            arguments, id_ = one.removeprefix(self.begin), other.removesuffix(self.end)
        if len(id_) + len(arguments) + self.size != len(body):  # one of the pieces deviates
            return None
        if _PLAIN_ID.fullmatch(id_) is None:
            return None
        if len(arguments) > _FLAT and may_nest_deeper(arguments, _DEPTH):
            return None
        try:
            if not arguments.isascii():
                _ = arguments.decode()
            _ = _decode_raw(arguments)
        except (ValueError, RecursionError):
            return None
        return Request(Raw(id_), mcp.TOOLS_CALL, TextParams(self.params + arguments + b"}"), self.target, self.said)


def known_call(body: bytes, request: Request) -> KnownCall | None:
    """The form of a body that was read and checked; None if it is no plain call, or differs each time."""
    said, params = request.said, dict(request.params.items())
    is_plain = request.request_state is None and request.input_responses is None and request.task is None
    if not (is_plain and said.is_shared and request.method == mcp.TOOLS_CALL and len(body) <= _LARGEST):
        return None
    if params.keys() != {"name", "arguments"} or _PLAIN_ID.fullmatch(request.id) is None:
        return None
    call = decode_usual(body)
    id_, arguments = bytes(call.id), bytes(call.params.arguments)
    begin = b'{"name":%b,"arguments":' % bytes(params["name"])
    for id_at in _values(body, b"id", id_):
        for at in _values(body, b"arguments", arguments):
            (first, told), (second, other) = sorted([(id_at, id_), (at, arguments)])
            pieces = body[:first], body[first + len(told) : second], body[second + len(other) :]
            form = KnownCall(*pieces, id_at < at, request.target, begin, said, sum(map(len, pieces)))
            if _fits(form, call.params.name):
                return form
    return None


def _values(body: bytes, name: bytes, value: bytes) -> Iterator[int]:
    """Where a value may stand that is a member of this name."""
    for found in re.finditer(rb'"%b"\s*:\s*' % name, body):
        if body.startswith(value, found.end()):
            yield found.end()


def _fits(form: KnownCall, name: Raw) -> bool:
    """Whether a body of this form has what is between its pieces as its id and its arguments, and nowhere else."""
    pieces = form.begin, form.middle, form.end
    between = (_ID, _ARGUMENTS) if form.is_id_first else (_ARGUMENTS, _ID)
    try:
        call = decode_usual(b"".join((pieces[0], between[0], pieces[1], between[1], pieces[2])))
    except ValueError:
        return False
    is_other = any(_ID in piece for piece in pieces)
    return not is_other and (call.id, call.params.arguments, call.params.name) == (Raw(_ID), Raw(_ARGUMENTS), name)
