"""Streamable HTTP of 2025-03-26 to 2025-11-25 towards one legacy server.

Source: specification 2025-11-25 basic/transports (Streamable HTTP). What real servers do beyond it is measured and
noted where it matters: session errors as plain 400, redirects of `/mcp` to `/mcp/`, streams that stay open after the
answer, an `initialize` answered by JSON or by SSE.

A request whose stream broke is picked up by GET with Last-Event-ID ("Resumability and Redelivery"). Servers leave gaps
between what they replay and what they then send live, so a GET that stays silent is opened again from the same place;
what was handed over already is known by its event id.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import aiohttp
from msgspec import Raw

from gateway.http.client import FOREIGN, REDIRECTS, Client, Exchange, mapped
from gateway.http.endpoint import Endpoint
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallGone, CallLost, NoHandshake, Refused, SessionLost, Unreachable, UpstreamError
from gateway.runtime.tasks import Tasks
from gateway.upstream.batches import hand_over
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Receive
from gateway.upstream.http_errors import Doubted, Greeting, NotSpoken, check_pong, ping_id, read_response, refusal
from gateway.upstream.silence_timeout import SilenceTimeout

_ACCEPT: Final = "application/json, text/event-stream"
_DRAIN_SECONDS: Final = 1.0
"""How long an answered stream may take to end before its connection is given up."""
_REOPEN_SECONDS: Final = (0.0, 0.5, 2.0, 5.0)
"""Pauses before a side stream that ended is opened again."""
_LASTING_SECONDS: Final = 1.0
_SIDE_HEAD_SECONDS: Final = 2.0
"""How long the handshake waits for the head of the side stream; a few servers send it with the first event."""
_RETRY_SECONDS: Final = (0.1, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0)
"""Pauses before a request is picked up again: as many failures in a row are borne as stand here."""
_RESUME_HEAD_SECONDS: Final = 5.0
_RETRY_FIELD_SECONDS: Final = 60.0
"""The longest pause that a server's `retry` field gets."""
_HANDED_KEPT: Final = 4096
_PONG_BYTES: Final = 65_536
_EVENT_ID_CHARACTERS: Final = 1024
_PASSING: Final = (408, 409, 425, 429)
"""What a GET may be answered that is served later: 409 while the server takes the broken stream for an open one."""
_OTHER: Final = (400, 404, 405)
"""How a server of HTTP+SSE may answer `initialize` (2025-11-25 basic/transports, Backwards Compatibility)."""


class _Cut(CallLost):
    """A request's event stream ended or broke before the answer; it may be picked up."""

    def __init__(self, message: str, cursor: str | None, retry_ms: int | None) -> None:
        super().__init__(message)
        self.cursor = cursor
        self.pause_seconds = min((retry_ms or 0) / 1000, _RETRY_FIELD_SECONDS)
        """What the server asks for."""


class _NotYet(CallLost):
    """A GET from a cursor failed in a way that may pass."""


