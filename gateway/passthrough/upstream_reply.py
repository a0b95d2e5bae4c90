"""The upstream's reply to a request that passes through."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.http.client import FOREIGN, REDIRECTS, mapped, read_at_most
from gateway.http.upstream_url import Endpoint
from gateway.passthrough.passage import Passage
from gateway.passthrough.sse_endpoint import FirstEventRewriter
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, Unreachable


class ReplyCut(ConnectionResetError):
    """The upstream broke off a reply that had begun."""


async def open_reply(passage: Passage, target: URL | None, headers: CIMultiDict[str]) -> aiohttp.ClientResponse:
    """Send a request to `target`, else to the endpoint, and follow one redirect within the endpoint's origin.

    Returns when the reply's head is here; raises Unreachable or CallLost.
    """
    incoming, upstream, endpoint = passage.incoming, passage.live.upstream, passage.probe.endpoint
    seconds = _head_seconds(passage)
    try:
        async with asyncio.timeout(seconds):
            for _ in range(2):
                url = target or _with_query(endpoint.url, incoming.url.raw_query_string)
                response = await upstream.client.open(incoming.method, url, headers, incoming.body or None)
                if response.status not in REDIRECTS:
                    upstream.health.ok()
                    return response
                response.close()
                if target is None:
                    endpoint.follow(response.headers.get("Location"))
                else:
                    target = endpoint.within(response.headers.get("Location", ""), target)
                    if target is None:
                        raise Unreachable(f"{endpoint.where} redirects messages to another origin")
    except TimeoutError as exc:
        slow = f"{endpoint.where} did not begin its answer in {seconds:g} s; the request may have had effects"
        error = mapped(exc, endpoint.where) if isinstance(exc, aiohttp.ConnectionTimeoutError) else CallLost(slow)
        error.status = 504
        raise error from exc
    except FOREIGN as exc:
        raise mapped(exc, endpoint.where) from exc
    raise Unreachable(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")


async def read_reply(
    response: aiohttp.ClientResponse, endpoint: Endpoint, seconds: float, limit: int | None = None
) -> bytes:
    """The whole body of a reply, or nothing if it is larger than `limit` bytes; raises UpstreamError."""
    try:
        async with asyncio.timeout(seconds):
            return await response.read() if limit is None else await read_at_most(response, limit) or b""
    except FOREIGN as exc:
        raise mapped(exc, endpoint.where) from exc


async def chunks(
    response: aiohttp.ClientResponse, seconds: float | None, first_event: FirstEventRewriter | None
) -> AsyncIterator[bytes]:
    """The body of a reply as it arrives, with its first event rewritten; raises ReplyCut."""
    while chunk := await _chunk(response, seconds):
        part = chunk if first_event is None else first_event.feed(chunk)
        if part:
            yield part
    if first_event is not None and (part := first_event.rest()):
        yield part


async def _chunk(response: aiohttp.ClientResponse, seconds: float | None) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await response.content.readany()
    except FOREIGN as exc:
        raise ReplyCut("the upstream broke off its reply") from exc


def _head_seconds(passage: Passage) -> float:
    """How long the upstream may take to send the head of its reply.

    Some servers send a JSON reply when the tool is done; a few send the head of a stream with its first event. A GET
    without a session never gets an event: a client that only tests for a stream must not wait for one.
    """
    incoming, timeouts = passage.incoming, passage.live.config.timeouts
    waits = incoming.method == "POST" or (incoming.method == "GET" and mcp.SESSION_ID in incoming.headers)
    return timeouts.idle_seconds if waits else timeouts.answer_seconds


def _with_query(url: URL, query: str) -> URL:
    """The upstream's URL with the client's query appended to its own."""
    if not query:
        return url
    own = url.raw_query_string
    return URL(f"{url.with_query(None)}?{own}&{query}" if own else f"{url}?{query}", encoded=True)
