"""The mirror for a link that is the session itself: HTTP+SSE, or the standard streams of a host.

The connection holds all state, so nothing is sealed: nested requests have numbers, and everything ends with the link.
"""

import itertools
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from msgspec import Raw

from gateway import world
from gateway.exchange.events import Leg
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import Policy
from gateway.http.outbox import FinalMessage
from gateway.legacy_front.backend import ClientLink, ClientMessage, cancelled
from gateway.mirror.call_rounds import Rounds
from gateway.mirror.change_subscription import Changes
from gateway.mirror.client_requests import (
    DEFAULT_LEVEL,
    Profile,
    answer_of,
    level_of,
    of_initialize,
    params_of,
    request_of,
    uri_of,
)
from gateway.mirror.mirrored_call import MirroredCall
from gateway.mirror.server_client import ServerClient, initialize
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, InvalidRequest
from gateway.protocol.jsonrpc import RequestId
from gateway.routes.live_route import LiveRoute
from gateway.upstream.channel import Headers


class MirrorBackend:
    """One session of a legacy client before a modern server (`legacy_front.backend.Backend`)."""

    def __init__(self, live: LiveRoute, server: ServerClient, link: ClientLink) -> None:
        self.live, self.server = live, server
        self.link = link
        self.level = DEFAULT_LEVEL
        self.calls: dict[RequestId, _LinkedCall] = {}
        self.nested: dict[bytes, tuple[_LinkedCall, str]] = {}
        """The open questions by the ids of their requests, each with the key that its call has for it."""
        self.ids = itertools.count(1)
        """Of nested requests."""
        self._changes: Changes | None = None
        """Once the client has its answer to `initialize`."""
        self._is_greeted = False
        """Whether the client has sent an `initialize` that was not refused."""
        self._is_closed = False

    def receive(self, message: ClientMessage) -> None:
        """See `Backend`."""
        opened, request_id = message.opened, message.request_id
        if request_id is not None:
            self._request(request_id, message)
        elif opened.method == mcp.INITIALIZED and self._changes is not None:
            self._changes.begin(message.headers)
        elif (call := self.calls.get(cancelled(opened) or b"")) is not None:
            call.cancel()
        elif opened.method is None and isinstance(opened.id, Raw):
            found = self.nested.pop(bytes(opened.id), None)
            if found is not None:
                found[0].respond(found[1], answer_of(opened), message.headers)

    async def greet(self, id_: RequestId, message: ClientMessage) -> None:
        """Serve `initialize`, and return once it is answered; raises as `receive`."""
        await self._answered(id_, self._greeting(message))

    async def close(self) -> None:
        """See `Backend`."""
        self._is_closed = True
        for call in list(self.calls.values()):
            call.cancel()
        if self._changes is not None:
            self._changes.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def _request(self, id_: RequestId, message: ClientMessage) -> None:
        method, headers, changes = message.opened.method, message.headers, self._changes
        if method == mcp.INITIALIZE:
            self._spawn(id_, self._greeting(message))
        elif method == mcp.PING:  # the only request that may come before `initialize` is answered
            self.link.send(jsonrpc.result(id_, b"{}"), id_)
        elif changes is None:
            raise InvalidRequest("The session begins with initialize; send that first, and wait for its result")
        elif method == mcp.SET_LEVEL:
            self.level = level_of(message.opened)
            for call in self.calls.values():
                call.want_level(self.level)
            self.link.send(jsonrpc.result(id_, b"{}"), id_)
        elif method in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE):
            self._spawn(id_, changes.change(method, uri_of(message.opened), headers))
        else:
            request = request_of(id_, message.opened)
            rounds = Rounds(self.live, world.token_hex(8), request, changes.profile, headers, self.level)
            call = self.calls[id_] = _LinkedCall(self, rounds)
            call.open(call)

    def _spawn(self, id_: RequestId, work: Coroutine[None, None, bytes | None]) -> None:
        self.live.process.tasks.spawn(self._answered(id_, work), "mirrored request")

    async def _answered(self, id_: RequestId, work: Coroutine[None, None, bytes | None]) -> None:
        """Answer a request with the result of some work, which may be empty."""
        if self._is_closed:  # before this task began
            work.close()  # else Python warns that it was never awaited
            return
        try:
            result = await work
        except GatewayError as exc:
            self.link.refuse(id_, exc)
        else:
            self.link.send(jsonrpc.result(id_, result or b"{}"), id_)

    def _greeting(self, message: ClientMessage) -> Coroutine[None, None, bytes]:
        """What serves `initialize`; raises InvalidRequest or InvalidParams."""
        if self._is_greeted:
            raise InvalidRequest("The session is initialized already; a new one needs a new connection")
        profile = of_initialize(params_of(message.opened))
        self._is_greeted = True  # before the first await: a second `initialize` may come meanwhile
        return self._initialize(profile, message.headers)

    async def _initialize(self, profile: Profile, headers: Headers) -> bytes:
        try:
            result = await initialize(self.server, profile, headers)
        except GatewayError:
            self._is_greeted = False
            raise
        tell = partial(self.link.send, related_to=None)
        self._changes = Changes(self.server, self.live.process.tasks, profile, tell)
        return result


class _LinkedCall(MirroredCall, Leg):
    """One call of the session, which is the leg that waits for it, too: it ends with the link."""

    def __init__(self, backend: MirrorBackend, rounds: Rounds) -> None:
        self._backend, self._id = backend, rounds.request.id
        super().__init__(rounds, backend.server, Policy())

    def _put(self, questions: tuple[Question, ...]) -> None:
        backend = self._backend
        for question in questions:
            id_ = b"%d" % next(backend.ids)
            backend.nested[id_] = self, question.key
            backend.link.send(question.nested(id_), self._id)

    def notify(self, message: bytes) -> None:
        self._backend.link.send(message, self._id)

    def finish(self, final: FinalMessage) -> None:
        link, id_ = self._backend.link, self._id
        if final.cause is not None:
            link.refuse(id_, final.cause)
        elif final.body:
            link.send(final.body, id_)
        else:
            link.forget(id_)

    def _fail(self, legs: Iterable[Any], error: GatewayError | jsonrpc.Error) -> None:
        """See `Engine`; the link words an error of the gateway, because it knows the request that waits."""
        if isinstance(error, GatewayError):
            self._finish(legs, FinalMessage(b"", cause=error))
        else:
            super()._fail(legs, error)

    def _ended(self) -> None:
        backend = self._backend
        backend.calls.pop(self._id, None)
        for id_ in [id_ for id_, (call, _) in backend.nested.items() if call is self]:
            del backend.nested[id_]

    _forget = _ended
