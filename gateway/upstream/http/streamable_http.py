"""Streamable HTTP of 2025-03-26 to 2025-11-25 towards one legacy server.

Source: specification 2025-11-25 basic/transports (Streamable HTTP). Real servers differ from it in ways that were
measured: they report session errors as plain 400, redirect `/mcp` to `/mcp/`, keep streams open after the answer, and
answer `initialize` in JSON or in SSE.

A request whose stream broke is resumed by GET with Last-Event-ID (`upstream.http.resumption`).
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Raw

from gateway.http.upstream_client import Sending
from gateway.http.upstream_reply import AwaitedReply
from gateway.protocol import jsonrpc, lost_session, mcp, reply_messages, sse
from gateway.protocol.errors import CallLost, NoHandshake, SessionLost, Unreachable, UpstreamError
from gateway.runtime.pieces import InTurns
from gateway.upstream.channel import Headers, Hearer, SideListener
from gateway.upstream.http.http_errors import (
    InitializeAnswer,
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    ping_id,
    read_refusal,
    read_response,
)
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.plain_reply import PlainReply
from gateway.upstream.http.resumable_channel import ResumableChannel, fixed_headers
from gateway.upstream.http.standalone_stream import StandaloneStream

_PING_ANSWER_BYTES: Final = 65_536
MAX_SESSION_ID_CHARACTERS: Final = 4096
_SESSION_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION_ID_CHARACTERS}}}")
_OTHER_TRANSPORT: Final = (400, 404, 405)
"""How a server of HTTP+SSE may answer `initialize` (2025-11-25 basic/transports, Backwards Compatibility)."""


class StreamableChannel(ResumableChannel):
    """One session over streamable HTTP."""

    __slots__ = ("_is_ready", "_standalone", "can_ask")

    def __init__(self, upstream: HttpUpstream, accepted: Callable[[Headers], None] = lambda _: None) -> None:
        """`accepted` is told of headers that the server accepted."""
        super().__init__(upstream, accepted)
        self.can_ask = True
        self._standalone: StandaloneStream | None = None
        """Made if the session listens."""
        self._is_ready = False
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""

    @property
    def hears_side(self) -> bool:
        """Whether the standalone GET stream is open."""
        return self._standalone is not None and self._standalone.is_open

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin. Also raises WrongTransport."""
        async with self._client.post_to(self._endpoint, self._whole(headers), message) as response:
            self._keep_headers(response, headers)
            try:
                return await self._initialized(response, message)
            except (CallLost, Unreachable) as exc:
                if response.status not in _OTHER_TRANSPORT:
                    raise
                raise WrongTransport(exc.message.partition("; the call")[0]) from exc

    async def _initialized(self, response: AwaitedReply, sent: bytes) -> Raw:
        where = self._endpoint.where
        answer = InitializeAnswer(self._endpoint, sent)
        try:
            refused = await self._read(response, answer.receive, None)
        except SessionLost as exc:
            raise NoHandshake(
                f"{where} answered `initialize` with HTTP {response.status}; check the path of upstream.url"
            ) from exc
        except ValueError as exc:
            raise WrongTransport(f"{where} answered `initialize` with a message that is not JSON-RPC") from exc
        result = answer.result(refused)
        self._identify(self._session_id(response), "")
        # Without a session id the legacy SDKs run stateless: they send a question, and its answer never arrives.
        self.can_ask = self.session_id is not None
        return result

    def _session_id(self, response: AwaitedReply) -> str | None:
        """The id that the server gave the session. Raises NoHandshake if it cannot be sent back."""
        found = response.headers.get(mcp.SESSION_ID)
        if not found:
            return None
        if _SESSION_ID.fullmatch(found) is None:
            error = NoHandshake(
                f"{self._endpoint.where} gave an Mcp-Session-Id that is not visible ASCII of at most "
                f"{MAX_SESSION_ID_CHARACTERS} characters"
            )
            error.fix = "correct the server: the specification allows only 0x21 to 0x7E in a session id"
            raise error
        return found

    def suspect(self) -> str:
        """Explain a silence: a server in JSON response mode sends nothing until the result, so questions are lost."""
        if not self._reply_began:
            return (
                "It has not begun to reply, which is how a server in JSON response mode swallows a question: if the "
                "tool asks the user, have the server answer with event streams (no json_response, no "
                "enableJsonResponse)"
            )
        if not self.can_ask:
            return (
                "It gives no Mcp-Session-Id (stateless mode), where questions outside of the call's own stream are "
                "lost: if the tool asks the user, run the server with sessions"
            )
        return ""

    def adopt(self, session_id: str, version: str) -> None:
        """Use a session that another process opened."""
        self._is_ready = True
        self._identify(session_id, version)

    def beside(self) -> "StreamableChannel":
        """Return a channel that shares the session, but not the request in flight."""

        def accepted(headers: Headers) -> None:
            self._headers = headers

        other = StreamableChannel(self._upstream, accepted)
        other.adopt(self.session_id or "", self._fixed.get(mcp.PROTOCOL_VERSION, ""))
        other.can_ask = self.can_ask
        return other

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Open the standalone GET stream and keep it open until `close`."""
        self._fixed = fixed_headers(version)
        if self._session_line:
            self._standalone = StandaloneStream(self._upstream, self)
            await self._standalone.open(headers, listener)

    # -- messages -----------------------------------------------------------------------------------------------

    def begin(self, message: bytes, headers: Headers, hearer: Hearer, unusual: Callable[[], None]) -> PlainReply:
        """POST a request whose reply is read by callback as long as it holds nothing but the answer."""
        self._start_request()
        reply = PlainReply(self, message, headers, hearer, unusual, self._client.limits.event_bytes)
        pending = reply.pending = self.post(message, headers, reply)
        pending.hear_whole = reply.on_whole
        return reply

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        where = self._endpoint.where
        post = partial(self.post, message, headers, is_repeatable=True)
        try:
            async with (
                asyncio.timeout(self._client.timeouts.answer_seconds),
                Sending(AwaitedReply(post).begun, where) as response,
            ):
                if response.status >= 300:
                    raise await self._refused(response, headers)
                self._note_sent(headers)
                response.let_end(self.drain_seconds)
        except TimeoutError as exc:
            raise CallLost(
                f"{self._endpoint.where} did not accept a message within timeouts.answer_seconds; the call may have "
                "had effects"
            ) from exc

    def _note_sent(self, headers: Headers) -> None:
        """The server has accepted a message with these headers."""
        self._is_ready = True
        self._headers = headers
        self._note_accepted(headers)
        if self._resumption is not None:
            self._resumption.answered()
        self._restart_silence()

    async def _refused(self, response: AwaitedReply, headers: Headers) -> CallLost:
        """Explain why the server refused an answer or a notification. Raises what `read_refusal` raises."""
        try:
            said = await read_refusal(response, self._endpoint)
        except SuspectedSessionLoss as exc:
            if not self._is_ready:
                raise
            said = exc.conclude(is_gone=await exc.is_confirmed(self.ping(headers)))
        why = self._endpoint.quoted(said.message) if isinstance(said, jsonrpc.Error) else f"HTTP {response.status}"
        return CallLost(f"{self._endpoint.where} refused a message: {why}")

    async def ping(self, headers: Headers) -> None:
        """POST a `ping`, beside a request that may be in flight."""
        id_, endpoint = ping_id(), self._endpoint
        message = jsonrpc.request(id_, mcp.PING, {})
        try:
            async with asyncio.timeout(self._client.timeouts.answer_seconds):
                async with self._client.post_to(endpoint, self._whole(headers), message) as response:
                    if response.status >= 300:
                        check_ping_answer(await read_refusal(response, endpoint, message), endpoint)
                    self._keep_headers(response, headers)
                    await self._read_ping_answer(response, id_)
        except TimeoutError as exc:
            raise CallLost(f"{endpoint.where} did not answer a ping within timeouts.answer_seconds") from exc

    async def _read_ping_answer(self, response: AwaitedReply, asked: bytes) -> None:
        """Read the answer, because a server whose reply stream is dropped sends it on the standalone GET stream.

        Raises CallLost for the answer to another request.
        """

        def hear(data: bytes) -> bool:
            return reply_messages.is_answer(lost_session.opened(data), asked)

        if response.content_type != reply_messages.EVENT_STREAM:
            body = await read_response(response, _PING_ANSWER_BYTES, self._endpoint.where)
            if body and not hear(body):
                response.distrust()
                raise CallLost(f"{self._endpoint.where} answered a ping with the response to another request")
            return
        parser = sse.Parser(_PING_ANSWER_BYTES)
        try:
            async for piece in InTurns(response):
                if any(event.data and hear(event.data) for event in parser.feed(piece)):
                    return
        except sse.EventTooLarge:
            response.close()

    async def close(self, *, end_session: bool) -> None:
        """Close the streams, after a DELETE of the session if it may be ended."""
        standalone = self._standalone
        if standalone is not None:
            standalone.stop_reporting()
        try:
            if end_session and self.session_id is not None and not self.forgotten:
                await self._delete()
        finally:
            if standalone is not None:
                standalone.close()

    async def _delete(self) -> None:
        endpoint, headers = self._endpoint, self._whole(self._headers)
        try:
            async with (
                asyncio.timeout(self._client.timeouts.cancel_seconds),
                self._client.exchange("DELETE", endpoint.url, headers, b"", endpoint.where) as response,
            ):
                response.let_end(self.drain_seconds)
        except (TimeoutError, UpstreamError):
            pass  # the server drops the session after its own timeout
