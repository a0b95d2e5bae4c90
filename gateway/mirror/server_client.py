"""A modern server as the mirror uses it: over streamable HTTP, or a child process."""

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Final, Protocol, Self, TypeVar

import msgspec
from msgspec import Raw

from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_url import Endpoint
from gateway.http_client.pending_request import PendingRequest
from gateway.http_client.reply_head import ReplyHead
from gateway.mirror.client_requests import Profile
from gateway.mirror.translation import initialize_result
from gateway.protocol import jsonrpc, mcp, reply_messages, sse
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, NoHandshake
from gateway.protocol.header_mismatch import encode_value
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.own_ids import new_id
from gateway.telemetry import NestedOutcome
from gateway.upstream.channel import NO_HEADERS, Answer, Headers, Hearer
from gateway.upstream.http.http_errors import mapped, refused
from gateway.upstream.http.reply_reader import ReplyReader

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0
"""How long a server may take for a list, its introduction or an acknowledgement; a child may have to start first."""
_NOT_MODERN: Final = frozenset({"_meta", "task", "inputResponses", "requestState"})
_OWN_META: Final = frozenset({mcp.META_VERSION, mcp.META_CLIENT_INFO, mcp.META_CAPABILITIES, mcp.META_LOG_LEVEL})
_ACCEPT: Final = "application/json, text/event-stream"


class ModernRequest(msgspec.Struct, frozen=True, eq=False):
    """One request to a modern server. Over stdio only `body` counts."""

    id: bytes
    """JSON of the id in the body."""
    body: bytes
    method: str
    target: str
    """The tool, prompt or URI; empty for other methods."""
    headers: Headers
    """The headers of the client that go upstream."""
    param_headers: Headers = NO_HEADERS

    @classmethod
    def new(  # noqa: PLR0913  (what one request consists of)
        cls,
        method: str,
        params: jsonrpc.Fields,
        profile: Profile,
        headers: Headers,
        *,
        target: str = "",
        param_headers: Headers = NO_HEADERS,
        log_level: str | None = None,
        added: Mapping[str, bytes | Raw] | None = None,
    ) -> Self:
        """The modern form of a legacy request, with an id of its own; `added` are further params.

        Raises ValueError for a `_meta` that is no object.
        """
        meta = jsonrpc.fields(params["_meta"]) if "_meta" in params else {}
        metas: dict[str, bytes | Raw] = {key: raw for key, raw in meta.items() if key not in _OWN_META}
        metas[mcp.META_VERSION] = jsonrpc.encode(mcp.MODERN)
        metas[mcp.META_CLIENT_INFO], metas[mcp.META_CAPABILITIES] = profile.info, profile.capabilities
        if log_level is not None:
            metas[mcp.META_LOG_LEVEL] = jsonrpc.encode(log_level)
        parts: dict[str, bytes | Raw] = {key: raw for key, raw in params.items() if key not in _NOT_MODERN}
        parts |= {**(added or {}), "_meta": jsonrpc.merge(metas.items())}
        id_ = new_id()
        body = jsonrpc.request(id_, method, jsonrpc.merge(parts.items()))
        return cls(id_, body, method, target, headers, param_headers)

    @property
    def repeated(self) -> dict[str, str]:
        """The headers that repeat the version, the method and the target of the body."""
        repeated = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: encode_value(self.method)}
        return {**repeated, mcp.NAME_HEADER: encode_value(self.target)} if self.target else repeated


class ServerClient(Protocol):
    """Sends requests of 2026-07-28 to one server."""

    @property
    def reads_headers(self) -> bool:
        """Whether headers must repeat the annotated arguments of a tool, whose schema has to be known for that."""

    def send(self, request: ModernRequest, hearer: Hearer) -> Coroutine[Any, Any, None]:
        """Send a request, and hand over what answers it until the response is here; if cancelled, cancel it there.

        `hearer` raises ValueError for a malformed message. Raises GatewayError if the response will not come.
        """


