"""The interface of all upstream transports: a channel is one session of one legacy server.

A channel moves messages. It knows nothing of exchanges, capabilities and results. Streamable HTTP, HTTP+SSE and stdio
implement it; only streamable HTTP can `resume`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Raw

from gateway import world
from gateway.protocol import jsonrpc, mcp, reply_messages
from gateway.protocol.jsonrpc import Error

Headers = Mapping[str, str]
"""The headers of a request that depend on its client: credentials, configured headers, trace context."""

NO_HEADERS: Final[Headers] = {}
_PING: Final = b"gw-ping-"
"""The ids of the gateway's own pings begin with this."""


class SideListener:
    """Hears the messages of the server that belong to no request, on the side stream; this one ignores them."""

    __slots__ = ()

    def hear_side(self, data: bytes) -> None:
        """Take a message."""

    def side_reopened(self) -> None:
        """The side stream was opened again; messages in between are lost."""

    def side_closed(self, *, was_open: bool) -> None:
        """There will be no side stream any more, or there never was one."""


class Hearer:
    """Hears the reply to one request, in the stack that reads it; this one ignores it."""

    __slots__ = ()

    def hear(self, data: bytes, /) -> bool:  # noqa: ARG002  (for requests with an answer)
        """Take a JSON-RPC message; returns whether it answers the request. An error that it raises ends the reply."""
        return False

    def accepted(self) -> None:
        """The server has accepted the request, with the credential that was sent with it."""

    def attached(self) -> None:
        """The stream that was asked for by GET is here; for a request that is resumed, more than once."""

    def over(self, reply: object, failure: Exception | None, /) -> None:
        """A reply for which no coroutine waits is over without the answer; `failure` says why it is not complete."""


class Answer(Hearer):
    """Keeps the answer to one request, and skips everything else."""

    def __init__(self, sent: bytes) -> None:
        """`sent` is the request."""
        self._asked = reply_messages.asked(sent)
        self.found: Raw | Error | None = None

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`; raises ValueError for what is not JSON-RPC."""
        message = jsonrpc.message(data)
        if not reply_messages.is_foreign(message, self._asked):
            if (error := message.failure) is not None:
                self.found = error
            elif isinstance(message.result, Raw):
                self.found = message.result
        return self.found is not None


class BegunReply(Protocol):
    """The reply to a request for which no coroutine waits."""

    def close(self) -> None:
        """Read nothing more: the answer came another way, or is not wanted."""


class Channel(ABC):
    """One session of one legacy server."""

    __slots__ = ()

    can_ask: bool = True
    """Whether an answer can reach the server. The stateless mode of the legacy SDKs loses it."""

    forgotten: bool = False
    """Whether the server was proved to have forgotten the session."""

    answers_apart: bool = False
    """Whether each request has a reply of its own, so that several may be in flight.

    Else there is one stream for everything: `send` sends requests too, and all messages of the server, answers
    included, come on the side stream.
    """

    session_id: str | None = None

    is_process: bool = False
    """Whether the session is a server process of its own, so that no other session hears of changes in it."""

    @property
    def hears_side(self) -> bool:
        """Whether a side stream is open, or opened again: the server sends there what belongs to no request."""
        return False

    @property
    def cursor(self) -> str | None:
        """The last event id on the stream of the current request: the place after everything that was handed over."""
        return None

    async def open(self, message: bytes, headers: Headers) -> "tuple[Channel, Raw]":
        """Send `initialize`; return the channel to use: a different one if another transport was detected."""
        return self, await self.initialize(message, headers)

    def suspect(self, *, is_accepted: bool) -> str:  # noqa: ARG002  (for the transports)
        """Explain a silence in a request, with a fix; empty if there is no explanation."""
        return ""

    @abstractmethod
    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`; return the JSON of its result. Raises UpstreamError or Refused."""

    @abstractmethod
    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Open the side stream, before `initialized` is sent."""

    def begin(self, message: bytes, headers: Headers, hearer: Hearer) -> BegunReply | None:  # noqa: ARG002  (for the transports)
        """Send a request for whose reply no coroutine waits; None if this transport cannot.

        `hearer` is told if the reply is over without the answer: then a coroutine has to `conclude` the request.
        """
        return None

    async def conclude(self, hearer: Hearer) -> Error | Raw | None:
        """Decide what becomes of the request that was begun last, as `request` does."""
        raise NotImplementedError

    @abstractmethod
    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> Error | Raw | None:
        """Send a request and hand over the messages on its stream until one is the answer.

        One that `is_repeatable` does no harm if it runs twice, so the end of a kept connection has it sent again.
        Returns None, or the JSON-RPC error (with any id) or result that came with an HTTP error status. Raises
        SessionLost or Refused if the server did not accept the request, Unreachable if it cannot have been sent, and
        CallLost if its answer will not come. A stream that breaks is resumed from its cursor, if it has one.
        """

    @abstractmethod
    def adopt(self, session_id: str, version: str) -> None:
        """Use a session that another process opened, in place of `initialize`."""

    @abstractmethod
    async def resume(self, cursor: str, headers: Headers, hearer: Hearer, *, is_shared: bool) -> None:
        """Resume a request behind `cursor` and hand over its messages until one is the answer.

        `hearer` is `attached` when the server accepts an attempt: from then on, its questions may be answered. An
        event is handed over once, however often the server repeats it. Raises CallGone if the session is gone, Refused
        if the credentials are not accepted, and CallLost if the server fails too often in a row. Faults of this host
        count only if another process may still hold the call (`is_shared`).
        """

    def give_up(self) -> None:  # noqa: B027  (for the transports)
        """The request in flight is not wanted any more: stop looking for its answer after a while."""

    @abstractmethod
    async def send(self, message: bytes, headers: Headers) -> None:
        """Send an answer or a notification and wait until the server accepts it. Raises the errors of `request`."""

    @abstractmethod
    async def beside(self, message: bytes, headers: Headers) -> Error | Raw | None:
        """Send a request that may run twice beside the one in flight; return its answer. Raises as `request`."""

    @abstractmethod
    async def ping(self, headers: Headers) -> None:
        """Send a `ping` with these headers, beside a request that may be in flight; return when it is accepted.

        Raises SessionLost if the refusal reads as if the session were gone, Refused if the credentials are not
        accepted, and CallLost or Unreachable if neither is known.
        """

    @abstractmethod
    async def close(self, *, end_session: bool) -> None:
        """Close every stream. `end_session` also ends the session, which must have no pending call."""


def new_ping() -> bytes:
    """Return a ping with a new id. Some servers key streams by it across sessions, so ids are never reused."""
    return jsonrpc.request(b'"%b%b"' % (_PING, world.token_hex(8).encode()), mcp.PING, {})


def is_pong(data: bytes) -> bool:
    """Whether a message answers a ping of the gateway's own."""
    if _PING not in data:
        return False
    message = reply_messages.opened(data)
    return message.method is None and isinstance(message.id, Raw) and bytes(message.id).startswith(b'"' + _PING)
