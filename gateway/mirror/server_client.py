"""A modern server as the mirror uses it: over streamable HTTP, or a child process.

A server over HTTP refuses a call whose `Mcp-Param-*` headers do not repeat its annotated arguments, and only the
tool's schema tells which these are. So the first call of a tool lists the tools, unless the client has done so.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Final, Protocol, Self, TypeVar

import msgspec
from msgspec import Raw

from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_url import Endpoint
from gateway.http_client.connection import PendingRequest
from gateway.http_client.reply_head import ReplyHead
from gateway.mirror.client_requests import Profile
from gateway.mirror.translation import initialize_result
from gateway.protocol import jsonrpc, mcp, param_headers, reply_messages, sse, tool_list
from gateway.protocol.errors import CallLost, CallSilent, GatewayError, InvalidParams, NoHandshake
from gateway.protocol.header_mismatch import encode_value
from gateway.protocol.tool_list import Tool
from gateway.routes.live_route import LiveRoute
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.own_ids import new_id
from gateway.sessions.known_tools import UNKNOWN_TOOL
from gateway.sessions.pool.tool_schemas import only_page, read_pages
from gateway.telemetry import NestedOutcome
from gateway.upstream.channel import NO_HEADERS, Answer, Headers, Hearer
from gateway.upstream.http.http_errors import mapped, refused
from gateway.upstream.http.http_session import fixed_headers
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import ReplyReader

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0
"""How long a server may take for a list, its introduction or an acknowledgement; a child may have to start first."""
_OWN_META: Final = frozenset({mcp.META_VERSION, mcp.META_CLIENT_INFO, mcp.META_CAPABILITIES, mcp.META_LOG_LEVEL})


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

    @classmethod
    def new(  # noqa: PLR0913  (what one request consists of)
        cls,
        method: str,
        params: Mapping[str, bytes | Raw],
        profile: Profile,
        headers: Headers,
        *,
        target: str = "",
        log_level: str | None = None,
    ) -> Self:
        """A request with an id of its own; raises ValueError for a `_meta` that is no object."""
        meta = jsonrpc.fields(params["_meta"]) if "_meta" in params else {}
        metas: dict[str, bytes | Raw] = {key: raw for key, raw in meta.items() if key not in _OWN_META}
        metas[mcp.META_VERSION] = jsonrpc.encode(mcp.MODERN)
        metas[mcp.META_CLIENT_INFO], metas[mcp.META_CAPABILITIES] = profile.info, profile.capabilities
        if log_level is not None:
            metas[mcp.META_LOG_LEVEL] = jsonrpc.encode(log_level)
        id_ = new_id()
        return cls(id_, jsonrpc.request(id_, method, jsonrpc.with_meta(params, metas)), method, target, headers)

    @property
    def params(self) -> jsonrpc.Fields:
        """The params in the body."""
        return jsonrpc.members(jsonrpc.message(self.body).params)

    @property
    def profile(self) -> Profile:
        """What the body says of the client."""
        meta = jsonrpc.members(self.params.get("_meta"))
        info = bytes(meta.get(mcp.META_CLIENT_INFO, b'{"name":"host","version":"0"}'))
        return Profile(mcp.LEGACY, info, bytes(meta.get(mcp.META_CAPABILITIES, b"{}")))

    @property
    def repeated(self) -> dict[str, str]:
        """The headers that repeat the version, the method and the target of the body."""
        repeated = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: encode_value(self.method)}
        return {**repeated, mcp.NAME_HEADER: encode_value(self.target)} if self.target else repeated


class ServerClient(Protocol):
    """Sends requests of 2026-07-28 to one server."""

    async def send(self, request: ModernRequest, hearer: Hearer) -> None:
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
            self.head = None

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
    """The modern server of a route, for one caller: a child process that all share, or one over streamable HTTP."""

    live: LiveRoute
    principal: bytes

    @property
    def upstream(self) -> HttpUpstream:
        """The server over HTTP."""
        assert self.live.upstream.era is not None, "an upstream without a command has a URL"
        return self.live.upstream.era.upstream

    @property
    def endpoint(self) -> Endpoint:
        """The address of the server over HTTP."""
        return self.upstream.endpoint

    async def tool(self, request: ModernRequest) -> Tool:
        """What is known of the tool that a request is to call, once the tools were listed."""
        catalog, principal = self.live.upstream.tools, self.principal
        if catalog.of(principal) is None:
            listing = self._list_tools(request.profile, request.headers)
            # It ends with the last call: a stranger may have any number of principals.
            _ = await self.live.process.tasks.share((catalog, principal), listing, "list tools", outlives=False)
        return (catalog.of(principal) or {}).get(request.target, UNKNOWN_TOOL)

    async def _list_tools(self, profile: Profile, headers: Headers) -> None:
        """List the tools; a list that the server breaks off with an error is kept as if it were whole.

        The server refuses a call that needs the rest, without running it, and the call then lists the tools again.
        """
        tools: dict[str, Tool] = {}

        async def page(params: dict[str, object]) -> Raw | jsonrpc.Error:
            fields = jsonrpc.fields(jsonrpc.encode(params))
            return await ask(self, ModernRequest.new(mcp.TOOLS_LIST, fields, profile, headers))

        with suppress(GatewayError, ValueError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                _ = await read_pages(page, lambda result: tools.update(tool_list.read(result).tools or {}))
            self.live.upstream.tools.keep(self.principal, tools)

    async def send(self, request: ModernRequest, hearer: Hearer) -> None:
        """See `ServerClient`."""
        live, stdio = self.live, self.live.upstream.stdio
        if stdio is not None:
            asking = stdio.modern.request(request.body, hearer)
            del request  # a call that waits need not keep it
            try:
                await asking
            except ValueError as exc:
                raise CallLost.by("The server", f"sent a malformed message ({exc})") from exc
            live.upstream.health.ok()
            return
        repeated = NO_HEADERS
        if request.method == mcp.TOOLS_CALL and (mirrored := (await self.tool(request)).mirrored):
            repeated = param_headers.headers_for(mirrored, request.params.get("arguments"))
        hearer = _ServerResponse(self, request, hearer)
        sending = self._sent(request, repeated, hearer)
        del request
        try:
            reply = await sending
            if reply.status in REDIRECTS and reply.request is not None:  # the server has not run it
                assert reply.head is not None, "it has a status"
                self.endpoint.follow(reply.head.text(b"location"))
                reply = await self._sent(reply.request, repeated, hearer)
            if not reply.is_done:
                self._read(reply, hearer)
        except GatewayError as exc:
            live.upstream.health.count(exc)
            live.upstream.note(exc)
            raise
        live.upstream.health.ok()

    def _sent(self, request: ModernRequest, repeated: Headers, hearer: Hearer) -> Awaitable[_ModernReply]:
        """Send the request; what is returned waits for the end of its reply."""
        live, upstream = self.live, self.upstream
        headers = {**request.headers, **repeated, **fixed_headers(mcp.MODERN), **request.repeated}
        limit = upstream.client.limits.event_bytes
        reply = _ModernReply(
            hearer,
            limit,
            upstream,
            unread=REDIRECTS,
            refusal_bytes=limit,  # an error of a modern server is a response like others, whatever its status
            request=request,
            idle=None if request.method == mcp.LISTEN else live.deadlines.idle,
        )
        try:
            pending = upstream.client.begin("POST", upstream.endpoint.url, headers, request.body, reply)
        except ValueError as exc:
            raise InvalidParams(f"A header of the request cannot be sent to the server: {exc}") from exc
        return reply.over(pending)

    def _read(self, reply: _ModernReply, hearer: Hearer) -> None:
        """Read a reply that is over, in which the response was not found."""
        status, body = reply.status, reply.body
        match reply.failure:
            case TimeoutError():
                raise CallSilent.by(self.endpoint.where, "was silent for timeouts.idle_seconds")
            case sse.EventTooLarge() as exc:
                raise CallLost.by(self.endpoint.where, "sent a message larger than limits.event_bytes") from exc
            case Exception() as exc:
                raise mapped(exc, self.endpoint.where) from exc
            case None:
                pass
        if reply.is_stream:
            raise CallLost.by(self.endpoint.where, "ended its reply without a response")
        if status in (401, 403):
            raise refused(reply, self.endpoint)
        if not body.lstrip().startswith(b"{"):
            raise CallLost.by(self.endpoint.where, f"answered HTTP {status} without a JSON-RPC response")
        if status < 300 or not hearer.hear(body):  # a 2xx body was heard when it was complete
            reply.pending.distrust()  # the next response on it may be another request's, too
            raise CallLost.by(
                self.endpoint.where, f"answered HTTP {status} without the JSON-RPC response to this request"
            )


class _ServerResponse(Hearer):
    """Hands on what answers one request."""

    def __init__(self, server: RouteServer, request: ModernRequest, hearer: Hearer) -> None:
        self._server, self._id, self._hearer = server, request.id, hearer
        self._listing = request.params if request.method == mcp.TOOLS_LIST else None

    def hear(self, data: bytes, /) -> bool:
        """Hand a message over; return whether it was the response to the request.

        The response to another request, which a server or a proxy wrote here, is skipped.
        """
        try:
            message = jsonrpc.message(data)
            if message.method is not None and isinstance(message.id, Raw):
                # Modern servers send no requests, and nobody gets this one.
                live = self._server.live
                counts = live.process.metrics.nested_requests
                counts[live.route.path, message.method, NestedOutcome.UNSOLICITED].inc()
                return False
            is_response = reply_messages.is_response(message)
            if is_response:
                if not reply_messages.is_answer(message, self._id):
                    return False
                self._learn(message)
            _ = self._hearer.hear(data)
        except (ValueError, RecursionError) as exc:  # what could just be read may be too deep to be searched
            endpoint = self._server.endpoint
            said = endpoint.quoted(str(exc))
            raise CallLost.by(endpoint.where, f"sent a malformed message ({said})") from exc
        return is_response

    def _learn(self, message: jsonrpc.Message) -> None:
        """Learn from a whole list of the client, and from a refused call, that another tool has to be known."""
        catalog, principal = self._server.live.upstream.tools, self._server.principal
        if (error := message.failure) is not None:
            if error.code == mcp.HEADER_MISMATCH:
                catalog.forget(principal)
        elif self._listing is not None and isinstance(message.result, Raw):
            with suppress(ValueError):
                if (tools := only_page(self._listing, tool_list.read(message.result))) is not None:
                    catalog.keep(principal, tools)


async def is_modern(live: LiveRoute, headers: Headers) -> bool:
    """Whether the server of a route is modern; asks it, unless that is known."""
    if live.upstream.stdio is not None:
        return await live.upstream.stdio.is_modern()
    return live.upstream.era is not None and await live.upstream.era.is_modern(headers, waits=True)
