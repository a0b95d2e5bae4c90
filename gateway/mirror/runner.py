"""Runs the rounds of one mirrored call at its server.

One call has at most one request in flight upstream. Between two rounds it has none, and nothing is held there.
"""

import itertools
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from msgspec import Raw

from gateway.mirror.call import Again, Ask, End, MirroredCall, Notify, Question, Step, with_trace
from gateway.mirror.catalog import CallerKey, ToolCatalog
from gateway.mirror.modern_server import ModernServer, Outgoing, Pending
from gateway.protocol import jsonrpc, mcp, param_headers
from gateway.protocol.errors import GatewayError, InvalidParams
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import Headers

_IDS: Final = itertools.count(1)


class Upstream(msgspec.Struct, frozen=True, eq=False):
    """The server of a call, with what calls of the same caller share."""

    server: ModernServer
    catalog: ToolCatalog
    caller: CallerKey
    tasks: Tasks


class Hears(Protocol):
    """The client's side of a call."""

    def notify(self, message: bytes) -> None:
        """A notification is here."""

    def ask(self, questions: tuple[Question, ...]) -> None:
        """The client has to answer these; nothing is in flight upstream until it has answered all."""

    def sending(self) -> Headers:
        """A round is about to go upstream: from now on the server may have run it. Returns its trace context."""

    def end(self, message: bytes) -> None:
        """The response is here."""

    def fail(self, error: GatewayError) -> None:
        """There will be no response of the server."""


class Runner:
    """One call at work."""

    def __init__(
        self, call: MirroredCall, upstream: Upstream, hears: Hears, log_level: Callable[[], str | None]
    ) -> None:
        self.call = call
        self.is_over = False
        self._upstream = upstream
        self._hears = hears
        self._log_level = log_level
        self._pending: Pending | None = None
        self._headers: Headers = {}
        self._is_relisted = False

    @property
    def is_running(self) -> bool:
        """Whether a round is upstream, or about to go there."""
        return not self.is_over and not self.call.open

    def run(self, headers: Headers) -> None:
        """Send the present round; `headers` are the client's."""
        self._headers = headers
        request = self.call.request
        if request.method != mcp.TOOLS_CALL or self._upstream.catalog.knows(self._upstream.caller, request.target):
            self._send()
        else:
            self._upstream.tasks.spawn(self._list_and_send(), "list tools")

    async def _list_and_send(self) -> None:
        upstream = self._upstream
        await upstream.catalog.read(upstream.caller, upstream.server, self.call.profile, self._headers)
        if not self.is_over:
            self._send()

    def _send(self) -> None:
        request, upstream = self.call.request, self._upstream
        trace = self._hears.sending()
        try:
            body = self.call.sent(b"%d" % next(_IDS), self._log_level(), trace)
            headers = with_trace(self._headers, trace) if trace else self._headers
            outgoing = Outgoing(body, request.method, request.target, headers, self._param_headers())
        except InvalidParams as exc:
            self._fail(exc)
            return
        except ValueError as exc:
            self._fail(InvalidParams(f'"params._meta" cannot be read: {exc}'))
            return
        try:
            self._pending = upstream.server.begin(outgoing, self)
        except ValueError as exc:
            self._fail(InvalidParams(f"A header of the request cannot be sent to the server: {exc}"))

    def _param_headers(self) -> dict[str, str]:
        request, upstream = self.call.request, self._upstream
        if request.method != mcp.TOOLS_CALL:
            return {}
        mirrored = upstream.catalog.find(upstream.caller, request.target).mirrored
        return param_headers.headers_for(mirrored, jsonrpc.fields(request.params).get("arguments")) if mirrored else {}

    def answer(self, key: str, message: jsonrpc.Message, headers: Headers) -> None:
        """Take the client's response to a question; the last one sends the next round, with its own headers."""
        if self.is_over:
            return
        step = self.call.answered(key, message)
        if step is not None:
            self._headers = headers
            self._take(step)

    def cancel(self) -> None:
        """Give the call up; the client's side hears nothing more."""
        self.is_over = True
        self._abort()

    def _abort(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abort()

    def _fail(self, error: GatewayError) -> None:
        self.is_over = True
        self._abort()
        self._hears.fail(error)

    # -- from the server ----------------------------------------------------------------------------------------

    def on_message(self, data: bytes, /) -> None:
        """See `Listener`."""
        if self.is_over or (self._is_stale(data) and self._list_again()):
            return
        step = self.call.received(data)
        if step is not None:
            if isinstance(step, End):
                self._learn(data)
            self._take(step)

    def on_failed(self, error: GatewayError, /) -> None:
        """See `Listener`."""
        self._pending = None
        if not self.is_over:
            self._fail(error)

    def _take(self, step: Step) -> None:
        match step:
            case Notify(message):
                self._hears.notify(message)
            case Ask(questions):
                self._pending = None
                self._hears.ask(questions)
            case Again():
                self._pending = None
                self._send()
            case End(message):
                self.is_over = True
                self._pending = None
                self._hears.end(message)

    def _learn(self, data: bytes) -> None:
        if self.call.request.method == mcp.TOOLS_LIST:
            result = jsonrpc.message(data).result
            if isinstance(result, Raw):
                self._upstream.catalog.learn(self._upstream.caller, result)

    def _is_stale(self, data: bytes) -> bool:
        """Whether the server refused the call, unrun, because its headers are not those of the tool's schema."""
        if self._is_relisted or self.call.request.method != mcp.TOOLS_CALL or b"%d" % mcp.HEADER_MISMATCH not in data:
            return False
        error = jsonrpc.message(data).error
        return isinstance(error, Raw) and jsonrpc.error(error).code == mcp.HEADER_MISMATCH

    def _list_again(self) -> bool:
        self._is_relisted = True
        self._pending = None
        self._upstream.catalog.forget(self._upstream.caller)
        self._upstream.tasks.spawn(self._list_and_send(), "list tools")
        return True
