"""One client session on its way to a legacy server that speaks another transport, or to the child of a host.

Rule 1: one upstream session per client session, opened by the client's `initialize`. Rule 2: messages pass unchanged,
in the order in which they came. Rule 3: when the upstream session ends, so does the client's. Rule 4: the upstream is
never told of the end of a session in which a call may still run; each such call is cancelled instead. Rule 5: a server
that refuses `initialize` because it is modern is mirrored from then on: nothing else tells such a server from one that
speaks both protocols.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from msgspec import Raw

from gateway.legacy_front.backend import ClientLink, ClientMessage, cancelled
from gateway.legacy_front.session import negotiated
from gateway.mirror.linked_backend import MirrorBackend
from gateway.mirror.server_client import ServerClient, is_modern
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    Busy,
    CallLost,
    GatewayError,
    InvalidRequest,
    Refused,
    SessionLost,
    UpstreamError,
)
from gateway.protocol.jsonrpc import RequestId, request_id
from gateway.routes.live_route import LiveRoute
from gateway.runtime.pieces import Turn
from gateway.sessions import pool_errors
from gateway.telemetry import Event, get_logger
from gateway.upstream.channel import NO_HEADERS, Channel, Headers, Hearer, SideListener
from gateway.upstream.stdio import StdioChannel

log = get_logger()

_MESSAGE_BYTES: Final = 512
"""What a message that waits costs besides its text."""


class SessionRelay(SideListener):
    """The backend of one session; it implements `backend.Backend`."""

    def __init__(self, live: LiveRoute, link: ClientLink, mirror_of: ServerClient | None = None) -> None:
        """`mirror_of` is the server as a modern one, if it may turn out to be that."""
        self.live = live
        self._mirror_of = mirror_of
        self._link = link
        self._server: Channel | MirrorBackend | None = None
        """Once the server has answered `initialize`, or has refused it and proved to be modern."""
        self._waiting: deque[ClientMessage] = deque()
        self._waiting_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._open: dict[RequestId, _RelayedRequest] = {}
        self._headers: Headers = NO_HEADERS
        """The newest headers of the client, for what is sent when it has left."""
        self._is_closed = False

    # -- from the client ----------------------------------------------------------------------------------------

    def receive(self, message: ClientMessage) -> None:
        """See `backend.Backend`."""
        if isinstance(self._server, MirrorBackend) and self._sender is None:  # else it would overtake what waits
            self._server.receive(message)
            return
        size = len(message.data)
        if self._waiting and not self._has_room(size):
            raise Busy(
                "The server does not read the messages of this session: more than limits.body_bytes of them wait; "
                "send this one again later",
                reached={"limits.body_bytes": self.live.config.limits.body_bytes},
            )
        self._headers = message.headers
        self._waiting.append(message)
        self._waiting_bytes += size + _MESSAGE_BYTES
        if self._sender is None:
            self._sender = self.live.process.tasks.start(self._send_all(), "relay to upstream")

    def _has_room(self, size: int) -> bool:
        return self._waiting_bytes + size <= self.live.config.limits.body_bytes

    async def room(self, size: int) -> None:
        """Wait until a message of this size can be taken."""
        if self._sender is not None and not self._has_room(size):
            _ = await asyncio.wait((self._sender,))

    async def _send_all(self) -> None:
        """Send the messages that wait, one after another."""
        try:
            turn = Turn()
            while self._waiting:
                message = self._waiting.popleft()
                self._waiting_bytes -= len(message.data) + _MESSAGE_BYTES
                await self._send(message)
                del message  # the next one may come much later
                await turn.give_way()
        finally:
            self._sender = None

    async def _send(self, message: ClientMessage) -> None:
        """Send `initialize`, or what follows it: to the server, or to the mirror."""
        server, request = self._server, message.request_id
        try:
            if isinstance(server, MirrorBackend):
                server.receive(message)
            elif server is None:
                if request is not None:
                    await self._initialize(request, message)
            elif request is None:
                await server.send(message.data, message.headers)
                given_up = self._open.get(cancelled(message.opened) or b"")
                if given_up is not None:
                    given_up.cancelled()
            else:
                meta = jsonrpc.members(jsonrpc.members(message.opened.params).get("_meta"))
                token = meta.get(mcp.META_PROGRESS_TOKEN)
                opened = _RelayedRequest(self, request, None if token is None else request_id(token))
                self._open[request] = opened  # first: the answer may come before `send` returns
                if server.answers_apart:  # a task, since the reply lasts as long as the call
                    opened.call = self.live.process.tasks.start(self._call(server, opened, message), "relayed call")
                else:
                    await server.send(message.data, message.headers)
        except GatewayError as exc:
            if request is not None:
                self._fail(request, exc)
            is_needed = message.opened.method in (None, mcp.INITIALIZED)  # without it, the server waits for ever
            if isinstance(exc, SessionLost) or (is_needed and isinstance(exc, UpstreamError)):
                self._lost(exc)

    async def _initialize(self, request: RequestId, message: ClientMessage) -> None:
        """Open the upstream session, and the stream for its messages, before the client gets the answer.

        If that is refused, go on with the mirror if the server is modern; else the session is over, unless the client
        may sign in.
        """
        if message.opened.method != mcp.INITIALIZE:
            raise InvalidRequest("The first message of a session must be `initialize`")
        seconds, stdio = self.live.config.timeouts.handshake_seconds, self.live.upstream.stdio
        # A process of its own, also where the sessions of modern requests share one.
        channel = self.live.upstream.pool.connect() if stdio is None else StdioChannel(stdio.launcher)
        try:
            async with asyncio.timeout(seconds):
                channel, result = await channel.open(message.data, message.headers)
                await channel.listen(negotiated(result) or mcp.LEGACY, message.headers, self)
        except BaseException as exc:
            self.live.process.tasks.spawn(channel.close(end_session=channel.session_id is not None), "close session")
            error = pool_errors.handshake_failed(exc, self.live.route, seconds)
            if not isinstance(error, GatewayError):
                raise
        else:
            self._server = channel
            self.live.upstream.health.ok()
            self._link.send(jsonrpc.result(request, result), request)
            return

        may_sign_in, server = isinstance(error, Refused), self._mirror_of
        if server is not None and not may_sign_in and await is_modern(self.live, message.headers):
            self._server = mirror = MirrorBackend(self.live, server, self._link)
            await mirror.greet(request, message)  # until then, it serves no other request
            return
        self._refuse(request, error)
        if not may_sign_in:
            self._link.ended()

    async def _call(self, channel: Channel, opened: "_RelayedRequest", message: ClientMessage) -> None:
        """Send a request whose reply is a stream of its own, and hand over what comes on it."""
        request = opened.id
        try:
            reading = channel.request(message.data, message.headers, opened)
            del message  # the channel keeps it as long as it may have to be sent again
            refused = await reading
        except SessionLost as exc:
            self._lost(exc)
        except UpstreamError as exc:
            self._fail(request, exc)
        else:
            if refused is not None:
                self.pass_on(jsonrpc.answer(request, refused), request)

    # -- from the upstream --------------------------------------------------------------------------------------

    def hear_side(self, data: bytes) -> None:
        """See `SideListener`."""
        self.pass_on(data, None)

    def side_closed(self, *, was_open: bool) -> None:  # noqa: ARG002  (for transports with other streams)
        """See `SideListener`."""
        server = self._server
        if not (server is None or isinstance(server, MirrorBackend) or server.answers_apart):
            # The stream is the session.
            self._lost(CallLost("The server ended the session; its open requests may have had effects"))

    def pass_on(self, data: bytes, request: RequestId | None) -> None:
        """Pass a message of the server on; `request` is that on whose reply it came."""
        if self._is_closed:
            return
        try:
            opened = jsonrpc.message(data)
            if opened.method is None:
                self.live.upstream.health.ok()
                answered = opened.rpc_id or b""
                self._forget(answered, reads_on=answered == request)
            elif request is None and opened.method == mcp.PROGRESS and isinstance(opened.params, Raw):
                token = jsonrpc.fields(opened.params).get(mcp.META_PROGRESS_TOKEN)
                wanted = b"" if token is None else request_id(token)
                request = next((id_ for id_, each in self._open.items() if each.token == wanted), None)
            elif request is None and len(self._open) == 1:
                # Many clients have no standalone stream, and would miss what can only be about this request.
                request = next(iter(self._open))
        except ValueError:
            self.live.upstream.health.malformed()
            return
        self._link.send(data, request)

    def _forget(self, request: RequestId, *, reads_on: bool = False) -> None:
        """Forget a request that is answered, wherever its answer came; its reply may have to be read on."""
        found = self._open.pop(request, None)
        if found is not None:
            found.end(reads_on=reads_on)

    def _fail(self, request: RequestId, error: GatewayError) -> None:
        """Answer a request with an error; it has ended at the server too, or never reached it."""
        self._forget(request)
        self._refuse(request, error)

    def _refuse(self, request: RequestId, error: GatewayError) -> None:
        self.live.upstream.note(error)
        self.live.upstream.health.count(error)
        self._link.refuse(request, error)

    def _lost(self, error: UpstreamError) -> None:
        """The upstream session has ended, so the client's ends too."""
        if self._is_closed:
            return
        self.live.upstream.health.advise(error)
        log.warning(Event.RELAY_LOST, route=self.live.route.path, cause=error.message, fix=error.fix)
        requests = [*self._open, *(message.request_id for message in self._waiting)]
        self._waiting.clear()
        if isinstance(error, SessionLost):  # a server that does not know the session runs nothing in it
            for request in tuple(self._open):
                self._forget(request)
        for each in requests:
            if each is not None:
                self._refuse(each, error)
        self._link.ended()

    # -- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See `backend.Backend`."""
        self._is_closed = True
        self._waiting.clear()
        running = tuple(self._open)
        for each in self._open.values():
            each.end()
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()
        server = self._server
        if isinstance(server, MirrorBackend):
            await server.close()
        elif server is not None:
            try:
                # Cancel the calls that may still run, as far as the server accepts that in time.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.live.config.timeouts.cancel_seconds):
                        for request in running:
                            params = {"requestId": Raw(request), "reason": "The client has left"}
                            with suppress(UpstreamError):
                                await server.send(jsonrpc.notification(mcp.CANCELLED, params), self._headers)
            finally:
                await server.close(end_session=not running)  # a DELETE under a call kills some servers (`mcp` 1.10)


