"""One request with one whole reply, for callers that wait.

Not for calls: a future and a body in memory for each request is what the callbacks avoid.
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from gateway.http_client.client import HttpClient
from gateway.http_client.errors import RequestFailed
from gateway.http_client.origin import Origin
from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.request_head import RequestHead


class WholeReply(NamedTuple):
    """A complete reply."""

    head: ReplyHead
    body: bytes


class BodyTooLarge(Exception):
    """The body of a reply is larger than the caller allows."""


async def request(  # noqa: PLR0913  (what one request consists of)
    client: HttpClient,
    origin: Origin,
    head: RequestHead,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    connect_seconds: float,
    max_body_bytes: int,
) -> WholeReply:
    """Send a request and wait for its whole reply. Cancelling it closes the connection.

    Raises RequestFailed, BodyTooLarge, or ValueError for headers that cannot be sent.
    """
    collector = _Collector(max_body_bytes)
    pending = client.begin(origin, head, headers, body, collector, connect_seconds=connect_seconds)
    try:
        return await collector.reply
    finally:
        pending.abort()


class _Collector:
    """Listens to a reply until it is complete or too large."""

    def __init__(self, max_body_bytes: int) -> None:
        self.reply: asyncio.Future[WholeReply] = asyncio.get_running_loop().create_future()
        self._max_body_bytes = max_body_bytes
        self._head: ReplyHead
        self._body = bytearray()

    def on_head(self, head: ReplyHead, /) -> None:
        self._head = head

    def on_body(self, data: bytes, /) -> None:
        self._body += data
        if len(self._body) > self._max_body_bytes:
            raise BodyTooLarge

    def on_end(self) -> None:
        if not self.reply.done():
            self.reply.set_result(WholeReply(self._head, bytes(self._body)))

    def on_failed(self, failure: RequestFailed, /) -> None:
        if not self.reply.done():
            is_large = isinstance(failure.__cause__, BodyTooLarge)
            self.reply.set_exception(BodyTooLarge() if is_large else failure)
