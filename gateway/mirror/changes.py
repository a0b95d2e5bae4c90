"""What changes at a modern server, for one legacy session: one `subscriptions/listen` at a time, opened again if lost.

A legacy client hears of every list that changes, and of the resources to which it subscribed. If the stream was lost,
it is told that everything may have changed, once there is a new one.

Source: specification 2026-07-28 basic/patterns/subscriptions.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.mirror.modern_server import ModernServer, Outgoing, Pending, in_time
from gateway.mirror.profile import Profile
from gateway.mirror.translation import legacy_notification, modern_request
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, UpstreamError
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import Headers

_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_TRIES: Final = 30
_MAX_URIS: Final = 1_000
_IDS: Final = itertools.count(1)
_LISTS: Final = {
    "toolsListChanged": mcp.TOOLS_CHANGED,
    "promptsListChanged": mcp.PROMPTS_CHANGED,
    "resourcesListChanged": mcp.RESOURCES_CHANGED,
}


class Honoured(msgspec.Struct):
    """SubscriptionFilter as the server acknowledged it."""

    toolsListChanged: bool = False  # noqa: N815  (the wire's spelling)
    promptsListChanged: bool = False  # noqa: N815
    resourcesListChanged: bool = False  # noqa: N815
    resourceSubscriptions: list[str] = []  # noqa: N815


class _Acknowledged(msgspec.Struct):
    notifications: Honoured = msgspec.field(default_factory=Honoured)


_decode_acknowledged = msgspec.json.Decoder(_Acknowledged).decode


class Changes:
    """The changes that one legacy session hears of."""

    def __init__(self, server: ModernServer, tasks: Tasks, profile: Profile, deliver: Callable[[bytes], None]) -> None:
        self._server = server
        self._tasks = tasks
        self._profile = profile
        self._deliver = deliver
        self.uris: set[str] = set()
        """The resources to which the client subscribed."""
        self._stream: _Stream | None = None
        self._opening: set[_Stream] = set()
        """Streams that the server has not acknowledged yet."""
        self._headers: Headers = {}
        self._reopening: asyncio.Task[None] | None = None

    async def subscribe(self, uri: str, headers: Headers) -> None:
        """Listen to a resource too; raises InvalidParams if the server does not offer that, or UpstreamError."""
        if len(self.uris) >= _MAX_URIS:
            raise InvalidParams(f"A session may subscribe to at most {_MAX_URIS} resources")
        if uri in self.uris:
            return
        self.uris.add(uri)
        try:
            honoured = await self.listen(headers)
        except BaseException:
            self.uris.discard(uri)
            raise
        if uri not in honoured.resourceSubscriptions:
            self.uris.discard(uri)
            raise InvalidParams("The server does not tell of changes of this resource")

    def add(self, uris: Iterable[str]) -> None:
        """Want to hear of these resources too, from the next `listen` on: the server has offered to tell of them."""
        self.uris.update(itertools.islice(uris, _MAX_URIS - len(self.uris)))

    async def unsubscribe(self, uri: str, headers: Headers) -> None:
        """Listen to a resource no more."""
        if uri in self.uris:
            self.uris.discard(uri)
            _ = await self.listen(headers)

    async def listen(self, headers: Headers) -> Honoured:
        """Listen to everything that is wanted now, in place of the stream before; raises GatewayError."""
        self._headers = headers
        stream = _Stream(self._deliver, self._lost)
        id_ = b'"listen-%d"' % next(_IDS)
        wanted = {**dict.fromkeys(_LISTS, True), "resourceSubscriptions": sorted(self.uris)}
        params = {"notifications": Raw(jsonrpc.encode(wanted))}
        body = modern_request(id_, mcp.LISTEN, params, self._profile)
        stream.pending = self._server.begin(Outgoing(body, mcp.LISTEN, "", headers, is_long=True), stream)
        self._opening.add(stream)
        try:
            honoured = await in_time(stream.acknowledged, mcp.LISTEN)
        except BaseException:
            stream.close()
            raise
        finally:
            self._opening.discard(stream)
        before, self._stream = self._stream, stream
        if before is not None:
            before.close()
        return honoured

    def close(self) -> None:
        """Listen no more."""
        if self._reopening is not None:
            _ = self._reopening.cancel()
        for opening in self._opening:
            opening.on_failed(CallLost("The subscription ended before the server acknowledged it"))
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _lost(self, stream: "_Stream") -> None:
        if stream is self._stream:
            self._stream = None
            self._reopening = self._tasks.start(self._reopen(), "listen again")

    async def _reopen(self) -> None:
        for attempt in range(_TRIES):
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
            await asyncio.sleep(pause * (1 + 0.5 * random.random()))  # noqa: S311  (no secret)
            try:
                honoured = await self.listen(self._headers)
            except Refused:
                return
            except UpstreamError:
                continue
            except GatewayError:
                return
            self.tell_all(honoured)
            return

    def tell_all(self, honoured: Honoured) -> None:
        """Tell the client of everything that may have changed in the meantime."""
        for flag, method in _LISTS.items():
            if getattr(honoured, flag):
                self._deliver(jsonrpc.notification(method))
        for uri in honoured.resourceSubscriptions:
            self._deliver(jsonrpc.notification(mcp.RESOURCE_UPDATED, {"uri": uri}))


class _Stream:
    """One subscriptions/listen in flight."""

    def __init__(self, deliver: Callable[[bytes], None], lost: Callable[["_Stream"], None]) -> None:
        self.pending: Pending
        self.acknowledged: asyncio.Future[Honoured] = asyncio.get_running_loop().create_future()
        self._deliver = deliver
        self._lost = lost

    def close(self) -> None:
        """Tell of nothing more."""
        self.pending.abort()

    def on_message(self, data: bytes, /) -> None:
        """See `Listener`."""
        message = jsonrpc.message(data)
        if message.method == mcp.ACKNOWLEDGED:
            if not self.acknowledged.done():
                raw = message.params if isinstance(message.params, Raw) else jsonrpc.EMPTY
                self.acknowledged.set_result(jsonrpc.inspect(_decode_acknowledged, raw).notifications)
        elif message.method is not None:
            notification = legacy_notification(message, data)
            if notification is not None and self.acknowledged.done():
                self._deliver(notification)
        elif isinstance(message.error, Raw):
            self._ended(
                InvalidParams(f"The server refused subscriptions/listen: {jsonrpc.error(message.error).message}")
            )
        elif isinstance(message.result, Raw):
            self._ended(CallLost("The server ended its subscription"))

    def on_failed(self, error: GatewayError, /) -> None:
        """See `Listener`."""
        self._ended(error)

    def _ended(self, error: GatewayError) -> None:
        if self.acknowledged.done():
            self._lost(self)
        else:
            self.acknowledged.set_exception(error)