class StreamableChannel(Channel):
    """One session over streamable HTTP."""

    def __init__(self, client: Client, endpoint: Endpoint, tasks: Tasks) -> None:
        self._client = client
        self._endpoint = endpoint
        self._tasks = tasks
        self._fixed: dict[str, str] = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        self._headers = NO_HEADERS
        """Those of the last message that was served: GET and DELETE need a credential too."""
        self._side: asyncio.Task[None] | None = None
        self._closed = False
        self._handed: set[str] = set()
        """Ids of the events of the current request that were handed over, since `_place`."""
        self._place = ""
        """The event id behind which a resumed request is asked for."""
        self._vigil: SilenceTimeout | None = None
        """Set while a request is resumed."""
        self._heard_side = False
        """Whether there was a side stream, which hears_side may only suppose."""
        self._begun = False
        """Whether the reply to the current request has begun."""
        self._is_ready = False
        """Whether `initialized` was accepted; some servers die of a ping before it."""

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin; raises NotSpoken too."""
        for _ in range(2):
            async with self._post(message, headers) as response:
                if response.status in REDIRECTS:
                    self._endpoint.follow(response.headers.get("Location"))
                    continue
                self._note(response, headers)
                try:
                    return await self._initialized(response)
                except (CallLost, Unreachable) as exc:
                    if response.status not in _OTHER:
                        raise
                    raise NotSpoken(exc.message.partition("; the call")[0]) from exc
        raise Unreachable(f"{self._endpoint.where} redirects in a circle; set upstream.url to the final address")

    async def _initialized(self, response: aiohttp.ClientResponse) -> Raw:
        where = self._endpoint.where
        greeting = Greeting(self._endpoint)
        try:
            refused = await self._read(response, greeting.receive, None)
        except SessionLost as exc:
            raise NoHandshake(
                f"{where} answered `initialize` with HTTP {response.status}; check the path of upstream.url"
            ) from exc
        except ValueError as exc:
            raise NotSpoken(f"{where} answered `initialize` with what is no JSON-RPC") from exc
        result = greeting.result(refused)
        self.session_id = response.headers.get(mcp.SESSION_ID)
        if self.session_id is not None:
            self._fixed[mcp.SESSION_ID] = self.session_id
        # Without a session id the old SDKs run stateless: a question is sent, its answer never arrives.
        self.can_ask = self.session_id is not None
        return result

    def suspect(self) -> str:
        """A server that answers with JSON sends nothing until its result is there: a question is swallowed."""
        if not self._begun:
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
        """Take over a session by its id."""
        self._is_ready = True
        self.session_id = session_id
        self._fixed[mcp.SESSION_ID] = session_id
        self._fixed[mcp.PROTOCOL_VERSION] = version

    async def listen(self, version: str, headers: Headers, receive: Receive, lost: Callable[[], None]) -> None:
        """Open the GET stream and keep it open until `close`."""
        self._fixed[mcp.PROTOCOL_VERSION] = version
        if self.session_id is None:
            return
        ready = asyncio.get_running_loop().create_future()
        self._side = self._tasks.start(self._keep_side(headers, receive, lost, ready), "side stream")
        # Not `wait_for`: cancelled in the moment the future completes, it returns as if nothing had been asked of it
        # (Python 3.11), and a call whose client has left would run on.
        _ = await asyncio.wait((ready,), timeout=_SIDE_HEAD_SECONDS)
        if not ready.done():
            self.hears_side = True

    async def _keep_side(
        self, headers: Headers, receive: Receive, lost: Callable[[], None], ready: asyncio.Future[None]
    ) -> None:
        """Hold the GET stream; open it again when it ends, never with a cursor (it may carry another's events)."""
        failures, attempts = 0, 0
        try:
            while failures < len(_REOPEN_SECONDS):
                await asyncio.sleep(_REOPEN_SECONDS[failures])
                started = time.monotonic()
                try:
                    attempts += 1
                    if not await self._hear_side(headers, receive, ready, again=attempts > 1):
                        return  # a server without this stream lives well without it
                except _NotYet:
                    failures += 1
                    continue
                except (UpstreamError, sse.EventTooLarge):
                    pass
                finally:
                    self.hears_side = False
                if not ready.done():
                    ready.set_result(None)
                # One that lasted may be opened again at once, one that did not must not be hammered.
                failures = 0 if time.monotonic() - started > _LASTING_SECONDS else failures + 1
        finally:
            if not ready.done():
                ready.set_result(None)
            if not self._closed:
                if self._heard_side:
                    lost()
                self._tell(opened=False)

    def _tell(self, *, opened: bool) -> None:
        if self.side_changed is not None:
            self.side_changed(opened)

    async def _hear_side(
        self, headers: Headers, receive: Receive, ready: asyncio.Future[None], *, again: bool
    ) -> bool:
        """One GET stream until it ends; whether another may be opened."""
        endpoint = self._endpoint
        newest = self._get_headers(headers)
        async with self._client.exchange("GET", endpoint.url, newest, None, endpoint.where) as response:
            if response.status in REDIRECTS:
                # Not known here yet in a session that another process opened.
                endpoint.follow(response.headers.get("Location"))
                raise _NotYet(f"{endpoint.where} redirected")
            if response.status == 409:
                # The stream of a process that died may still count as open.
                raise _NotYet(f"{endpoint.where} takes another side stream for open")
            if response.status != 200 or response.content_type != "text/event-stream":
                return False
            self.hears_side = self._heard_side = True
            if not ready.done():
                ready.set_result(None)
            if again:
                self._tell(opened=True)
            parser = sse.Parser(self._client.limits.event_bytes)
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    if event.data:
                        _ = hand_over(event.data, receive)
        return True

    def _get_headers(self, headers: Headers) -> dict[str, str]:
        """The headers of a GET; the newest credential that was served is more likely to be good than the call's."""
        fixed = {key: value for key, value in self._fixed.items() if key != "Content-Type"}
        return {**(self._headers or headers), **fixed, "Accept": "text/event-stream"}

    # -- messages -----------------------------------------------------------------------------------------------

    async def request(self, message: bytes, headers: Headers, receive: Receive) -> jsonrpc.Error | Raw | None:
        """POST a request and read its reply until it is answered; picks it up again where the server can do that."""
        self.cursor = None
        if self._handed:
            self._handed.clear()
        endpoint = self._endpoint
        try:
            # Without the context managers of the other requests: this is the hot path.
            self._begun = self.taken = False
            response = await self._client.open("POST", endpoint.url, {**headers, **self._fixed}, message)
            self._begun = True
            try:
                self._note(response, headers)
                self.taken = response.status < 300
                return await self._read(response, receive, message)
            finally:
                response.release()
        except Doubted as exc:
            self.forgotten = await exc.is_proven(self.ping(headers))
            return exc.verdict(is_gone=self.forgotten)
        except _Cut as exc:
            if exc.cursor is None:  # only an id on this stream proves that there is a store
                raise
            cursor, pause_seconds = exc.cursor, exc.pause_seconds
        except FOREIGN as exc:
            raise mapped(exc, endpoint.where) from exc
        await asyncio.sleep(pause_seconds)
        try:
            await self._resume(cursor, headers, receive, _nothing)
        except Refused as exc:
            # The server did take the call: this must not look as if it had not.
            raise CallLost(
                f"{exc.message} when the call's stream was picked up again; the call may have had effects"
            ) from exc
        return None

    async def resume(self, cursor: str, headers: Headers, receive: Receive, attached: Callable[[], None]) -> None:
        """Pick up a request that another process sent."""
        self.cursor = cursor
        self.taken = False
        await self._resume(cursor, headers, receive, attached)

    async def _resume(self, place: str, headers: Headers, receive: Receive, attached: Callable[[], None]) -> None:
        """GET from one place, again and again, until the request is answered."""
        self._place = place
        vigil = self._vigil = SilenceTimeout()
        turns = failures = 0

        def hear(data: bytes) -> bool:
            nonlocal turns
            turns = 0
            vigil.heard()
            return receive(data)

        try:
            while True:
                pause_seconds = 0.0
                try:
                    response = await self._get_again(headers)
                    failures = 0
                    attached()
                    attached = _nothing
                    try:
                        async with vigil.watch():
                            await self._read_events(response, hear, again=True)
                        return
                    finally:
                        vigil.rest()
                        response.release()
                except TimeoutError:
                    vigil.lengthen()
                    continue
                except _NotYet as exc:
                    failures += 1
                    if failures > len(_RETRY_SECONDS):
                        cause = exc.message.partition(";")[0]
                        raise CallLost(
                            f"{cause} when a running call was to be picked up; the call may have had effects"
                        ) from exc
                except _Cut as exc:
                    vigil.lengthen()
                    pause_seconds = exc.pause_seconds
                await asyncio.sleep(max(pause_seconds, _RETRY_SECONDS[min(turns, len(_RETRY_SECONDS) - 1)]))
                turns += 1
        finally:
            self._vigil = None

    async def _get_again(self, headers: Headers) -> aiohttp.ClientResponse:
        """Open the stream of a request from `_place`; the caller releases it. Raises _NotYet, or what is final."""
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(_RESUME_HEAD_SECONDS):
                newest_headers = self._headers or headers
                newest = self._get_headers(headers) | {mcp.LAST_EVENT_ID: self._place}
                response = await self._client.open("GET", endpoint.url, newest, None)
                if response.status == 200 and response.content_type == "text/event-stream":
                    self.taken = self.taken or newest_headers == headers
                    return response
                try:
                    raise await self._refused_resume(response, newest_headers)
                finally:
                    response.release()
        except FOREIGN as exc:
            raise _NotYet(mapped(exc, endpoint.where).message) from exc

    async def _refused_resume(self, response: aiohttp.ClientResponse, headers: Headers) -> CallLost:
        """Why there is no stream to pick up; raises Refused."""
        status, where = response.status, self._endpoint.where
        if status < 300 or status in _PASSING or status >= 500:
            return _NotYet(f"{where} answered HTTP {status} to GET with Last-Event-ID")
        try:
            _ = await refusal(response, self._endpoint)
        except Doubted as exc:
            if await exc.is_proven(self.ping(headers), of_get=True):
                return CallGone(
                    f"{where} does not know the session of a running call any more (HTTP {status}), it was probably "
                    "restarted; the call may have had effects: check them before calling again"
                )
        except CallLost:
            pass
        return CallLost(f"{where} cannot pick up a call (HTTP {status}); the call may have had effects")

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        try:
            async with asyncio.timeout(self._client.timeouts.answer_seconds), self._post(message, headers) as response:
                if response.status >= 300:
                    raise await self._refused(response, headers)
                self._is_ready = True
                self._note(response, headers)
                if self._vigil is not None:
                    self._vigil.answered()
                await response.read()
        except TimeoutError as exc:
            raise CallLost(
                f"{self._endpoint.where} did not accept a message within timeouts.answer_seconds; the call may have "
                "had effects"
            ) from exc

    async def _refused(self, response: aiohttp.ClientResponse, headers: Headers) -> CallLost:
        """Why the server did not take an answer or a notification; raises what `refusal` raises."""
        try:
            said = await refusal(response, self._endpoint)
        except Doubted as exc:
            if not self._is_ready:
                raise
            said = exc.verdict(is_gone=await exc.is_proven(self.ping(headers)))
        why = self._endpoint.quoted(said.message) if isinstance(said, jsonrpc.Error) else f"HTTP {response.status}"
        return CallLost(f"{self._endpoint.where} refused a message: {why}")

    async def ping(self, headers: Headers) -> None:
        """POST a `ping`; the request that may be under way is not touched."""
        message = jsonrpc.request(ping_id(), mcp.PING, {})
        try:
            async with asyncio.timeout(self._client.timeouts.answer_seconds):
                if not await self._ping(message, headers) and not await self._ping(message, headers):
                    raise Unreachable(f"{self._endpoint.where} redirects in a circle")
        except TimeoutError as exc:
            raise CallLost(f"{self._endpoint.where} did not answer a ping within timeouts.answer_seconds") from exc

    async def _ping(self, message: bytes, headers: Headers) -> bool:
        """POST a ping once; False where it was redirected, to an address that this process did not know yet."""
        endpoint = self._endpoint
        async with self._post(message, headers) as response:
            if response.status in REDIRECTS:
                endpoint.follow(response.headers.get("Location"))
                return False
            if response.status >= 300:
                check_pong(await refusal(response, endpoint, message), endpoint.where)
            self._note(response, headers)
            await self._hear_pong(response)
        return True

    async def _hear_pong(self, response: aiohttp.ClientResponse) -> None:
        """Read the answer: a server whose stream was dropped would say it on the side stream."""
        parser = sse.Parser(_PONG_BYTES)
        try:
            async for chunk in response.content.iter_any():
                if any(event.data for event in parser.feed(chunk)):
                    return
        except sse.EventTooLarge:
            response.close()

    def _note(self, response: aiohttp.ClientResponse, headers: Headers) -> None:
        """Keep the newest headers that the upstream served, for what is sent without a request: GET and DELETE."""
        if response.status < 300:
            self._headers = headers

    def _post(self, message: bytes, headers: Headers) -> Exchange:
        endpoint = self._endpoint
        return self._client.exchange("POST", endpoint.url, {**headers, **self._fixed}, message, endpoint.where)

    async def _read(
        self, response: aiohttp.ClientResponse, receive: Receive, sent: bytes | None
    ) -> jsonrpc.Error | Raw | None:
        if response.status >= 300:
            return await refusal(response, self._endpoint, sent)
        if response.content_type == "text/event-stream":
            await self._read_events(response, receive)
            return None
        body = await read_response(response, self._client.limits.event_bytes, self._endpoint.where)
        if not body or not hand_over(body, receive):
            raise CallLost(
                f"{self._endpoint.where} answered HTTP {response.status} without a result; the call may have had "
                "effects"
            )
        return None

    async def _read_events(self, response: aiohttp.ClientResponse, receive: Receive, *, again: bool = False) -> None:
        """Hand over events until the request is answered; `again` leaves out those that were handed over before."""
        parser = sse.Parser(self._client.limits.event_bytes)
        try:
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    if event.id is not None and self._repeats(event.id) and again:
                        continue
                    if event.data and hand_over(event.data, receive):
                        if not again:  # those stay open after the answer, and nothing may be waited for after it
                            await self._drain(response)
                        return
            cut = f"{self._endpoint.where} ended the call's stream without a result; the call may have had effects"
        except FOREIGN as exc:
            cut = mapped(exc, self._endpoint.where).message
        except sse.EventTooLarge as exc:
            raise CallLost(
                f"{self._endpoint.where} sent an event larger than limits.event_bytes; the call may have had effects"
            ) from exc
        raise _Cut(cut, self.cursor, parser.retry_ms)

    def _repeats(self, event_id: str) -> bool:
        """Whether this event was handed over before; if not, the cursor moves on to it."""
        if not 0 < len(event_id) <= _EVENT_ID_CHARACTERS or not event_id.isprintable():
            self.cursor = None  # taken back by the server, or nothing that a header (and memory, 4096 times) can carry
            return False
        if event_id in self._handed:
            return True
        if len(self._handed) >= _HANDED_KEPT:
            self._handed.clear()
            self._place = event_id
        self._handed.add(event_id)
        self.cursor = event_id
        return False

    async def _drain(self, response: aiohttp.ClientResponse) -> None:
        """Read on to the end, so that the connection can be used again; some servers never end the stream."""
        if response.content.at_eof():
            return
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not response.content.at_eof():
                    await response.content.readany()
        except (TimeoutError, aiohttp.ClientError):
            response.close()

    async def close(self, *, end_session: bool) -> None:
        """Close the streams, and DELETE the session if it may be ended."""
        self._closed = True
        if end_session and self.session_id is not None:
            await self._delete()
        if self._side is not None:
            self._side.cancel()

    async def _delete(self) -> None:
        endpoint, headers = self._endpoint, {**self._headers, **self._fixed}
        try:
            async with (
                asyncio.timeout(self._client.timeouts.cancel_seconds),
                self._client.exchange("DELETE", endpoint.url, headers, None, endpoint.where) as response,
            ):
                await response.read()
        except (TimeoutError, UpstreamError):
            pass  # the server will forget the session by itself


def _nothing() -> None:
    """For who does not want to know."""
