"""What changes at a modern server, for one legacy session: one `subscriptions/listen` at a time, opened again if lost.

A legacy client hears of every list that changes, and of the resources to which it subscribed. If the stream was lost,
it is told that everything may have changed, once there is a new one.

Source: specification 2026-07-28 basic/patterns/subscriptions.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from msgspec import Raw

from gateway import world
from gateway.bridge.subscription import LISTS, Filter
from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ModernRequest, ServerClient, in_time
from gateway.mirror.translation import legacy_notification
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, UpstreamError
from gateway.runtime.tasks import Tasks, telling
from gateway.upstream.channel import Headers, Hearer

_PAUSES: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_TRIES: Final = 30
_EARLY_SECONDS: Final = 10.0
"""A stream that is lost within this time after its beginning counts as a failed attempt."""
_MAX_URIS: Final = 1_000
_MAX_URI_BYTES: Final = 65_536


def listening(profile: Profile, headers: Headers, uris: Iterable[str] = ()) -> ModernRequest:
    """The request for the changes of all lists, and of these resources."""
    wanted = {**dict.fromkeys(LISTS, True), "resourceSubscriptions": sorted(uris)}
    params = {"notifications": jsonrpc.encode(wanted)}
    return ModernRequest.new(mcp.LISTEN, params, profile, headers)


class Changes:
    """The changes that one legacy session hears of."""

    def __init__(
        self,
        server: ServerClient,
        tasks: Tasks,
        profile: Profile,
        deliver: Callable[[bytes], None],
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`gave_up` is called if there is no stream, and no further attempt at one."""
        self.profile = profile
        self.server, self.tasks = server, tasks
        self.deliver, self._gave_up = deliver, gave_up
        self.uris: dict[str, None] = {}
        """The resources to which the client subscribed."""
        self._turn = asyncio.Lock()
        """Streams are opened one after another, so that the last one covers everything that is wanted."""
        self._stream: _ChangeStream | None = None
        """The stream that the server has acknowledged last, until its end is noticed."""
        self._opening: _ChangeStream | None = None
        """The stream that waits for its acknowledgement."""
        self._headers: Headers = {}
        self._keeping: asyncio.Task[None] | None = None
        self._closed = 0
        """How often this was closed: what began before that must not go on after it."""

    @property
    def uri_bytes(self) -> int:
        """The size of the URIs of all subscriptions."""
        return sum(map(_size, self.uris))

    async def change(self, method: str, uri: str, headers: Headers) -> None:
        """Serve resources/subscribe or resources/unsubscribe.

        Raises InvalidParams if the server does not offer the changes of a resource, or another GatewayError.
        """
        async with self._in_turn():
            if (uri in self.uris) is (method == mcp.SUBSCRIBE):
                return
            if method == mcp.UNSUBSCRIBE:
                del self.uris[uri]
                _ = await self._open(self.uris, headers)
                return
            if not self._has_room(uri):
                raise InvalidParams(
                    f"A session may subscribe to at most {_MAX_URIS} resources, whose URIs have at most "
                    f"{_MAX_URI_BYTES} bytes together; unsubscribe from some first"
                )
            honoured = await self._open((*self.uris, uri), headers)
            if uri not in honoured.resourceSubscriptions:
                raise InvalidParams("The server does not announce changes of this resource; read it again instead")
            self.uris[uri] = None

    def add(self, uris: Iterable[str]) -> None:
        """Include these resources from the next `listen` on; the server has already offered their changes."""
        for uri in uris:
            if self._has_room(uri):
                self.uris[uri] = None

    def _has_room(self, uri: str) -> bool:
        return len(self.uris) < _MAX_URIS and self.uri_bytes + _size(uri) <= _MAX_URI_BYTES

    async def listen(self, headers: Headers) -> Filter:
        """Listen to everything that is wanted now, in place of the stream before; raises GatewayError."""
        async with self._in_turn():
            return await self._open(self.uris, headers)

    def begin(self, headers: Headers) -> None:
        """Listen to everything that is wanted, as soon as the server can be reached; a second time changes nothing."""
        self._headers = headers
        if self._keeping is None or self._keeping.done():
            self._keeping = self.tasks.start(self._keep(), "listen")

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        closed = self._closed
        async with self._turn:
            self._check_open(closed)
            yield

    def _check_open(self, closed: int) -> None:
        if self._closed != closed:
            raise CallLost("The subscription ended before the server acknowledged it")

    async def _open(self, uris: Iterable[str], headers: Headers) -> Filter:
        closed, self._headers = self._closed, headers
        self._opening = opening = _ChangeStream(self, listening(self.profile, headers, uris))
        try:
            honoured = await in_time(opening.acknowledged, mcp.LISTEN)
            self._check_open(closed)  # `close` may come between the acknowledgement and this line
        except BaseException:  # also if the client left: nothing else would end the stream
            _ = opening.task.cancel()
            raise
        finally:
            self._opening = None
        # Only now does the stream before end: had the server refused the new one, it would go on.
        before, self._stream = self._stream, opening
        if before is not None:
            _ = before.task.cancel()
        self.begin(headers)
        return honoured

    async def _keep(self) -> None:
        """Open a stream whenever there is none, and tell the client of everything if it has missed changes.

        A server that ends each stream early is asked less and less often, and finally not at all.
        """
        attempts, has_missed = 0, False
        while self._stream is not None or attempts < _TRIES:
            if (stream := self._stream) is not None:
                _ = await asyncio.wait((stream.task,))
                if self._stream is stream:  # and was not replaced
                    self._stream, has_missed = None, True
                    if world.monotonic() - stream.began >= _EARLY_SECONDS:
                        attempts = 0
                continue
            pause = _PAUSES[min(attempts, len(_PAUSES) - 1)]
            attempts += 1
            await asyncio.sleep(pause * (1 + 0.5 * world.random()))  # a server that restarts loses all streams at once
            try:
                honoured = await self.listen(self._headers)
            except GatewayError as exc:
                has_missed = True
                # Time changes neither a credential nor a request that is refused, so only the client can go on.
                if isinstance(exc, Refused) or not isinstance(exc, UpstreamError):
                    attempts = _TRIES
            else:
                if has_missed:
                    self.tell_all(honoured)
        self._gave_up()

    def close(self) -> None:
        """Stop listening until `listen` is called again."""
        self._closed += 1
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            _ = keeping.cancel()
        if self._opening is not None:
            self._opening.fail(CallLost("The subscription ended before the server acknowledged it"))
        stream, self._stream = self._stream, None
        if stream is not None:
            _ = stream.task.cancel()

    def tell_all(self, honoured: Filter) -> None:
        """Tell the client of everything that may have changed in the meantime."""
        for flag, (_, method) in LISTS.items():
            if getattr(honoured, flag):
                self.deliver(jsonrpc.notification(method))
        for uri in sorted(self.uris.keys() & honoured.resourceSubscriptions):
            self.deliver(jsonrpc.notification(mcp.RESOURCE_UPDATED, {"uri": uri}))


