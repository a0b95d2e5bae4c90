"""Sends one HTTP request of the probe itself, whose reply is bounded in size as well as in time."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Final

from yarl import URL

from gateway import __version__
from gateway.config import InForce
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.client import HttpClient
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc, reply_messages
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from gateway.upstream.channel import Headers

_BODY_BYTES: Final = 262_144
NO_REPLY: Final = (RequestFailed, TimeoutError)
"""Why there is no reply, or no complete one, in time."""


@asynccontextmanager
async def http_client(bounds: Bounds) -> AsyncIterator[tuple[Client, Tasks]]:
    """Yield an HTTP client like that of a route, with the tasks that it runs in; both end with the block."""
    tasks = Tasks(Metrics(__version__))
    client = Client(InForce(bounds), HttpClient(tasks))
    try:
        yield client, tasks
    finally:
        await tasks.close()
        client.close()


class ProbeReply:
    """One reply, or its beginning."""

    def __init__(self, reply: AwaitedReply) -> None:
        self.status = reply.status
        self.headers = reply.headers
        self.content_type = reply.content_type
        self.body = b""

    def messages(self) -> Iterator[jsonrpc.Message]:
        """Yield the JSON-RPC messages received so far."""
        return reply_messages.messages(self.content_type, self.body)

    def is_answered(self, asked: bytes) -> bool:
        """Return whether the response to the request with this id has come."""
        return any(reply_messages.is_answer(message, asked) for message in self.messages())


async def ask(  # noqa: PLR0913  (what one request consists of)
    client: Client, method: str, url: URL, headers: Headers, body: bytes = b"", *, seconds: float, asked: bytes = b""
) -> ProbeReply:
    """Send a request that may run twice; return its reply up to the answer to `asked`, its end, a break or a deadline.

    Raises TimeoutError if no reply begins in time, or RequestFailed.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    async with asyncio.timeout_at(deadline):
        coming = await client.send(method, url, headers, body, sending="repeatable")
    reply = ProbeReply(coming)
    # What came before a failure counts.
    with closing(coming), suppress(*NO_REPLY):
        async with asyncio.timeout_at(deadline):
            async for chunk in coming:
                reply.body += chunk
                if len(reply.body) > _BODY_BYTES or (asked and reply.is_answered(asked)):
                    break
    return reply
