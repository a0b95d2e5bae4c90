"""Streamable HTTP of 2025-03-26 to 2025-11-25 towards one legacy server.

Source: specification 2025-11-25 basic/transports (Streamable HTTP). Real servers differ from it in ways that were
measured: they report session errors as plain 400, redirect `/mcp` to `/mcp/`, keep streams open after the answer, and
answer `initialize` in JSON or in SSE.

A request whose stream broke is resumed by GET with Last-Event-ID (`upstream.http.resumption`).
"""

import asyncio
import re
from contextlib import suppress
from typing import Final

from msgspec import Raw

from gateway.http.upstream_client import REDIRECTS
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, NoHandshake, SessionLost, Unreachable
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.upstream.channel import Answer, Headers, Hearer, SideListener
from gateway.upstream.http.http_errors import (
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    initialize_result,
    ping_id,
    read_refusal,
)
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import ReplyReader, redirected
from gateway.upstream.http.resumable_channel import ResumableChannel, fixed_headers
from gateway.upstream.http.standalone_stream import StandaloneStream

_PING_ANSWER_BYTES: Final = 65_536
MAX_SESSION_ID_CHARACTERS: Final = 4096
_SESSION_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION_ID_CHARACTERS}}}")
_OTHER_TRANSPORT: Final = (400, 404, 405)
"""How a server of HTTP+SSE may answer `initialize` (2025-11-25 basic/transports, Backwards Compatibility)."""

_UNHEARD: Final = Hearer()


class StreamableChannel(ResumableChannel):
    """One session over streamable HTTP."""

    answers_apart = True

    __slots__ = ("_is_ready", "_standalone", "can_ask")

    def __init__(self, upstream: HttpUpstream) -> None:
        super().__init__(upstream)
        self.can_ask = True
        self._standalone: StandaloneStream | None = None
        """Made if the session listens."""
        self._is_ready = False
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""

    @property
    def hears_side(self) -> bool:
        """Whether the standalone GET stream is open, or is just opened again."""
        return self._standalone is not None and self._standalone.is_open

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin. Also raises WrongTransport."""
        answer = Answer(message)
        reply = await self._beside(message, headers, answer, self._client.limits.event_bytes)
        where = self._endpoint.where
        try:
            found = answer.found if reply.is_done else read_refusal(reply, self._endpoint)
            result = initialize_result(found, self._endpoint)
        except SessionLost as exc:
            said = f"{where} answered `initialize` with HTTP {reply.status}; check the path of upstream.url"
            raise (WrongTransport if reply.status in _OTHER_TRANSPORT else NoHandshake)(said) from exc
        except ValueError as exc:
            raise WrongTransport(f"{where} answered `initialize` with a message that is not JSON-RPC") from exc
        except (CallLost, Unreachable) as exc:
            if reply.status not in _OTHER_TRANSPORT:
                raise
            raise WrongTransport(exc.message.partition("; the call")[0]) from exc
        self._identify(self._given_id(reply), "")
        # Without a session id the legacy SDKs run stateless: they send a question, and its answer never arrives.
        self.can_ask = self.session_id is not None
        return result

    async def _beside(self, message: bytes, headers: Headers, hearer: Hearer, max_bytes: int) -> ReplyReader:
        """POST what may run twice, beside the request in flight; return its reply once that is over."""

        async def send() -> ReplyReader:
            reply = self._reader(hearer, max_bytes)
            return await reply.over(self.post(message, headers, reply, is_repeatable=True))

        reply = await redirected(self._endpoint, send)
        if 0 < reply.status < 300:
            self.note_headers(headers)
        return reply

    def _reader(self, hearer: Hearer, max_bytes: int = 0, *, needs_body: bool = True) -> ReplyReader:
        unread = REDIRECTS if needs_body else ()
        return ReplyReader(
            hearer, max_bytes, self._client.arriving, self.times.drain_seconds, needs_body=needs_body, unread=unread
        )

    def _given_id(self, reply: ReplyReader) -> str | None:
        """The id that the server gave the session. Raises NoHandshake if it cannot be sent back."""
        found = None if reply.head is None else reply.head.text(b"mcp-session-id")
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
        if not self.taken:
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

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Open the standalone GET stream and keep it open until `close`."""
        self._fixed = fixed_headers(version)
        if self._session_line:
            self._standalone = StandaloneStream(self._upstream, self)
            await self._standalone.open(headers, listener)

    # -- messages -----------------------------------------------------------------------------------------------

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        reply = self._reader(_UNHEARD, needs_body=False)
        try:
            with CoarseTimeout(self._client.answering):
                _ = await reply.over(self.post(message, headers, reply, is_repeatable=True))
                if not reply.is_done:
                    raise await self._refused(reply, headers)
                self._is_ready = True
                self.note_headers(headers)
                if self._request is not None and self._request.place is not None:
                    self._request.place.answered()
                    self._request.restart_silence()
        except TimeoutError as exc:
            raise CallLost(
                f"{self._endpoint.where} did not accept a message within timeouts.answer_seconds; the call may have "
                "had effects"
            ) from exc

    async def _refused(self, reply: ReplyReader, headers: Headers) -> CallLost:
        """Explain why the server refused an answer or a notification. Raises what `read_refusal` raises."""
        try:
            said = read_refusal(reply, self._endpoint)
        except SuspectedSessionLoss as exc:
            if not self._is_ready:
                raise
            said = exc.conclude(is_gone=await exc.is_confirmed(self.ping(headers)))
        why = self._endpoint.quoted(said.message) if isinstance(said, jsonrpc.Error) else f"HTTP {reply.status}"
        return CallLost(f"{self._endpoint.where} refused a message: {why}")

    async def ping(self, headers: Headers) -> None:
        """POST a `ping`, beside a request that may be in flight.

        Its answer is read, because a server whose reply stream is dropped sends it on the standalone GET stream.
        """
        endpoint, message = self._endpoint, jsonrpc.request(ping_id(), mcp.PING, {})
        try:
            with CoarseTimeout(self._client.answering):
                reply = await self._beside(message, headers, Answer(message), _PING_ANSWER_BYTES)
        except TimeoutError as exc:
            raise CallLost(f"{endpoint.where} did not answer a ping within timeouts.answer_seconds") from exc
        if reply.status >= 300:
            check_ping_answer(read_refusal(reply, endpoint, message), endpoint)
        elif isinstance(reply.failure, RequestFailed):
            raise reply.failure.mapped(endpoint.where) from reply.failure
        elif reply.body:
            raise CallLost(f"{endpoint.where} answered a ping with the response to another request")

    async def close(self, *, end_session: bool) -> None:
        """Close the streams, after a DELETE of the session if it may be ended."""
        standalone = self._standalone
        if standalone is not None:
            standalone.stop_reporting()
        try:
            if end_session and self.session_id is not None and not self.forgotten:
                reply, headers = self._reader(_UNHEARD, needs_body=False), self._whole(self._headers)
                with suppress(TimeoutError):  # the server drops the session after its own timeout
                    async with asyncio.timeout(self._client.timeouts.cancel_seconds):
                        _ = await reply.over(self._client.begin("DELETE", self._endpoint.url, headers, b"", reply))
        finally:
            if standalone is not None:
                standalone.close()
