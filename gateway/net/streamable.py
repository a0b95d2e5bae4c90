"""Streamable HTTP of 2025-03-26 to 2025-11-25 towards one legacy server.

Source: specification 2025-11-25 basic/transports (Streamable HTTP). What real servers do beyond it is measured and
noted where it matters: session errors as plain 400, redirects of `/mcp` to `/mcp/`, streams that stay open after the
answer, an `initialize` answered by JSON or by SSE.
"""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw
from yarl import URL

from gateway.config import Limits, Timeouts
from gateway.core import jsonrpc, mcp, sse
from gateway.errors import CallLost, Refused, SessionLost, Unreachable, UpstreamError
from gateway.net.tasks import Tasks
from gateway.net.upstream import NO_HEADERS, Channel, Headers, Receive

_ACCEPT: Final = "application/json, text/event-stream"
_SESSION_WORDING: Final = re.compile(rb"session", re.IGNORECASE)
_KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s; a connection that is older may close under a request, and a
`tools/call` must not be sent twice."""
_DRAIN_SECONDS: Final = 1.0
"""How long an answered stream may take to end before its connection is given up."""
_REOPEN_SECONDS: Final = (0.0, 0.5, 2.0, 5.0)
"""Pauses before a side stream that ended is opened again."""
_LASTING_SECONDS: Final = 1.0
_SIDE_HEAD_SECONDS: Final = 2.0
"""How long the handshake waits for the head of the side stream; a few servers send it with the first event."""
_ERROR_BODY_BYTES: Final = 65_536
_READ_BYTES: Final = 65_536
FOREIGN: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What aiohttp raises; none of it leaves this file."""


class Client:
    """The process's one HTTP client towards upstreams."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Upstream streams live as long as a person thinks; every wait has its own deadline instead.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_READ_BYTES,
            headers={"Accept-Encoding": "identity", "User-Agent": "mrtr-gateway"},
            skip_auto_headers=("Content-Type",),
        )

    def exchange(self, method: str, url: URL, headers: dict[str, str], body: bytes | None, where: str) -> "_Exchange":
        """One HTTP request, to be entered for its response."""
        context = self._http.request(method, url, data=body, headers=headers, allow_redirects=False)
        return _Exchange(context, where)

    async def open(self, method: str, url: URL, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        """One HTTP request, whose response the caller releases; raises one of FOREIGN."""
        return await self._http.request(method, url, data=body, headers=headers, allow_redirects=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


class _Exchange:
    """One HTTP request; foreign exceptions become Unreachable (nothing was sent) or CallLost.

    A class, because two generators for every request are a measurable part of a plain call.
    """

    __slots__ = ("_context", "_where")

    def __init__(self, context: AbstractAsyncContextManager[aiohttp.ClientResponse], where: str) -> None:
        self._context = context
        self._where = where

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            return await self._context.__aenter__()
        except FOREIGN as exc:
            raise _mapped(exc, self._where) from exc

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, exc, traceback)
        if isinstance(exc, FOREIGN):
            raise _mapped(exc, self._where) from exc


def _mapped(exc: BaseException, where: str) -> UpstreamError:
    """What a foreign exception means to the caller."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return Unreachable(
            f"{where} cannot be reached ({exc.strerror or exc.os_error}); check that the server runs and "
            "that upstream.url is right"
        )
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return Unreachable(
            f"{where} did not accept a connection within timeouts.connect_seconds; check address and firewall"
        )
    return CallLost(f"{where} broke the connection ({type(exc).__name__}); the request may have had effects")


class Endpoint:
    """One upstream URL and what was learnt about it; shared by all its channels."""

    def __init__(self, route: str, url: str) -> None:
        self.url = URL(url)
        self.where = f"The upstream {url} of route {route}"

    def follow(self, location: str | None) -> None:
        """Take a redirect within the origin (`/mcp` to `/mcp/`); anything else is refused.

        Credentials and bodies must not travel to another origin because an upstream says so.
        """
        target = self.url.join(URL(location)) if location else self.url
        if location is None or target.origin() != self.url.origin():
            raise Unreachable(f"{self.where} redirects to another origin; set upstream.url to the final address")
        self.url = target


