"""A modern server as the mirror uses it: over streamable HTTP, or a child process."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from yarl import URL

from gateway.bridge.upstream_call import BUG
from gateway.http.upstream_client import REDIRECTS
from gateway.http_client.errors import ListenerFailed, RequestFailed
from gateway.http_client.pending_request import PendingRequest  # noqa: TC001  (one import style)
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import jsonrpc, mcp, reply_messages, sse
from gateway.protocol.errors import CallLost, GatewayError, Unreachable, UpstreamError
from gateway.protocol.header_mismatch import encode_value
from gateway.routes.live_route import LiveRoute
from gateway.runtime.tasks import Tasks
from gateway.runtime.throttle import Arrival  # noqa: TC001  (one import style)
from gateway.telemetry import NestedOutcome
from gateway.upstream.channel import Headers
from gateway.upstream.children.modern_stdio import ModernStdio
from gateway.upstream.http.http_errors import refused

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0
"""How long a server may take for a list, its introduction or an acknowledgement; a child may have to start first."""
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


class Listener(Protocol):
    """What hears the reply to one request."""

    def on_message(self, data: bytes, /) -> None:
        """A message is here: a notification, or the response, which is the last. Raises ValueError for a bad one."""

    def on_failed(self, error: GatewayError, /) -> None:
        """The response will not come."""


class Pending(Protocol):
    """A request in flight."""

    def abort(self) -> None:
        """Give the request up, which cancels it at the server. The listener hears nothing more."""


class PendingTask(NamedTuple):
    """A request whose reply a task waits for (`Pending`)."""

    task: asyncio.Task[None]

    def abort(self) -> None:
        """See `Pending`."""
        if self.task is not asyncio.current_task():
            _ = self.task.cancel()


class ModernServer(Protocol):
    """Sends requests of 2026-07-28 to one server."""

    reads_headers: ClassVar[bool]
    """Whether headers must repeat the annotated arguments of a tool, whose schema has to be known for that."""

    def begin(self, request: Outgoing, listener: Listener) -> Pending:
        """Send a request. No method of the listener is called before this returns."""


async def ask(server: ModernServer, request: Outgoing) -> Raw | jsonrpc.Error:
    """Send a request and wait for its response; raises GatewayError if there is none."""
    waiting = _Waiting()
    pending = server.begin(request, waiting)
    try:
        return await in_time(waiting.response, request.method)
    finally:
        pending.abort()


async def in_time(answer: asyncio.Future[T], method: str) -> T:
    """Wait for what a server must not take long for; raises CallLost."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer
    except TimeoutError as exc:
        raise CallLost(f"The server did not answer {method} in {ANSWER_SECONDS:g} s") from exc


class _Waiting:
    """Hears one response, for a coroutine that awaits it."""

    def __init__(self) -> None:
        self.response: asyncio.Future[Raw | jsonrpc.Error] = asyncio.get_running_loop().create_future()

    def on_message(self, data: bytes, /) -> None:
        message = jsonrpc.message(data)
        if self.response.done():
            return
        if isinstance(message.error, Raw):
            self.response.set_result(jsonrpc.error(message.error))
        elif isinstance(message.result, Raw):
            self.response.set_result(message.result)

    def on_failed(self, error: GatewayError, /) -> None:
        if not self.response.done():
            self.response.set_exception(error)


class HttpServer(msgspec.Struct, frozen=True, eq=False):
    """A modern server over streamable HTTP."""

    reads_headers: ClassVar[bool] = True
    live: LiveRoute

    def begin(self, request: Outgoing, listener: Listener) -> Pending:
        """See `ModernServer`."""
        return _Reply(self.live, request, listener).begin()


class StdioServer(msgspec.Struct, frozen=True, eq=False):
    """A modern server that is a child process, which all requests share."""

    reads_headers: ClassVar[bool] = False
    modern: ModernStdio
    tasks: Tasks

    def begin(self, request: Outgoing, listener: Listener) -> Pending:
        """See `ModernServer`."""
        return PendingTask(self.tasks.start(self._run(request.body, listener), "modern request"))

    async def _run(self, body: bytes, listener: Listener) -> None:
        try:
            sending = self.modern.request(body, listener.on_message)
            del body  # it is sent once, and a call need not keep it
            await sending
        except GatewayError as exc:
            listener.on_failed(exc)
        except ValueError as exc:
            listener.on_failed(CallLost(f"The server sent a malformed message ({exc}); the call may have had effects"))
        except Exception:  # the outermost edge of the request's task, where it is counted
            listener.on_failed(CallLost(BUG))
            raise


