"""One connection of a listener: its requests one after the other, each in a task, or without one.

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

from gateway.http.server.known_heads import KnownHeads, ParsedHead
from gateway.http.server.request import NO_HEADERS, BodyBroken, HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.request_parser import Malformed, RequestParser
from gateway.http.server.response import Response, TextResponse
from gateway.http.server.traffic import Traffic
from gateway.http.server.unread import Unread
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
_BODY_SECONDS: Final = 0.02
"""How long a head without its body waits to be parsed: many clients send the two in packets of their own."""
_CONTINUED_SECONDS: Final = 0.5
"""The same for a client that sends the body once it hears `100 Continue`: both event loops may be busy meanwhile."""

_FAILED: Final = "500 Internal Server Error\n"
_MALFORMED: Final = "400 Bad Request\n"

Handler = Callable[[HttpRequest], Awaitable[Response]]
"""Serves one request; what it raises is a bug, unless it is a ConnectionError."""


class DirectRequest(Protocol):
    """A request that waits for its reply without a task, until its client leaves, or until it takes a task."""

    head: ParsedHead
    waits: bool
    """Whether its reply comes without a task, as far as is known."""

    def serve(self, http: HttpRequest) -> Awaitable[Response]:
        """Serve it in a task from now on; what is returned is awaited at once."""

    def leave(self) -> None:
        """The client has closed its connection."""


class Direct:
    """How a listener begins requests without a task; it does not if `begin` is None."""

    def __init__(self, begin: Callable[..., DirectRequest | None] | None, heads: KnownHeads | None = None) -> None:
        self.begin = begin
        self.heads = heads or KnownHeads()


class Service:
    """What the connections of one listener share."""

    def __init__(self, handler: Handler, traffic: Traffic, direct: Direct | None = None) -> None:
        self.handler = handler
        self.traffic = traffic
        self.direct = direct
        self.connections: dict[Connection, None] = {}
        self.is_leaving = False
        """Whether each connection ends with its next reply."""
        self.is_closed = False
        """Whether connections are closed as soon as they are made."""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    __slots__ = (
        "_ahead",
        "_current",
        "_ends",
        "_head_timer",
        "_held",
        "_idle_timer",
        "_idle_until",
        "_is_malformed",
        "_loop",
        "_next",
        "_pieces",
        "_queue",
        "_requests",
        "_rest",
        "_service",
        "in_hand",
        "task",
        "wire",
    )

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.wire: Wire
        heads = None if service.direct is None else service.direct.heads
        self._requests: RequestParser | None = RequestParser(self._begun, self._malformed, heads)
        self._queue: deque[HttpRequest] = deque()
        """Requests whose heads are here, and that wait for the one before."""
        self._is_malformed = False
        """Whether a malformed request comes behind them."""
        self._current: HttpRequest | None = None
        """The request that the task serves."""
        self.task: asyncio.Task[None] | None = None
        """What serves the requests, while there are any."""
        self.in_hand: DirectRequest | None = None
        """The request that is served without a task."""
        self._next: DirectRequest | None = None
        """A request that needs a task after all, and waits for it."""
        self._held: tuple[ParsedHead, bytes, asyncio.TimerHandle] | None = None
        """A known head without its body, its bytes, and when they are parsed after all."""
        self._ahead: Share | None = None
        """Bytes that no handler reads yet: a part of a head, or what a client sent before its reply was complete."""
        self._rest = b""
        """What is not parsed, because too many requests wait."""
        self._pieces: Pieces | None = None
        """While a packet is parsed that takes long."""
        self._ends = False
        """Whether the connection ends once its requests are served."""
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
        self.wire = Wire(out, Unread(out, service.traffic.sending, service.traffic.timeouts))
        self.wire.is_last = service.is_leaving
        # Without a threshold, the transport tells as soon as the client is behind, and when it is not any more. Over
        # TLS, uvloop tells so at once.
        out.set_write_buffer_limits(high=1, low=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Begin a request without a task, or else parse bytes."""
        known: tuple[ParsedHead, bytes] | None = None
        if self._held is not None:
            head, held, timer = self._held
            timer.cancel()
            self._held, known, data = None, (head, data), held + data
        direct = self._service.direct
        if direct is None or not self._begin_direct(direct, data, known):
            self._parse(data)

    def connection_lost(self, _: BaseException | None) -> None:
        """End what the connection still waited for."""
        if self._requests is None:
            return
        _ = self._service.connections.pop(self, None)
        for timer in (self._head_timer, self._idle_timer, None if self._held is None else self._held[2]):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = self._held = None
        if self._pieces is not None:
            self._pieces.drop()
        self.wire.lost()
        for request in (self.in_hand, self._next):
            if request is not None:
                request.leave()
        self.in_hand = self._next = None
        if self._ahead is not None:
            self._ahead.release()
        self._ahead = self._requests = self._pieces = None  # the parser refers to this
        self._rest = b""
        self._queue.clear()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """The client has not read everything."""
        self.wire.fell_behind()

    def resume_writing(self) -> None:
        """The client has read everything."""
        self.wire.caught_up()

    # -- for the listener ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection once its requests are served."""
        self._ends = self.wire.is_last = True
        if self._held is not None:
            self._parse_held(self._held[1])
        if self.in_hand is not None:
            self.serve_by_task()
        if self.task is None:
            self.wire.end()

    # -- requests without a task --------------------------------------------------------------------------------

    def _begin_direct(self, direct: Direct, data: bytes, known: tuple[ParsedHead, bytes] | None) -> bool:
        """Begin a request without a task, if it came whole on an idle connection, with a head that is known.

        `known`: its head, and what came behind it, if the head came in a packet of its own.
        """
        parser = self._requests
        if (
            self.task is not None
            or self.in_hand is not None
            or self.wire.is_behind
            or parser is None
            or self.wire.is_last
        ):
            return False
        if direct.begin is None or (known := known or parser.known(data)) is None:
            return False
        head, body = known
        if not body:
            seconds = _BODY_SECONDS
            if head.rest:
                self.wire.say_continue()
                data, seconds = head.rest, _CONTINUED_SECONDS
            self._held = head, data, self._loop.call_later(seconds, self._parse_held, data)
            return True
        if len(body) != head.length or (request := direct.begin(self, head, body)) is None:
            return False
        self._head_is_complete()
        self.in_hand = request
        if not request.waits:
            self.serve_by_task()
        return True

    def _parse_held(self, data: bytes) -> None:
        if self._held is not None:
            self._held[2].cancel()
            self._held = None
        self._parse(data)

    def serve_by_task(self) -> None:
        """Have a task serve the request in hand."""
        self.in_hand, self._next = None, self.in_hand
        self._serve_soon()

    def reply(self, whole: bytes) -> None:
        """Send the reply to the request in hand; the client may send the next one."""
        self.in_hand = None
        self.wire.write_alone(whole)
        self._begin_idle_time()

    # -- parsing ------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Parse bytes, and count those that no handler reads yet."""
        is_ahead = self._is_ahead()
        if self.in_hand is not None:
            self.serve_by_task()
        is_waiting = self.task is not None
        if self._pieces is None:
            self._take(data)
        else:
            self._pieces.take(data)
        if is_ahead and (is_waiting or self.wire.is_behind or not self._queue) and self._requests is not None and data:
            self._ahead = self._ahead or self._service.traffic.bodies.budget.share(self.wire.abort)
            self._ahead.grow(_AHEAD_COST * len(data))
        # No request is in flight and none is complete, so this is part of a head.
        if self.task is None:
            self._watch_head()
        else:
            self._head_is_complete()

    def _is_ahead(self) -> bool:
        """Whether no handler reads what arrives now."""
        request, parser = self._current, self._requests
        if parser is None:
            return False
        if self.in_hand is not None or self._next is not None or parser.body is None:
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
            except Malformed:
                self._is_malformed = True
                self._serve_soon()

    def _read_on(self) -> None:
        self._pieces = None
        self.wire.resume_reading()

    def _begun(self, head: ReceivedHead) -> RequestBody:
        """The head of a request is here."""
        request = HttpRequest(head, RequestBody(self.wire), self.wire)
        self._queue.append(request)
        self._serve_soon()
        return request.body

    def _malformed(self, kind: Malformation) -> None:
        self._service.traffic.malformed(kind, self.wire.remote)

    # -- requests in the task -----------------------------------------------------------------------------------

    def _serve_soon(self) -> None:
        if self.task is None:
            self.task = self._loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Serve the requests that are here, one after the other."""
        turn = Turn()
        is_open = True
        try:
            while is_open and (self._queue or self._next is not None):
                is_open = await self._serve_next()
                if self._queue:  # a client may send many requests at once
                    await turn.give_way()
            if is_open and self._is_malformed:
                is_open = False
                await self._refuse()
        except ConnectionError:
            is_open = False
        except BaseException:
            is_open = False
            raise
        finally:
            self.task = None
            if not is_open or self._ends:
                self.wire.end()

    async def _serve_next(self) -> bool:
        """Serve the oldest request; returns whether the connection can have another one."""
        await self.wire.drained()  # the client has not read the reply to a request that no task served
        http, serving = self._oldest()
        self._current, self.wire.has_written = http, False
        try:
            response = await serving
            if http.body.is_broken:
                response.force_close()  # the rest of the body cannot be told from the next request
            await self._finish(http, response)
        except ConnectionError:
            return False
        except Exception:  # the outermost edge of a request
            self._service.traffic.metrics.task_failed()
            log.exception(Event.TASK_FAILED, task="serve a request")
            if not self.wire.has_written:
                failed = TextResponse(_FAILED, 500)
                failed.force_close()
                await self._finish(http, failed)
            return False
        finally:
            self._current = None
        # A client that still sends when the connection closes would not get its reply.
        if not await self._skip(http.body) or response.closes:
            return False
        self._begin_idle_time()
        return True

    def _oldest(self) -> tuple[HttpRequest, Awaitable[Response]]:
        """Return the oldest request, and what serves it."""
        if self._next is not None:
            direct, self._next = self._next, None
            http = HttpRequest(direct.head.message, RequestBody(is_complete=True), self.wire)
            return http, direct.serve(http)
        http = self._queue.popleft()
        if self._rest and len(self._queue) < _PIPELINED // 2:
            rest, self._rest = self._rest, b""
            self.wire.resume_reading()
            self._take(rest)
        if self._ahead is not None and not self._queue:
            self._ahead.release()  # what was received ahead of this request is its own now
            self._ahead = None
        return http, self._service.handler(http)

    async def _skip(self, body: RequestBody) -> bool:
        """Read the rest of a body that its handler did not want, for a while; returns whether all of it came."""
        if body.is_complete:
            _ = body.read_now()
            return True
        turn = Turn()
        with suppress(TimeoutError, BodyBroken):
            async with asyncio.timeout(_UNWANTED_SECONDS):
                while await body.read():
                    await turn.give_way()
        return body.is_complete

    async def _refuse(self) -> None:
        """Answer a malformed request, of which nothing else is known."""
        head = ReceivedHead("", "", NO_HEADERS, URL(), is_1_1=False, keep_alive=False)
        http = HttpRequest(head, RequestBody(is_complete=True), self.wire)
        await self._finish(http, TextResponse(_MALFORMED, 400))

    async def _finish(self, http: HttpRequest, response: Response) -> None:
        """Write what its handler has not written of a response."""
        self.wire.is_finishing = True
        try:
            await response.finish(http)
        finally:
            self.wire.is_finishing = False

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _begin_idle_time(self) -> None:
        self._idle_until = self._loop.time() + _IDLE_SECONDS
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self.task is not None or self.in_hand is not None or self._held is not None:
            return  # the next reply begins the time again
        if self._loop.time() < self._idle_until:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self.wire.end()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            seconds = self._service.traffic.limits.value.receive_seconds
            self._head_timer = self._loop.call_later(seconds, self._give_up)

    def _head_is_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.wire.abort()
