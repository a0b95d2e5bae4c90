"""One connection of a listener: its requests one after the other.

Rule 1: whatever a client does, the connection ends: half a head, an idle connection, a body that nobody wants and a
reply that is not read have deadlines.
Rule 2: what it receives ahead of a handler, and what its client does not read, is in the budgets of the process.
Rule 3: nothing behind a request is parsed before that has its reply. So a malformed request is answered in its turn,
with a bare status; and nothing behind it is parsed. A request in the packet in which a body in chunks ends is dropped:
the connection ends with the reply before it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from yarl import URL

from gateway import world
from gateway.http.server.known_heads import KnownHeads
from gateway.http.server.request import ALL_READ, NO_HEADERS, BodyBroken, HttpRequest, ReceivedHead, RequestBody
from gateway.http.server.request_parser import ChunkedBody, HeadParser, Malformed, SizedBody
from gateway.http.server.response import Response, TextResponse, json_response
from gateway.http.server.traffic import Traffic
from gateway.http.server.wire import Wire
from gateway.runtime.budget import Share
from gateway.runtime.pieces import PIECE_BYTES, Pieces, Turn
from gateway.telemetry import Event, get_logger

log = get_logger()

_WAITING_BYTES: Final = 131_072
"""If more than this waits behind a request, no more is read."""
_IDLE_SECONDS: Final = 75.0
"""How long a connection stays open after a reply."""
_UNWANTED_SECONDS: Final = 10.0
"""How long the rest of a body is read that its handler did not want."""
_AHEAD_COST: Final = 2
"""Each header of half a head is kept twice, as it came and as it was parsed."""

Handler = Callable[[HttpRequest], Awaitable[Response]]
"""Serves one request; what it raises is a bug, unless it is a ConnectionError."""


class Begun(Protocol):
    """A request that no coroutine serves, until it is answered or a task asks for its `rest`."""

    http: HttpRequest

    def rest(self) -> Awaitable[Response]:
        """Serve the rest; has to be awaited at once."""

    def leave(self) -> None:
        """The client has left."""


Begin = Callable[[ReceivedHead, bytes, "Connection"], Begun | None]
"""Begins a request whose body is here, and that `Connection.reply` answers; returns None if a handler has to."""
_UNKNOWN: Final = ReceivedHead("", "", NO_HEADERS, URL(), is_1_1=False, keep_alive=False)
"""The head of a malformed request, of which nothing else is known."""


@dataclass(eq=False)
class Service:
    """What the connections of one listener share."""

    handler: Handler
    traffic: Traffic
    begin: Begin | None = None
    heads: KnownHeads = field(default_factory=KnownHeads)
    connections: "dict[Connection, None]" = field(default_factory=dict)
    """Those that are open."""
    is_leaving: bool = False
    """Whether each connection ends with its next reply."""
    is_closed: bool = False
    """Whether connections are closed as soon as they are made."""
    leaves_spares: bool = False
    """Whether it takes no spare descriptor (`world.is_spare`)."""

    def send_away(self) -> None:
        """Close each connection after its next reply, so that its client opens the next one elsewhere."""
        self.is_leaving = True
        for connection in self.connections:
            connection.wire.end_after_reply()


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    _service: Service
    wire: Wire = field(init=False)
    task: asyncio.Task[None] | None = None
    """While a coroutine serves a request."""
    _begun: Begun | None = None
    """The request under way, as long as no coroutine serves it."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _heads: HeadParser = field(init=False)
    _arriving: SizedBody | ChunkedBody | None = None
    """The body of the request under way, if it is not all here."""
    _pieces: Pieces | None = None
    """While a packet is parsed that takes long."""
    _behind: bytes = b""
    """What came behind the request under way."""
    _ahead: Share = field(init=False)
    """Bytes that no handler reads yet: that, or a part of a head."""
    _timer: asyncio.TimerHandle | None = None
    """The deadline of a head, or what looks whether the connection is idle."""
    _idle_until: float = 0.0

    # -- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the deadline of the first head, unless there are too many connections or the listener has closed."""
        out = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio.Transport
        service = self._service
        traffic = service.traffic
        new = out.get_extra_info("socket") if service.leaves_spares else None
        is_spare = new is not None and world.is_spare(new)
        if service.is_closed or is_spare or len(service.connections) >= traffic.limits.value.connections:
            out.abort()
            return
        service.connections[self] = None
        self.wire = Wire(out, traffic.sending, traffic.timeouts)
        if service.is_leaving or (new is not None and world.is_for_answers(new)):
            self.wire.end_after_reply()
        self._heads = HeadParser(service.heads)
        self._ahead = traffic.receiving.share(self.wire.abort)
        # Without a threshold, the transport tells as soon as the client is behind, and when it is not any more. Over
        # TLS, uvloop tells so at once.
        out.set_write_buffer_limits(high=1, low=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, or keep them behind those that are parsed in pieces."""
        if self._pieces is None:
            self._take(data)
        else:
            self._pieces.take(data)

    def connection_lost(self, _: BaseException | None) -> None:
        """End what the connection still waited for."""
        if self not in self._service.connections:
            return
        del self._service.connections[self]
        self._stop_timer()
        if self._pieces is not None:
            self._pieces.drop()
        self.wire.lost()
        self._ahead.release()
        self._arriving = self._pieces = None
        self._behind = b""
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
        return self._begun is not None or self.task is not None

    def close(self) -> None:
        """Close the connection once its request is served; the service is closed."""
        self.wire.end_after_reply()
        self.serve_rest()  # the listener waits for tasks
        if self.task is None:
            self.wire.end()

    # -- for a request that is served without a task --------------------------------------------------------------

    def reply(self, body: bytes) -> bool:
        """Answer the request that was begun with JSON; returns False if that is for a task."""
        wire, begun = self.wire, self._begun
        if begun is None or self.task is not None or wire.is_last or wire.is_behind:
            return False
        self._begun = None
        try:
            wire.write(json_response(begun.http, body))
        except ConnectionError:
            return True  # its end will be told soon
        self._replied()
        return True

    def serve_rest(self) -> None:
        """Have a task serve the rest of that request."""
        if self._begun is not None and self.task is None:
            self.task = self._loop.create_task(self._serve(self._begun.http))

    # -- parsing ------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Parse bytes up to the end of a request, and keep those behind it until it has its reply."""
        try:
            while data:
                if self._arriving is not None:
                    data = self._take_body(self._arriving, data)
                elif self.task is not None or self._begun is not None:
                    before, self._behind = len(self._behind), self._behind + data
                    if before <= _WAITING_BYTES < len(self._behind):
                        self.wire.pause_reading()
                    self._ahead.hold(_AHEAD_COST * len(self._behind))
                    return
                elif self.wire.is_lost:  # TLS hands over what comes before the client has closed its side too
                    return
                elif (found := self._heads.find(data)) is not None:
                    data = self._begin(*found)
                else:
                    # More of a head has to come. The first one of all has had its deadline from the start.
                    if not self._ahead.used and self.wire.writes:
                        self._watch_head()
                    self._ahead.hold(self._ahead.used + _AHEAD_COST * len(data))
                    return
        except Malformed as exc:
            self._service.traffic.malformed(exc.kind, self.wire.remote)
            if self.is_serving:
                self.wire.end_after_reply()
            else:
                self._refuse()

    def _take_body(self, arriving: SizedBody | ChunkedBody, data: bytes) -> bytes:
        if len(data) > PIECE_BYTES and isinstance(arriving, ChunkedBody):  # chunks of one byte take long to parse
            pieces = self._pieces = Pieces(self._take, self.wire.pause_reading, self._read_on)
            pieces.take(data)
            if not pieces.is_waiting:
                self._pieces = None
            return b""
        behind = arriving.take(data)
        if arriving.body.is_complete:
            self._arriving = None
        return behind

    def _read_on(self) -> None:
        self._pieces = None
        self.wire.resume_reading()

    def _begin(self, head: ReceivedHead, rest: bytes) -> bytes:
        """Begin with a request; `rest` stands behind its head. Returns what is not parsed yet."""
        if self._ahead.used or not self.wire.writes:  # the head had a deadline
            self._ahead.hold(0)
            self._stop_timer()
        service, body = self._service, ALL_READ
        if head.length and len(rest) == head.length:
            if service.begin is not None and not self.wire.is_last:
                try:
                    self._begun = service.begin(head, rest, self)
                except Exception:  # the outermost edge of a request, which may have been sent: it is not served again
                    service.traffic.metrics.task_failures.inc()
                    log.exception(Event.TASK_FAILED, task="begin a request")
                    self.wire.abort()
                    return b""
                if self._begun is not None:
                    return b""
            body, rest = RequestBody(self.wire, is_complete=True, parts=[rest]), b""
        elif head.length:
            body = RequestBody(self.wire)
            self._arriving = SizedBody(body, head.length)
        elif "Transfer-Encoding" in head.headers:
            body = RequestBody(self.wire)
            self._arriving = ChunkedBody(body, is_last=not head.keep_alive)
        self.task = self._loop.create_task(self._serve(HttpRequest(head, body, self.wire)))
        return rest

    def _refuse(self) -> None:
        """Answer a malformed request, and end the connection."""
        with suppress(ConnectionError):
            self.wire.write(TextResponse("400 Bad Request\n", 400).encoded(HttpRequest(_UNKNOWN, ALL_READ, self.wire)))
        self.wire.end()

    # -- requests in a task -------------------------------------------------------------------------------------

    async def _serve(self, http: HttpRequest) -> None:
        """Serve one request, or the rest of one that was begun."""
        wire, writes, closes = self.wire, self.wire.writes, True
        try:
            begun, self._begun = self._begun, None
            response = await (self._service.handler(http) if begun is None else begun.rest())
            if (finishing := response.finish(http)) is not None:
                await finishing
            body = http.body
            if body.parts or not body.is_complete:
                await _discard(body)
            closes = response.closes or not body.is_complete or self._service.is_closed
        except ConnectionError:
            pass
        except Exception:  # the outermost edge of a request
            self._service.traffic.metrics.task_failures.inc()
            log.exception(Event.TASK_FAILED, task="serve a request")
            if wire.writes == writes:  # else a part of another reply is written
                wire.end_after_reply()
                with suppress(ConnectionError):
                    wire.write(TextResponse("500 Internal Server Error\n", 500).encoded(http))
        finally:
            self.task = None
            if closes:
                wire.end()
        if not closes:
            self._replied()

    # -- between requests ---------------------------------------------------------------------------------------

    def _replied(self) -> None:
        """The reply is written: parse what came behind the request, or wait for the next one for a while."""
        self._idle_until = self._loop.time() + _IDLE_SECONDS
        if self._timer is None:
            self._timer = self._loop.call_at(self._idle_until, self._check_idle)
        if self._arriving is not None:  # llhttp does not tell where the request behind a body in chunks begins
            self.wire.end()
        elif self._behind:
            data, self._behind = self._behind, b""
            self._ahead.hold(0)
            if len(data) > _WAITING_BYTES:
                self.wire.resume_reading()
            self._take(data)

    def _check_idle(self) -> None:
        self._timer = None
        if self.is_serving:
            return  # the next reply begins the time again
        if self._loop.time() < self._idle_until:
            self._timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self.wire.end()

    def _watch_head(self) -> None:
        self._stop_timer()
        seconds = self._service.traffic.limits.value.receive_seconds
        self._timer = self._loop.call_later(seconds, self.wire.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _discard(body: RequestBody) -> None:
    """Read the rest of a body that its handler did not want, for a while.

    A client that still sends when the connection closes would not get its reply.
    """
    turn = Turn()
    with suppress(TimeoutError, BodyBroken):
        async with asyncio.timeout(_UNWANTED_SECONDS):
            while await body.read():
                await turn.give_way()
