"""`subscriptions/listen`: one upstream session of its own, whose change notifications are passed on.

Source: specification 2026-07-28 basic/patterns/subscriptions. The acknowledgement goes out when the upstream's side
stream is open, so that no change after it is missed. A side stream that ends is opened again, by its channel in the
same session or here in a new one; then everything that was subscribed to is said to have changed, for it may have.
What was acknowledged is kept, or the subscription ends: nobody is left listening to what cannot come.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from gateway.bridge.change_queue import ChangeQueue
from gateway.bridge.response_queue import FinalMessage
from gateway.exchange.events import Leg
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, UpstreamError
from gateway.protocol.request import Request
from gateway.sessions.call import PoolKey
from gateway.sessions.session import Session
from gateway.telemetry import Event, get_logger
from gateway.upstream.channel import Headers

if TYPE_CHECKING:  # the bridge knows its listeners
    from gateway.routes.live_route import LiveRoute

log = get_logger()

_FLAGS: Final = {
    "toolsListChanged": ("tools", mcp.TOOLS_CHANGED),
    "promptsListChanged": ("prompts", mcp.PROMPTS_CHANGED),
    "resourcesListChanged": ("resources", mcp.RESOURCES_CHANGED),
}
_MAX_URIS: Final = 1000
_MAX_PARAMS_BYTES: Final = 16_384
"""What a change may say beside its URI; a waiting client may be owed as much for each thing it subscribed to."""
_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before each attempt at a new session; the last one again and again."""
_JITTER: Final = 0.5
"""A restarted server shall not see all subscriptions in the same moment: pauses are up to that much longer."""
_LASTING_SECONDS: Final = 30.0
"""A session that lived as long is replaced at once when it is lost; one that did not goes on with the pauses."""
_GIVE_UP_SECONDS: Final = 300.0


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
    chosen.resourceSubscriptions = list(dict.fromkeys(chosen.resourceSubscriptions))
    return chosen


@asynccontextmanager
async def subscription(
    live: "LiveRoute", request: Request, key: PoolKey, headers: Headers
) -> AsyncIterator[ChangeQueue]:
    """The stream of one listen request: it starts with the acknowledgement and ends when the gateway stops."""
    listener = Subscription(live, request, key, headers)
    # Before anything is waited for: a drain or a reload meanwhile ends this one too.
    live.upstream.subscriptions.add(listener)
    live.process.metrics.subscribed(live.route.path, 1)
    try:
        await listener.begin()
        with live.upstream.pool.hearing(key.principal, listener):
            yield listener.stream
    finally:
        live.upstream.subscriptions.discard(listener)
        live.process.metrics.subscribed(live.route.path, -1)
        listener.close()