class _Reply:
    """One request over HTTP with its reply (`Pending`, `ReplyListener`)."""

    def __init__(self, live: LiveRoute, request: Outgoing, listener: Listener) -> None:
        assert live.upstream.era is not None, "an upstream without a command has a URL"
        self._live = live
        self._client, self._endpoint = live.upstream.client, live.upstream.era.endpoint
        self._request = request
        self._listener = listener
        self._silence = live.deadlines.idle
        """Limits how long a reply may be silent."""
        self._pending: PendingRequest
        self._head: ReplyHead
        self._parser: sse.Parser | None = None
        self._body = bytearray()
        self._arrival: Arrival | None = None
        """While a large message is arriving."""
        self._is_redirected = False
        self._is_over = False

    def begin(self) -> "_Reply":
        request = self._request
        headers = {
            **request.headers,
            **request.param_headers,
            "Accept": _ACCEPT,
            "Content-Type": "application/json",
            **request.repeated,
        }
        self._begin(self._endpoint.url, headers)
        return self

    def _begin(self, url: URL, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._pending = self._client.begin("POST", url, headers, self._request.body, self)
        self._restart()

    def abort(self) -> None:
        self._end()
        self._pending.abort()

    def _end(self) -> None:
        self._is_over = True
        self._silence.disarm(self)
        self._release()

    def _release(self) -> None:
        """Hold no part of a message any more."""
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None

    def _hold(self, size: int) -> None:
        """Read on only if there is room for more of a message, of which `size` bytes are here."""
        if not self._is_over:
            self._arrival = self._client.arriving.arriving(self._arrival, size, self)

    def pause_reading(self) -> None:
        """See `throttle.Reader`. It is not the server that is silent then."""
        self._silence.disarm(self)
        self._pending.pause_reading()

    def resume_reading(self) -> None:
        """See `throttle.Reader`."""
        self._restart()
        self._pending.resume_reading()

    def _restart(self) -> None:
        if not (self._request.is_long or self._is_over):
            self._silence.arm(self, self._silent)

    def _silent(self) -> None:
        self._pending.abort()
        self._lose("was silent for timeouts.idle_seconds")

    def _lose(self, why: str) -> None:
        self._fail(CallLost(f"{self._endpoint.where} {why}; the call may have had effects"))

    def _fail(self, error: GatewayError) -> None:
        if not self._is_over:
            self._end()
            if isinstance(error, UpstreamError):
                self._live.process.metrics.upstream_failed(self._live.route.path, error.reason)
            self._live.upstream.health.note(error)
            self._listener.on_failed(error)

    # -- from the connection ------------------------------------------------------------------------------------

    def on_head(self, head: ReplyHead, /) -> None:
        self._head = head
        self._restart()
        if head.status < 300:
            self._request = replace(self._request, body=b"")  # it is not sent again, so a call need not keep it
        if head.status < 300 and head.content_type == "text/event-stream":
            self._parser = sse.Parser(self._client.limits.event_bytes)

    def on_body(self, data: bytes, /) -> None:
        self._restart()
        if self._parser is None:
            self._body += data
            if len(self._body) > self._client.limits.event_bytes:
                self._too_large()
            else:
                self._hold(len(self._body))
            return
        try:
            events = self._parser.feed(data)
        except sse.EventTooLarge:
            self._too_large()
            return
        for event in events:
            if event.data and not self._is_over:
                self._take(event.data)
        self._hold(self._parser.unfinished_bytes)

    def _too_large(self) -> None:
        self._pending.abort()
        self._lose("sent a message larger than limits.event_bytes")

    def _take(self, data: bytes) -> None:
        """Hand a message over; the response ends the reply, even if the stream stays open.

        The response to another request, which a server or a proxy wrote here, is skipped.
        """
        try:
            message = jsonrpc.message(data)
            if message.method is not None and isinstance(message.id, Raw):
                # Modern servers send no requests, and nobody gets this one.
                metrics, path = self._live.process.metrics, self._live.route.path
                metrics.nested_request(path, message.method, NestedOutcome.UNSOLICITED)
                return
            if reply_messages.is_response(message):
                if not reply_messages.is_answer(message, self._request.id):
                    return
                self._end()
                # If the server ends the stream now, its connection carries the next request.
                self._pending.end_within(self._live.process.stream_times.drain_seconds)
            self._listener.on_message(data)
        except (ValueError, RecursionError) as exc:
            self._is_over = False
            self._pending.abort()
            self._lose(f"sent a malformed message ({self._endpoint.quoted(str(exc))})")

    def on_end(self) -> None:
        if self._is_over:
            return
        self._release()
        if self._parser is not None:
            self._lose("ended its reply without a response")
            return
        status = self._head.status
        if status in REDIRECTS and not self._is_redirected:
            self._follow()
        elif status in (401, 403):
            self._fail(refused(self._endpoint, status, self._head.texts()))
        elif self._body.lstrip().startswith(b"{"):
            self._take(bytes(self._body))
            if not self._is_over:
                self._pending.distrust()
                self._lose(f"answered HTTP {status} without the JSON-RPC response to this request")
        else:
            self._lose(f"answered HTTP {status} without a JSON-RPC response")

    def _follow(self) -> None:
        """Send the request to the address that the server names: it has not run it."""
        self._is_redirected = True
        try:
            self._endpoint.follow(self._head.text(b"location"))
        except Unreachable as exc:
            self._fail(exc)
        else:
            self._body.clear()
            self._begin(self._endpoint.url, self._headers)

    def on_failed(self, failure: RequestFailed, /) -> None:
        self._silence.disarm(self)
        self._release()
        if not isinstance(failure, ListenerFailed):
            self._fail(failure.mapped(self._endpoint.where))
        else:
            self._fail(CallLost(f"{self._endpoint.where}: the gateway could not read its reply"))
