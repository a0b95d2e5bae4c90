"""Serves `subscriptions/listen` from one upstream session of its own, whose change notifications it passes on.

Source: specification 2026-07-28 basic/patterns/subscriptions. The acknowledgement goes out when the upstream's
standalone stream is open, so that the client misses no change after it. If that stream ends, it is opened again: by
its channel in the same session, or here in a new one. The client is then told that everything it subscribed to has
changed, because it may have. A subscription keeps what it acknowledged, or it ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import chain, repeat
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import ClientCall
from gateway.bridge.response_queue import ChangeQueue
from gateway.http.outbox import FinalMessage
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, TasksUndeclared
from gateway.protocol.request import Request
from gateway.sessions.session import Session
from gateway.telemetry import Event, get_logger

log = get_logger()

LISTS: Final = {
    "toolsListChanged": ("tools", mcp.TOOLS_CHANGED),
    "promptsListChanged": ("prompts", mcp.PROMPTS_CHANGED),
    "resourcesListChanged": ("resources", mcp.RESOURCES_CHANGED),
}
"""The flags of a filter, each with the capability of the server, and the notification, that belong to it."""
_MAX_URIS: Final = 1000
_MAX_PARAMS_BYTES: Final = 16_384
"""The size of a change beside its URI; as much may wait for a client for each thing that it subscribed to."""
_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The pauses before the attempts at a new session; the last one repeats."""
_JITTER: Final = 0.5
"""Pauses are longer by up to this factor, so that not all subscriptions return to a restarted server at once."""
_LASTING_SECONDS: Final = 30.0
"""A session that lived longer than this is replaced at once when it is lost; else the pauses continue."""
_GIVE_UP_SECONDS: Final = 300.0


class Filter(msgspec.Struct, omit_defaults=True):
    """SubscriptionFilter: the changes that a client subscribes to."""

    toolsListChanged: bool = False  # noqa: N815  (the wire's spelling)
    promptsListChanged: bool = False  # noqa: N815
    resourcesListChanged: bool = False  # noqa: N815
    resourceSubscriptions: list[str] = []  # noqa: N815
    taskIds: list[str] | UnsetType = UNSET  # noqa: N815


def wanted(request: Request) -> Filter:
    """The filter of a listen request; raises InvalidParams, or TasksUndeclared for `taskIds`.

    `taskIds` are left out of the acknowledgement, as the extension allows: clients poll.
    """
    try:
        chosen = jsonrpc.decode(request.params.get("notifications") or b"null", type=Filter)
    except ValueError as exc:
        raise InvalidParams(f'subscriptions/listen needs "params.notifications", a SubscriptionFilter: {exc}') from exc
    if len(chosen.resourceSubscriptions) > _MAX_URIS:
        raise InvalidParams(f"resourceSubscriptions may name at most {_MAX_URIS} URIs")
    if chosen.taskIds is not UNSET and not request.said.declared.tasks:
        raise TasksUndeclared("subscriptions/listen with taskIds")
    return replace(chosen, taskIds=UNSET, resourceSubscriptions=list(dict.fromkeys(chosen.resourceSubscriptions)))


@asynccontextmanager
async def subscription(asked: ClientCall) -> AsyncIterator[ChangeQueue]:
    """The stream of one listen request: it starts with the acknowledgement and ends when the gateway stops.

    If it would not start before that, this raises ShuttingDown: an acknowledgement of less would be false.
    """
    live, serving = asked.live, Subscription(asked)
    # Registered before anything is awaited, so that a reload meanwhile ends this subscription too.
    live.upstream.subscriptions[serving] = None
    live.process.metrics.subscriptions[live.route.path,].inc(1)
    try:
        async with live.process.draining.preparing():
            await serving.begin()
        with live.upstream.pool.hearing(asked.key.principal, serving, serving.filter.resourceSubscriptions):
            yield serving.stream
    finally:
        _ = live.upstream.subscriptions.pop(serving, None)
        live.process.metrics.subscriptions[live.route.path,].inc(-1)
        serving.close()


