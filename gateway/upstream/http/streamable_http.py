"""Streamable HTTP of 2025-03-26 to 2025-11-25 towards one legacy server.

Source: specification 2025-11-25 basic/transports (Streamable HTTP). Real servers differ from it in ways that were
measured: they report session errors as plain 400, redirect `/mcp` to `/mcp/`, keep streams open after the answer, and
answer `initialize` in JSON or in SSE.

A request whose stream broke is resumed by GET with Last-Event-ID (`upstream.resumption`).
"""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Raw

from gateway.http.awaited_reply import AwaitedReply
from gateway.http.client import FOREIGN, REDIRECTS, Exchange, Prepared, mapped
from gateway.http_client.errors import RequestFailed
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, NoHandshake, Refused, SessionLost, Unreachable, UpstreamError
from gateway.runtime.throttle import AwaitedArrival
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Receive, Sending, SideListener
from gateway.upstream.http.http_errors import (
    InitializeAnswer,
    RetryLater,
    SuspectedSessionLoss,
    WrongTransport,
    check_ping_answer,
    is_local,
    ping_id,
    read_refusal,
    read_response,
)
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.plain_reply import Acceptance, Broken, PlainReply
from gateway.upstream.http.resumption import Resumption, asked_seconds
from gateway.upstream.http.silence_timeout import SilenceTimeout
from gateway.upstream.http.standalone_stream import StandaloneStream
from gateway.upstream.jsonrpc_batches import hand_over

_ACCEPT: Final = "application/json, text/event-stream"
_PING_ANSWER_BYTES: Final = 65_536
MAX_SESSION_ID_CHARACTERS: Final = 4096
_SESSION_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION_ID_CHARACTERS}}}")
_MAY_PASS: Final = (408, 409, 425, 429)
"""Statuses of a GET that may succeed later. A server answers 409 while it takes the broken stream for an open one."""
_OTHER_TRANSPORT: Final = (400, 404, 405)
"""How a server of HTTP+SSE may answer `initialize` (2025-11-25 basic/transports, Backwards Compatibility)."""


class _StreamCut(CallLost):
    """The event stream of a request ended before the answer, so the request may be resumed."""

    def __init__(self, message: str, retry_ms: int | None) -> None:
        super().__init__(message)
        self.retry_ms = retry_ms


