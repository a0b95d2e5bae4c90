"""A modern server as the mirror uses it: over streamable HTTP, or a child process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import ClassVar, Final, Protocol, TypeVar

import msgspec
from msgspec import Raw

from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc, mcp, reply_messages, sse
from gateway.protocol.errors import CallLost, GatewayError, UpstreamError
from gateway.protocol.header_mismatch import encode_value
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.runtime.pieces import InTurns
from gateway.runtime.throttle import AwaitedArrival
from gateway.telemetry import NestedOutcome
from gateway.upstream.channel import Headers
from gateway.upstream.children.modern_stdio import ModernStdio
from gateway.upstream.http.http_errors import refused

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0
"""How long a server may take for a list, its introduction or an acknowledgement; a child may have to start first."""
_TOO_LARGE: Final = "sent a message larger than limits.event_bytes"
_ACCEPT: Final = "application/json, text/event-stream"


class Outgoing(msgspec.Struct, frozen=True, eq=False):
    """One request to a modern server. Over stdio only `body` counts."""

    id: bytes
    """JSON of the id in the body."""
    body: bytes
    method: str
    target: str
    """The tool, prompt or URI; empty for other methods."""
    headers: Headers
    """The headers of the client that go upstream."""
    param_headers: Mapping[str, str] = {}
    is_long: bool = False
    """Whether the reply may be silent for any time, as a subscription is."""

    @property
    def repeated(self) -> dict[str, str]:
        """The headers that repeat the version, the method and the target of the body."""
        repeated = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: encode_value(self.method)}
        return {**repeated, mcp.NAME_HEADER: encode_value(self.target)} if self.target else repeated


Hear = Callable[[bytes], None]
"""Takes a message of a reply: a notification, or the response, which is the last. Raises ValueError for a bad one."""


class ModernServer(Protocol):
    """Sends requests of 2026-07-28 to one server."""

    reads_headers: ClassVar[bool]
    """Whether headers must repeat the annotated arguments of a tool, whose schema has to be known for that."""

    async def send(self, request: Outgoing, hear: Hear) -> None:
        """Send a request, and hand over what answers it until the response is here; if cancelled, cancel it there.

        Raises GatewayError if the response will not come, and ValueError for headers that cannot be sent.
        """


async def ask(server: ModernServer, request: Outgoing) -> Raw | jsonrpc.Error:
    """Send a request and wait for its response; raises GatewayError if there is none."""
    found: list[Raw | jsonrpc.Error] = []

    def hear(data: bytes) -> None:
        message = jsonrpc.message(data)
        if isinstance(message.error, Raw):
            found.append(jsonrpc.error(message.error))
        elif isinstance(message.result, Raw):
            found.append(message.result)

    await in_time(server.send(request, hear), request.method)
    return found[0]


async def in_time(answer: Awaitable[T], method: str) -> T:
    """Wait for what a server must not take long for; raises CallLost."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer
    except TimeoutError as exc:
        raise CallLost(f"The server did not answer {method} in {ANSWER_SECONDS:g} s") from exc


class StdioServer(msgspec.Struct, frozen=True, eq=False):
    """A modern server that is a child process, which all requests share."""

    reads_headers: ClassVar[bool] = False
    modern: ModernStdio

    async def send(self, request: Outgoing, hear: Hear) -> None:
        """See `ModernServer`."""
        sending = self.modern.request(request.body, hear)
        del request  # it is sent once, and a call need not keep it
        try:
            await sending
        except ValueError as exc:
            raise CallLost(f"The server sent a malformed message ({exc}); the call may have had effects") from exc


class HttpServer(msgspec.Struct, frozen=True, eq=False):
    """A modern server over streamable HTTP."""

    reads_headers: ClassVar[bool] = True
    live: LiveRoute

    async def send(self, request: Outgoing, hear: Hear) -> None:
        """See `ModernServer`."""
        live = self.live
        sending = _Request(live, request, hear).run(request)
        del request
        try:
            await sending
        except GatewayError as exc:
            if isinstance(exc, UpstreamError):
                live.process.metrics.upstream_failed(live.route.path, exc.reason)
            live.upstream.health.note(exc)
            raise