class Subscription:
    """One listen request, with the session that serves it now."""

    def __init__(self, asked: ClientCall) -> None:
        self.filter = wanted(asked.request)
        """What the client wants to hear of."""
        self._asked, self._live = asked, asked.live
        self.stream = ChangeQueue(asked.live.deadlines.silence)
        self._meta = {mcp.META_SUBSCRIPTION: asked.request.id}
        self._session: Session | None = None
        self._acknowledged_filter = Filter()
        self._topics: dict[tuple[str, str], None] = {}
        """The changes that are passed on."""
        self._stream_ended = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._is_acknowledged = self._is_ending = False

    @property
    def _is_told(self) -> bool:
        """Whether the client is told of changes: those before the acknowledgement were never promised."""
        return self._is_acknowledged and self.stream.final is None

    async def begin(self) -> None:
        """Subscribe and acknowledge; raises what opening a session raises."""
        # Opening a session also shows the credential to the upstream: nothing is sent to a client with a forged one.
        self._session = await self._open(is_exempt=False)
        params = {"_meta": self._meta, "notifications": self._acknowledged_filter}
        self.stream.send(jsonrpc.notification(mcp.ACKNOWLEDGED, params))
        self._is_acknowledged = True
        # An end that came before the acknowledgement could not be told then.
        if self._is_ending or self._live.upstream.pool.closed:
            self.end()
        elif self._topics:
            self._replacing = self._live.process.tasks.start(self._replace_sessions(), "subscription")
        elif (session := self._take_session()) is not None:
            self._live.upstream.pool.release(session, clean=True)  # nothing was set on it, and nothing will come

    def end(self) -> None:
        """End the subscription gracefully (basic/patterns/subscriptions, Graceful Closure)."""
        self._is_ending = True
        if self._is_told:
            result = jsonrpc.encode({"resultType": "complete", "_meta": self._meta})
            self.stream.finish(FinalMessage(jsonrpc.result(self._asked.request.id, result)))

    def close(self) -> None:
        """Give the session up, because the client is gone."""
        if self._replacing is not None:
            _ = self._replacing.cancel()
        session = self._take_session()
        if session is not None:
            self._live.process.tasks.spawn(self._unsubscribe(session), "close subscription")

    # -- changes at the upstream -----------------------------------------------------------------------------------

    def changed(self, method: str, data: bytes) -> None:
        """Pass on one notification of the upstream, if it was asked for."""
        try:
            params = jsonrpc.members(jsonrpc.message(data).params)
        except ValueError:
            params = {}
        uri = jsonrpc.text(params.get("uri")) if method == mcp.RESOURCE_UPDATED else ""
        if self.stream.final is not None or uri is None or (method, uri) not in self._topics:
            return
        meta = jsonrpc.members(params.get("_meta"))
        message = jsonrpc.notification(method, {**params, "_meta": {**meta, **self._meta}})
        is_small = len(b"".join(params.values())) <= _MAX_PARAMS_BYTES
        if is_small and self.stream.has_room((method, uri), message):
            self.stream.tell((method, uri), message)
        else:
            self._tell_briefly(method, uri)

    def _tell_briefly(self, method: str, uri: str) -> None:
        """Tell the client only that something changed."""
        about = {"uri": uri} if uri else {}
        self.stream.tell((method, uri), jsonrpc.notification(method, {**about, "_meta": self._meta}))

    def missed(self) -> None:
        """Tell the client of everything that it may have changed."""
        if self._is_told:
            for topic in self._topics:
                self._tell_briefly(*topic)

    def deaf(self, *, heard: bool) -> None:  # noqa: ARG002  (the session says whether it is lost)
        """The session hears no more changes, so it has to be replaced."""
        self._stream_ended.set()

    # -- the session ----------------------------------------------------------------------------------------------

    async def _open(self, *, is_exempt: bool = True) -> Session:
        """A session with the subscriptions that the upstream supports; when this returns, `_topics` holds them.

        Raises CallLost if the standalone stream ended meanwhile.
        """
        pool = self._live.upstream.pool
        session = await pool.open(self._asked.key, self._asked.headers, is_exempt=is_exempt)
        session.watch(self)
        with ExitStack() as undo:
            undo.callback(pool.release, session, clean=False)
            undo.callback(session.unwatch, self)
            self._stream_ended.clear()
            self._topics.clear()
            honoured: dict[str, Any] = {}
            uris: list[str] = []
            hears, offers = session.channel.hears_side, session.shaken.offers
            for flag, (capability, method) in LISTS.items():
                if hears and getattr(self.filter, flag) and offers(capability, "listChanged"):
                    honoured[flag] = True
                    self._topics[method, ""] = None
            for uri in self.filter.resourceSubscriptions if hears and offers("resources", "subscribe") else ():
                topic = mcp.RESOURCE_UPDATED, uri
                self._topics[topic] = None  # before its answer: an update may overtake that on the side stream
                answer = await session.ask(mcp.SUBSCRIBE, {"uri": uri}, self._asked.headers)
                if isinstance(answer, jsonrpc.Error):
                    del self._topics[topic]
                else:
                    uris.append(uri)
            self._acknowledged_filter = Filter(**honoured, resourceSubscriptions=uris)
            if session.lost:
                raise CallLost(f"The side stream of route {self._live.route.path} ended while it was subscribed to")
            _ = undo.pop_all()
        return session

    async def _replace_sessions(self) -> None:
        """Replace the session whenever it is lost; the subscription ends when it cannot be replaced."""
        pauses = _pauses()
        try:
            while True:
                opened = world.monotonic()
                _ = await self._stream_ended.wait()
                session = self._take_session()
                assert session is not None, "this task is cancelled before the session is taken away"
                self._live.upstream.pool.release(session, clean=False)
                if not session.lost:
                    return  # the stream never opened: it was believed to be open, because its response head was slow
                if world.monotonic() - opened > _LASTING_SECONDS:
                    pauses = _pauses()
                self._session = await self._open_again(pauses)
                route, is_open = self._live.route, self._session is not None
                log.info(Event.SUBSCRIPTION_LOST, route=route.path, upstream=route.upstream.name, opened_again=is_open)
                self._live.process.metrics.subscriptions_lost[route.path, "reopened" if is_open else "ended"].inc()
                if not is_open:
                    return
                self.missed()
        finally:
            # Also after a bug, so that no client waits for changes that never come. After a cancellation none waits.
            self.end()

    async def _open_again(self, pauses: Iterator[float]) -> Session | None:
        """A new session with the same subscriptions as the one before; None if there will be none."""
        acknowledged, deadline = self._acknowledged_filter, world.monotonic() + _GIVE_UP_SECONDS
        while world.monotonic() < deadline and not self._live.upstream.pool.closed:
            await asyncio.sleep(next(pauses))
            try:
                session = await self._open()
            except Refused:
                return None  # waiting does not make a refused credential good
            except GatewayError as exc:
                self._live.upstream.health.count(exc)
                continue
            if self._acknowledged_filter == acknowledged:
                return session
            session.unwatch(self)
            self._live.upstream.pool.release(session, clean=False)
            return None
        return None

    def _take_session(self) -> Session | None:
        """The session, which is no longer watched and no longer this subscription's."""
        session, self._session = self._session, None
        if session is not None:
            session.unwatch(self)
        return session

    async def _unsubscribe(self, session: Session) -> None:
        """Take the subscriptions back as far as time allows, then release the session."""
        try:
            async with asyncio.timeout(self._live.config.timeouts.cancel_seconds):
                for uri in self._acknowledged_filter.resourceSubscriptions:
                    if session.lost:
                        break
                    _ = await session.ask(mcp.UNSUBSCRIBE, {"uri": uri}, self._asked.headers)
        except (GatewayError, TimeoutError):
            pass  # they end with the session, here or when the server forgets it
        finally:
            # The session is never pooled again, and what was set on it ends with it.
            self._live.upstream.pool.release(session, clean=False)


def _pauses() -> Iterator[float]:
    """Seconds to wait before each attempt, with jitter."""
    for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
        yield pause * (1 + _JITTER * world.random())