class _RelayedRequest(Hearer):
    """A request of the client that the server has not answered; it hears its reply, if that is a stream of its own."""

    def __init__(self, relay: SessionRelay, id_: RequestId, token: RequestId | None) -> None:
        """`token` is that of its progress."""
        self.id, self.token = id_, token
        self.call: asyncio.Task[None] | None = None
        """Reads the reply."""
        self._relay = relay
        self._timer = relay.live.deadlines.cancelled
        """Runs once the client has cancelled it."""
        self._is_over = False

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`."""
        self._relay.pass_on(data, self.id)
        return self._is_over

    def cancelled(self) -> None:
        """The client has cancelled it."""
        if self._timer.deadline(self) is None:
            answer = jsonrpc.failure(self.id, jsonrpc.Error(0, "Request cancelled"))
            # Many servers do not answer a cancelled request. As if it came on the reply, this would have that read on.
            self._timer.arm(self, self._relay.pass_on, answer, None)

    def end(self, *, reads_on: bool = False) -> None:
        """It is answered, or given up; the reply may have to be read on."""
        self._is_over = True
        self._timer.disarm(self)
        if self.call is not None and self.call is not asyncio.current_task() and not reads_on:
            # Its answer came on another stream, or the client gave it up.
            asyncio.get_running_loop().call_soon(self.call.cancel)
