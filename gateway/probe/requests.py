"""One HTTP request of the probe's own, and as much of its reply as is wanted: bounded in size and in time."""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
from msgspec import Raw
from yarl import URL

from gateway.core import jsonrpc, sse
from gateway.net.client import FOREIGN, Client
from gateway.net.upstream import Headers

_BODY_BYTES: Final = 262_144
EVENTS: Final = "text/event-stream"


class Reply:
    """One reply, or its beginning."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content_type = response.content_type
        self.body = b""


async def ask(  # noqa: PLR0913  (what a request is made of)
    client: Client,
    method: str,
    url: URL,
    headers: Headers,
    body: bytes | None,
    seconds: float,
    enough: Callable[[Reply], bool] = lambda _: False,
) -> Reply:
    """Send one request; its reply, up to where it ends, breaks, is `enough`, or takes too long.

    Raises TimeoutError when no reply began in time, or one of FOREIGN.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    async with asyncio.timeout_at(deadline):
        response = await client.open(method, url, headers, body)
    reply = Reply(response)
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in response.content.iter_any():
                reply.body += chunk
                if len(reply.body) > _BODY_BYTES or enough(reply):
                    break
    except FOREIGN:
        pass  # what came before it is told
    finally:
        response.close()
    return reply


def messages(reply: Reply) -> tuple[list[jsonrpc.Message], list[str]]:
    """The JSON-RPC messages that have come so far, and the ids of the events that brought them."""
    found: list[jsonrpc.Message] = []
    ids: list[str] = []
    bodies = [reply.body]
    if reply.content_type == EVENTS:
        events = sse.Parser(len(reply.body) + 1).feed(reply.body)
        bodies = [event.data for event in events if event.data]
        ids = [event.id for event in events if event.id]
    for body in bodies:
        try:
            found.append(jsonrpc.message(body))
        except ValueError:
            continue
    return found, ids


def is_answered(reply: Reply) -> bool:
    """Whether a response (and no request or notification) has come."""
    return any(isinstance(each.result, Raw) or isinstance(each.error, Raw) for each in messages(reply)[0])
