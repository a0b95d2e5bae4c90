"""The log level of a mirrored session, kept by its client as SEP-1655 has it.

The replicas know the level, as long as they live. One that starts later, or missed the change, learns it from the
client's next request.
"""

from typing import Final

from msgspec.structs import replace

from gateway import world
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.client_requests import params_of
from gateway.mirror.streamable.session_homes import Homes
from gateway.mirror.streamable.tokens import MirroredSession
from gateway.protocol import jsonrpc
from gateway.routes.live_route import LiveRoute
from gateway.seal import sep_1655_items
from gateway.seal.sep_1655_items import Item

NAME: Final = "mrtr-gateway/log-level"


def taken(message: jsonrpc.Message, at: Arrival, session: MirroredSession, homes: Homes) -> jsonrpc.Message:
    """A request as the server gets it; its session learns the level that its client keeps. Raises InvalidParams."""
    params = params_of(message)
    try:
        meta, sealed = sep_1655_items.taken(jsonrpc.fields(params.get("_meta", jsonrpc.EMPTY)), NAME)
    except ValueError:
        return message  # its `_meta` is not an object, which the call reports
    if sealed is None:
        return message
    item = at.live.kept_item(sealed, NAME, at.bearer)
    if item is not None and item.place == session.key:  # state ends with its session
        homes.learn_level(session, item)
    return replace(message, params=jsonrpc.with_meta(params, meta))


def new(level: str, session: MirroredSession) -> Item:
    """A level that the client of a session has set now."""
    return Item(NAME, session.route, session.principal, world.wall(), session.key, level)


def given(response: bytes, level: Item, live: LiveRoute) -> bytes:
    """The response with the level for its client to keep."""
    return sep_1655_items.with_item(response, NAME, live.process.items.seal(level))