async def ask(server: ServerClient, request: ModernRequest) -> Raw | jsonrpc.Error:
    """Send a request and wait for its response; raises GatewayError if there is none."""
    answer = Answer(request.body)
    await in_time(server.send(request, answer), request.method)
    assert answer.found is not None, "the response is here"
    return answer.found


async def in_time(answer: Awaitable[T], method: str) -> T:
    """Wait for what a server must not take long for; raises CallLost."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer
    except TimeoutError as exc:
        raise CallLost(f"The server did not answer {method} in {ANSWER_SECONDS:g} s") from exc


async def initialize(server: ServerClient, profile: Profile, headers: Headers) -> bytes:
    """The InitializeResult of a modern server; raises GatewayError."""
    found = await ask(server, ModernRequest.new(mcp.DISCOVER, {}, profile, headers))
    if isinstance(found, jsonrpc.Error):
        raise NoHandshake(f"The server refused server/discover, so it is not a modern one: {found.message}")
    try:
        return initialize_result(found, profile)
    except ValueError as exc:
        raise CallLost(f"The server answered server/discover with a malformed result: {exc}") from exc


class _ModernReply(ReplyReader, kw_only=True):
    """The reply to a request."""

    request: ModernRequest | None
    """As long as it may have to be sent again."""
    idle: CoarseTimer | None
    """Limits its silence, unless nothing may have changed."""

    async def over(self, pending: PendingRequest) -> Self:
        """See `ReplyReader`."""
        self._wait_on()
        try:
            return await super().over(pending)
        finally:
            if self.idle is not None:
                self.idle.disarm(self)

    def on_head(self, head: ReplyHead, /) -> None:
        """The server is not silent."""
        self._wait_on()
        super().on_head(head)

    def on_body(self, data: bytes, /) -> None:
        """The server is not silent."""
        if not self.is_over:  # a stream may go on for a moment behind the answer
            self._wait_on()
        super().on_body(data)

    def accepted(self) -> None:
        """Keep nothing that is not needed any more: a call may wait for long."""
        self.request = None
        if self.is_stream:
            self.head, self.pending.is_silent = None, True

    def hand_over(self, data: bytes) -> None:
        """Hand over a message; a body may be something else."""
        if self.is_stream or data.lstrip().startswith(b"{"):
            super().hand_over(data)

    def _wait_on(self) -> None:
        if self.idle is not None:
            self.idle.arm(self, self._wait_no_more)

    def _wait_no_more(self) -> None:
        if self.pending.is_paused:
            self._wait_on()  # for other replies, not for the server
        else:
            self._end(TimeoutError())


class RouteServer(msgspec.Struct, frozen=True, eq=False):
    """The modern server of a route: a child process that all requests share, or one over streamable HTTP."""

    live: LiveRoute

    @property
    def reads_headers(self) -> bool:
        """See `ServerClient`."""
        return self.live.upstream.stdio is None

    def send(self, request: ModernRequest, hearer: Hearer) -> Coroutine[Any, Any, None]:
        """See `ServerClient`."""
        stdio = self.live.upstream.stdio
        if stdio is None:
            return self._send_over_http(request, hearer)
        return _send_to_child(stdio.modern.request(request.body, hearer))

    @property
    def _endpoint(self) -> Endpoint:
        assert self.live.upstream.era is not None, "an upstream without a command has a URL"
        return self.live.upstream.era.endpoint

    async def _send_over_http(self, request: ModernRequest, hearer: Hearer) -> None:
        live, hearer = self.live, _ServerResponse(self.live, self._endpoint, request.id, hearer)
        sending = self._sent(request, hearer)
        del request  # a call that waits need not keep it
        try:
            reply = await sending
            if reply.status in REDIRECTS and reply.request is not None:  # the server has not run it
                assert reply.head is not None, "it has a status"
                self._endpoint.follow(reply.head.text(b"location"))
                reply = await self._sent(reply.request, hearer)
            if not reply.is_done:
                self._read(reply, hearer)
        except GatewayError as exc:
            live.upstream.health.count(exc)
            live.upstream.health.note(exc)
            raise

    def _sent(self, request: ModernRequest, hearer: Hearer) -> Awaitable[_ModernReply]:
        """Send the request; what is returned waits for the end of its reply."""
        live, client = self.live, self.live.upstream.client
        headers = {
            **request.headers,
            **request.param_headers,
            "Accept": _ACCEPT,
            "Content-Type": "application/json",
            **request.repeated,
        }
        limit = client.limits.event_bytes
        reply = _ModernReply(
            hearer,
            limit,
            client.arriving,
            live.process.stream_times.drain_seconds,
            unread=REDIRECTS,
            refusal_bytes=limit,
            request=request,
            idle=None if request.method == mcp.LISTEN else live.deadlines.idle,
        )
        try:
            pending = client.begin("POST", self._endpoint.url, headers, request.body, reply)
        except ValueError as exc:
            raise InvalidParams(f"A header of the request cannot be sent to the server: {exc}") from exc
        return reply.over(pending)

    def _read(self, reply: _ModernReply, hearer: Hearer) -> None:
        """Read a reply that is over, in which the response was not found."""
        status, body = reply.status, reply.body
        match reply.failure:
            case TimeoutError():
                raise _lost(self._endpoint, "was silent for timeouts.idle_seconds")
            case sse.EventTooLarge() as exc:
                raise _lost(self._endpoint, "sent a message larger than limits.event_bytes") from exc
            case Exception() as exc:
                raise mapped(exc, self._endpoint.where) from exc
            case None:
                pass
        if reply.is_stream:
            raise _lost(self._endpoint, "ended its reply without a response")
        if status in (401, 403):
            assert reply.head is not None, "it has a status"
            raise refused(self._endpoint, status, reply.head.texts())
        if not body.lstrip().startswith(b"{"):
            raise _lost(self._endpoint, f"answered HTTP {status} without a JSON-RPC response")
        if status < 300 or not hearer.hear(body):
            reply.pending.distrust()
            raise _lost(self._endpoint, f"answered HTTP {status} without the JSON-RPC response to this request")


async def _send_to_child(sending: Awaitable[None]) -> None:
    try:
        await sending
    except ValueError as exc:
        raise CallLost(f"The server sent a malformed message ({exc}); the call may have had effects") from exc


class _ServerResponse(Hearer):
    """Hands on what answers one request."""

    def __init__(self, live: LiveRoute, endpoint: Endpoint, id_: bytes, hearer: Hearer) -> None:
        self._live, self._endpoint, self._id, self._hearer = live, endpoint, id_, hearer

    def hear(self, data: bytes, /) -> bool:
        """Hand a message over; return whether it was the response to the request.

        The response to another request, which a server or a proxy wrote here, is skipped.
        """
        try:
            message = jsonrpc.message(data)
            if message.method is not None and isinstance(message.id, Raw):
                # Modern servers send no requests, and nobody gets this one.
                metrics, path = self._live.process.metrics, self._live.route.path
                metrics.nested_requests[path, message.method, NestedOutcome.UNSOLICITED].inc()
                return False
            is_response = reply_messages.is_response(message)
            if is_response and not reply_messages.is_answer(message, self._id):
                return False
            _ = self._hearer.hear(data)
        except (ValueError, RecursionError) as exc:
            said = self._endpoint.quoted(str(exc))
            raise _lost(self._endpoint, f"sent a malformed message ({said})") from exc
        return is_response


def _lost(endpoint: Endpoint, why: str) -> CallLost:
    return CallLost(f"{endpoint.where} {why}; the call may have had effects")


async def is_modern(live: LiveRoute, headers: Headers) -> bool:
    """Whether the server of a route is modern; asks it, unless that is known."""
    if live.upstream.stdio is not None:
        return await live.upstream.stdio.is_modern()
    return live.upstream.era is not None and await live.upstream.era.is_modern(headers, waits=True)
