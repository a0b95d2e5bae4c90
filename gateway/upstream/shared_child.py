"""One child process that several sessions share, for `mrtr-gateway wrap`: a stdio server expects one client.

The first session makes the handshake. Later sessions of the same client speak to the same child without one, and it
lives on when a session ends. Responses go to the session that asked. Everything else goes to the session with a call
in flight that may ask the user, of which there is one at a time (`sessions.affinity: principal`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.process.child import Child
from gateway.process.launcher import ChildLauncher
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallGone, CallLost, SessionLost
from gateway.upstream.channel import Channel, Headers, Receive, SideListener
from gateway.upstream.stdio import StdioChannel, is_message

_INITIALIZED: Final = jsonrpc.notification(mcp.INITIALIZED)
_EMPTY_RESULT: Final = b"{}"


class ChildHolder:
    """The child that the sessions of one route share; another client's handshake replaces it."""

    def __init__(self, launcher: ChildLauncher, malformed: Callable[[], None]) -> None:
        self._launcher = launcher
        self._malformed = malformed
        self._shared: SharedChild | None = None
        self._opening = asyncio.Lock()

    def connect(self) -> "SharedChannel":
        """Return the channel of a new session."""
        return SharedChannel(self)

    async def child(self, message: bytes, headers: Headers) -> "SharedChild":
        """Return the child that has had this handshake; raises what `StdioChannel.initialize` raises."""
        async with self._opening:
            shared = self._shared
            if shared is not None and shared.message == message and not shared.child.over.done():
                return shared
            if shared is not None:
                self._shared = None
                await shared.replaced()
            channel = StdioChannel(self._launcher, self._malformed)
            result = await channel.initialize(message, headers)
            seconds = self._launcher.client.timeouts.answer_seconds
            self._shared = SharedChild(channel.child, message, result, seconds, self._malformed)
            return self._shared

    async def close(self) -> None:
        """End the child."""
        if self._shared is not None:
            await self._shared.child.close()


class SharedChild:
    """A child after its handshake, with the channels that speak to it."""

    def __init__(
        self, child: Child, message: bytes, result: Raw, send_seconds: float, malformed: Callable[[], None]
    ) -> None:
        self.child = child
        self.message = message
        self.result = result
        self.channels: list[SharedChannel] = []
        self._malformed = malformed
        self._send_seconds = send_seconds
        self._is_initialized = False
        self._is_replaced = False
        self._subscribed: Counter[bytes] = Counter()
        child.receive_with(self._hear)

    def _hear(self, line: bytes) -> None:
        if not is_message(line):
            self._malformed()
        elif (channel := self._channel_of(jsonrpc.message(line))) is not None:
            channel.hear(line)

    def _channel_of(self, message: jsonrpc.Message) -> "SharedChannel | None":
        if message.method is None:
            id_ = bytes(message.id) if isinstance(message.id, Raw) else b""
            return next((each for each in self.channels if each.awaits(id_)), None)
        first = self.channels[0] if self.channels else None
        return next((each for each in self.channels if each.may_ask), first)

    async def send(self, message: bytes) -> None:
        """Write a message; the child gets `initialized` once."""
        if message == _INITIALIZED:
            if self._is_initialized:
                return
            self._is_initialized = True
        await self.child.send(message, self._send_seconds)

    def counts(self, method: str | None, uri: bytes) -> bool:
        """Count a subscription or its end; return whether the child has to know."""
        if method == mcp.SUBSCRIBE:
            self._subscribed[uri] += 1
        elif method == mcp.UNSUBSCRIBE:
            self._subscribed[uri] -= 1
            return self._subscribed[uri] <= 0
        return True

    async def left(self, channel: "SharedChannel") -> None:
        """Forget a channel; a child that was replaced ends with its last one."""
        if channel in self.channels:
            self.channels.remove(channel)
        await self._end_if_unused()

    async def replaced(self) -> None:
        """Take no more channels."""
        self._is_replaced = True
        await self._end_if_unused()

    async def _end_if_unused(self) -> None:
        if self._is_replaced and not self.channels:
            await self.child.close()


