"""A session that passes from a legacy server's backend to the mirror if the server refuses `initialize`.

Nothing else tells a modern-only server from one that speaks both protocols.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Raw

from gateway.legacy_front.backend import Backend, ClientLink, ClientMessage, Connect, RequestId
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, GatewayError, Refused
from gateway.runtime.tasks import Tasks

_MESSAGE_BYTES: Final = 512
"""What a message costs besides its text."""

MirrorIfModern = Callable[[Backend, ClientMessage, bytes], Awaitable[Connect | None]]
"""Given what refused `initialize`, that message and the response (empty without one), returns the mirror.

That is None if the server is not modern. It closes the backend that refused.
"""


class FallbackBackend:
    """A `Backend` that another one stands behind."""

    def __init__(
        self, link: ClientLink, first: Connect, mirror_if_modern: MirrorIfModern, tasks: Tasks, waiting_bytes: int
    ) -> None:
        """`waiting_bytes` limits what waits while the mirror is chosen."""
        self.link = link
        self._mirror_if_modern: MirrorIfModern | None = mirror_if_modern
        self._tasks = tasks
        self._greeting: ClientMessage | None = None
        """`initialize`, until it is answered."""
        self._waiting: list[ClientMessage] | None = None
        """What comes while the mirror is chosen; None at other times."""
        self._room = waiting_bytes
        self._is_closed = False
        self.backend = first(_Link(self))

    # -- the backend ------------------------------------------------------------------------------------------------

    def receive(self, message: ClientMessage) -> None:
        """See `Backend`."""
        if self._waiting is not None:
            size = len(message.data) + _MESSAGE_BYTES
            if self._waiting and size > self._room:
                raise Busy(
                    "The gateway is finding out which protocol the server speaks, and more than limits.body_bytes "
                    "of messages wait for that; send this one again later",
                    status=503,
                )
            self._room -= size
            self._waiting.append(message)
            return
        if self._mirror_if_modern is not None and message.opened.method == mcp.INITIALIZE:
            self._greeting = message
        self.backend.receive(message)

    async def close(self) -> None:
        """See `Backend`."""
        self._greeting, self._is_closed = None, True
        await self.backend.close()

    # -- from the first backend -------------------------------------------------------------------------------------

    def sent(self, message: bytes, related_to: RequestId | None) -> None:
        """Pass a message on, unless it refuses `initialize`."""
        if self._greeting is not None:
            opened = jsonrpc.message(message)
            if opened.method is None and isinstance(opened.id, Raw) and bytes(opened.id) == self._greeting.request_id:
                if isinstance(opened.error, Raw):
                    self._refused(message, lambda: self.link.send(message, related_to))
                    return
                self._greeting = None
        self.link.send(message, related_to)

    def refused(self, request: RequestId, error: GatewayError) -> None:
        """Pass a refusal on, unless it is that of `initialize`; what refuses the credential says nothing of an era."""
        is_greeting = self._greeting is not None and request == self._greeting.request_id
        if is_greeting and not isinstance(error, Refused):
            self._refused(b"", lambda: self.link.refuse(request, error))
        else:
            self.link.refuse(request, error)

    def ended(self) -> None:
        """End the session, unless the mirror may go on with it."""
        if self._waiting is None:
            self.link.close()

    def _refused(self, response: bytes, give_up: Callable[[], None]) -> None:
        greeting, self._greeting = self._greeting, None
        mirror, self._mirror_if_modern = self._mirror_if_modern, None
        assert greeting is not None
        assert mirror is not None
        self._waiting = []
        self._tasks.spawn(self._choose(mirror, greeting, response, give_up), "choose the mirror")

    async def _choose(
        self, mirror: MirrorIfModern, greeting: ClientMessage, response: bytes, give_up: Callable[[], None]
    ) -> None:
        connect = None
        try:
            connect = await mirror(self.backend, greeting, response)
        finally:
            waiting, self._waiting = self._waiting or [], None
            if connect is None and not self._is_closed:
                give_up()
                self.link.close()
        if connect is not None and not self._is_closed:
            self.backend = connect(self.link)
            for message in (greeting, *waiting):
                try:
                    self.backend.receive(message)
                except GatewayError as exc:
                    if message.request_id is not None:
                        self.link.refuse(message.request_id, exc)


class _Link:
    """The link of the first backend (`ClientLink`)."""

    def __init__(self, fallback: FallbackBackend) -> None:
        self._fallback = fallback

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        self._fallback.sent(message, related_to)

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        self._fallback.refused(request, error)

    def forget(self, request: RequestId) -> None:
        self._fallback.link.forget(request)

    def close(self) -> None:
        self._fallback.ended()
