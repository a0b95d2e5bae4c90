"""A session that passes from a legacy server's backend to the mirror if the server refuses `initialize`.

Nothing else tells a modern-only server from one that speaks both protocols.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Raw

from gateway.legacy_front.backend import Backend, ClientLink, ClientMessage, Connect
from gateway.mirror.server_client import is_modern
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, GatewayError, Refused
from gateway.protocol.jsonrpc import RequestId, request_id
from gateway.routes.live_route import LiveRoute

_MESSAGE_BYTES: Final = 512
"""What a message costs besides its text."""

TellsModern = Callable[[Backend, ClientMessage, bytes], bool]
"""Given what refused `initialize`, that message and the response (empty without one), returns whether they alone show
that the server is modern."""


class FallbackBackend:
    """A `Backend` that another one stands behind, whose `ClientLink` it is.

    Until `initialize` is answered, no backend gets another request: the mirror may have to serve them all, and serves
    none before its own answer.
    """

    def __init__(
        self,
        live: LiveRoute,
        first: Connect,
        mirror: Connect,
        link: ClientLink,
        tells_modern: TellsModern = lambda *_: False,
    ) -> None:
        self.link = link
        self._live = live
        self._mirror: Connect | None = mirror
        """What serves the session if the server refuses `initialize` because it is modern; None once that is past."""
        self._tells_modern = tells_modern
        self._greeting: ClientMessage | None = None
        """`initialize`, until it is answered."""
        self._waiting: list[ClientMessage] | None = None
        """What comes while `initialize` is not answered, or the mirror is chosen; None at other times."""
        self._room = 0
        """How much more may wait."""
        self._is_closed = False
        self.backend = first(self)

    @property
    def is_undecided(self) -> bool:
        """Whether messages wait until it is known what serves the session."""
        return self._waiting is not None

    # -- the backend ------------------------------------------------------------------------------------------------

    def receive(self, message: ClientMessage) -> None:
        """See `Backend`."""
        is_answer = message.opened.method is None
        if self._waiting is not None and not (is_answer and self._greeting is not None):
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
        is_greeting = message.opened.method == mcp.INITIALIZE and message.request_id is not None
        if is_greeting and self._mirror is not None:
            self._greeting, self._waiting, self._room = message, [], self._live.config.limits.body_bytes
        try:
            self.backend.receive(message)
        except GatewayError:
            if message is self._greeting:
                self._greeting = self._waiting = None
            raise

    async def close(self) -> None:
        """See `Backend`."""
        self._greeting, self._is_closed = None, True
        await self.backend.close()

    # -- from a backend --------------------------------------------------------------------------------------------

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        """Pass a message on, unless it refuses `initialize`."""
        opened = jsonrpc.message(message) if self._greeting is not None else None
        if opened is None or not self._answers_greeting(opened):
            self.link.send(message, related_to)
        elif isinstance(opened.error, Raw) and self._mirror is not None:
            self._refused(message)
        else:
            self._mirror = None
            self.link.send(message, related_to)
            self._pass_on(self._waited())

    def _answers_greeting(self, opened: jsonrpc.Message) -> bool:
        """Whether a message answers `initialize`, the only request that the server has: an error may lack the id."""
        if opened.method is not None or not isinstance(opened.id, Raw) or self._greeting is None:
            return False
        is_error, answered = isinstance(opened.error, Raw), request_id(opened.id)
        return answered == self._greeting.request_id or (is_error and answered == b"null")

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """Pass a refusal on, unless it is that of `initialize`; what refuses the credential says nothing of an era."""
        if self._greeting is None or request != self._greeting.request_id:
            self.link.refuse(request, error)
        elif isinstance(error, Refused) or self._mirror is None:
            self.link.refuse(request, error)
            for message in self._waited():
                if message.request_id is not None:
                    self.link.refuse(message.request_id, error)
        else:
            self._refused(error)

    def passed_on(self, request: RequestId) -> None:
        """See `ClientLink`."""
        self.link.passed_on(request)

    def forget(self, request: RequestId) -> None:
        """See `ClientLink`."""
        self.link.forget(request)

    def ended(self) -> None:
        """End the session, unless the mirror may go on with it."""
        if self._waiting is None or self._greeting is not None:
            self.link.ended()

    def _refused(self, refusal: bytes | GatewayError) -> None:
        greeting, self._greeting = self._greeting, None
        mirror, self._mirror = self._mirror, None
        assert greeting is not None
        assert mirror is not None
        self._live.process.tasks.spawn(self._choose(mirror, greeting, refusal), "choose the mirror")

    async def _choose(self, mirror: Connect, greeting: ClientMessage, refusal: bytes | GatewayError) -> None:
        request = greeting.request_id or b""
        connect = None
        try:
            response = refusal if isinstance(refusal, bytes) else b""
            is_told = self._tells_modern(self.backend, greeting, response)
            await self.backend.close()
            if is_told or await is_modern(self._live, greeting.headers):
                connect = mirror
        finally:
            waiting = self._waited()
            if connect is None and not self._is_closed:
                if isinstance(refusal, bytes):
                    self.link.send(refusal, request)
                else:
                    self.link.refuse(request, refusal)
                self.link.ended()
        if connect is not None and not self._is_closed:
            self.backend = connect(self)
            self._greeting, self._waiting = greeting, waiting
            self._pass_on([greeting])

    def _waited(self) -> list[ClientMessage]:
        """What has waited; from now on nothing does."""
        waiting, self._waiting, self._greeting = self._waiting or [], None, None
        return waiting

    def _pass_on(self, messages: list[ClientMessage]) -> None:
        for message in messages:
            try:
                self.backend.receive(message)
            except GatewayError as exc:
                if message.request_id is not None:
                    self.refuse(message.request_id, exc)
