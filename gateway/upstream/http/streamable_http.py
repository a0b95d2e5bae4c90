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

from gateway import world
from gateway.http.upstream_client import REDIRECTS
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallGone, CallLost, NoHandshake, Refused, SessionLost, Unheeded, Unreachable
from gateway.runtime.coarse_timeout import CoarseTimeout
from gateway.upstream.channel import Answer, Channel, Headers, Hearer, SideListener, new_ping
from gateway.upstream.http.call_reply import CallReply, ResumedReply
from gateway.upstream.http.http_errors import (
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    initialize_result,
    is_local,
    read_refusal,
    stream_cut,
)
from gateway.upstream.http.http_session import HttpSession
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import UNHEARD, Acceptance, ReplyReader, redirected
from gateway.upstream.http.resumption import asked_seconds
from gateway.upstream.http.standalone_stream import StandaloneStream

_MAY_PASS: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses of a GET that may succeed later. A server answers 409 while it takes the broken stream for an open one."""
RESUME_HEAD_SECONDS: Final = 5.0
"""How long a server may take to answer the GET that resumes a request."""
_PING_ANSWER_BYTES: Final = 65_536
MAX_SESSION_ID_CHARACTERS: Final = 4096
_SESSION_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION_ID_CHARACTERS}}}")
_OTHER_TRANSPORT: Final = (400, 404, 405)
"""How a server of HTTP+SSE may answer `initialize` (2025-11-25 basic/transports, Backwards Compatibility)."""


class StreamableChannel(Channel):
    """One session over streamable HTTP."""

    answers_apart = True

    __slots__ = ("_endpoint", "_is_ready", "_request", "_session", "_standalone", "_upstream", "can_ask")

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream, self._endpoint = upstream, upstream.endpoint
        self.can_ask = True
        self._session = HttpSession(upstream)
        self._request: CallReply | None = None
        """The newest request."""
        self._standalone: StandaloneStream | None = None
        """Made if the session listens."""
        self._is_ready = False
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""

    @property
    def session_id(self) -> str | None:  # type: ignore[override]  # read-only
        """The id that the server gave the session."""
        return self._session.id

    @property
    def forgotten(self) -> bool:  # type: ignore[override]  # read-only
        """Whether the server was proved to have forgotten the session."""
        return self._session.is_forgotten

    @property
    def cursor(self) -> str | None:
        """The last event id on the stream of the newest request."""
        place = None if self._request is None else self._request.place
        return None if place is None else place.cursor

    @property
    def hears_side(self) -> bool:
        """Whether the standalone GET stream is open, or is just opened again."""
        return self._standalone is not None and self._standalone.is_open

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin. Also raises WrongTransport."""
        answer = Answer(message)
        reply = await self._beside(message, headers, answer, self._upstream.client.limits.event_bytes)
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
        given = None if reply.head is None else reply.head.text(b"mcp-session-id")
        if given and _SESSION_ID.fullmatch(given) is None:
            raise NoHandshake(
                f"{where} gave an Mcp-Session-Id that is not visible ASCII of at most {MAX_SESSION_ID_CHARACTERS} "
                "characters",
                fix="correct the server: the specification allows only 0x21 to 0x7E in a session id",
            )
        self._session.identify(given)
        # Without a session id the legacy SDKs run stateless: they send a question, and its answer never arrives.
        self.can_ask = self.session_id is not None
        return result

    async def _beside(self, message: bytes, headers: Headers, hearer: Hearer, max_bytes: int) -> ReplyReader:
        """POST what may run twice, beside the request in flight; return its reply once that is over."""

        async def send() -> ReplyReader:
            reply = ReplyReader(hearer, max_bytes, self._upstream, unread=REDIRECTS)
            return await reply.over(self._session.post(message, headers, reply, is_repeatable=True))

        reply = await redirected(self._endpoint, send)
        if 0 < reply.status < 300:
            self._session.accepted(headers)
        return reply

    async def beside(self, message: bytes, headers: Headers) -> jsonrpc.Error | Raw | None:
        """See `Channel.beside`."""
        answer = Answer(message)
        reply = await self._beside(message, headers, answer, self._upstream.client.limits.event_bytes)
        return answer.found if reply.is_done else read_refusal(reply, self._endpoint, message)

    def suspect(self, *, is_accepted: bool) -> str:
        """Explain a silence: a server in JSON response mode sends nothing until the result, so questions are lost."""
        if not is_accepted:
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
        self._is_ready = True  # the process that opened it has sent `initialized`
        self._session.identify(session_id)
        self._session.negotiate(version)

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Open the standalone GET stream and keep it open until `close`."""
        self._session.negotiate(version)
        if self.session_id is not None:
            self._standalone = StandaloneStream(self._session, headers, listener)
            await self._standalone.open()

    # -- requests ----------------------------------------------------------------------------------------------

    def begin(self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False) -> CallReply:
        """POST a request for whose reply no coroutine waits."""
        reply = self._request = self._call_reply(message, headers, hearer)
        reply.pending = self._session.post(message, headers, reply, is_repeatable=is_repeatable)
        return reply

    def _call_reply(self, message: bytes, headers: Headers, hearer: Hearer) -> CallReply:
        largest = self._upstream.client.limits.event_bytes
        return CallReply(hearer, largest, self._upstream, session=self._session, message=message, headers=headers)

    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and read its reply until it is answered; resume it if the server supports that."""
        reply = self.begin(message, headers, hearer, is_repeatable=is_repeatable)
        message = b""  # a call that waits should not keep it
        return await self._conclude(await reply.over(reply.pending), hearer)

    async def conclude(self, hearer: Hearer) -> jsonrpc.Error | Raw | None:
        """See `Channel.conclude`."""
        assert self._request is not None, "it was begun"
        return await self._conclude(self._request, hearer)

    async def _conclude(self, reply: CallReply, hearer: Hearer) -> jsonrpc.Error | Raw | None:
        """Decide what becomes of a request whose reply is over; see `Channel.request`."""
        if reply.is_done:
            return None
        retry_ms = reply.retry_ms
        try:
            if not reply.is_stream:
                return read_refusal(reply, self._endpoint, reply.message)
            cut = stream_cut(reply, self._endpoint.where)
        except SuspectedSessionLoss as exc:
            is_gone = await exc.is_confirmed(self.ping(reply.headers))
            if is_gone:
                self._session.forgotten()
            return exc.conclude(is_gone=is_gone)
        finally:
            reply.message, reply.content = b"", None  # the session keeps its newest request for as long as it is idle
        place = reply.place
        if place is None or place.cursor is None:  # only an event id shows that the server stores events
            raise cut
        place.start(place.cursor)
        # A server of 2025-11-25 may cut a stream on purpose, and say when to come back.
        await asyncio.sleep(asked_seconds(retry_ms))
        try:
            await self._resume(reply, hearer)
        except Refused as exc:
            # The server did accept the call, so this must not read as if it had not.
            raise CallLost(
                f"{exc.message} when the call's stream was picked up again; the call may have had effects"
            ) from exc
        return None

    # -- broken streams -----------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """See `Channel.give_up`."""
        if self._request is not None:
            self._request.resumption.give_up()

    async def resume(self, cursor: str, headers: Headers, hearer: Hearer, *, is_shared: bool) -> None:
        """Resume a request that another process sent."""
        request = self._request = self._call_reply(b"", headers, hearer)
        request.resumption.start(cursor, counts_local=is_shared)
        await self._resume(request, hearer)

    async def _resume(self, request: CallReply, hearer: Hearer) -> None:
        """GET the stream from one place, again and again, until the request is answered."""
        upstream, resumption, where = self._upstream, request.resumption, self._endpoint.where
        while True:
            newest = self._session.newest or request.headers
            largest = upstream.client.limits.event_bytes
            reply = ResumedReply(hearer, largest, upstream, unread=_MAY_PASS, request=request, newest=newest)
            try:
                async with asyncio.timeout(RESUME_HEAD_SECONDS) as deadline:
                    reply.deadline = deadline
                    _ = await reply.over(self._session.get(request.headers, reply, last_event_id=resumption.place))
            except TimeoutError:
                pass  # `is_late`, unless the reply was over by then, in a process that has stood still
            finally:
                request.silence = None
            if reply.is_done and not reply.is_late:
                return
            if reply.is_stream and reply.is_late:
                resumption.silent()
                continue
            if reply.is_stream:
                lost: CallLost = stream_cut(reply, where)
                pause_seconds = resumption.cut(reply.retry_ms)
            else:
                why, is_here = f"{where} did not answer", False
                if not reply.is_late:
                    why, is_here = await self._refused_resume(reply, newest)
                pause_seconds = resumption.failed(is_local=is_here)
                cause = f"{why.partition(';')[0]} when a running call was to be picked up"
                lost = CallLost(f"{cause}; the call may have had effects")
            if pause_seconds is None:
                raise lost from reply.failure
            await asyncio.sleep(pause_seconds)

    async def _refused_resume(self, reply: ReplyReader, headers: Headers) -> tuple[str, bool]:
        """Return why the stream cannot be resumed now, and whether that says nothing of the server, but of this host.

        Raises Refused if the credential is not accepted.
        """
        status, where = reply.status, self._endpoint.where
        if isinstance(reply.failure, RequestFailed):
            return reply.failure.mapped(where).message, is_local(reply.failure)
        if status < 300 or status in _MAY_PASS:
            return f"{where} answered HTTP {status} to GET with Last-Event-ID", False
        try:
            _ = read_refusal(reply, self._endpoint)
        except SuspectedSessionLoss as exc:
            if await exc.is_confirmed(self.ping(headers), of_get=True):
                raise CallGone(
                    f"{where} does not know the session of a running call any more (HTTP {status}), it was probably "
                    "restarted; the call may have had effects: check them before calling again"
                ) from exc
        except CallLost:
            pass
        raise CallLost.by(where, f"cannot pick up a call (HTTP {status})")

    # -- messages -----------------------------------------------------------------------------------------------

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        reply = Acceptance(UNHEARD, 0, self._upstream)
        try:
            with CoarseTimeout(self._upstream.client.answering):
                # All servers that were measured take the first of two answers, and say 202 to both.
                _ = await reply.over(self._session.post(message, headers, reply, is_repeatable=True))
                if not reply.is_done:
                    raise await self._refused(reply, headers)
                self._is_ready = True
                self._session.accepted(headers)
                request = self._request
                if request is not None and request.place is not None:
                    request.place.answered()
                    request.restart_silence()
        except TimeoutError as exc:
            raise Unheeded.by(self._endpoint.where, "did not accept a message within timeouts.answer_seconds") from exc

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
        endpoint, message = self._endpoint, new_ping()
        try:
            with CoarseTimeout(self._upstream.client.answering):
                reply = await self._beside(message, headers, Answer(message), _PING_ANSWER_BYTES)
        except TimeoutError as exc:
            hangs = (
                "accepts connections but does not answer a ping within timeouts.answer_seconds (hung or overloaded?)"
            )
            raise Unheeded(f"{endpoint.where} {hangs}") from exc
        if reply.status >= 300:
            check_ping_answer(read_refusal(reply, endpoint, message), endpoint)
        elif isinstance(reply.failure, RequestFailed):
            raise reply.failure.mapped(endpoint.where) from reply.failure
        elif reply.body:
            raise CallLost(f"{endpoint.where} answered a ping with the response to another request")

    async def close(self, *, end_session: bool) -> None:
        """Close the streams, with a DELETE of the session if it may be ended."""
        standalone = self._standalone
        if standalone is not None:
            standalone.stop_reporting()
            if world.free_descriptors() < 0:
                standalone.close()  # its descriptor is for the DELETE
        try:
            if end_session and self.session_id is not None and not self.forgotten:
                reply, headers = Acceptance(UNHEARD, 0, self._upstream), self._session.headers(self._session.newest)
                client = self._upstream.client
                with suppress(TimeoutError):  # the server drops the session after its own timeout
                    async with asyncio.timeout(client.timeouts.cancel_seconds):
                        _ = await reply.over(client.begin("DELETE", self._endpoint.url, headers, b"", reply))
        finally:
            if standalone is not None:
                standalone.close()
