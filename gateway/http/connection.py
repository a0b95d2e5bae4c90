"""One connection of a listener: aiohttp's, with the bounds that it lacks.

aiohttp never closes a connection that sends half a request head, nor one that does not read its reply. It logs what is
malformed, and it does not tell whether a reply has been sent completely.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

from aiohttp import StreamReader, web
from aiohttp.http import StreamWriter
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _PAYLOAD_ACCESS_ERROR, ERROR, RequestHandler, _ErrInfo

from gateway.http.json_reply import JsonReply
from gateway.http.request_parser import KnownHeads, ParsedHead, RequestParser
from gateway.http.traffic import Traffic
from gateway.http.unread import Unread
from gateway.http_client.reply_head import CONTINUE
from gateway.runtime.budget import Share  # noqa: TC001  (one import style; it costs nothing here)
from gateway.runtime.pieces import Turn
from gateway.telemetry import Malformation

_AHEAD_COST: Final = 2
"""aiohttp keeps each header of a half head twice, as bytes and as text."""
_BODY_SECONDS: Final = 0.02
"""How long a head without its body waits to be parsed: many clients send the two in packets of their own."""
_CONTINUED_SECONDS: Final = 0.5
"""The same for a client that sends the body once it hears `100 Continue`: both event loops may be busy meanwhile."""


class DirectRequest(Protocol):
    """A request that waits for its reply without a task, until its client leaves, or until it takes a task."""

    head: ParsedHead
    waits: bool
    """Whether its reply comes without a task, as far as is known."""

    def serve(self, http: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        """Serve it in a task from now on; what is returned is awaited at once."""

    def leave(self) -> None:
        """The client has closed its connection."""


class Direct:
    """How a listener begins requests without a task; it does not if `begin` is None."""

    def __init__(self, begin: Callable[..., DirectRequest | None] | None, heads: KnownHeads | None = None) -> None:
        self.begin = begin
        self.heads = heads or KnownHeads()


class Connection(RequestHandler):
    """One connection; what it receives ahead of its handler, and what its client does not read, is in the budgets."""

    __slots__ = (
        "_ahead",
        "_direct",
        "_finishing",
        "_head_timer",
        "_held",
        "_next",
        "_out",
        "_requests",
        "_traffic",
        "in_hand",
        "remote",
        "unread",
    )

    def __init__(self, manager: web.Server, traffic: Traffic, direct: Direct | None = None, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._traffic = traffic
        self._direct = direct
        self.in_hand: DirectRequest | None = None
        """The request that is served without a task."""
        self._next: DirectRequest | None = None
        """A request that needs a task after all, and waits for it."""
        heads = None if direct is None else direct.heads
        self._requests: RequestParser | None = RequestParser(self, self._loop, self._malformed, heads)
        self._parser = self._requests
        self._ahead: Share | None = None
        """Bytes that no handler reads yet: a part of a head, or what a client sent before its reply was complete."""
        self.unread: Unread
        self._head_timer: asyncio.TimerHandle | None = None
        self._finishing = False
        self._held: tuple[ParsedHead, bytes, asyncio.TimerHandle] | None = None
        """A known head without its body, its bytes, and when they are parsed after all."""
        self._out: asyncio.Transport
        self.remote: str | None
        """The address of the client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the deadline of the first head."""
        super().connection_made(transport)
        # aiohttp drops its reference when it closes the transport, which is before everything is sent.
        self._out = cast("asyncio.Transport", transport)
        self.unread = Unread(self._out, self._traffic)
        # Without a threshold, the transport tells as soon as the client is behind, and when it is not any more.
        self._out.set_write_buffer_limits(high=1, low=0)
        peer = self.peername
        self.remote = peer[0] if isinstance(peer, tuple) else peer
        self._watch_head()

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply has not reached the kernel yet."""
        return self._finishing or self.unread.is_in_process

    async def start(self) -> None:
        """Serve one request after the other, like aiohttp, but in the task of the connection.

        aiohttp makes a task for each request, to copy context variables, and no handler here sets any.
        """
        turn = Turn()
        while not self._force_close:
            if not self._messages:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if not await self._serve_next():
                break
            if self._messages:  # a client may send many requests at once
                await turn.give_way()
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    async def _serve_next(self) -> bool:
        """Serve the oldest request; returns whether the connection can have another one."""
        try:
            if self._paused:  # the client has not read the reply to a request that no task served
                await self._drain_helper()
        except ConnectionError:
            return False
        request, handler = self._next_request()
        payload = request.content
        try:
            try:
                response, is_lost = await self._handle_request(request, None, handler)
            except ConnectionError:
                return False
            if is_lost:
                return False
            self._keepalive = bool(response.keep_alive)
            if not payload.is_eof():
                await self._skip_body(payload)
            payload.set_exception(_PAYLOAD_ACCESS_ERROR)
        except Exception as exc:  # noqa: BLE001  (the outermost edge of a request)
            self.log_exception("Unhandled exception", exc_info=exc)
            self.force_close()
        except BaseException:
            self.force_close()
            raise
        finally:
            request._task = None  # type: ignore[assignment]  # noqa: SLF001  (it would be a reference cycle)
        if not self._keepalive or self._close or self._force_close:
            return False
        self._begin_idle_time()
        return True

    def _next_request(self) -> tuple[web.BaseRequest, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]:
        """Return the oldest request with its handler."""
        message, payload = self._messages.popleft()
        direct, self._next = self._next, None
        if self._parser is not None and direct is None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        manager, handler, new_request = self._manager, self._request_handler, self._request_factory
        assert manager is not None
        assert handler is not None
        assert new_request is not None
        manager.requests_count += 1
        if isinstance(message, _ErrInfo):
            handler, message = self._make_error_handler(message), ERROR
        elif direct is not None:
            handler = direct.serve
        if direct is None and self._ahead is not None and not self._messages:
            self._ahead.release()  # what was received ahead of this request is its own now
            self._ahead = None
        task = self._task_handler or cast("asyncio.Task[None]", asyncio.current_task())
        return new_request(message, payload, self, StreamWriter(self, self._loop), task), handler

    async def _skip_body(self, payload: StreamReader) -> None:
        """Read the rest of a body that its handler did not want, for a while; else close the connection."""
        turn = Turn()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lingering_time):
                while not (payload.is_eof() or self._force_close):
                    _ = await payload.readany()
                    await turn.give_way()
        if not (payload.is_eof() or self._force_close):
            self.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the rest of a reply when its handler is done; for most replies that is the whole reply."""
        transport = self.transport
        self._finishing = True
        try:
            if request.content.exception() is not None:
                resp.force_close()  # the rest of the body cannot be told from the next request
            if type(resp) is not JsonReply or transport is None or self._upgraded or transport.is_closing():
                return await super().finish_response(request, resp, start_time)
            resp.send(request, transport)  # without the many steps of other replies
            if self._paused:
                await request.writer.drain()
        except ConnectionError:
            return resp, True
        finally:
            self._finishing = False
        return resp, False

    def data_received(self, data: bytes) -> None:
        """Begin a request without a task, or else parse bytes."""
        known: tuple[ParsedHead, bytes] | None = None
        if self._held is not None:
            head, held, timer = self._held
            timer.cancel()
            self._held, known, data = None, (head, data), held + data
        if self._direct is None or not self._begin_direct(self._direct, data, known):
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse bytes, and count those that no handler reads yet."""
        self._held = None
        is_ahead = self._is_ahead()
        if self.in_hand is not None:
            self.serve_by_task()
        super().data_received(data)
        # A task that waits until the client reads its earlier reply has not begun with the oldest message yet.
        is_waiting = self._current_request is not None or self._next is not None or not self._messages or self._paused
        if is_ahead and data and is_waiting:
            self._ahead = self._ahead or self._traffic.bodies.budget.share(self._out.abort)
            self._ahead.grow(_AHEAD_COST * len(data))
        # No request is in flight and none is complete, so this is part of a head.
        if self._current_request is None and not self._messages:
            self._watch_head()
        else:
            self._head_is_complete()

    def _begin_direct(self, direct: Direct, data: bytes, known: tuple[ParsedHead, bytes] | None) -> bool:
        """Begin a request without a task, if it came whole on an idle connection, with a head that is known.

        `known`: its head, and what came behind it, if the head came in a packet of its own.
        """
        waiter, parser = self._waiter, self._requests
        if self.in_hand is not None or waiter is None or waiter.done() or parser is None or self._paused:
            return False
        if direct.begin is None or self._upgraded or self._close or self._force_close:
            return False
        if (known := known or parser.known(data)) is None:
            return False
        head, body = known
        if not body:
            seconds = _BODY_SECONDS
            if head.rest:
                self._write(CONTINUE)
                data, seconds = head.rest, _CONTINUED_SECONDS
            self._held = head, data, self._loop.call_later(seconds, self._parse, data)
            return True
        if len(body) != head.length or (request := direct.begin(self, head, body)) is None:
            return False
        self._head_is_complete()
        self.in_hand = request
        if not request.waits:
            self.serve_by_task()
        return True

    def serve_by_task(self) -> None:
        """Have the task of the connection serve the request in hand."""
        request, waiter = self.in_hand, self._waiter
        assert request is not None
        self.in_hand, self._next = None, request
        self._messages.append((request.head.message, EMPTY_PAYLOAD))
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def reply(self, whole: bytes) -> None:
        """Send the reply to the request in hand; the client may send the next one."""
        self.in_hand = None
        if self.transport is None or self.transport.is_closing():
            return
        self._write(whole)
        self._begin_idle_time()

    def _write(self, data: bytes) -> None:
        """Write something that no task waits for."""
        self._finishing = True
        self._out.write(data)  # whoever cannot read it now is watched while this is set
        self._finishing = False

    def _begin_idle_time(self) -> None:
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def _process_keepalive(self) -> None:
        self._keepalive_handle = None  # the next reply makes another one
        if self.in_hand is None and self._held is None:
            super()._process_keepalive()

    def close(self) -> None:
        """Close the connection once its requests are served."""
        if self.in_hand is not None:
            self.serve_by_task()
        super().close()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  (as of aiohttp)
        """Read on after a pause; aiohttp calls this for every body, though hardly any was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _is_ahead(self) -> bool:
        """Whether no handler reads what arrives now."""
        request, parser = self._current_request, self._requests
        if parser is None:
            return False
        if self.in_hand is not None or self._next is not None:
            return True
        is_next = len(self._messages) > 1 if request is None else parser.body is not request.content
        return is_next or not parser.is_in_body

    def _malformed(self, kind: Malformation) -> None:
        self._traffic.malformed(kind, self.remote)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log an unexpected exception, but not that a malformed body cannot be skipped."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def unsent(self, count: int) -> None:
        """Count the part of a reply that its handler has not written yet."""
        self.unread.unsent = count
        self.unread.count(is_behind=self._paused)

    def pause_writing(self) -> None:
        """Count what the client has not read."""
        super().pause_writing()
        self.unread.count(is_behind=self._paused)
        if self._finishing and not self.unread.unsent:
            self.unread.watch()

    def resume_writing(self) -> None:
        """Stop counting: the client has read everything."""
        super().resume_writing()
        self.unread.count(is_behind=self._paused)
        self.unread.caught_up()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer with the status alone: aiohttp would quote the request, or show the traceback of a debug run.

        A malformed request is not logged, because aiohttp's message quotes its header. A client that has disconnected
        gets no answer.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _ = super().handle_error(request, status, exc, message)  # logs the exception
        elif request.writer.output_size > 0:
            raise ConnectionError("The request is malformed, and a part of its reply was sent already")
        plain = web.Response(status=status, text=f"{status} {HTTPStatus(status).phrase}\n")
        plain.force_close()
        return plain

    def connection_lost(self, exc: BaseException | None) -> None:
        """End what the connection still waited for."""
        self._head_is_complete()
        if self._held is not None:
            self._held[2].cancel()
        self.unread.close()
        for request in (self.in_hand, self._next):
            if request is not None:
                request.leave()
        self.in_hand = self._next = None
        if self._ahead is not None:
            self._ahead.release()
        self._ahead = self._requests = None  # the parser has a part of a head, and refers to this
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self._head_timer is None:
            seconds = self._traffic.limits.value.receive_seconds
            self._head_timer = self._loop.call_later(seconds, self._give_up)

    def _head_is_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self.transport.abort()
