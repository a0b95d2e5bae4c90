"""State that a client keeps for its server, as SEP-1655 has it.

State is a dictionary of items in the `_meta` of results. The client sends it back in the `_meta` of each request. The
gateway may have an item of its own in it, which is sealed, bound to the caller and the route, and never shown to the
server. All other items are the server's, and pass untouched.
"""

from typing import Final

import msgspec
from msgspec import Raw

from gateway.config import InForce
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keys

DIALECT: Final = "sep-1655"
KEY: Final = "modelcontextprotocol.io/state/session"
PURPOSE: Final = "client state"
_MAX_CHARACTERS: Final = 2_048


class _KeptState(msgspec.Struct):
    scopes: tuple[str, ...] = ("session", "server")


class _KeepsState(msgspec.Struct):
    state: _KeptState | None = None


_decode_declared = msgspec.json.Decoder(_KeepsState).decode


def declares(capabilities: bytes | Raw, scope: str = "session") -> bool:
    """Whether a client keeps state of this scope; SEP-1685 added the scopes to the capability."""
    try:
        state = jsonrpc.inspect(_decode_declared, capabilities).state
    except (ValueError, RecursionError):
        return False  # a capability that cannot be read is not declared
    return state is not None and scope in state.scopes


def taken(meta: jsonrpc.Fields, name: str) -> tuple[jsonrpc.Fields, Raw | None]:
    """The `_meta` of a request without the item of that name, and the item."""
    try:
        state = jsonrpc.fields(meta[KEY])
    except (KeyError, ValueError):
        return meta, None
    item = state.pop(name, None)
    if item is None:
        return meta, None
    others = {key: raw for key, raw in meta.items() if key != KEY}
    return (others | {KEY: Raw(jsonrpc.merge(state))} if state else others), item


def with_item(response: bytes, name: str, sealed: str) -> bytes:
    """The response with a sealed item in its state, if it is a result; a server's malformed state stays as it is."""
    message = jsonrpc.message(response)
    if not (isinstance(message.result, Raw) and isinstance(message.id, Raw)):
        return response
    try:
        result = jsonrpc.fields(message.result)
        meta = jsonrpc.fields(result.get("_meta", jsonrpc.EMPTY))
        state = jsonrpc.fields(meta.get(KEY, jsonrpc.EMPTY))
    except ValueError:
        return response
    meta[KEY] = Raw(jsonrpc.merge(state | {name: Raw(jsonrpc.encode(sealed))}))
    if "cacheScope" in result:
        result["cacheScope"] = Raw(b'"private"')  # the item is for this client alone
    return jsonrpc.result(message.id, jsonrpc.with_meta(result, meta))


class Item(msgspec.Struct, frozen=True, array_like=True):
    """The content of an item; `place` is the replica or the mirrored session to which the value belongs."""

    name: str
    route: str
    principal: bytes
    issued: float
    place: str
    value: str


def items(keys: InForce[Keys]) -> Claims[Item]:
    """Seals and opens the items."""
    return Claims(keys, PURPOSE, Item, _MAX_CHARACTERS)


def opened(by: Claims[Item], sealed: Raw, name: str, bearer: Bearer, ttl_seconds: float) -> Item:
    """The content of an item that this caller got on this route, and whose time is not over; raises InvalidState."""
    item = by.open(jsonrpc.text(sealed) or "")
    if item.name != name:
        raise InvalidState("other_target")
    bearer.check(item.route, item.principal, issued=item.issued, expires=item.issued + ttl_seconds)
    return item
