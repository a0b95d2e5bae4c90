"""What is not bridged goes through as it is: old clients to their server, and modern ones to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is never held back and never changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied: what belongs to one connection, or claims what only a proxy can know, stays.
"""

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from gateway.config import Config, InForce, Timeouts
from gateway.http import request_id
from gateway.http.client import FOREIGN, REDIRECTS, Endpoint, mapped
from gateway.http.forwarded_headers import for_passing, joined, passed_back
from gateway.http.reply import REQUEST_ID, Challenge, Incoming, leave_open, send
from gateway.identity import principal as principals
from gateway.passthrough.sse_endpoint import Beginning, EndpointRewriter
from gateway.protocol import era as eras
from gateway.protocol import jsonrpc, lost_session, mcp
from gateway.protocol.errors import (
    CallLost,
    DownstreamError,
    GatewayError,
    InvalidRequest,
    Stopping,
    Unreachable,
    UnsupportedVersion,
    UpstreamError,
)
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Metrics, Passed, TrafficEra
from gateway.upstream.channel import Headers
from gateway.upstream.era_probe import EraProbe

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REBUILT: Final = frozenset({"origin", "proxy-connection"})
"""An Origin was checked here and names a page that the upstream does not know."""
_INFLATED: Final = frozenset({"gzip", "deflate", "br", "zstd"})
"""What aiohttp takes off a request's body as it reads it."""
_PROXYS: Final = ("forwarded", "x-real-ip", "x-forwarded-")
_REFUTING_BYTES: Final = 65_536


class _Cut(ConnectionResetError):
    """The upstream broke off a reply whose beginning its client has."""


class LongLivedStream:
    """A stream that is no reply to anything and would be open for hours: it does not keep a process from ending."""

    def __init__(self) -> None:
        self.ended = False
        self._response: aiohttp.ClientResponse | None = None

    def begin(self, response: aiohttp.ClientResponse) -> None:
        """The upstream has sent the head."""
        self._response = response
        if self.ended:
            response.close()

    def end(self) -> None:
        """End it: its reader finds the upstream's connection closed."""
        self.ended = True
        if self._response is not None:
            self._response.close()


