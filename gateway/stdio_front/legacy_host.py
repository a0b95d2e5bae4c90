"""A legacy host that backends serve: its messages go to one of them, whose messages become lines.

The first backend is that of a legacy server. If it refuses `initialize`, because the server is modern, the next one
gets the same `initialize`: the mirror.
"""

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw

from gateway.legacy_front.backend import Backend, ClientMessage, Connect, RequestId
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.runtime.tasks import Tasks
from gateway.stdio_front.host import Host

MayMirror = Callable[[bytes, Backend], Awaitable[Connect | None]]
"""Returns what mirrors the server, if a refusal of `initialize` means that it is modern."""


class LegacyHost:
    """The one session of a legacy host; the link of its backend."""

    def __init__(
        self, host: Host, connect: Connect, tasks: Tasks, ended: Callable[[], None], may_mirror: MayMirror | None
    ) -> None:
        """`ended` is called when the backend ends the session."""
        self._host = host
        self._tasks = tasks
        self._ended = ended
        self._may_mirror = may_mirror
        self._greeting: tuple[bytes, jsonrpc.Message] | None = None
        """`initialize`, until it is answered."""
        self._held: list[tuple[bytes, jsonrpc.Message]] = []
        """What came while another backend is chosen."""
        self._is_choosing = False
        self._open: set[RequestId] = set()
        self._asked: dict[RequestId, RequestId | None] = {}
        """Open questions by id, each with the request that it is about."""
        self.backend: Backend = connect(self)

    @property
    def is_busy(self) -> bool:
        """Whether a request of the host is worked on, and does not wait for an answer of the host."""
        asking = {about for about in self._asked.values() if about is not None}
        return bool(self._open - asking)

    def receive(self, line: bytes, opened: jsonrpc.Message) -> None:
        """Take one message of the host."""
        if self._is_choosing:
            self._held.append((line, opened))
            return
        message = ClientMessage(line, opened)
        id_ = message.request_id
        if id_ is not None:
            if id_ in self._open:
                # An answer with this id would end the other request.
                error = jsonrpc.Error(mcp.INVALID_REQUEST, "A request with this id is in flight; use another id")
                self._host.send(jsonrpc.failure(None, error))
                return
            self._open.add(id_)
            if opened.method == mcp.INITIALIZE:
                self._greeting = line, opened
        elif opened.method is None and isinstance(opened.id, Raw):
            _ = self._asked.pop(bytes(opened.id), None)
        try:
            self.backend.receive(message)
        except GatewayError as exc:
            if id_ is not None:
                self.refuse(id_, exc)

    # -- the link ---------------------------------------------------------------------------------------------------

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        """Write a message; a response to no open request is dropped."""
        opened = jsonrpc.message(message)
        if opened.method is None and isinstance(opened.id, Raw):
            self._answer(bytes(opened.id), message, is_error=isinstance(opened.error, Raw))
            return
        if isinstance(opened.id, Raw):
            self._asked[bytes(opened.id)] = related_to
        self._host.send(message)

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """Answer a request with an error."""
        data = Raw(jsonrpc.encode(error.data)) if error.data else msgspec.UNSET
        self._answer(request, jsonrpc.failure(request, jsonrpc.Error(error.code, error.message, data)), is_error=True)

    def _answer(self, request: RequestId, message: bytes, *, is_error: bool) -> None:
        if request not in self._open:
            return
        if self._greeting is not None and self._greeting[1].id == Raw(request):
            greeting, self._greeting = self._greeting, None
            if is_error and self._may_mirror is not None:
                self._is_choosing = True
                self._tasks.spawn(self._choose_again(greeting, message, self._may_mirror), "choose the mirror")
                return
        self._open.discard(request)
        self._host.send(message)

    async def _choose_again(
        self, greeting: tuple[bytes, jsonrpc.Message], refusal: bytes, may_mirror: MayMirror
    ) -> None:
        """Greet the mirror instead, or hand the refusal over."""
        connect = await may_mirror(refusal, self.backend)
        self._is_choosing, self._may_mirror = False, None
        id_ = greeting[1].id
        assert isinstance(id_, Raw)
        self._open.discard(bytes(id_))
        held, self._held = self._held, []
        if connect is None:
            self._host.send(refusal)
        else:
            self.backend = connect(self)
            held.insert(0, greeting)
        for line, opened in held:
            self.receive(line, opened)

    def close(self) -> None:
        """The backend ends the session: answer what is open, and end."""
        if self._is_choosing:
            return
        error = jsonrpc.Error(mcp.INTERNAL_ERROR, "The session with the server has ended; start it again")
        for id_ in sorted(self._open):
            self._host.send(jsonrpc.failure(id_, error))
        self._open.clear()
        self._ended()

    async def end(self) -> None:
        """The host has left."""
        await self.backend.close()