class Subscription:
    """One listen request, and the session that serves it at the moment."""

    def __init__(self, live: "LiveRoute", request: Request, key: PoolKey, headers: Headers) -> None:
        self._chosen = wanted(request)
        self.stream = ChangeQueue(Leg(request.id), live.deadlines.silence, live.config.limits.behind_bytes)
        self._live = live
        self._key = key
        self._headers = headers
        self._id = request.id
        self._meta = {mcp.META_SUBSCRIPTION: request.id}
        self._session: Session | None = None
        self._honoured = Filter()
        self._topics: dict[tuple[str, str], None] = {}
        """What is passed on."""
        self._is_deaf = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._acknowledged = self._ending = self._ended = False

    async def begin(self) -> None:
        """Subscribe and acknowledge; raises what opening a session raises."""
        # A session of its own is also how the upstream gets to see the credential: nothing goes out on a forged one.
        self._session = await self._open()
        params = {"_meta": self._meta, "notifications": self._honoured}
        self.stream.send(jsonrpc.notification(mcp.ACKNOWLEDGED, params))
        self._acknowledged = True
        if self._ending or self._live.upstream.pool.closed:
            self.end()
        elif self._topics:
            self._keeper = self._live.process.tasks.start(self._keep(), "subscription")
        elif (session := self._dismissed()) is not None:
            self._live.upstream.pool.release(session, clean=True)  # nothing was set on it, and nothing will be heard

    def end(self) -> None:
        """End the subscription gracefully (basic/patterns/subscriptions, Graceful Closure)."""
        self._ending = True
        if self._acknowledged and not self._ended:
            self._ended = True
            result = jsonrpc.encode({"resultType": "complete", "_meta": self._meta})
            self.stream.finish(FinalMessage(jsonrpc.result(self._id, result)))

    def close(self) -> None:
        """Let the session go; nobody listens any more."""
        if self._keeper is not None:
            _ = self._keeper.cancel()
        session = self._dismissed()
        if session is not None:
            self._live.process.tasks.spawn(self._part(session), "close subscription")

    # -- what the upstream says -----------------------------------------------------------------------------------

    def changed(self, method: str, data: bytes) -> None:
        """Pass on one notification of the upstream, if it was asked for."""
        params = _params(data)
        uri = jsonrpc.text(params.get("uri")) if method == mcp.RESOURCE_UPDATED else ""
        if self._ended or uri is None or (method, uri) not in self._topics:
            return
        if len(b"".join(params.values())) > _MAX_PARAMS_BYTES:
            self._tell(method, uri)
            return
        old = _opened(params.get("_meta"))
        message = jsonrpc.notification(method, {**params, "_meta": {**old, **self._meta}})
        if self.stream.has_room((method, uri), message):
            self.stream.tell((method, uri), message)
        else:
            self._tell(method, uri)

    def _tell(self, method: str, uri: str) -> None:
        """Say that something changed, and nothing else."""
        about = {"uri": uri} if uri else {}
        self.stream.tell((method, uri), jsonrpc.notification(method, {**about, "_meta": self._meta}))

    def missed(self) -> None:
        """Say of everything that it may have changed."""
        if self._ended or not self._acknowledged:
            return  # what changed before the acknowledgement was never promised
        for topic in self._topics:
            self._tell(*topic)

    def deaf(self, *, heard: bool) -> None:  # noqa: ARG002  (its session knows)
        """This session hears nothing any more; see `_keep`."""
        self._is_deaf.set()

    # -- the session ----------------------------------------------------------------------------------------------

    async def _open(self) -> Session:
        """A session with all subscriptions, of which `_topics` tells when this returns."""
        pool = self._live.upstream.pool
        session = await pool.open(self._key, self._headers)
        session.watchers.append(self)
        try:
            await self._subscribe(session)
            self._check(session)
        except BaseException:
            session.watchers.remove(self)
            pool.release(session, clean=False)
            raise
        return session

    async def _subscribe(self, session: Session) -> None:
        """Ask for what the upstream can really tell about."""
        self._is_deaf.clear()
        self._topics.clear()
        self._honoured = honoured = Filter()
        if not session.channel.hears_side:
            return
        for flag, (capability, method) in _FLAGS.items():
            if getattr(self._chosen, flag) and session.shaken.offers(capability, "listChanged"):
                setattr(honoured, flag, True)
                self._topics[method, ""] = None
        if session.shaken.offers("resources", "subscribe"):
            for uri in self._chosen.resourceSubscriptions:
                if self._ending:
                    break
                topic = mcp.RESOURCE_UPDATED, uri
                self._topics[topic] = None  # before its answer: an update may overtake that on the side stream
                if isinstance(await self._ask(session, mcp.SUBSCRIBE, uri), jsonrpc.Error):
                    del self._topics[topic]
                else:
                    honoured.resourceSubscriptions.append(uri)

    def _check(self, session: Session) -> None:
        """Raise CallLost when the side stream ended before anybody watched it."""
        if session.lost:
            raise CallLost(f"The side stream of route {self._live.route.path} ended while it was subscribed to")

    async def _ask(self, session: Session, method: str, uri: str) -> Raw | jsonrpc.Error:
        return await session.ask(method, {"uri": uri}, self._headers, self._live.upstream.pool.handshake_seconds)

    async def _keep(self) -> None:
        """Keep a session until there is none to be had; then the subscription ends."""
        try:
            await self._replace_sessions()
        finally:
            # Also after a bug: nobody shall wait for what never comes. Cancelled, nobody waits.
            self.end()

    async def _replace_sessions(self) -> None:
        """Open a new session whenever one is lost."""
        route = self._live.route.path
        pauses = _pauses()
        while True:
            opened = time.monotonic()
            _ = await self._is_deaf.wait()
            session = self._dismissed()
            assert session is not None, "whoever takes the session away ends this task"
            self._live.upstream.pool.release(session, clean=False)
            if not session.lost:
                return  # its side stream was taken for open, for its head was slow, and never was
            if time.monotonic() - opened > _LASTING_SECONDS:
                pauses = _pauses()
            self._session = await self._open_again(pauses)
            log.info(
                Event.SUBSCRIPTION_LOST,
                route=route,
                upstream=self._live.route.upstream.name,
                opened_again=self._session is not None,
            )
            self._live.process.metrics.subscription_lost(route, opened_again=self._session is not None)
            if self._session is None:
                return
            self.missed()

    async def _open_again(self, pauses: Iterator[float]) -> Session | None:
        """A new session that tells as much as the one before; None when there will be none."""
        promised, deadline = self._honoured, time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < deadline and not self._live.upstream.pool.closed:
            await asyncio.sleep(next(pauses))
            try:
                session = await self._open()
            except Refused:
                return None
            except GatewayError as exc:
                if isinstance(exc, UpstreamError):
                    self._live.process.metrics.upstream_failed(self._live.route.path, exc.reason)
                continue
            if self._honoured == promised:
                return session
            session.watchers.remove(self)
            self._live.upstream.pool.release(session, clean=False)
            return None
        return None

    def _dismissed(self) -> Session | None:
        session, self._session = self._session, None
        if session is not None:
            session.watchers.remove(self)
        return session

    async def _part(self, session: Session) -> None:
        """Take the subscriptions back, as far as there is time; then the session may be ended."""
        try:
            async with asyncio.timeout(self._live.config.timeouts.cancel_seconds):
                for uri in self._honoured.resourceSubscriptions:
                    if session.lost:
                        break
                    _ = await self._ask(session, mcp.UNSUBSCRIBE, uri)
        except (GatewayError, TimeoutError):
            pass  # they end with the session, here or when the server forgets it
        finally:
            # Never pooled again: whatever was set on it is gone with it.
            self._live.upstream.pool.release(session, clean=False)


def _pauses() -> Iterator[float]:
    """Seconds to wait before each attempt."""
    for pause in _PAUSES:
        yield pause * (1 + _JITTER * random.random())  # noqa: S311  (no secret)
    while True:
        yield _PAUSES[-1] * (1 + _JITTER * random.random())  # noqa: S311


def _params(data: bytes) -> jsonrpc.Fields:
    try:
        return _opened(jsonrpc.message(data).params)
    except ValueError:
        return {}


def _opened(raw: object) -> jsonrpc.Fields:
    """An object one level deep; empty when it is none."""
    try:
        return jsonrpc.fields(raw) if isinstance(raw, Raw) else {}
    except ValueError:
        return {}
