"""What hears the reply to a request."""

from typing import Protocol

from gateway.http_client.errors import RequestFailed
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
