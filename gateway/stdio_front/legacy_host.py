"""A legacy host that a backend serves, line by line: the relay to its server, or the mirror."""

import asyncio
from typing import Final

from gateway.http.outbox import error_response
from gateway.legacy_front.backend import ClientMessage, cancelled
from gateway.mirror.linked_backend import MirrorBackend
from gateway.mirror.server_client import RouteServer
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, GatewayError, IdInUse
from gateway.protocol.jsonrpc import RequestId
from gateway.routes.live_route import LiveRoute
from gateway.runtime.call_bytes import Weight  # noqa: TC001  (one import style; it costs nothing here)
from gateway.stdio_front.host import HOST, Host
from gateway.transport_relay.session_relay import SessionRelay

_MAX_ASKED: Final = 256
"""Open questions that are counted; beyond them, a request that asks counts as one that is worked on."""


class LegacyHost:
    """The one session of a legacy host; the link of its backend."""

    def __init__(self, host: Host, live: LiveRoute, over: asyncio.Future[None]) -> None:
        """`over` is done when the backend ends the session."""
        self._calls = live.process.calls
        self._host = host
        self._over = over
        self._open: dict[RequestId, Weight] = {}
        """The requests that are not answered yet."""
        self._cancelled: set[RequestId] = set()
        """Open requests that the host has given up; their responses may come all the same."""
        self._asked: dict[RequestId, RequestId] = {}
        """Open questions by id, each with the open request that it is about."""
        server, era = RouteServer(live, HOST), live.route.era
        self._backend: SessionRelay | MirrorBackend = (
            MirrorBackend(live, server, self)
            if era == "mirror"
            else SessionRelay(live, self, mirror_of=server if era == "auto" else None)
        )

    @property
    def is_busy(self) -> bool:
        """Whether a request of the host is worked on, and does not wait for an answer of the host."""
        return bool(self._open.keys() - set(self._asked.values()) - self._cancelled)

    async def room(self, size: int) -> None:
        """Wait until a message of this size can be taken."""
        if isinstance(self._backend, SessionRelay):
            await self._backend.room(size)

    def receive(self, message: ClientMessage) -> None:
        """Take one message of the host; raises IdInUse."""
        id_, opened = message.request_id, message.opened
        if id_ is not None:
            if id_ in self._open:
                raise IdInUse  # without the id, for that would end the other request
            try:
                self._open[id_] = self._calls.take(HOST, 2 * len(message.data))
            except Busy as exc:
                self._host.send(error_response(id_, exc))
                return
        elif opened.method is None:
            _ = self._asked.pop(opened.rpc_id or b"", None)
        elif (given_up := cancelled(opened)) in self._open:
            self._cancelled.add(given_up)
        try:
            self._backend.receive(message)
        except GatewayError as exc:
            if id_ is not None:
                self.refuse(id_, exc)

    # -- the link ---------------------------------------------------------------------------------------------------

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        """Write a message; a response to no open request is dropped."""
        opened = jsonrpc.message(message)
        id_ = opened.rpc_id
        if opened.method is None and id_ is not None:
            if id_ not in self._open:
                return
            self.forget(id_)
        elif id_ is not None and related_to in self._open and len(self._asked) < _MAX_ASKED:
            self._asked[id_] = related_to
        self._host.send(message)

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """Answer a request with an error."""
        self.send(error_response(request, error), request)

    def forget(self, request: RequestId) -> None:
        """Count a request as answered."""
        if request in self._open:
            self._open.pop(request).release()
        self._cancelled.discard(request)
        self._asked = {question: about for question, about in self._asked.items() if about != request}

    def ended(self) -> None:
        """The backend ends the session: answer what is open, and end."""
        error = jsonrpc.Error(mcp.INTERNAL_ERROR, "The session with the server has ended; start it again")
        for id_ in sorted(self._open):
            self._host.send(jsonrpc.failure(id_, error))
        self._release_all()
        if not self._over.done():
            self._over.set_result(None)

    def _release_all(self) -> None:
        for weight in self._open.values():
            weight.release()
        self._open.clear()

    async def end(self) -> None:
        """The host has left."""
        self._release_all()
        await self._backend.close()