class StreamableChannel(Channel):
    """One session over streamable HTTP."""

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_client",
        "_endpoint",
        "_fixed",
        "_headers",
        "_is_ready",
        "_prepared",
        "_reply_began",
        "_resumption",
        "_silence",
        "_standalone",
        "_times",
        "_upstream",
        "can_ask",
        "forgotten",
        "session_id",
        "taken",
    )

    def __init__(
        self,
        upstream: HttpUpstream,
        fixed: dict[str, str] | None = None,
        accepted: Callable[[Headers], None] = lambda _: None,
    ) -> None:
        """`fixed` has the headers of a session that another channel opened; it is told of `accepted` headers."""
        self.can_ask = True
        self.taken = self.forgotten = False
        self.session_id: str | None = None
        self._upstream = upstream
        self._client, self._endpoint, _, self._times = upstream
        self._fixed = {"Accept": _ACCEPT, "Content-Type": "application/json"} if fixed is None else fixed
        self._accepted = accepted
        self._headers = NO_HEADERS
        """The headers of the last message that the server accepted: GET and DELETE need a credential too."""
        self._standalone = StandaloneStream(upstream, self._get_headers)
        self._resumption = Resumption(upstream.times)
        self._silence = SilenceTimeout(self._resumption)
        self._reply_began = False
        """Whether the response to the current request has begun."""
        self._prepared: Prepared | None = None
        self._is_ready = fixed is not None
        """Whether the server accepted `initialized`; some servers crash on a ping before it."""

    @property
    def cursor(self) -> str | None:
        """The last event id on the stream of the current request."""
        return self._resumption.cursor

    @property
    def hears_side(self) -> bool:
        """Whether the standalone GET stream is open."""
        return self._standalone.is_open

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin. Also raises WrongTransport."""
        for _ in range(2):
            async with self._post(message, headers) as response:
                if response.status in REDIRECTS:
                    self._endpoint.follow(response.headers.get("Location"))
                    continue
                self._keep_headers(response, headers)
                try:
                    return await self._initialized(response)
                except (CallLost, Unreachable) as exc:
                    if response.status not in _OTHER_TRANSPORT:
                        raise
                    raise WrongTransport(exc.message.partition("; the call")[0]) from exc
        raise Unreachable(f"{self._endpoint.where} redirects in a circle; set upstream.url to the final address")

    async def _initialized(self, response: AwaitedReply) -> Raw:
        where = self._endpoint.where
        answer = InitializeAnswer(self._endpoint)
        try:
            refused = await self._read(response, answer.receive, None)
        except SessionLost as exc:
            raise NoHandshake(
                f"{where} answered `initialize` with HTTP {response.status}; check the path of upstream.url"
            ) from exc
        except ValueError as exc:
            raise WrongTransport(f"{where} answered `initialize` with a message that is not JSON-RPC") from exc
        result = answer.result(refused)
        self.session_id = self._session_id(response)
        if self.session_id is not None:
            self._fixed[mcp.SESSION_ID] = self.session_id
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
        self.session_id = session_id
        self._fixed[mcp.SESSION_ID] = session_id
        self._fixed[mcp.PROTOCOL_VERSION] = version

    def beside(self) -> "StreamableChannel":
        """Return a channel that shares the session, but not the request in flight."""

        def accepted(headers: Headers) -> None:
            self._headers = headers

        other = StreamableChannel(self._upstream, self._fixed, accepted)
        other.session_id, other.can_ask = self.session_id, self.can_ask
        return other

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Open the standalone GET stream and keep it open until `close`."""
        self._fixed[mcp.PROTOCOL_VERSION] = version
        if self.session_id is not None:
            await self._standalone.open(headers, listener)

    def _get_headers(self, headers: Headers) -> dict[str, str]:
        """The headers of a GET, with the newest accepted credential: the credential of the call may have expired."""
        fixed = {key: value for key, value in self._fixed.items() if key != "Content-Type"}
        return {**(self._headers or headers), **fixed, "Accept": "text/event-stream"}

    # -- messages -----------------------------------------------------------------------------------------------

    def begin(self, message: bytes, headers: Headers) -> PlainReply:
        """POST a request whose reply is read by callback as long as it holds nothing but the answer."""
        self._resumption.begin()
        self._reply_began = self.taken = False

        def accepted() -> None:
            self._reply_began = self.taken = True
            self._headers = headers

        return PlainReply(
            partial(self._client.begin_prepared, self._prepared_post(headers), message),
            accepted,
            self._resumption,
            lambda reply, receive: self.request(message, headers, receive, reply),
            partial(self._go_on, headers),  # kept while the call is held, so without a closure
            throttle=self._client.arriving,
            max_bytes=self._client.limits.event_bytes,
            drain_seconds=self._times.drain_seconds,
        )

    def _prepared_post(self, headers: Headers) -> Prepared:
        """The head of a call; the calls of a session often have the same."""
        whole = {**headers, **self._fixed}
        prepared = self._prepared = self._client.prepared("POST", self._endpoint.url, whole, self._prepared)
        return prepared

    async def request(
        self, message: bytes, headers: Headers, receive: Receive, begun: AwaitedReply | None = None
    ) -> jsonrpc.Error | Raw | None:
        """POST a request and read its reply until it is answered; resume it if the server supports that."""
        endpoint = self._endpoint
        try:
            # Without the context managers of the other requests: this is the hot path.
            if begun is None:
                self._resumption.begin()
                self._reply_began = self.taken = False
                response = await self._client.send("POST", endpoint.url, {**headers, **self._fixed}, message)
            else:
                response = begun
                await response.begun()
            self._reply_began = True
            try:
                self._keep_headers(response, headers)
                self.taken = response.status < 300
                return await self._read(response, receive, message)
            finally:
                response.close()
        except SuspectedSessionLoss as exc:
            self.forgotten = await exc.is_confirmed(self.ping(headers))
            return exc.conclude(is_gone=self.forgotten)
        except _StreamCut as exc:
            cut = exc
        except FOREIGN as exc:
            raise mapped(exc, endpoint.where) from exc
        await self._pick_up(cut, headers, receive)
        return None

    async def _go_on(self, headers: Headers, broken: Broken, receive: Receive) -> None:
        """Resume a stream that broke while it was read by callback, if the server supports that."""
        await self._pick_up(self._cut(broken.cause, broken.retry_ms), headers, receive)

    def _cut(self, cause: Exception | None, retry_ms: int | None) -> "_StreamCut":
        """Return why a stream broke (`cause` is None if the server ended it); raises what cannot be resumed."""
        where = self._endpoint.where
        if cause is None:
            return _StreamCut(
                f"{where} ended the call's stream without a result; the call may have had effects", retry_ms
            )
        if isinstance(cause, FOREIGN):
            return _StreamCut(mapped(cause, where).message, retry_ms)
        if isinstance(cause, sse.EventTooLarge):
            raise CallLost(
                f"{where} sent an event larger than limits.event_bytes; the call may have had effects"
            ) from cause
        raise cause

    async def _pick_up(self, cut: "_StreamCut", headers: Headers, receive: Receive) -> None:
        """Resume the stream of a request; raises the cut if the server does not store events."""
        cursor = self.cursor
        if cursor is None:  # only an event id on this stream shows that it does
            raise cut
        self._resumption.start(cursor)
        await asyncio.sleep(asked_seconds(cut.retry_ms))
        try:
            await self._resume(headers, receive, None)
        except Refused as exc:
            # The server did accept the call, so this must not read as if it had not.
            raise CallLost(
                f"{exc.message} when the call's stream was picked up again; the call may have had effects"
            ) from exc

    async def resume(
        self, cursor: str, headers: Headers, receive: Receive, attached: Callable[[], None], *, is_shared: bool
    ) -> None:
        """Resume a request that another process sent."""
        self._resumption.begin(cursor)
        self._resumption.start(cursor, counts_local=is_shared)
        self.taken = False
        await self._resume(headers, receive, attached)

    async def _resume(self, headers: Headers, receive: Receive, attached: Callable[[], None] | None) -> None:
        """GET the stream from one place, again and again, until the request is answered."""
        resumption, silence = self._resumption, self._silence

        def hear(data: bytes) -> bool:
            resumption.heard()
            silence.restart()
            return receive(data)

        while True:
            try:
                response = await self._get_again(headers)
                resumption.connected()
                if attached is not None:
                    attached()
                    attached = None
                try:
                    response.expect_silence()
                    async with silence.start():
                        await self._read_events(response, hear, again=True)
                    return
                finally:
                    silence.stop()
                    response.close()
            except TimeoutError:
                resumption.silent()
                continue
            except RetryLater as exc:
                pause_seconds = resumption.failed(is_local=exc.is_local)
                if pause_seconds is None:
                    cause = f"{exc.message.partition(';')[0]} when a running call was to be picked up"
                    raise CallLost(f"{cause}; the call may have had effects") from exc
            except _StreamCut as exc:
                pause_seconds = resumption.cut(exc.retry_ms)
            await asyncio.sleep(pause_seconds)

    async def _get_again(self, headers: Headers) -> AwaitedReply:
        """Open the stream of a request; the caller releases it. Raises RetryLater, or another error that is final."""
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(self._times.resume_head_seconds):
                newest_headers = self._headers or headers
                newest = self._get_headers(headers) | {mcp.LAST_EVENT_ID: self._resumption.place}
                response = await self._client.send("GET", endpoint.url, newest, b"")
                if response.status == 200 and response.content_type == "text/event-stream":
                    self.taken = self.taken or newest_headers == headers
                    return response
                try:
                    raise await self._refused_resume(response, newest_headers)
                finally:
                    response.close()
        except FOREIGN as exc:
            raise RetryLater(mapped(exc, endpoint.where).message, is_local=is_local(exc)) from exc

    async def _refused_resume(self, response: AwaitedReply, headers: Headers) -> CallLost:
        """Explain why the stream cannot be resumed. Raises Refused if the credential is not accepted."""
        status, where = response.status, self._endpoint.where
        if status < 300 or status in _MAY_PASS or status >= 500:
            return RetryLater(f"{where} answered HTTP {status} to GET with Last-Event-ID")
        try:
            _ = await read_refusal(response, self._endpoint)
        except SuspectedSessionLoss as exc:
            if await exc.is_confirmed(self.ping(headers), of_get=True):
                return CallGone(
                    f"{where} does not know the session of a running call any more (HTTP {status}), it was probably "
                    "restarted; the call may have had effects: check them before calling again"
                )
        except CallLost:
            pass
        return CallLost(f"{where} cannot pick up a call (HTTP {status}); the call may have had effects")

    def begin_send(
        self, message: bytes, headers: Headers, accepted: Callable[[], None], unusual: Callable[[Sending], None]
    ) -> bool:
        """See `Channel.begin_send`."""
        seconds = self._client.timeouts.answer_seconds
        deadline = asyncio.get_running_loop().time() + seconds

        def note() -> None:
            self._note_sent(headers)

        def finish(reply: AwaitedReply) -> None:
            unusual(self._send(Exchange(reply.begun, self._endpoint.where), headers, deadline))

        begin = partial(self._client.begin_prepared, self._prepared_post(headers), message)
        _ = Acceptance(begin, note, accepted, finish, seconds)
        return True

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        deadline = asyncio.get_running_loop().time() + self._client.timeouts.answer_seconds
        await self._send(self._post(message, headers), headers, deadline)

    async def _send(self, exchange: Exchange, headers: Headers, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline), exchange as response:
                if response.status >= 300:
                    raise await self._refused(response, headers)
                self._note_sent(headers)
                await response.skip()
        except TimeoutError as exc:
            raise CallLost(
                f"{self._endpoint.where} did not accept a message within timeouts.answer_seconds; the call may have "
                "had effects"
            ) from exc

    def _note_sent(self, headers: Headers) -> None:
        """The server has accepted a message with these headers."""
        self._is_ready = True
        self._headers = headers
        self._accepted(headers)
        self._resumption.answered()
        self._silence.restart()

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
        message, endpoint = jsonrpc.request(ping_id(), mcp.PING, {}), self._endpoint
        try:
            async with asyncio.timeout(self._client.timeouts.answer_seconds):
                for _ in range(2):
                    async with self._post(message, headers) as response:
                        if response.status in REDIRECTS:
                            endpoint.follow(response.headers.get("Location"))
                            continue
                        if response.status >= 300:
                            check_ping_answer(await read_refusal(response, endpoint, message), endpoint)
                        self._keep_headers(response, headers)
                        await self._read_ping_answer(response)
                        return
                raise Unreachable(f"{endpoint.where} redirects in a circle")
        except TimeoutError as exc:
            raise CallLost(f"{endpoint.where} did not answer a ping within timeouts.answer_seconds") from exc

    async def _read_ping_answer(self, response: AwaitedReply) -> None:
        """Read the answer, because a server whose reply stream is dropped sends it on the standalone GET stream."""
        parser = sse.Parser(_PING_ANSWER_BYTES)
        try:
            async for chunk in response:
                if any(event.data for event in parser.feed(chunk)):
                    return
        except sse.EventTooLarge:
            response.close()

    def _keep_headers(self, response: AwaitedReply, headers: Headers) -> None:
        """Keep the newest headers that the upstream accepted, for messages without a client: GET and DELETE."""
        if response.status < 300:
            self._headers = headers
            self._accepted(headers)

    def _post(self, message: bytes, headers: Headers) -> Exchange:
        endpoint = self._endpoint
        return self._client.exchange("POST", endpoint.url, {**headers, **self._fixed}, message, endpoint.where)

    async def _read(self, response: AwaitedReply, receive: Receive, sent: bytes | None) -> jsonrpc.Error | Raw | None:
        if response.status >= 300:
            return await read_refusal(response, self._endpoint, sent)
        if response.content_type == "text/event-stream":
            if sent is not None:
                response.expect_silence()
            await self._read_events(response, receive)
            return None
        client, where = self._client, self._endpoint.where
        body = await read_response(response, client.limits.event_bytes, where, client.arriving)
        if not body or not hand_over(body, receive):
            raise CallLost(
                f"{self._endpoint.where} answered HTTP {response.status} without a result; the call may have had "
                "effects"
            )
        return None

    async def _read_events(self, response: AwaitedReply, receive: Receive, *, again: bool = False) -> None:
        """Hand over events until the request is answered; `again` skips events that were handed over before."""
        parser = sse.Parser(self._client.limits.event_bytes)
        arrival = AwaitedArrival(self._client.arriving)
        try:
            async for chunk in response:
                for event in parser.feed(chunk):
                    if event.id is not None and self._resumption.is_repeated(event.id) and again:
                        continue
                    if event.data and hand_over(event.data, receive):
                        if not again:  # a resumed stream stays open after the answer
                            await self._drain(response)
                        return
                await arrival.hold(parser.unfinished_bytes)
            cut = self._cut(None, parser.retry_ms)
        except (*FOREIGN, sse.EventTooLarge) as exc:
            cut = self._cut(exc, parser.retry_ms)
        finally:
            arrival.release()
        raise cut

    async def _drain(self, response: AwaitedReply) -> None:
        """Read to the end, so that the connection can be reused. Some servers never end the stream."""
        if response.is_read:
            return
        with suppress(TimeoutError, RequestFailed):
            async with asyncio.timeout(self._times.drain_seconds):
                await response.skip()

    async def close(self, *, end_session: bool) -> None:
        """Close the streams, after a DELETE of the session if it may be ended."""
        self._standalone.stop_reporting()
        try:
            if end_session and self.session_id is not None:
                await self._delete()
        finally:
            self._standalone.close()

    async def _delete(self) -> None:
        endpoint, headers = self._endpoint, {**self._headers, **self._fixed}
        try:
            async with (
                asyncio.timeout(self._client.timeouts.cancel_seconds),
                self._client.exchange("DELETE", endpoint.url, headers, b"", endpoint.where) as response,
            ):
                await response.skip()
        except (TimeoutError, UpstreamError):
            pass  # the server drops the session after its own timeout
