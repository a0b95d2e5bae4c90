"""Pins modern clients that keep state to one upstream session each (SEP-1655).

The gateway's item names a pin, which is part of the pool key, and the replica that has the session. A request with the
item goes to that replica. An item that does not open, or whose replica does not take the request, is ignored: the
request gets a session of its own, and the result a new item.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.cluster.router import Router
from gateway.downstream.round import Round
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import ReplyWriter, WrappedReply
from gateway.http.server.response import Response
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidState
from gateway.routes.live_route import ProcessScope
from gateway.seal import sep_1655_items
from gateway.seal.sep_1655_items import Item

NAME: Final = "mrtr-gateway/upstream-session"
_FREE: Final = mcp.TASK_METHODS | mcp.FIRST_FORM_METHODS | {mcp.LISTEN}
"""Requests that have a session of their own."""

Serve = Callable[[Round], Awaitable[Response]]


class PinnedClients:
    """The clients of one process that keep state."""

    def __init__(self, process: ProcessScope, router: Router) -> None:
        self._process = process
        self._router = router

    async def serve(self, round_: Round, serve: Serve, *, is_stopping: bool) -> Response:
        """Serve a round on a route with dialects; a process that `is_stopping` pins no client."""
        request, said = round_.request, round_.request.said
        if sep_1655_items.DIALECT not in round_.live.route.dialects or not sep_1655_items.declares(said.capabilities):
            return await serve(round_)
        meta, sealed = sep_1655_items.taken(said.user_meta, NAME)
        round_.request = replace(request, said=replace(said, user_meta=meta))
        item = None if sealed is None else self._opened(sealed, round_)
        own, path = self._process.owner, round_.live.route.path
        # A retry goes to the replica that holds its call.
        is_free = request.request_state is not None or request.method in _FREE
        if item is not None and not is_free and self._is_elsewhere(item.place, round_.incoming):
            replied = await self._router.send_to(item.place, round_.incoming, round_.reply)
            if replied is not None:
                return replied
        if item is not None and item.place == own:
            round_.key = replace(round_.key, pin=item.value)
        elif not is_free and not is_stopping:  # a session of its own, and the item that leads to it
            pin = world.token_urlsafe(12)
            given = Item(NAME, path, round_.key.principal, world.wall(), own, pin)
            round_.key = replace(round_.key, pin=pin)
            round_.reply = _ReplyWithItem(round_.reply, self._process.items.seal(given))
        return await serve(round_)

    def _opened(self, sealed: Raw, round_: Round) -> Item | None:
        bearer, seconds = round_.incoming.bearer(round_.caller), round_.live.config.state.session_ttl_seconds
        try:
            return sep_1655_items.opened(self._process.items, sealed, NAME, bearer, seconds)
        except InvalidState as exc:
            self._process.metrics.state_rejections[exc.reason,].inc()
            return None

    def _is_elsewhere(self, owner: str, incoming: Incoming) -> bool:
        """Whether another replica must serve a request. One that a peer forwarded does not leave this host."""
        own = self._process.owner
        if owner == own or incoming.is_local:
            return False
        return incoming.peer_request is None or owner.partition("#")[0] == own.partition("#")[0]


class _ReplyWithItem(WrappedReply):
    """A reply whose result has the gateway's item."""

    def __init__(self, reply: ReplyWriter, item: str) -> None:
        super().__init__(reply)
        self._item = item

    @property
    def started(self) -> bool:  # type: ignore[override]
        return self._reply.started

    async def whole(self, final: FinalMessage) -> Response:
        """See `ReplyWriter`; it ends every round."""
        return await self._reply.whole(replace(final, body=sep_1655_items.with_item(final.body, NAME, self._item)))
