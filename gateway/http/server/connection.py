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
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from yarl import URL

from gateway.http.server.known_heads import KnownHeads
from gateway.http.server.request import NO_HEADERS, BodyBroken, HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.request_parser import Malformed, RequestParser
from gateway.http.server.response import Response, TextResponse, json_response
from gateway.http.server.traffic import Traffic
from gateway.http.server.wire import Wire
from gateway.runtime.budget import Share
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
_UNKNOWN: Final = ReceivedHead("", "", NO_HEADERS, URL(), is_1_1=False, keep_alive=False)
"""The head of a malformed request, of which nothing else is known."""


async def _refuse(_: HttpRequest) -> Response:
    return TextResponse("400 Bad Request\n", 400)


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

    def send_away(self) -> None:
        """Close each connection after its next reply, so that its client opens the next one elsewhere."""
        self.is_leaving = True
        for connection in self.connections:
            connection.wire.end_after_reply()

    def close(self) -> None:
        """Close each connection that is made from now on; `Connection.close` closes those that are open."""
        self.is_closed = True


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    _service: Service
    wire: Wire = field(init=False)
    task: asyncio.Task[None] | None = None
    """What serves the requests, from the first one on that was not begun."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _requests: RequestParser = field(init=False)
    _queue: deque[HttpRequest] = field(default_factory=deque)
    """Requests whose heads are here, and that wait for the one before; a malformed one is the last."""
    _current: HttpRequest | None = None
    """The request that is served."""
    _begun: Begun | None = None
    """That request, as long as no coroutine serves it."""
    _more: asyncio.Future[None] = field(init=False)
    """What the task waits for if it has none to serve."""
    _ahead: Share | None = None
    """Bytes that no handler reads yet: a part of a head, or what a client sent before its reply was complete."""
    _rest: bytes = b""
    """What is not parsed, because too many requests wait."""
    _pieces: Pieces | None = None
    """While a packet is parsed that takes long."""
    _is_finishing: bool = False
    """Whether a reply is being written that no handler watches."""
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_until: float = 0.0

    def __post_init__(self) -> None:
        self._requests = RequestParser(self._take_head, self._service.heads)

    # -- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the deadline of the first head, unless there are too many connections or the listener has closed."""
        out = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio.Transport
        service = self._service
        if service.is_closed or len(service.connections) >= service.traffic.limits.value.connections:
            del self._requests  # it refers to this
            out.abort()
            return
        service.connections[self] = None
        self.wire = Wire(out, service.traffic.sending, service.traffic.timeouts)
        if service.is_leaving:
            self.wire.end_after_reply()
        # Without a threshold, the transport tells as soon as the client is behind, and when it is not any more. Over
        # TLS, uvloop tells so at once.
        out.set_write_buffer_limits(high=1, low=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count those that no handler reads yet."""
        served = self._current
        if served is None and self._queue:
            served = self._queue[0]
        is_ahead = served is None or self._requests.body is not served.body  # no handler reads it
        if self._pieces is None:
            self._take(data)
        else:
            self._pieces.take(data)
        if is_ahead and data and (served is not None or self.wire.is_behind or not (self._queue or self._begun)):
            self._ahead = self._ahead or self._service.traffic.receiving.share(self.wire.abort)
            self._ahead.hold(self._ahead.used + _AHEAD_COST * len(data))
        # No request is in flight and none is complete, so this is part of a head.
        if self._current is None and not self._queue:
            self._watch_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, _: BaseException | None) -> None:
        """End what the connection still waited for."""
        if self not in self._service.connections:
            return
        del self._service.connections[self]
        for timer in (self._head_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = None
        del self._requests  # it refers to this
        if self._pieces is not None:
            self._pieces.drop()
        self.wire.lost()
        if self._ahead is not None:
            self._ahead.release()
        self._ahead = self._pieces = None
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
    def is_serving(self) -> bool:
        """Whether there is a request that is not answered."""
        return self._current is not None or bool(self._queue)

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply has not reached the kernel yet."""
        return self._is_finishing or self.wire.is_writing

    def close(self) -> None:
        """Close the connection once its requests are served; the service is closed."""
        self.wire.end_after_reply()
        self.serve_rest()  # the listener waits for tasks
        if not self.is_serving:
            if self.task is not None:
                _ = self.task.cancel()
            self.wire.end()

    # -- for a request that is served without the task ------------------------------------------------------------

    def reply(self, body: bytes) -> bool:
        """Answer the request that was begun with JSON; returns False if that is for the task."""
        wire, http = self.wire, self._current
        if self._begun is None or http is None or wire.is_last or wire.is_behind:
            return False
        self._begun, self._is_finishing = None, True
        try:
            wire.write(json_response(http, body))
        except ConnectionError:
            self._replied()  # its end will be told soon
            return True
        if not wire.is_behind:
            self._replied()
        if self._current is not None or self._queue:
            self._have_served()
        return True

    def serve_rest(self) -> None:
        """Have the task serve the rest of that request."""
        if self._begun is not None:
            self._have_served()

    # -- parsing ------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Parse bytes as far as there is room for requests."""
        while data:
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
                is_serving = self.is_serving
                self._queue.append(HttpRequest(_UNKNOWN, _READ, self.wire))
                if not is_serving:
                    self._have_served()
                return

    def _read_on(self) -> None:
        self._pieces = None
        self.wire.resume_reading()

    def _take_head(self, head: ReceivedHead, whole: bytes) -> RequestBody:
        """The head of a request is here, perhaps with its whole body."""
        begin, is_serving = self._service.begin, self._current is not None or bool(self._queue)
        if whole and begin is not None and not (is_serving or self._ahead or self.wire.is_last):
            http = HttpRequest(head, _READ, self.wire)
            try:
                begun = begin(http, whole, self)
            except Exception:  # the outermost edge of such a request, which may have been sent: it is not served again
                self._service.traffic.metrics.task_failures.inc()
                log.exception(Event.TASK_FAILED, task="begin a request")
                self.wire.abort()
                return _READ
            if begun is not None:
                self._begun, self._current = begun, http
                return _READ
        body = RequestBody(self.wire, is_complete=True, parts=[whole]) if whole else RequestBody(self.wire)
        self._queue.append(HttpRequest(head, body, self.wire))
        if not is_serving:
            self._have_served()
        return body

    # -- requests in the task -----------------------------------------------------------------------------------

    def _have_served(self) -> None:
        """Have the task serve what there is."""
        if self.task is None:
            self.task = self._loop.create_task(self._serve())
        elif not self._more.done():
            self._more.set_result(None)

    async def _serve(self) -> None:
        """Serve requests, one after the other, until the connection ends; a second coroutine for each would cost more.

        The names of a request are deleted at its end, because the connection may be idle for long.
        """
        turn: Turn | None = None
        wire, writes = self.wire, -1
        try:
            while not self._service.is_closed or self.is_serving:
                if self._is_finishing:
                    await wire.drained()
                    self._replied()
                    continue
                if self._current is None and not self._queue:
                    turn = None
                    self._more = asyncio.Future(loop=self._loop)  # without the loop, it asks for the process id
                    await self._more
                    continue
                writes = wire.writes
                response, http = await self._serve_next(), self._current
                assert http is not None, "it is being served"
                self._is_finishing = True
                if (finishing := response.finish(http)) is not None:
                    await finishing
                self._is_finishing = False
                has_rest = response.closes or http.body.parts or not http.body.is_complete
                if has_rest and await self._ends_with(response, http.body):
                    return
                del http, response, finishing
                self._replied()
                if self._queue:  # a client may send many requests at once
                    turn = turn or Turn()
                    await turn.give_way()
        except ConnectionError:
            pass
        except Exception:  # the outermost edge of a request
            self._service.traffic.metrics.task_failures.inc()
            log.exception(Event.TASK_FAILED, task="serve a request")
            if self._current is not None and wire.writes == writes:  # else a part of another reply is written
                with suppress(ConnectionError):
                    await self._say_failed(self._current)
        finally:
            self.task = self._current = None
            self._is_finishing = False
            self._queue.clear()
            wire.end()

    def _serve_next(self) -> Awaitable[Response]:
        """Return what serves the request that was begun, or else the oldest."""
        begun = self._begun
        if begun is not None:
            self._begun = None
            return begun.rest()
        http = self._current = self._queue.popleft()
        if self._rest and len(self._queue) < _PIPELINED // 2:
            rest, self._rest = self._rest, b""
            self.wire.resume_reading()
            self._take(rest)
        if self._ahead is not None and not self._queue:
            self._ahead.release()  # what was received ahead of this request is its own now
            self._ahead = None
        return _refuse(http) if http.head is _UNKNOWN else self._service.handler(http)

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

    async def _say_failed(self, http: HttpRequest) -> None:
        """Tell the client that its request has failed, as the last response."""
        response = TextResponse("500 Internal Server Error\n", 500)
        response.closes = True
        self._is_finishing = True
        if (finishing := response.finish(http)) is not None:
            await finishing

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _replied(self) -> None:
        """The client has read the reply."""
        self._current, self._is_finishing = None, False
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
            self._head_timer = self._loop.call_later(seconds, self.wire.abort)