class StreamableChannel(Channel):
    """One session over streamable HTTP."""

    def __init__(self, client: Client, endpoint: Endpoint, limits: Limits, timeouts: Timeouts, tasks: Tasks) -> None:
        self._client = client
        self._endpoint = endpoint
        self._limits = limits
        self._timeouts = timeouts
        self._tasks = tasks
        self._fixed: dict[str, str] = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        self._headers = NO_HEADERS
        """Those of the last message that was served: GET and DELETE need a credential too."""
        self._side: asyncio.Task[None] | None = None
        self._closed = False

    # -- handshake ----------------------------------------------------------------------------------------------

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Send `initialize`, following one redirect within the origin."""
        for _ in range(2):
            async with self._post(message, headers) as response:
                if response.status in (301, 302, 303, 307, 308):
                    self._endpoint.follow(response.headers.get("Location"))
                    continue
                self._note(response, headers)
                return await self._initialized(response)
        raise Unreachable(f"{self._endpoint.where} redirects in a circle; set upstream.url to the final address")

    async def _initialized(self, response: aiohttp.ClientResponse) -> Raw:
        answers: list[Raw] = []

        def receive(data: bytes) -> bool:
            opened = jsonrpc.message(data)
            if isinstance(opened.error, Raw):
                said = jsonrpc.error(opened.error).message
                raise Unreachable(f"{self._endpoint.where} refused `initialize`: {said[:200]}")
            if isinstance(opened.result, Raw):
                answers.append(opened.result)
            return bool(answers)

        try:
            refusal = await self._read(response, receive)
            if refusal is not None:
                raise Unreachable(f"{self._endpoint.where} refused `initialize`: {refusal.message[:200]}")
        except SessionLost as exc:
            raise Unreachable(
                f"{self._endpoint.where} answered `initialize` with HTTP {response.status}; check the path of "
                "upstream.url"
            ) from exc
        except ValueError as exc:
            raise Unreachable(f"{self._endpoint.where} answered `initialize` with what is no JSON-RPC") from exc
        self.session_id = response.headers.get(mcp.SESSION_ID)
        if self.session_id is not None:
            self._fixed[mcp.SESSION_ID] = self.session_id
        # Without a session id the old SDKs run stateless: a question is sent, its answer never arrives.
        self.can_ask = self.session_id is not None
        return answers[0]

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
        failures, was_open = 0, False
        try:
            while failures < len(_REOPEN_SECONDS):
                await asyncio.sleep(_REOPEN_SECONDS[failures])
                started = time.monotonic()
                try:
                    if not await self._hear_side(headers, receive, ready):
                        return  # a server without this stream lives well without it
                    was_open = True
                except (UpstreamError, sse.EventTooLarge):
                    pass
                finally:
                    self.hears_side = False
                    if not ready.done():
                        ready.set_result(None)
                # One that lasted may be opened again at once, one that did not must not be hammered.
                failures = 0 if time.monotonic() - started > _LASTING_SECONDS else failures + 1
        finally:
            if was_open and not self._closed:
                lost()

    async def _hear_side(self, headers: Headers, receive: Receive, ready: asyncio.Future[None]) -> bool:
        """One GET stream until it ends; whether another may be opened."""
        fixed = {key: value for key, value in self._fixed.items() if key != "Content-Type"}
        fixed["Accept"] = "text/event-stream"
        endpoint = self._endpoint
        newest = {**(self._headers or headers), **fixed}
        async with self._client.exchange("GET", endpoint.url, newest, None, endpoint.where) as response:
            if response.status != 200 or response.content_type != "text/event-stream":
                return False
            self.hears_side = True
            if not ready.done():
                ready.set_result(None)
            parser = sse.Parser(self._limits.event_bytes)
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    if event.data:
                        receive(event.data)
        return True

    # -- messages -----------------------------------------------------------------------------------------------

    async def request(self, message: bytes, headers: Headers, receive: Receive) -> jsonrpc.Error | None:
        """POST a request and read its reply until it is answered."""
        self.cursor = None
        endpoint = self._endpoint
        try:
            # Without the context managers of the other requests: this is the hot path.
            response = await self._client.open("POST", endpoint.url, {**headers, **self._fixed}, message)
            try:
                self._note(response, headers)
                return await self._read(response, receive)
            finally:
                response.release()
        except FOREIGN as exc:
            raise _mapped(exc, endpoint.where) from exc

    async def send(self, message: bytes, headers: Headers) -> None:
        """POST an answer or a notification; done when the server accepts it."""
        try:
            async with asyncio.timeout(self._timeouts.answer_seconds), self._post(message, headers) as response:
                if response.status >= 300 and (refusal := await self._refusal(response)) is not None:
                    raise CallLost(f"{self._endpoint.where} refused a message: {refusal.message[:200]}")
                self._note(response, headers)
                await response.read()
        except TimeoutError as exc:
            raise CallLost(
                f"{self._endpoint.where} did not accept a message within timeouts.answer_seconds; the call may have "
                "had effects"
            ) from exc

    def _note(self, response: aiohttp.ClientResponse, headers: Headers) -> None:
        """Keep the newest headers that the upstream served, for what is sent without a request: GET and DELETE."""
        if response.status < 300:
            self._headers = headers

    def _post(self, message: bytes, headers: Headers) -> _Exchange:
        endpoint = self._endpoint
        return self._client.exchange("POST", endpoint.url, {**headers, **self._fixed}, message, endpoint.where)

    async def _read(self, response: aiohttp.ClientResponse, receive: Receive) -> jsonrpc.Error | None:
        if response.status >= 300:
            return await self._refusal(response)
        if response.content_type == "text/event-stream":
            await self._read_events(response, receive)
            return None
        body = await self._body(response, self._limits.event_bytes)
        if not body or not self._receive_body(body, receive):
            raise CallLost(
                f"{self._endpoint.where} answered HTTP {response.status} without a result; the call may have had "
                "effects"
            )
        return None

    def _receive_body(self, body: bytes, receive: Receive) -> bool:
        if body[:1] == b"{" or body.lstrip()[:1] != b"[":
            return receive(body)
        # 2025-03-26 allowed batches as a reply.
        answered = False
        try:
            batch = jsonrpc.decode(body, type=list[Raw])
        except ValueError as exc:
            raise CallLost(
                f"{self._endpoint.where} sent a batch that is no JSON; the call may have had effects"
            ) from exc
        for item in batch:
            answered = receive(bytes(item)) or answered
        return answered

    async def _read_events(self, response: aiohttp.ClientResponse, receive: Receive) -> None:
        parser = sse.Parser(self._limits.event_bytes)
        try:
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    self.cursor = event.id or self.cursor
                    if event.data and receive(event.data):
                        await self._drain(response)
                        return
        except sse.EventTooLarge as exc:
            raise CallLost(
                f"{self._endpoint.where} sent an event larger than limits.event_bytes; the call may have had effects"
            ) from exc
        raise CallLost(
            f"{self._endpoint.where} ended the call's stream without a result; the call may have had effects"
        )

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

    async def _body(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        if response.content_length is not None and response.content_length <= limit:
            return await response.read()
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise CallLost(
                    f"{self._endpoint.where} sent a body larger than limits.event_bytes; the call may have had effects"
                )
        return bytes(body)

    async def _refusal(self, response: aiohttp.ClientResponse) -> jsonrpc.Error | None:
        """The JSON-RPC error of an HTTP refusal; raises what any other refusal means."""
        status, where = response.status, self._endpoint.where
        body = await self._body(response, _ERROR_BODY_BYTES)
        if status in (401, 403):
            raise Refused(
                f"{where} refused the credentials (HTTP {status})",
                status=status,
                challenge=response.headers.get("WWW-Authenticate"),
            )
        if status == 404 or (status == 400 and _SESSION_WORDING.search(body)):
            raise SessionLost(f"{where} does not know its session any more (HTTP {status})")
        error = _json_error(body)
        if error is not None and status < 500:
            return error
        said = error.message[:200] if error is not None else "no JSON-RPC error"
        raise CallLost(f"{where} answered HTTP {status} ({said}); the call may have had effects")

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
                asyncio.timeout(self._timeouts.cancel_seconds),
                self._client.exchange("DELETE", endpoint.url, headers, None, endpoint.where) as response,
            ):
                await response.read()
        except (TimeoutError, UpstreamError):
            pass  # the server will forget the session by itself


def _json_error(body: bytes) -> jsonrpc.Error | None:
    try:
        opened = jsonrpc.message(body)
    except (ValueError, msgspec.MsgspecError):
        return None
    return jsonrpc.error(opened.error) if isinstance(opened.error, Raw) else None
