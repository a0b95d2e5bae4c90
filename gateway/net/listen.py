"""`subscriptions/listen`: one upstream session of its own, whose change notifications are passed on.

Source: specification 2026-07-28 basic/patterns/subscriptions. The acknowledgement goes out when the upstream's side
stream is open, so that no change after it is missed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from gateway.core import jsonrpc, mcp
from gateway.core.events import Leg
from gateway.core.request import Request
from gateway.errors import InvalidParams
from gateway.net.outbox import Last, Outbox
from gateway.net.sessions import PoolKey, Session
from gateway.net.upstream import Headers

if TYPE_CHECKING:  # the bridge knows its listeners
    from gateway.net.bridge import Bridge

_FLAGS: Final = {
    "toolsListChanged": ("tools", mcp.TOOLS_CHANGED),
    "promptsListChanged": ("prompts", mcp.PROMPTS_CHANGED),
    "resourcesListChanged": ("resources", mcp.RESOURCES_CHANGED),
}
_MAX_URIS: Final = 1000


class Filter(msgspec.Struct, omit_defaults=True):
    """SubscriptionFilter: what a client wants to hear."""

    toolsListChanged: bool = False  # noqa: N815  (the wire's spelling)
    promptsListChanged: bool = False  # noqa: N815
    resourcesListChanged: bool = False  # noqa: N815
    resourceSubscriptions: list[str] = []  # noqa: N815


def wanted(request: Request) -> Filter:
    """The filter of a listen request; raises InvalidParams."""
    try:
        chosen = jsonrpc.decode(request.params.get("notifications", Raw(b"null")), type=Filter)
    except ValueError as exc:
        raise InvalidParams(f'subscriptions/listen needs "params.notifications", a SubscriptionFilter: {exc}') from exc
    if len(chosen.resourceSubscriptions) > _MAX_URIS:
        raise InvalidParams(f"resourceSubscriptions may name at most {_MAX_URIS} URIs")
    return chosen


@asynccontextmanager
async def subscription(
    bridge: "Bridge", request: Request, key: PoolKey, headers: Headers, timeout_seconds: float
) -> AsyncIterator[Outbox]:
    """The stream of one listen request: it starts with the acknowledgement and ends when the gateway stops."""
    chosen = wanted(request)
    await bridge.pool.authorise(key, headers)
    session = await bridge.pool.acquire(key, headers)
    outbox = Outbox(Leg(request.id), bridge.alarms.silence)
    try:
        honoured = await _subscribe(session, chosen, headers, timeout_seconds)
        listener = Subscription(request.id, honoured, outbox)
        session.on_change = listener.changed
        session.on_deaf = listener.end  # rather an end that the client sees than changes that it misses
        outbox.send(listener.acknowledgement())
        bridge.listeners.add(listener)
        if bridge.pool.closed:
            listener.end()  # a reload took the upstream away while it was asked
        try:
            with bridge.pool.hearing(key.principal, listener.changed):
                yield outbox
        finally:
            bridge.listeners.discard(listener)
    finally:
        # Subscriptions end with their session, so it is not pooled again.
        bridge.pool.release(session, clean=False)


async def _subscribe(session: Session, chosen: Filter, headers: Headers, timeout_seconds: float) -> Filter:
    """What the upstream can really tell about."""
    if not session.channel.hears_side:
        return Filter()
    honoured = Filter()
    for flag, (capability, _) in _FLAGS.items():
        setattr(honoured, flag, getattr(chosen, flag) and session.shaken.offers(capability, "listChanged"))
    if session.shaken.offers("resources", "subscribe"):
        for uri in chosen.resourceSubscriptions:
            answer = await session.ask(mcp.SUBSCRIBE, {"uri": uri}, headers, timeout_seconds)
            if not isinstance(answer, jsonrpc.Error):
                honoured.resourceSubscriptions = [*honoured.resourceSubscriptions, uri]
    return honoured


class Subscription:
    """One listen request and what it hears."""

    def __init__(self, id_: Raw, honoured: Filter, outbox: Outbox) -> None:
        self._id = id_
        self._honoured = honoured
        self._outbox = outbox
        self._methods = {method for flag, (_, method) in _FLAGS.items() if getattr(honoured, flag)}
        self._uris = set(honoured.resourceSubscriptions)
        self._meta = {mcp.META_SUBSCRIPTION: self._id}
        self._ended = False

    def acknowledgement(self) -> bytes:
        """The first message of the stream."""
        return jsonrpc.notification(mcp.ACKNOWLEDGED, {"_meta": self._meta, "notifications": self._honoured})

    def changed(self, method: str, data: bytes) -> None:
        """Pass on one notification of the upstream, if it was asked for."""
        params = _params(data)
        if self._ended or not (method in self._methods or jsonrpc.text(params.get("uri")) in self._uris):
            return
        old = jsonrpc.fields(params["_meta"]) if "_meta" in params else {}
        self._outbox.send(jsonrpc.notification(method, {**params, "_meta": {**old, **self._meta}}))

    def end(self) -> None:
        """End the subscription gracefully (basic/patterns/subscriptions, Graceful Closure)."""
        if not self._ended:
            self._ended = True
            result = jsonrpc.encode({"resultType": "complete", "_meta": self._meta})
            self._outbox.finish(Last(jsonrpc.result(self._id, result)))


def _params(data: bytes) -> jsonrpc.Fields:
    try:
        params = jsonrpc.message(data).params
        return jsonrpc.fields(params) if isinstance(params, Raw) else {}
    except ValueError:
        return {}
