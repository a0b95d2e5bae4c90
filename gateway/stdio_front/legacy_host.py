"""A legacy host that is served by a backend: each message of the host goes to it, each of its messages is a line."""

from collections.abc import Callable

import msgspec
from msgspec import Raw

from gateway.legacy_front.backend import Backend, ClientMessage, Connect, RequestId
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.stdio_front.host import Host


class LegacyHost:
    """The one session of a legacy host; the link of its backend."""

    def __init__(self, host: Host, connect: Connect, ended: Callable[[], None]) -> None:
        """`ended` is called when the backend ends the session."""
        self._host = host
        self._ended = ended
        self._open: set[RequestId] = set()
        self._backend: Backend = connect(self)

    @property
    def is_busy(self) -> bool:
        """Whether a request of the host has no response yet."""
        return bool(self._open)

    def receive(self, line: bytes, opened: jsonrpc.Message) -> None:
        """Take one message of the host."""
        message = ClientMessage(line, opened)
        id_ = message.request_id
        if id_ is not None:
            if id_ in self._open:
                error = jsonrpc.Error(mcp.INVALID_REQUEST, "A request with this id is in flight; use another id")
                self._host.send(jsonrpc.failure(id_, error))
                return
            self._open.add(id_)
        try:
            self._backend.receive(message)
        except GatewayError as exc:
            if id_ is not None:
                self.refuse(id_, exc)

    # -- the link ---------------------------------------------------------------------------------------------------

    def send(self, message: bytes, related_to: RequestId | None) -> None:  # noqa: ARG002  (a ClientLink)
        """Write a message; a response to no open request is dropped."""
        opened = jsonrpc.message(message)
        if opened.method is None and isinstance(opened.id, Raw):
            if bytes(opened.id) not in self._open:
                return
            self._open.discard(bytes(opened.id))
        self._host.send(message)

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """Answer a request with an error."""
        if request in self._open:
            self._open.discard(request)
            data = error.data or msgspec.UNSET
            raw = Raw(jsonrpc.encode(data)) if error.data else msgspec.UNSET
            self._host.send(jsonrpc.failure(request, jsonrpc.Error(error.code, error.message, raw)))

    def close(self) -> None:
        """The backend ends the session: answer what is open, and end."""
        error = jsonrpc.Error(mcp.INTERNAL_ERROR, "The session with the server ended; start the server again")
        for id_ in sorted(self._open):
            self._host.send(jsonrpc.failure(id_, error))
        self._open.clear()
        self._ended()

    async def end(self) -> None:
        """The host has left."""
        await self._backend.close()
