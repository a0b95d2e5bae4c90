"""One session of a legacy client that ends at the gateway.

Rule 1: an open request gets one response; a response that answers no open request is dropped. Rule 2: the session ends
once, whichever side ends it: each open request gets an error, then every stream ends.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from msgspec import Raw

from gateway.exchange.commands import Timer
from gateway.http.incoming import Caller
from gateway.http.outbox import FinalMessage, error_response
from gateway.legacy_front.backend import ClientMessage, Connect
from gateway.legacy_front.session_ids import Front
from gateway.legacy_front.stream import ENDED, Stream
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, IdInUse, InvalidRequest, UpstreamError
from gateway.protocol.jsonrpc import RequestId
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.runtime.call_bytes import Weight
from gateway.telemetry import Event, Passed, TrafficEra
from gateway.telemetry.upstream_health import log_failure
from gateway.upstream.channel import NO_HEADERS

STANDALONE: Final = 0
"""The name of the stream for messages that belong to no request; over HTTP+SSE it is the only one."""
_MAX_OPEN: Final = 256
"""How many requests of a session may be open at once."""


class _OpenRequest(NamedTuple):
    """A request that is not answered yet."""

    stream: Stream
    """The stream of its answer, which is over if the client has left."""
    weight: Weight
    http_id: str


class FrontSession:
    """The client's link; it implements `backend.ClientLink`."""

    def __init__(  # noqa: PLR0913  (what a session begins with)
        self,
        live: LiveRoute,
        front: Front,
        id_: str,
        caller: Caller,
        budget: Budget,
        connect: Connect,
        ended: Callable[["FrontSession"], None],
    ) -> None:
        """`id_` is sealed; `ended` is called once, when the session is over."""
        self.live = live
        self.front = front
        self.id = id_
        self.caller = caller
        self._is_over = False
        self.is_initialized = False
        self._readers = 0
        """HTTP requests whose replies are being written."""
        self._budget = budget
        self._ended = ended
        self._initialize: RequestId | None = None
        self._numbers = STANDALONE
        self.streams: dict[int, Stream] = {}
        self.standalone = self._new_stream()
        self._open: dict[RequestId, _OpenRequest] = {}
        self.greeting: asyncio.Future[GatewayError | None]
        """Done once the last `initialize` is answered: over HTTP+SSE with why, if the client has to sign in first."""
        self.backend = connect(self)
        late = InvalidRequest("`initialize` did not arrive within limits.receive_seconds")
        live.deadlines.greeting.arm(self, self.end, late)
        self._wait_for_client()

    @property
    def open_requests(self) -> int:
        """How many requests of the client are not answered yet."""
        return len(self._open)

    @property
    def is_unproven(self) -> bool:
        """Whether nothing but the client keeps the session: no server has accepted it, or is being asked to."""
        return not (self.is_initialized or self._open)

    def _wait_for_client(self) -> None:
        """Limit for how long the session may be idle, from now on."""
        self.live.deadlines.client_idle.arm(self, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """A stream keeps a session alive only if the session is initialized, because anyone can open a stream."""
        if self._readers and not self.is_unproven:
            self._wait_for_client()
        else:
            self.end(InvalidRequest("The session was idle for sessions.client_idle_seconds"))

    # -- from the client ----------------------------------------------------------------------------------------

    def take(self, message: ClientMessage) -> Stream | None:
        """Hand a message to the backend; return the stream of a request's reply. Raises GatewayError."""
        request = message.request_id
        is_initialize = message.opened.method == mcp.INITIALIZE
        if is_initialize is (self._initialize is not None) and request is not None:
            raise InvalidRequest(
                "The session is initialized already; send `initialize` without Mcp-Session-Id for a new one"
                if is_initialize
                else "The first message of a session must be `initialize`"
            )
        if request is None:
            self.backend.receive(message)
            return None
        if request in self._open:
            raise IdInUse
        if len(self._open) >= _MAX_OPEN:
            raise InvalidRequest(
                f"The session has {_MAX_OPEN} open requests, which is the most; await an answer first"
            )
        weight = self.live.process.calls.take(self.caller.principal, 2 * len(message.data))
        stream = self.standalone if self.front == "sse" else self._new_stream(request)
        self._open[request] = _OpenRequest(stream, weight, message.http_id)  # first: the backend may answer at once
        if is_initialize:
            self._initialize, self.greeting = request, asyncio.get_running_loop().create_future()
            self.live.deadlines.greeting.disarm(self)  # for good: one whose credential was refused may sign in
        try:
            self.backend.receive(message)
        except BaseException:
            if request in self._open:  # else the backend has answered it
                self._open.pop(request).weight.release()
            if stream is not self.standalone:
                self._drop(stream)
            raise
        return stream

    def tells_refused(self, message: ClientMessage, error: GatewayError) -> bool:
        """Tell a client of HTTP+SSE on its stream that a request is refused, for it does not read the reply to a POST.

        Returns False if that would end another request of the same id, or if the error is about the session.
        """
        request = message.request_id
        if self.front != "sse" or not self.is_initialized or request is None or request in self._open:
            return False
        if error.status_in_session != 200:
            return False
        self.standalone.ask(self._failure(request, error, message.http_id))
        return True

    def _new_stream(self, request: RequestId | None = None) -> Stream:
        principal, silence = self.caller.principal, self.live.deadlines.silence
        stream = Stream(self._numbers, request, self._budget, principal, silence, self.end)
        stream.is_resumable = request is not None and self.standalone.is_resumable
        self.streams[self._numbers] = stream
        self._numbers += 1
        return stream

    def _drop(self, stream: Stream) -> None:
        """Forget a stream whose messages nobody will ask for."""
        self.live.deadlines.shared[Timer.LINGER].disarm(stream)
        stream.clear()
        self.streams.pop(stream.name, None)

    def _linger(self, stream: Stream) -> None:
        """Keep a stream that is complete for a while: its end may not have reached the client."""
        self.live.deadlines.shared[Timer.LINGER].arm(stream, partial(self._drop, stream))

    def left(self, stream: Stream) -> None:
        """The reply to a request is complete, or the client has disconnected from it.

        That does not cancel the request. If the client cannot come back for the stream, questions of the server go to
        the standalone one from now on.
        """
        if stream.is_resumable and stream.began:
            if stream.final is not None and stream.name in self.streams:
                self._linger(stream)
            return
        if stream.final is None:
            stream.move_to(self.standalone)
        self._drop(stream)

    # -- from the backend ---------------------------------------------------------------------------------------

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        """See `backend.ClientLink`."""
        if self._is_over:
            return
        opened = jsonrpc.message(message)
        if opened.method is None:
            request, given = opened.rpc_id or b"", NO_HEADERS
            if request in self._open and request == self._initialize and isinstance(opened.result, Raw):
                self.is_initialized = True
                # Older SDKs take the empty event that begins such a stream for an error (`mcp` 1.10, TypeScript 1.20).
                self.standalone.is_resumable = self.front == "http" and negotiated(opened.result) == mcp.LEGACY
                given = {mcp.SESSION_ID: self.id}
            self._respond(request, FinalMessage(message, headers=given))
            return
        stream = self.standalone
        if self.is_initialized:  # the reply to `initialize` is one JSON body
            waiting = {request: each.stream for request, each in self._open.items() if each.stream.final is None}
            related = waiting.get(related_to or b"")
            if related is None and stream.reader is None:
                # The client listens to nothing but the replies to its requests.
                related = next(reversed(waiting.values()), None)
            stream = related or stream
        (stream.ask if isinstance(opened.id, Raw) else stream.send)(message)

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """See `backend.ClientLink`."""
        found = self._open.get(request)
        is_greeting = found is not None and request == self._initialize
        if is_greeting and self.front == "sse" and error.status in (401, 403):
            # Only a status makes the client sign in; then it sends `initialize` again.
            self.greeting.set_result(error)
            self._respond(request, ENDED)
            self._initialize = None
        elif found is not None:
            if isinstance(error, UpstreamError):
                self.live.upstream.health.advise(error)
                route, about = self.live.route, {"request_id": found.http_id}
                log_failure(Event.UPSTREAM_FAILED, error, route.path, route.upstream.name, about)
            self._respond(request, FinalMessage(self._failure(request, error, found.http_id), cause=error))

    def _failure(self, request: RequestId, error: GatewayError, http_id: str) -> bytes:
        return error_response(request, error, http_id, self.live.sender(self.caller.principal))

    def forget(self, request: RequestId) -> None:
        """See `backend.ClientLink`."""
        self._respond(request, ENDED)

    def ended(self) -> None:
        """See `backend.ClientLink`."""
        self.end(CallLost("The server ended the session; its open requests may have had effects"))

    def _respond(self, request: RequestId, final: FinalMessage) -> None:
        """Close a request, if it is open, with its response.

        That ends its stream; the client of an error sees the error's status if nothing came before.
        """
        found = self._open.pop(request, None)
        if found is None:
            return
        found.weight.release()
        if request == self._initialize and not self.greeting.done():
            self.greeting.set_result(None)
        stream = found.stream
        if stream is self.standalone:
            if final.body:
                stream.ask(final.body)
        elif stream.final is None:
            stream.finish(final)
            if stream.is_resumable and stream.reader is None:
                self._linger(stream)

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, error: GatewayError) -> None:
        """End the session: answer each open request with `error`, end every stream, close the backend."""
        if self._is_over:
            return
        self._is_over = True
        self.live.deadlines.greeting.disarm(self)
        self.live.deadlines.client_idle.disarm(self)
        for request in tuple(self._open):
            self.refuse(request, error)
        for stream in self.streams.values():
            if stream.final is None:
                stream.finish(ENDED)
        self._ended(self)
        self.live.process.tasks.spawn(self.backend.close(), "close session")
        self._free()

    def _free(self) -> None:
        """Free the messages of a session that is over once nobody writes them any more."""
        if self._is_over and not self._readers:
            for stream in tuple(self.streams.values()):
                self._drop(stream)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request of the client, and keep the session from being idle.

        A drain waits for the requests of clients that are open in the session instead.
        """
        process = self.live.process
        self._readers += 1
        try:
            with process.draining.leaving_out():
                yield
        finally:
            self._readers -= 1
            if not self._is_over:
                self._wait_for_client()
            self._free()
            process.metrics.passed[self.live.route.path, TrafficEra.LEGACY, Passed.RELAYED].inc()


def negotiated(result: Raw) -> str | None:
    """The protocol version in a result of `initialize`; None if it is malformed."""
    return jsonrpc.text(jsonrpc.members(result).get("protocolVersion"))


def session_gone() -> InvalidRequest:
    """The error for a session that does not exist, for whatever reason: clients begin a new one."""
    return InvalidRequest(
        "The session does not exist, or not any more: send `initialize` to begin a new one", status=404
    )
