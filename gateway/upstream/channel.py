"""The upstream side as the rest of the gateway sees it: a channel is one session of one legacy server.

A channel moves messages; it knows no exchange, no capability and no result. Streamable HTTP is the first transport
(`upstream.streamable_http`); HTTP+SSE (`upstream.http_sse`) and stdio fit the same methods, and cannot `resume`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Raw

from gateway.protocol.jsonrpc import Error

Headers = Mapping[str, str]
"""Headers of this request that the client's side decides: credentials, configured ones, trace context."""

Receive = Callable[[bytes], bool]
"""Takes one JSON-RPC message; returns whether the request that listens here is answered now."""

NO_HEADERS: Final[Headers] = {}


class Channel(ABC):
    """One session of one legacy server."""

    can_ask: bool = True
    """Whether an answer can reach the server (not in the stateless mode of the old SDKs)."""

    hears_side: bool = False
    """Whether a side stream is open, on which the server speaks outside of requests."""

    side_changed: Callable[[bool], None] | None = None
    """Called when the side stream was opened again (True: what was said meanwhile is lost) or will not be (False)."""

    taken: bool = False
    """Whether the server has taken the request under way with the credential that was sent with it."""

    forgotten: bool = False
    """Whether the server proved not to know the session any more."""

    session_id: str | None = None
    cursor: str | None = None
    """The last event id on the stream of the current request: always the place after what was handed over."""

    async def open(self, message: bytes, headers: Headers) -> "tuple[Channel, Raw]":
        """`initialize`, and the channel to go on with: another one where the transport had to be found out."""
        return self, await self.initialize(message, headers)

    def suspect(self) -> str:
        """What may be behind a silence in the request under way, as a sentence with its fix; empty if not known."""
        return ""

    @abstractmethod
    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`; its result, as JSON. Raises UpstreamError or Refused."""

    @abstractmethod
    async def listen(self, version: str, headers: Headers, receive: Receive, lost: Callable[[], None]) -> None:
        """Open the side stream, before `initialized` is sent; `lost` is called when it ends for good."""

    @abstractmethod
    async def request(self, message: bytes, headers: Headers, receive: Receive) -> Error | Raw | None:
        """Send a request and hand over what comes on its stream until `receive` says that it is answered.

        Returns the answer of a refusal in HTTP: a JSON-RPC error, whose id may be anything, or a result; else None.
        Raises SessionLost or Refused when the server did not take it, Unreachable when it cannot have been sent,
        CallLost when its answer will not come. A stream that breaks is resumed from its cursor, if it gave one.
        """

    @abstractmethod
    def adopt(self, session_id: str, version: str) -> None:
        """Speak in a session that another process opened, in place of `initialize`."""

    @abstractmethod
    async def resume(self, cursor: str, headers: Headers, receive: Receive, attached: Callable[[], None]) -> None:
        """Pick a request up behind `cursor` and hand over what comes until `receive` says that it is answered.

        `attached` is called once, when the server took the first attempt: its questions may be answered from then on.
        An event is handed over once, however often the server repeats it. Tries for as long as it is not cancelled;
        raises CallGone when the session is gone, Refused when the credentials are not accepted, and CallLost when the
        server fails again and again.
        """

    @abstractmethod
    async def send(self, message: bytes, headers: Headers) -> None:
        """Send an answer or a notification and wait until the server accepts it. Raises as `request` does."""

    @abstractmethod
    async def ping(self, headers: Headers) -> None:
        """Have the server take a `ping` with these headers, beside a request that may be under way.

        Returns when the server accepted it. Raises SessionLost when the refusal reads as if the session were gone,
        Refused when the credentials are not accepted, CallLost or Unreachable when neither is known.
        """

    @abstractmethod
    async def close(self, *, end_session: bool) -> None:
        """Close every stream; `end_session` also ends the session (never under a pending call)."""
