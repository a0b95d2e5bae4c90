"""The mirror for a link that is the session itself: HTTP+SSE, or the standard streams of a host.

The connection holds all state, so nothing is sealed: nested requests have numbers, and everything ends with the link.
"""

import itertools
from collections.abc import Coroutine

from msgspec import Raw

from gateway import world
from gateway.legacy_front.backend import ClientLink, ClientMessage, cancelled
from gateway.mirror.call_rounds import MirroredCall, Question, Request
from gateway.mirror.call_runner import Runner
from gateway.mirror.change_subscription import Changes
from gateway.mirror.client_profile import Profile, of_initialize
from gateway.mirror.client_requests import DEFAULT_LEVEL, initialize, level_of, params_of, request_of, uri_of
from gateway.mirror.upstream import CallServer
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, InvalidRequest
from gateway.protocol.jsonrpc import RequestId
from gateway.upstream.channel import NO_HEADERS, Headers


class MirrorBackend:
    """One session of a legacy client before a modern server (`legacy_front.backend.Backend`)."""

    def __init__(self, upstream: CallServer, link: ClientLink) -> None:
        self.upstream = upstream
        self.link = link
        self.level = DEFAULT_LEVEL
        self._profile: Profile | None = None
        self._calls: dict[RequestId, _LinkedCall] = {}
        self._nested: dict[bytes, tuple[_LinkedCall, str]] = {}
        self._ids = itertools.count(1)
        self._changes: Changes | None = None
        self._is_greeted = False
        """Whether the client has sent an `initialize` that was not refused."""
        self._is_listening = False
        self._is_closed = False

    def receive(self, message: ClientMessage) -> None:
        """See `Backend`."""
        opened, request_id = message.opened, message.request_id
        if request_id is not None:
            self._request(request_id, message)
        elif opened.method == mcp.INITIALIZED and self._changes is not None and not self._is_listening:
            self._is_listening = True
            self._changes.begin(message.headers)
        elif (call := self._calls.get(cancelled(opened) or b"")) is not None:
            call.runner.cancel()
            self.forget(call)
            self.link.forget(call.id)
        elif opened.method is None and isinstance(opened.id, Raw):
            found = self._nested.pop(bytes(opened.id), None)
            if found is not None:
                found[0].runner.answer(found[1], opened, message.headers)

    async def close(self) -> None:
        """See `Backend`."""
        self._is_closed = True
        for call in list(self._calls.values()):
            call.runner.cancel()
        self._calls.clear()
        self._nested.clear()
        if self._changes is not None:
            self._changes.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def _request(self, id_: RequestId, message: ClientMessage) -> None:
        method, headers, profile = message.opened.method, message.headers, self._profile
        if method == mcp.INITIALIZE:
            if self._is_greeted:
                raise InvalidRequest("The session is initialized already; a new one needs a new connection")
            profile = of_initialize(params_of(message.opened))
            self._is_greeted = True
            self._spawn(id_, self._initialize(profile, headers))
        elif method == mcp.PING:
            self.link.send(jsonrpc.result(id_, b"{}"), id_)
        elif profile is None:
            raise InvalidRequest("The session begins with initialize; send that first, and wait for its result")
        elif method == mcp.SET_LEVEL:
            self.level = level_of(params_of(message.opened))
            self.link.send(jsonrpc.result(id_, b"{}"), id_)
        elif method in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE):
            self._spawn(id_, self._subscribe(method, uri_of(params_of(message.opened)), headers))
        else:
            call = self._calls[id_] = _LinkedCall(self, request_of(id_, message.opened), profile)
            call.runner.run(headers)

    def _spawn(self, id_: RequestId, work: Coroutine[None, None, bytes]) -> None:
        self.upstream.tasks.spawn(self._answered(id_, work), "mirrored request")

    async def _answered(self, id_: RequestId, work: Coroutine[None, None, bytes]) -> None:
        if self._is_closed:  # before this task began
            work.close()
            return
        try:
            result = await work
        except GatewayError as exc:
            if not self._is_closed:
                self.link.refuse(id_, exc)
            return
        if not self._is_closed:
            self.link.send(jsonrpc.result(id_, result), id_)

    async def _initialize(self, profile: Profile, headers: Headers) -> bytes:
        try:
            result = await initialize(self.upstream.server, profile, headers)
        except GatewayError:
            self._is_greeted = False
            raise
        self._profile = profile
        self._changes = Changes(self.upstream.server, self.upstream.tasks, profile, self._tell)
        return result

    async def _subscribe(self, method: str, uri: str, headers: Headers) -> bytes:
        assert self._changes is not None, "there is a profile"
        await self._changes.change(method, uri, headers)
        return b"{}"

    def _tell(self, message: bytes) -> None:
        if not self._is_closed:
            self.link.send(message, None)

    # -- calls --------------------------------------------------------------------------------------------------

    def ask(self, call: "_LinkedCall", question: Question) -> None:
        """Put a question to the client."""
        id_ = b"%d" % next(self._ids)
        self._nested[id_] = call, question.key
        self.link.send(question.asked(id_), call.id)

    def forget(self, call: "_LinkedCall") -> None:
        """A call is over."""
        self._calls.pop(call.id, None)
        self._nested = {id_: found for id_, found in self._nested.items() if found[0] is not call}


class _LinkedCall:
    """One call of the session (`Hears`)."""

    def __init__(self, backend: MirrorBackend, request: Request, profile: Profile) -> None:
        self.id = request.id
        self._backend = backend
        call = MirroredCall(request, profile, world.token_hex(8), drives_tasks=backend.upstream.drives_tasks)
        self.runner = Runner(call, backend.upstream, self, lambda: backend.level)

    def notify(self, message: bytes) -> None:
        self._backend.link.send(message, self.id)

    def ask(self, questions: tuple[Question, ...]) -> None:
        for question in questions:
            self._backend.ask(self, question)

    def sending(self) -> Headers:
        return NO_HEADERS

    def end(self, message: bytes) -> None:
        self._backend.forget(self)
        self._backend.link.send(message, self.id)

    def fail(self, error: GatewayError) -> None:
        self._backend.forget(self)
        self._backend.link.refuse(self.id, error)