class _ChangeStream(Hearer):
    """Hears one stream, from its acknowledgement on."""

    def __init__(self, changes: Changes, request: ModernRequest) -> None:
        self.acknowledged: asyncio.Future[Filter] = asyncio.get_running_loop().create_future()
        self.began = world.monotonic()
        self.task = changes.tasks.start(self._listen(changes.server, request), "listen")
        """Hears it until its end."""
        self._deliver = changes.deliver

    async def _listen(self, server: ServerClient, request: ModernRequest) -> None:
        with telling(self.fail):
            await server.send(request, self)
            self.fail(CallLost("The server ended its subscription"))

    def fail(self, error: GatewayError) -> None:
        """There will be no acknowledgement, unless there was one."""
        if not self.acknowledged.done():
            self.acknowledged.set_exception(error)

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`."""
        message, acknowledged = jsonrpc.message(data), self.acknowledged
        if message.method == mcp.ACKNOWLEDGED:
            if not acknowledged.done():
                params = jsonrpc.fields(message.params) if isinstance(message.params, Raw) else {}
                honoured = jsonrpc.fields(params.get("notifications", jsonrpc.EMPTY))
                _ = honoured.pop("taskIds", None)  # legacy clients hear of no tasks, so it may be anything
                acknowledged.set_result(jsonrpc.decode(jsonrpc.merge(honoured), type=Filter))
        elif message.method is not None:
            notification = legacy_notification(message, data)
            if notification is not None and acknowledged.done():
                self._deliver(notification)
        elif (error := message.failure) is not None:
            self.fail(InvalidParams(f"The server refused subscriptions/listen: {error.message}"))
        return message.method is None


def _size(uri: str) -> int:
    return len(uri.encode("utf-8", "surrogatepass"))
