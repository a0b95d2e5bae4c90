"""One child process that several sessions share, for `mrtr-gateway wrap`: a stdio server expects one client.

The first session makes the handshake. Later sessions of the same client speak to the same child without one, and it
lives on when a session ends. Responses go to the session that asked. Everything else goes to the session with a call
in flight that may ask the user, of which there is one at a time (`sessions.affinity: principal`).

A call that was cancelled may run on if the child has not answered it. A question may then be that call's, so it is
refused, and later sessions get another child, in which questions are clear again.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Raw

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher
from gateway.protocol import jsonrpc, mcp
from gateway.telemetry import Event, get_logger
from gateway.upstream.channel import Headers, Hearer
from gateway.upstream.stdio import StdioChannel

log = get_logger()

_INITIALIZED: Final = jsonrpc.notification(mcp.INITIALIZED)
_UNCLEAR: Final = jsonrpc.Error(
    mcp.INVALID_PARAMS, "A call that was cancelled is not answered yet, and the request may be that call's"
)


@dataclass(eq=False)
class ChildHolder:
    """The child that the sessions of one route share; another client's handshake replaces it."""

    launcher: ChildLauncher
    _shared: "SharedChild | None" = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def child(self, message: bytes, headers: Headers) -> "SharedChild":
        """Return the child that has had this handshake; raises what `StdioChannel.initialize` raises."""
        async with self._opening:
            shared, handshake = self._shared, jsonrpc.message(message).params
            if shared is not None and not shared.is_replaced:
                if shared.handshake == handshake and not shared.child.over.done():
                    return shared
                await shared.replace()
            channel = StdioChannel(self.launcher)
            try:
                result = await channel.initialize(message, headers)
            except BaseException:
                channel.abandon()
                raise
            self._shared = SharedChild(channel.child, handshake, result)
            return self._shared


class SharedChild:
    """A child after its handshake, with the channels that speak to it."""

    def __init__(self, child: Child, handshake: Raw | msgspec.UnsetType, result: Raw) -> None:
        """`handshake` are the parameters of the `initialize` that it has had, `result` its answer."""
        self.child = child
        self.handshake, self.result = handshake, result
        self.channels: list[SharedChannel] = []
        self.is_replaced = False
        """Whether it is given to no more sessions, and ends with its last one."""
        self._given_up: set[bytes] = set()
        """The calls that may ask, that nobody waits for, and that the child has not answered (JSON of their ids)."""
        self._is_initialized = False
        self._subscribed: Counter[bytes] = Counter()
        child.hear_with(self._hear)

    def _hear(self, line: bytes, message: jsonrpc.Message) -> None:
        id_ = bytes(message.id) if isinstance(message.id, Raw) else b""
        if message.method is None:
            self._given_up.discard(id_)
            hearing = [each for each in self.channels if each.awaits(id_)]
        else:
            asking = [each for each in self.channels if each.may_ask]
            if id_ and message.method != mcp.PING and self._given_up and asking:
                self._refuse(id_)
                return
            hearing = asking or self.channels
        for channel in hearing[:1]:  # one is enough, because a session tells all listeners of its caller
            channel.hear(line)

    def give_up(self, id_: bytes) -> None:
        """Nobody waits any more for the answer to a call that may ask."""
        self._given_up.add(id_)

    def _refuse(self, id_: bytes) -> None:
        """Refuse a question that may be of the call in flight, or of one that was given up.

        The sessions of this child end with their calls.
        """
        self.child.write(jsonrpc.failure(id_, _UNCLEAR))
        if self.is_replaced:
            return
        cause = "the server asked something while a cancelled call may still run in it; the question was refused"
        fix = "call again: the next call starts the server anew. A server that answers cancelled calls is kept"
        log.warning(Event.UPSTREAM_FAILED, route=self.child.route.path, cause=cause, fix=fix)
        self.is_replaced = True
        for channel in tuple(self.channels):
            channel.lose()

    async def send(self, message: bytes) -> None:
        """Write a message; the child gets `initialized` once."""
        if message == _INITIALIZED:
            if self._is_initialized:
                return
            self._is_initialized = True
        await self.child.send(message)

    def counts(self, request: jsonrpc.Message) -> bool:
        """Count a subscription or its end; return whether the child has to know."""
        if request.method not in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE):
            return True
        uri = bytes(jsonrpc.members(request.params).get("uri", b""))
        self._subscribed[uri] += 1 if request.method == mcp.SUBSCRIBE else -1
        if request.method == mcp.UNSUBSCRIBE:
            if self._subscribed[uri] > 0:
                return False
            del self._subscribed[uri]  # also if nobody had subscribed
        return True

    async def left(self, channel: "SharedChannel") -> None:
        """Forget a channel; a child that was replaced ends with its last one."""
        if channel in self.channels:
            self.channels.remove(channel)
        if self.is_replaced and not self.channels:
            await self.child.close()

    async def replace(self) -> None:
        """Give the child to no more sessions."""
        self.is_replaced = True
        if not self.channels:
            await self.child.close()


class SharedChannel(StdioChannel):
    """One session in a shared child."""

    is_process = False

    def __init__(self, holder: ChildHolder) -> None:
        super().__init__(holder.launcher)
        self._holder = holder
        self._shared: SharedChild | None = None
        self._id = b""
        self.may_ask = False
        """Whether the call in flight may ask the user."""

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Join the child, which may have had this handshake."""
        shared = self._shared = await self._holder.child(message, headers)
        self.child = shared.child
        shared.channels.append(self)
        return shared.result

    def awaits(self, id_: bytes) -> bool:
        """Whether the request in flight has this id."""
        return self._call is not None and self._id == id_

    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """Write a request and wait until it is answered, or the child ends."""
        assert self._shared is not None, "the handshake came first"
        opened = jsonrpc.message(message)
        if not self._shared.counts(opened):
            return jsonrpc.EMPTY
        self._id = bytes(opened.id) if isinstance(opened.id, Raw) else b""
        is_call = opened.method in mcp.ASKING
        self.may_ask = is_call or opened.method == mcp.TASKS_RESULT  # which brings what a task asks
        try:
            return await super().request(message, headers, hearer)
        except asyncio.CancelledError:
            if is_call and self._call is None:
                self._shared.give_up(self._id)
            raise
        finally:
            if self._call is None:
                self.may_ask = False

    def lose(self) -> None:
        """End the session with its call: the child is given to no more sessions."""
        if self._side is not None:
            self._side.side_closed(was_open=True)

    async def send(self, message: bytes, headers: Headers) -> None:
        """Write an answer or a notification."""
        assert self._shared is not None, "the handshake came first"
        await self._shared.send(message)

    async def close(self, *, end_session: bool) -> None:
        """Leave the child, which serves the next session too."""
        if self._shared is not None:
            await self._shared.left(self)
