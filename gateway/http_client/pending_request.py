"""A request: what is sent, and how its caller sees it while it is in flight."""

import asyncio
from typing import Protocol

import msgspec

from gateway.http_client.errors import RequestFailed
from gateway.http_client.origin import Origin
from gateway.http_client.reply_head import ReplyHead


class ReplyListener(Protocol):
    """What hears a reply, in the stack that reads it from the socket.

    `on_head` comes once, then `on_body` any number of times, then `on_end`; or else `on_whole` in place of them all.
    `on_failed` comes in place of whatever is missing, and is the last. No method is called before `begin` has
    returned, nor after `abort`.
    """

    def on_head(self, head: ReplyHead, /) -> None:
        """The status and the headers of the final reply are here."""

    def on_body(self, data: bytes, /) -> None:
        """A part of the body is here, never empty."""

    def on_end(self) -> None:
        """The reply is complete. A request that is begun here may use the same connection."""

    def on_whole(self, head: ReplyHead, body: bytes, /) -> None:
        """The reply is complete, and all of it is here. A request that is begun here may use the same connection."""

    def on_failed(self, failure: RequestFailed, /) -> None:
        """The reply will not be completed."""


class Carrier(Protocol):
    """The connection of a request."""

    def abort(self) -> None:
        """Close the connection at once, without a word to the listener."""

    def pause_reading(self) -> None:
        """Read nothing more from the socket."""

    def resume_reading(self) -> None:
        """Read from the socket again."""

    def distrust(self) -> None:
        """Carry no further request."""


class PendingRequest(msgspec.Struct, eq=False):
    """One request. All methods but `distrust` do nothing once its reply has ended."""

    origin: Origin
    listener: ReplyListener
    """Until the request is over."""
    head: bytes = b""
    body: bytes = b""
    """Both until they need not be sent any more."""
    connect_seconds: float = 0.0
    is_head: bool = False
    """Whether its method is HEAD."""
    is_idempotent: bool = False
    """Whether it does not matter whether it has run."""
    is_repeatable: bool = False
    """Whether it may run twice, and is sent once more if its connection ends without a byte of a reply. One that is
    sent on a new connection in any case is not."""
    is_lenient: bool = False
    """Whether the values of the reply's headers may have control characters, which the listener then removes."""
    awaits_continue: bool = False
    """Whether the body is not sent yet: the server has not said `100 Continue`, for which the head has to ask."""
    is_over: bool = False
    """Whether the listener has heard, or must hear, nothing more."""
    is_paused: bool = False
    is_read: bool = False
    """Whether the whole reply was read before the listener hears of it."""
    carrier: Carrier | None = None
    """The connection that the request is sent on, or was sent on."""
    _connecting: asyncio.Task[None] | None = None
    _closing: asyncio.TimerHandle | None = None
    """When the rest of the reply is given up."""

    def abort(self) -> None:
        """Give the request up. Its connection is closed, because the rest of the reply would come on it."""
        if self.is_over:
            return
        carrier, connecting = self.carrier, self._connecting
        _ = self.end()
        self.carrier = None
        if carrier is not None:
            carrier.abort()
        elif connecting is not None:
            connecting.cancel()

    def pause_reading(self) -> None:
        """Stop the reply until `resume_reading`. What was read from the socket before is still handed over.

        Without reading, the end of the connection is not noticed either.
        """
        if self.is_over:
            return
        self.is_paused = True
        if self.carrier is not None:
            self.carrier.pause_reading()

    def resume_reading(self) -> None:
        """Go on with the reply."""
        if self.is_over:
            return
        self.is_paused = False
        if self.carrier is not None:
            self.carrier.resume_reading()

    def end_within(self, seconds: float) -> None:
        """Read the rest of the reply, so that its connection can be used again, but give it up after this time.

        Many servers keep a stream open after their response.
        """
        if self.is_over or self.is_read or self._closing is not None:
            return
        if self.is_paused:
            self.resume_reading()
        self._closing = asyncio.get_running_loop().call_later(seconds, self.abort)

    def distrust(self) -> None:
        """Use the connection for no further request, even if the reply is complete.

        What came on it was not the response to this request, so the next response may be that of another one too.
        """
        if self.carrier is not None:
            self.carrier.distrust()
            self.carrier = None

    @property
    def is_connecting(self) -> bool:
        """Whether the request still waits for its connection."""
        return self._connecting is not None

    def waits_for(self, task: asyncio.Task[None]) -> bool:
        """Whether this is the task that the request waits for; it may have been sent, and be sent again, meanwhile."""
        return self._connecting is task

    # -- for the client -----------------------------------------------------------------------------------------

    def connecting(self, task: asyncio.Task[None]) -> None:
        """A task opens a connection for the request."""
        self.carrier, self._connecting = None, task

    def sent_on(self, carrier: Carrier) -> None:
        """It is sent on this connection, and may be in flight for long."""
        self.carrier = carrier
        if not self.is_repeatable:
            self.head = self.body = b""

    def repeats(self) -> bool:
        """Whether it is sent once more, which it is only once."""
        is_repeatable, self.is_repeatable = self.is_repeatable, False
        return is_repeatable

    def continued(self) -> None:
        """The server has asked for the body."""
        self.awaits_continue = False

    def keep_nothing(self) -> None:
        """It is sent, and will not be sent again: a request may be in flight for long."""
        self.head, self.body, self.is_repeatable = b"", b"", False

    def connected(self) -> None:
        """The task has opened the connection."""
        self._connecting = None

    def end(self) -> ReplyListener:
        """Let go of all but the connection; return the listener, which hears no more than one last word."""
        self.is_over = True
        self._connecting = None
        if self.head:
            self.keep_nothing()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        listener = self.listener
        del self.listener  # it often refers to this handle
        return listener