class _Request:
    """One request over HTTP with its reply."""

    def __init__(self, live: LiveRoute, request: Outgoing, hear: Hear) -> None:
        assert live.upstream.era is not None, "an upstream without a command has a URL"
        self._live = live
        self._client, self._endpoint = live.upstream.client, live.upstream.era.endpoint
        self._id, self._is_long = request.id, request.is_long
        self._hear = hear

    async def run(self, request: Outgoing) -> None:
        """Send the request, and hand over its reply."""
        try:
            reply = await self._sent(request)
            if reply.status in REDIRECTS:  # the server has not run it
                reply.close()  # its body says nothing, and may never end
                self._endpoint.follow(reply.head.text(b"location"))
                reply = await self._sent(request)
            del request  # it is not sent again, so a call need not keep it
            try:
                await self._read(reply)
            finally:
                reply.close()
        except RequestFailed as exc:
            raise exc.mapped(self._endpoint.where) from exc

    async def _sent(self, request: Outgoing) -> AwaitedReply:
        """Wait for the head of the reply."""
        headers = {
            **request.headers,
            **request.param_headers,
            "Accept": _ACCEPT,
            "Content-Type": "application/json",
            **request.repeated,
        }
        return await self._heard(self._client.send("POST", self._endpoint.url, headers, request.body))

    async def _heard(self, said: Awaitable[T]) -> T:
        """Wait for the server, but not for ever, unless it may be silent."""
        try:
            with nullcontext() if self._is_long else CoarseTimeout(self._live.deadlines.idle):
                return await said
        except TimeoutError as exc:
            raise self._lost("was silent for timeouts.idle_seconds") from exc

    def _lost(self, why: str) -> CallLost:
        return CallLost(f"{self._endpoint.where} {why}; the call may have had effects")

    async def _read(self, reply: AwaitedReply) -> None:
        """Hand over an event stream or a body. Unfinished messages of all replies together have a limit."""
        limit, arrival = self._client.limits.event_bytes, AwaitedArrival(self._client.arriving)
        is_stream = reply.status < 300 and reply.content_type == reply_messages.EVENT_STREAM
        pieces, parser, body = InTurns(reply), sse.Parser(limit), bytearray()
        if is_stream:
            reply.expect_silence()
        try:
            while piece := await self._heard(anext(pieces, b"")):
                if is_stream:
                    for event in parser.feed(piece):
                        if event.data and self._take(event.data):
                            # If the server ends the stream now, its connection carries the next request.
                            reply.let_end(self._live.process.stream_times.drain_seconds)
                            return
                else:
                    body += piece
                    if len(body) > limit:
                        raise self._lost(_TOO_LARGE)
                await arrival.hold(parser.unfinished_bytes or len(body))
        except sse.EventTooLarge as exc:
            raise self._lost(_TOO_LARGE) from exc
        finally:
            arrival.release()
        if is_stream:
            raise self._lost("ended its reply without a response")
        self._take_whole(reply, bytes(body))

    def _take_whole(self, reply: AwaitedReply, body: bytes) -> None:
        status = reply.status
        if status in (401, 403):
            raise refused(self._endpoint, status, reply.head.texts())
        if not body.lstrip().startswith(b"{"):
            raise self._lost(f"answered HTTP {status} without a JSON-RPC response")
        if not self._take(body):
            reply.distrust()
            raise self._lost(f"answered HTTP {status} without the JSON-RPC response to this request")

    def _take(self, data: bytes) -> bool:
        """Hand a message over; return whether it was the response.

        The response to another request, which a server or a proxy wrote here, is skipped.
        """
        try:
            message = jsonrpc.message(data)
            if message.method is not None and isinstance(message.id, Raw):
                # Modern servers send no requests, and nobody gets this one.
                metrics, path = self._live.process.metrics, self._live.route.path
                metrics.nested_request(path, message.method, NestedOutcome.UNSOLICITED)
                return False
            is_response = reply_messages.is_response(message)
            if is_response and not reply_messages.is_answer(message, self._id):
                return False
            self._hear(data)
        except (ValueError, RecursionError) as exc:
            raise self._lost(f"sent a malformed message ({self._endpoint.quoted(str(exc))})") from exc
        return is_response
