"""The upstream's reply to a request that passes through."""

from contextlib import nullcontext

from yarl import URL

from gateway.http.awaited_reply import AwaitedReply
from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_url import Endpoint
from gateway.http_client.errors import ConnectTimedOut, RequestFailed
from gateway.http_client.request_head import HeaderLines
from gateway.passthrough.passage import Passage
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, Unreachable
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.runtime.coarse_timer import CoarseTimer


class ReplyCut(ConnectionResetError):
    """The upstream broke off a reply that had begun."""


async def open_reply(passage: Passage, target: URL | None, headers: HeaderLines) -> AwaitedReply:
    """Send a request to `target`, else to the endpoint, and follow one redirect within the endpoint's origin.

    Returns when the reply's head is here; raises Unreachable or CallLost.
    """
    incoming, upstream, endpoint = passage.incoming, passage.live.upstream, passage.probe.endpoint
    waits = _waits(passage)
    deadlines, timeouts = passage.live.deadlines, passage.live.config.timeouts
    try:
        with CoarseTimeout(deadlines.idle if waits else deadlines.answer):
            for _ in range(2):
                url = target or _with_query(endpoint.url, incoming.url.raw_query_string)
                reply = await upstream.client.send(incoming.method, url, headers, incoming.body, is_lenient=True)
                if reply.status not in REDIRECTS:
                    upstream.health.ok()
                    return reply
                reply.close()
                location = reply.head.text(b"location")
                if target is None:
                    endpoint.follow(location)
                else:
                    target = endpoint.within(location or "", target)
                    if target is None:
                        raise Unreachable(f"{endpoint.where} redirects messages to another origin")
    except TimeoutError as exc:
        seconds = timeouts.idle_seconds if waits else timeouts.answer_seconds
        error = CallLost(
            f"{endpoint.where} did not begin its answer in {seconds:g} s; the request may have had effects"
        )
        error.status = 504
        raise error from exc
    except RequestFailed as exc:
        failure = exc.mapped(endpoint.where)
        if isinstance(exc, ConnectTimedOut):
            failure.status = 504
        raise failure from exc
    raise Unreachable(f"{endpoint.where} redirects in a circle; set upstream.url to the final address")


async def read_reply(
    reply: AwaitedReply, endpoint: Endpoint, deadline: CoarseTimer, limit: int | None = None
) -> bytes:
    """The whole body of a reply, or nothing if it is larger than `limit` bytes; raises UpstreamError."""
    try:
        with CoarseTimeout(deadline):
            if limit is not None:
                return await reply.read_at_most(limit) or b""
            return b"".join([part async for part in reply])
    except TimeoutError as exc:
        raise CallLost(f"{endpoint.where} did not complete its reply within timeouts.idle_seconds") from exc
    except RequestFailed as exc:
        raise exc.mapped(endpoint.where) from exc


async def next_part(reply: AwaitedReply, deadline: CoarseTimer | None) -> bytes | None:
    """What has come of the body since the last part, None at its end; raises ReplyCut.

    Until the next call, nothing more is read from the upstream: what a slow client does not take stays there.
    """
    try:
        with nullcontext() if deadline is None else CoarseTimeout(deadline):
            part = await anext(reply, None)
    except (TimeoutError, RequestFailed) as exc:
        raise ReplyCut("the upstream broke off its reply") from exc
    if part is not None:
        reply.hold()
    return part


def _waits(passage: Passage) -> bool:
    """Whether the head of the reply may take timeouts.idle_seconds instead of timeouts.answer_seconds.

    Some servers send a JSON reply when the tool is done; a few send the head of a stream with its first event. A GET
    without a session never gets an event: a client that only tests for a stream must not wait for one.
    """
    incoming = passage.incoming
    return incoming.method == "POST" or (incoming.method == "GET" and mcp.SESSION_ID in incoming.headers)


def _with_query(url: URL, query: str) -> URL:
    """The upstream's URL with the client's query appended to its own."""
    if not query:
        return url
    own = url.raw_query_string
    return URL(f"{url.with_query(None)}?{own}&{query}" if own else f"{url}?{query}", encoded=True)