class Passthrough:
    """Forwards the requests of one listener."""

    def __init__(
        self, in_force: InForce[Config], challenge: Challenge, named: EndpointRewriter, metrics: Metrics, epoch: str
    ) -> None:
        """`epoch` names this process, in the Via header that RFC 9110 (7.6.3) asks of proxies."""
        self.stopping = False
        self.lasting = 0
        """Streams that a drain does not wait for."""
        self._challenge = challenge
        self._named = named
        self._metrics = metrics
        self._via = f"1.1 mrtr-{epoch}"
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        """Forward new requests by this configuration."""
        self._config = config
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]

    def headers(self, http: web.BaseRequest, live: LiveRoute) -> CIMultiDict[str]:
        """The headers of this request as they go upstream; raises InvalidRequest, also where it has been here."""
        if any(self._via in line for line in http.headers.getall("Via", ())):
            raise _loop(http.path)
        dropped = set(_REBUILT)
        if http.headers.get("Content-Encoding", "").lower() in _INFLATED:
            dropped.add("content-encoding")
        if not principals.is_trusted(http.remote, self._networks):
            dropped |= {name for name in map(str.lower, http.headers) if name.startswith(_PROXYS)}
            dropped.add((self._config.principal.header or "").lower())
        kept = for_passing(live.route, http.headers, dropped)
        kept.add("Via", self._via)
        return kept

    async def legacy(self, http: web.BaseRequest, live: LiveRoute, incoming: Incoming) -> web.StreamResponse:
        """The upstream's reply to a request of the handshake era; raises GatewayError where there is none."""
        if live.upstream.era is None:
            raise _not_passable(http, live, incoming)
        if self.stopping and http.method == "GET":
            raise Stopping("The gateway is shutting down; open the stream again, another replica will serve it")
        reply = await self._forward(http, live, live.upstream.era, incoming, TrafficEra.LEGACY)
        assert reply is not None, "only a modern request can be bridged instead"
        return reply

    async def modern(self, http: web.BaseRequest, live: LiveRoute, incoming: Incoming) -> web.StreamResponse | None:
        """The modern upstream's reply to a modern request; None when it is not modern any more and took nothing."""
        assert live.upstream.era is not None, "only a probe finds a modern upstream"
        if self.stopping:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        return await self._forward(http, live, live.upstream.era, incoming, TrafficEra.MODERN)

    async def _forward(
        self, http: web.BaseRequest, live: LiveRoute, era: EraProbe, incoming: Incoming, kind: TrafficEra
    ) -> web.StreamResponse | None:
        if http.method not in _METHODS:
            raise not_allowed(http.method, ", ".join(sorted(_METHODS)))
        lasting = LongLivedStream() if _lasts(http, kind) else None
        outcome, started = Passed.LEFT, time.monotonic()
        if lasting is not None:
            live.upstream.streams.add(lasting)
            self.lasting += 1
        try:
            reply, outcome = await self._exchange(http, live, era, incoming.body, kind, lasting)
        except DownstreamError as exc:
            outcome = Passed.REFUSED
            exc.request_id = id_of(incoming, live.config.limits.json_depth)
            raise
        except UpstreamError as exc:
            outcome = Passed.UNREACHABLE
            self._metrics.upstream_failed(live.route.path, exc.reason)
            exc.request_id = id_of(incoming, live.config.limits.json_depth)
            raise
        except _Cut:
            outcome = Passed.ENDED if lasting is not None and lasting.ended else Passed.CUT
            raise
        finally:
            if lasting is not None:
                live.upstream.streams.discard(lasting)
                self.lasting -= 1
            seconds = None if lasting is not None else time.monotonic() - started
            self._metrics.passed(live.route.path, kind, outcome, seconds)
        return reply

    async def _exchange(  # noqa: PLR0913  (what one request is made of)
        self,
        http: web.BaseRequest,
        live: LiveRoute,
        era: EraProbe,
        body: bytes,
        kind: TrafficEra,
        lasting: LongLivedStream | None,
    ) -> tuple[web.StreamResponse | None, Passed]:
        headers = self.headers(http, live)
        response = await self._open(http, live, era.endpoint, headers, body)
        try:
            if kind is TrafficEra.MODERN and _may_refute(response):
                said = await _read(response, era.endpoint, live.config.timeouts.idle_seconds)
                if eras.refutes(response.status, said):
                    era.doubt()
                    # What answers this request may have run it: then only the next one is bridged.
                    if not lost_session.is_answered(said, body) and not await era.is_modern(probe_headers(headers)):
                        return None, Passed.BRIDGED
                return web.Response(
                    body=said, status=response.status, headers=self._head(http, response)
                ), Passed.REFUSED
            if lasting is not None:
                lasting.begin(response)
            return await self._relay(http, live, era.endpoint, response, lasting)
        finally:
            response.close()

    async def _open(
        self,
        http: web.BaseRequest,
        live: LiveRoute,
        endpoint: Endpoint,
        headers: CIMultiDict[str],
        body: bytes,
    ) -> aiohttp.ClientResponse:
        """The head of the upstream's reply, after a redirect within its origin; raises Unreachable or CallLost."""
        seconds = _head_seconds(http, live.config.timeouts)
        try:
            async with asyncio.timeout(seconds):
                target = self._named.target(http, endpoint)
                for _ in range(2):
                    url = target or _with_query(endpoint.url, http.rel_url.raw_query_string)
                    response = await live.upstream.client.open(http.method, url, headers, body or None)
                    if response.status not in REDIRECTS:
                        live.upstream.health.ok()
                        return response
                    response.close()
                    if target is None:
                        endpoint.follow(response.headers.get("Location"))
                    else:
                        target = endpoint.within(response.headers.get("Location", ""), target)
                        if target is None:
                            raise Unreachable(f"{endpoint.where} redirects messages to another origin")
        except aiohttp.ConnectionTimeoutError as exc:
            raise _with_status(mapped(exc, endpoint.where), 504) from exc
        except TimeoutError as exc:
            slow = f"{endpoint.where} did not begin its answer in {seconds:g} s; the request may have had effects"
            raise _with_status(CallLost(slow), 504) from exc
        except FOREIGN as exc:
            raise _with_status(mapped(exc, endpoint.where), 502) from exc
        except UpstreamError as exc:
            raise _with_status(exc, 502) from exc
        circle = f"{endpoint.where} redirects in a circle; set upstream.url to the final address"
        raise _with_status(Unreachable(circle), 502)

    async def _relay(
        self,
        http: web.BaseRequest,
        live: LiveRoute,
        endpoint: Endpoint,
        response: aiohttp.ClientResponse,
        lasting: LongLivedStream | None,
    ) -> tuple[web.StreamResponse, Passed]:
        """Write the reply as it comes; what the upstream cuts short ends here without its end, too."""
        timeouts = live.config.timeouts
        is_stream = response.content_type == "text/event-stream"
        reply = web.StreamResponse(status=response.status, reason=response.reason, headers=self._head(http, response))
        if is_stream:
            reply.headers.setdefault("X-Accel-Buffering", "no")
        if http.method != "HEAD" and "Content-Length" not in reply.headers:
            leave_open(http, reply)
        if self.stopping:
            reply.force_close()
        beginning = self._named.beginning(http, endpoint) if is_stream else None
        await reply.prepare(http)
        try:
            # A stream waits for people; any other body was complete before it began.
            async for part in _parts(response, None if is_stream else timeouts.idle_seconds, beginning):
                await send(http, reply, part, timeouts.send_seconds)
        except _Cut:
            # A side stream may end at any time; a reply that ends without its last message must not look complete.
            if lasting is None or not lasting.ended or http.method != "GET":
                _cut_short(http, timeouts.send_seconds)
                raise
            reply.force_close()  # the client's next request finds another replica
            await reply.write_eof()
            return reply, Passed.ENDED
        except ConnectionError:
            raise  # the client's side
        except Exception:
            _cut_short(http, timeouts.send_seconds)
            raise
        await reply.write_eof()
        return reply, _outcome(response.status)

    def _head(self, http: web.BaseRequest, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """The reply's headers as they go to the client, who must not be sent to the upstream to sign in."""
        headers = passed_back(response.headers)
        headers[request_id.HEADER] = http[REQUEST_ID]  # what the upstream calls it is in its own log
        challenges = headers.popall("WWW-Authenticate", ())
        headers.extend([("WWW-Authenticate", self._challenge(http, value)) for value in challenges])
        return headers


async def _parts(
    response: aiohttp.ClientResponse, seconds: float | None, beginning: Beginning | None
) -> AsyncIterator[bytes]:
    while chunk := await _chunk(response, seconds):
        part = chunk if beginning is None else beginning.feed(chunk)
        if part:
            yield part
    if beginning is not None and (part := beginning.rest()):
        yield part


async def _chunk(response: aiohttp.ClientResponse, seconds: float | None) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await response.content.readany()
    except FOREIGN as exc:
        raise _Cut("the upstream broke off its reply") from exc


async def _read(response: aiohttp.ClientResponse, endpoint: Endpoint, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await response.read()
    except FOREIGN as exc:
        raise _with_status(mapped(exc, endpoint.where), 502) from exc


def _cut_short(http: web.BaseRequest, seconds: float) -> None:
    """Close the connection without the end that the client waits for; what was written before still goes out."""
    transport = http.transport
    if transport is not None:
        transport.close()
        _ = asyncio.get_running_loop().call_later(seconds, transport.abort)


def probe_headers(headers: CIMultiDict[str]) -> Headers:
    """Of a request's headers upstream those that are not about its message."""
    own = {"accept", "content-type", "last-event-id"}
    return {
        name: joined(headers, name) or ""
        for name in headers
        if name.lower() not in own and not name.lower().startswith("mcp-")
    }


def _with_query(url: URL, query: str) -> URL:
    """The upstream's URL with what the client asked for; a query of the configuration comes first."""
    if not query:
        return url
    own = url.raw_query_string
    return URL(f"{url.with_query(None)}?{own}&{query}" if own else f"{url}?{query}", encoded=True)


def _lasts(http: web.BaseRequest, kind: TrafficEra) -> bool:
    if kind is TrafficEra.LEGACY:
        return http.method == "GET"
    return http.headers.get(mcp.METHOD_HEADER) == mcp.LISTEN


def _head_seconds(http: web.BaseRequest, timeouts: Timeouts) -> float:
    """How long the upstream may take to begin its reply.

    Some servers send JSON when the tool is done, a few send a stream's head with its first event. Without a session
    no event will come: a client that only looks whether somebody is there must not wait for one.
    """
    waits = http.method == "POST" or (http.method == "GET" and mcp.SESSION_ID in http.headers)
    return timeouts.idle_seconds if waits else timeouts.answer_seconds


def _may_refute(response: aiohttp.ClientResponse) -> bool:
    size = response.content_length
    return response.status in eras.REFUTING and size is not None and size <= _REFUTING_BYTES


def _outcome(status: int) -> Passed:
    return Passed.ANSWERED if status < 400 else Passed.REFUSED if status < 500 else Passed.FAILED


def _with_status(error: UpstreamError, status: int) -> UpstreamError:
    """An old client looks at the HTTP status first, and would take a JSON-RPC error in HTTP 200 for its answer."""
    error.status = status
    return error


def id_of(incoming: Incoming, max_depth: int) -> bytes | None:
    """The id of a request; None for all else."""
    try:
        id_ = incoming.posted(max_depth).id
    except DownstreamError:
        return None
    return bytes(id_) if id_ is not None else None


def not_allowed(method: str, allowed: str) -> GatewayError:
    """The answer to an HTTP method that is not served."""
    error = InvalidRequest(f"HTTP {method[:20]} is not served here: a modern endpoint takes POST only")
    error.status = 405
    error.headers["Allow"] = allowed
    return error


def _loop(path: str) -> GatewayError:
    error = InvalidRequest(f"The request came back to where it was forwarded: upstream.url of route {path} leads here")
    error.status = 508
    return error


def _not_passable(http: web.BaseRequest, live: LiveRoute, incoming: Incoming) -> GatewayError:
    """The answer to an old client where the upstream cannot be given its bytes."""
    if http.method != "POST":
        return not_allowed(http.method, "POST")
    try:
        posted = incoming.posted(live.config.limits.json_depth)
    except DownstreamError as exc:
        return exc
    named = jsonrpc.text(posted.params.get("protocolVersion")) or http.headers.get(mcp.PROTOCOL_VERSION)
    error = UnsupportedVersion(named or "none")
    error.request_id = bytes(posted.id) if posted.id is not None else None
    error.message += (
        f"; this request is of the initialize era, and the server of route {live.route.path} is reached by other "
        "means than streamable HTTP, so nothing can be passed through to it: use a client of 2026-07-28, or reach "
        "the server directly"
    )
    return error
