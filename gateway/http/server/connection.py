"""One connection of a listener: its requests one after the other, in one task.

Rule 1: whatever a client does, the connection ends: half a head, an idle connection, a body that nobody wants and a
reply that is not read have deadlines.
Rule 2: what it receives ahead of a handler, and what its client does not read, is in the budgets of the process.
Rule 3: a malformed request is answered in its turn with a bare status, and nothing behind it is parsed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol, cast

from yarl import URL

from gateway.http.server.known_heads import KnownHeads
from gateway.http.server.request import NO_HEADERS, BodyBroken, HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.request_parser import Malformed, RequestParser
from gateway.http.server.response import Response, TextResponse, json_response
from gateway.http.server.traffic import Traffic
from gateway.http.server.wire import Wire
from gateway.runtime.budget import Share  # noqa: TC001  (one import style; it costs nothing here)
from gateway.runtime.pieces import PIECE_BYTES, Pieces, Turn
from gateway.telemetry import Event, Malformation, get_logger

log = get_logger()

_PIPELINED: Final = 32
"""Requests that wait for the one before; no more are parsed."""
_IDLE_SECONDS: Final = 75.0
"""How long a connection stays open after a reply."""
_UNWANTED_SECONDS: Final = 10.0
"""How long the rest of a body is read that its handler did not want."""
_AHEAD_COST: Final = 2
"""Each header of half a head is kept twice, as it came and as it was parsed."""

_FAILED: Final = "500 Internal Server Error\n"
_MALFORMED: Final = "400 Bad Request\n"

Handler = Callable[[HttpRequest], Awaitable[Response]]
"""Serves one request; what it raises is a bug, unless it is a ConnectionError."""


class Begun(Protocol):
    """A request that no coroutine serves, until it is answered or the task asks for its `rest`."""

    def rest(self) -> Awaitable[Response]:
        """Serve the rest; has to be awaited at once."""

    def leave(self) -> None:
        """The client has left."""


Begin = Callable[[HttpRequest, bytes, "Connection"], Begun | None]
"""Begins a request whose body is here, and that `Connection.reply` answers; returns None if a handler has to."""
_READ: Final = RequestBody(is_complete=True)
"""The body of such a request."""


class Service:
    """What the connections of one listener share."""

    def __init__(self, handler: Handler, traffic: Traffic, begin: Begin | None = None) -> None:
        self.handler = handler
        self.begin = begin
        self.traffic = traffic
        self.heads = KnownHeads()
        self.connections: dict[Connection, None] = {}
        self.is_leaving = False
        """Whether each connection ends with its next reply."""
        self.is_closed = False
        """Whether connections are closed as soon as they are made."""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    __slots__ = (
        "_ahead",
        "_begun",
        "_current",
        "_head_timer",
        "_idle_timer",
        "_idle_until",
        "_is_finishing",
        "_is_malformed",
        "_loop",
        "_more",
        "_pieces",
        "_queue",
        "_requests",
        "_rest",
        "_service",
        "is_serving",
        "task",
        "wire",
    )

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.wire: Wire
        self._requests: RequestParser | None = RequestParser(self._take_head, service.heads)
        self._queue: deque[HttpRequest] = deque()
        """Requests whose heads are here, and that wait for the one before."""
        self._is_malformed = False
        """Whether a malformed request comes behind them."""
        self._current: HttpRequest | None = None
        """The request that is served."""
        self._begun: Begun | None = None
        """That request, as long as no coroutine serves it."""
        self.task: asyncio.Task[None] | None = None
        """What serves the requests, from the first one on."""
        self.is_serving = False
        """Whether it has any to serve."""
        self._more: asyncio.Future[None]
        """What it waits for if not."""
        self._ahead: Share | None = None
        """Bytes that no handler reads yet: a part of a head, or what a client sent before its reply was complete."""
        self._rest = b""
        """What is not parsed, because too many requests wait."""
        self._pieces: Pieces | None = None
        """While a packet is parsed that takes long."""
        self._is_finishing = False
        """Whether a reply is being written that no handler watches."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_until = 0.0

    # -- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the deadline of the first head, unless there are too many connections or the listener has closed."""
        out = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio.Transport
        service = self._service
        if service.is_closed or len(service.connections) >= service.traffic.limits.value.connections:
            self._requests = None
            out.abort()
            return
        service.connections[self] = None
        self.wire = Wire(out, service.traffic.sending, service.traffic.timeouts)
        self.wire.is_last = service.is_leaving
        # Without a threshold, the transport tells as soon as the client is behind, and when it is not any more. Over
        # TLS, uvloop tells so at once.
        out.set_write_buffer_limits(high=1, low=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those that no handler reads yet."""
        is_waiting = self.is_serving
        is_ahead = not is_waiting or self._is_ahead()
        if self._pieces is None:
            self._take(data)
        else:
            self._pieces.take(data)
        is_kept = is_waiting or self.wire.is_behind or not (self._queue or self._begun)
        if is_ahead and is_kept and self._requests is not None and data:
            self._ahead = self._ahead or self._service.traffic.bodies.budget.share(self.wire.abort)
            self._ahead.hold(self._ahead.used + _AHEAD_COST * len(data))
        # No request is in flight and none is complete, so this is part of a head.
        if not self.is_serving:
            self._watch_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, _: BaseException | None) -> None:
        """End what the connection still waited for."""
        if self._requests is None:
            return
        _ = self._service.connections.pop(self, None)
        for timer in (self._head_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = None
        if self._pieces is not None:
            self._pieces.drop()
        self.wire.lost()
        if self._ahead is not None:
            self._ahead.release()
        self._ahead = self._requests = self._pieces = None  # the parser refers to this
        self._rest = b""
        self._queue.clear()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.leave()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """The client has not read everything."""
        self.wire.fell_behind()

    def resume_writing(self) -> None:
        """The client has read everything."""
        self.wire.caught_up()

    # -- for the listener ---------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply has not reached the kernel yet."""
        return self._is_finishing or self.wire.is_writing

    def close(self) -> None:
        """Close the connection once its requests are served; the service is closed."""
        self.wire.is_last = True
        self.serve_rest()  # the listener waits for tasks
        if not self.is_serving:
            if self.task is not None:
                _ = self.task.cancel()
            self.wire.end()

    # -- for a request that is served without the task ------------------------------------------------------------

    def reply(self, body: bytes) -> bool:
        """Answer the request that was begun with JSON; returns False if that is for the task."""
        wire, http = self.wire, self._current
        if self._begun is None or http is None or wire.is_last or wire.is_behind or self._is_malformed:
            return False
        self._begun, self._is_finishing = None, True
        try:
            wire.write(json_response(http, body))
        except ConnectionError:
            self._replied()  # its end will be told soon
            return True
        if self.wire.is_behind:
            self._have_served()
            return True
        self._replied()
        self.is_serving = False
        if self._queue:
            self._have_served()
        return True

    def serve_rest(self) -> None:
        """Have the task serve the rest of that request."""
        if self._begun is not None:
            self._have_served()

    # -- parsing ------------------------------------------------------------------------------------------------

    def _is_ahead(self) -> bool:
        """Whether no handler reads what arrives now."""
        request, parser = self._current, self._requests
        if parser is None:
            return False
        if parser.body is None:
            return True
        return len(self._queue) > 1 if request is None else parser.body is not request.body

    def _take(self, data: bytes) -> None:
        """Parse bytes as far as there is room for requests."""
        while data and self._requests is not None and not self._is_malformed:
            if len(self._queue) >= _PIPELINED:
                if not self._rest:
                    self.wire.pause_reading()
                self._rest += data
                return
            if len(data) > PIECE_BYTES and self._requests.is_costly:
                pieces = self._pieces = Pieces(self._take, self.wire.pause_reading, self._read_on)
                pieces.take(data)
                if not pieces.is_waiting:
                    self._pieces = None
                return
            try:
                data = self._requests.feed(data)
            except Malformed as exc:
                self._service.traffic.malformed(exc.kind, self.wire.remote)
                if exc.kind is Malformation.BODY:
                    return  # its request has one reply, that of its handler
                self._is_malformed = True
                self._serve_soon()

    def _read_on(self) -> None:
        self._pieces = None
        self.wire.resume_reading()

    def _take_head(self, head: ReceivedHead, whole: bytes) -> RequestBody:
        """The head of a request is here, perhaps with its whole body."""
        begin = self._service.begin
        if whole and begin is not None and not (self.is_serving or self._ahead or self.wire.is_last):
            http = HttpRequest(head, _READ, self.wire)
            try:
                begun = begin(http, whole, self)
            except Exception:  # the outermost edge of such a request, which may have been sent: it is not served again
                self._service.traffic.metrics.task_failures.inc()
                log.exception(Event.TASK_FAILED, task="begin a request")
                self.wire.abort()
                return _READ
            if begun is not None:
                self._begun, self._current, self.is_serving, self.wire.has_written = begun, http, True, False
                return _READ
        body = RequestBody(self.wire, is_complete=True, parts=[whole]) if whole else RequestBody(self.wire)
        self._queue.append(HttpRequest(head, body, self.wire))
        self._serve_soon()
        return body

    # -- requests in the task -----------------------------------------------------------------------------------

    def _serve_soon(self) -> None:
        if not self.is_serving:
            self._have_served()

    def _have_served(self) -> None:
        """Have the task serve what there is."""
        self.is_serving = True
        if self.task is None:
            self.task = self._loop.create_task(self._serve())
        elif not self._more.done():
            self._more.set_result(None)

    async def _serve(self) -> None:  # noqa: C901  (the life of a connection, in one place)
        """Serve requests, one after the other, until the connection ends; a second coroutine for each would cost more.

        The names of a request are deleted at its end, because the connection may be idle for long.
        """
        turn: Turn | None = None
        wire = self.wire
        try:
            while (
                self._begun or self._queue or self._is_finishing or not (self._is_malformed or self._service.is_closed)
            ):
                if self._is_finishing:
                    await wire.drained()
                    self._replied()
                    continue
                if not (self._begun or self._queue):
                    self.is_serving, turn = False, None
                    self._more = asyncio.Future(loop=self._loop)  # without the loop, it asks for the process id
                    await self._more
                    continue
                response, http = await self._serve_next(), self._current
                assert http is not None, "it is being served"
                if http.body.is_broken:
                    response.closes = True  # the rest of the body cannot be told from the next request
                self._is_finishing = True
                if (finishing := response.finish(http)) is not None:
                    await finishing
                self._current, self._is_finishing = None, False
                has_rest = response.closes or http.body.parts or not http.body.is_complete
                if has_rest and await self._ends_with(response, http.body):
                    return
                del http, response, finishing
                self._begin_idle_time()
                if self._queue:  # a client may send many requests at once
                    turn = turn or Turn()
                    await turn.give_way()
            if self._is_malformed:
                await self._refuse()
        except ConnectionError:
            pass
        except Exception:  # the outermost edge of a request
            self._service.traffic.metrics.task_failures.inc()
            log.exception(Event.TASK_FAILED, task="serve a request")
            with suppress(ConnectionError):
                await self._say_failed()
        finally:
            self.task, self.is_serving, self._current = None, False, None
            self._is_finishing = False
            wire.end()

    async def _say_failed(self) -> None:
        """Tell the client that its request has failed, unless a part of another reply is written."""
        if self._current is not None and not self.wire.has_written:
            await self._say(_FAILED, 500, self._current)

    def _serve_next(self) -> Awaitable[Response]:
        """Return what serves the request that was begun, or else the oldest."""
        begun = self._begun
        if begun is not None:
            self._begun = None
            return begun.rest()
        http = self._current = self._queue.popleft()
        self.wire.has_written = False
        if self._rest and len(self._queue) < _PIPELINED // 2:
            rest, self._rest = self._rest, b""
            self.wire.resume_reading()
            self._take(rest)
        if self._ahead is not None and not self._queue:
            self._ahead.release()  # what was received ahead of this request is its own now
            self._ahead = None
        return self._service.handler(http)

    async def _ends_with(self, response: Response, body: RequestBody) -> bool:
        """Read the rest of a body that its handler did not want, for a while; returns whether the connection ends.

        A client that still sends when the connection closes would not get its reply.
        """
        turn = Turn()
        with suppress(TimeoutError, BodyBroken):
            async with asyncio.timeout(_UNWANTED_SECONDS):
                while await body.read():
                    await turn.give_way()
        return response.closes or not body.is_complete

    async def _refuse(self) -> None:
        """Answer a malformed request, of which nothing else is known."""
        head = ReceivedHead("", "", NO_HEADERS, URL(), is_1_1=False, keep_alive=False)
        await self._say(_MALFORMED, 400, HttpRequest(head, RequestBody(is_complete=True), self.wire))

    async def _say(self, text: str, status: int, http: HttpRequest) -> None:
        """Write a short text as the last response."""
        response = TextResponse(text, status)
        response.closes = True
        self._is_finishing = True
        if (finishing := response.finish(http)) is not None:
            await finishing

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _replied(self) -> None:
        """The reply that was written without the task is read."""
        self._current, self._is_finishing = None, False
        self._begin_idle_time()

    def _begin_idle_time(self) -> None:
        self._idle_until = self._loop.time() + _IDLE_SECONDS
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self.is_serving:
            return  # the next reply begins the time again
        if self._loop.time() < self._idle_until:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self.wire.end()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            seconds = self._service.traffic.limits.value.receive_seconds
            self._head_timer = self._loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        self.wire.abort()