class SharedChannel(Channel):
    """One session in a shared child."""

    taken = True
    """A child receives no credential, so it cannot refuse one."""

    def __init__(self, holder: ChildHolder) -> None:
        self._holder = holder
        self._shared: SharedChild | None = None
        self._call: tuple[bytes, Receive, asyncio.Future[None]] | None = None
        self.may_ask = False
        """Whether the call in flight may ask the user."""
        self._side: Receive = lambda _: False
        self._is_listening = False

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Join the child, which may have had this handshake."""
        self._shared = await self._holder.child(message, headers)
        self._shared.channels.append(self)
        return self._shared.result

    @property
    def hears_side(self) -> bool:
        """Whether the child runs and its messages outside of requests are heard."""
        return self._is_listening and self._shared is not None and not self._shared.child.over.done()

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Hand over messages outside of requests; the side stream is lost when the child ends by itself."""
        assert self._shared is not None, "the handshake came first"
        child, self._side, self._is_listening = self._shared.child, listener.receive, True

        def ended(_: object) -> None:
            if self._is_listening and not child.asked:
                listener.lost()

        child.over.add_done_callback(ended)

    def awaits(self, id_: bytes) -> bool:
        """Whether the request in flight has this id."""
        return self._call is not None and self._call[0] == id_

    def hear(self, line: bytes) -> None:
        """Take a message of the child that is for this session."""
        call = self._call
        if call is None:
            _ = self._side(line)
            return
        _, receive, answered = call
        try:
            if receive(line):
                self._forget(call)
                answered.set_result(None)
        except Exception as exc:  # noqa: BLE001  (the task of the request handles it, not the pipe)
            self._forget(call)
            answered.set_exception(exc)

    def _forget(self, call: object) -> None:
        if self._call is call:
            self._call, self.may_ask = None, False

    async def request(self, message: bytes, headers: Headers, receive: Receive) -> jsonrpc.Error | Raw | None:
        """Write a request and wait until it is answered, or the child ends."""
        shared = self._shared
        assert shared is not None, "the handshake came first"
        child = shared.child
        if child.over.done():
            raise SessionLost(f"{child.where} {child.over.result()}")
        opened = jsonrpc.message(message)
        if not shared.counts(opened.method, _uri(opened)):
            return Raw(_EMPTY_RESULT)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        id_ = bytes(opened.id) if isinstance(opened.id, Raw) else b""
        call = self._call = id_, receive, answered
        self.may_ask = opened.method in mcp.ASKING
        try:
            await shared.send(message)
            _ = await asyncio.wait((answered, child.over), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise CallLost(f"{child.where} {child.over.result()} in a call; the call may have had effects")
            answered.result()
        finally:
            self._forget(call)
            answered.cancel()
        return None

    async def send(self, message: bytes, headers: Headers) -> None:
        """Write an answer or a notification."""
        assert self._shared is not None, "the handshake came first"
        await self._shared.send(message)

    async def ping(self, headers: Headers) -> None:
        """Do nothing: a child receives no credential that it could refuse."""

    def adopt(self, session_id: str, version: str) -> None:
        """Raise CallGone, because only the process that started a child can speak to it."""
        raise CallGone("A child is a process of this gateway alone; the call may have had effects")

    async def resume(self, *_: object, **__: object) -> None:
        """Raise CallGone, as `adopt` does."""
        self.adopt("", "")

    async def close(self, *, end_session: bool) -> None:
        """Leave the child, which serves the next session too."""
        self._is_listening = False
        if self._shared is not None:
            await self._shared.left(self)


def _uri(message: jsonrpc.Message) -> bytes:
    """Return the JSON of the URI that a request is about; empty if it has none."""
    if message.method not in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE) or not isinstance(message.params, Raw):
        return b""
    try:
        return bytes(jsonrpc.fields(message.params).get("uri", b""))
    except (ValueError, msgspec.MsgspecError):
        return b""
