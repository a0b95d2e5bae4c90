"""Pins modern clients that keep state to one upstream session each (SEP-1655).

The gateway's item names a pin, which is part of the pool key, and the replica that has the session. A request with the
item goes to that replica. An item that does not open, or whose replica does not take the request, is ignored: the
request gets a session of its own, and the result a new item.
"""

from typing import Final

from msgspec.structs import replace

from gateway import world
from gateway.cluster.worker import host_of
from gateway.downstream.round import SESSION_ITEM, Round
from gateway.http.incoming import Incoming
from gateway.http.server.response import Response
from gateway.protocol import mcp
from gateway.seal import sep_1655_items
from gateway.seal.sep_1655_items import Item

_FREE: Final = mcp.TASK_METHODS | mcp.FIRST_FORM_METHODS | {mcp.LISTEN}
"""Requests that have a session of their own."""


async def placed(round_: Round) -> Round | Response:
    """Return a round on a route with dialects as its session wants it, or the reply of the replica that has that."""
    request, said, process = round_.request, round_.request.said, round_.live.process
    if sep_1655_items.DIALECT not in round_.live.route.dialects or not sep_1655_items.declares(said.capabilities):
        return round_
    meta, sealed = sep_1655_items.taken(said.user_meta, SESSION_ITEM)
    round_ = replace(round_, request=replace(request, said=replace(said, user_meta=meta)))
    bearer = round_.incoming.bearer(round_.caller)
    item = None if sealed is None else round_.live.kept_item(sealed, SESSION_ITEM, bearer)
    # A retry goes to the replica that holds its call.
    is_free = request.request_state is not None or request.method in _FREE
    if item is not None and not is_free and _is_elsewhere(item.place, process.owner, round_.incoming):
        replied = await process.router.send_to(item.place, round_.incoming, round_.reply)
        if replied is not None:
            return replied
    if item is not None and item.place == process.owner:
        return replace(round_, key=replace(round_.key, pin=item.value))
    if is_free or process.draining.has_begun:
        return round_
    # A session of its own, and the item that leads to it.
    pin, key = world.token_urlsafe(12), round_.key
    given = Item(SESSION_ITEM, round_.live.route.path, key.principal, world.wall(), process.owner, pin)
    return replace(round_, key=replace(key, pin=pin), item=process.items.seal(given))


def _is_elsewhere(owner: str, own: str, incoming: Incoming) -> bool:
    """Whether another replica must serve a request. One that a peer forwarded does not leave this host."""
    came = incoming.peer_request
    if came is None:
        return owner != own
    # To this very process, it came from another one of this host, or its sender knew the place.
    return own not in (owner, came.to) and host_of(owner) == host_of(own)
