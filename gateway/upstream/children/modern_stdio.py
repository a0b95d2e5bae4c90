"""MCP of 2026-07-28 over stdio towards one modern server: the requests of all clients, in one child.

Source: specification 2026-07-28 basic/transports/stdio. A modern server keeps nothing between requests, so one child
serves everybody. Clients choose their ids and progress tokens without regard to each other: the child gets ids of the
gateway's own, and each message goes back with the client's. A log message names no request: among several clients, it
reaches one only if no other request in flight wants logs.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Raw

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallSilent, ChildUnreachable
from gateway.telemetry import Metrics, NestedOutcome
from gateway.upstream.channel import Hearer

_DONE: Final = {"resultType": Raw(b'"complete"')}
_NAMED_BY: Final = {mcp.PROGRESS: "progressToken", mcp.CANCELLED: "requestId"}
"""The parameters that name the request of a notification."""


class _InFlight(msgspec.Struct, eq=False):
    """One request in flight, with what its client called it."""

    id: Raw
    method: str
    token: Raw | None
    wants_logs: bool
    hearer: Hearer
    answered: asyncio.Future[None]
    heard: float
    """The event loop's time of the last message."""

    def hand_over(self, message: bytes, *, is_last: bool = False) -> None:
        """Give a message to the client, which hears nothing after the last one."""
        self.heard = asyncio.get_running_loop().time()
        try:
            _ = self.hearer.hear(message)
        except Exception as exc:  # noqa: BLE001  (the task of the request handles it, not the pipe that all requests share)
            self.answered.set_exception(exc)
        else:
            if is_last:
                self.answered.set_result(None)

    def respond(self, message: jsonrpc.Message) -> None:
        """Give the client its response, with its own ids; a malformed one ends the request."""
        result = message.result
        try:
            if isinstance(message.error, Raw):
                response = b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (bytes(self.id), bytes(message.error))
            elif not isinstance(result, Raw):
                self.answered.set_exception(ValueError("a response needs a result or an error"))
                return
            elif self.method == mcp.LISTEN:
                response = jsonrpc.result(self.id, jsonrpc.encode(_named(jsonrpc.fields(result), self.id)))
            else:
                response = jsonrpc.result(self.id, result)
        except ValueError as exc:
            self.answered.set_exception(exc)
        else:
            self.hand_over(response, is_last=True)


@dataclass(eq=False)
class ModernStdio:
    """One modern server as a child; it is started when a request needs it, and again after it has ended."""

    _launcher: ChildLauncher
    _metrics: Metrics
    child: Child | None = None
    """The process that serves requests now, if there is one."""
    _is_retired: bool = False
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _requests: dict[bytes, _InFlight] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def use(self, child: Child) -> None:
        """Speak to this child from now on."""
        self.child = child
        child.hear_with(self._hear)

    def retire(self) -> None:
        """The route leads elsewhere from now on: end the child once it has answered its open requests."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._requests and self.child is not None:
            child, self.child = self.child, None
            child.end()

    async def request(self, message: bytes, hearer: Hearer) -> None:
        """Send a request, and hand over its messages with the client's own ids, the response last.

        The server is told if this is cancelled. Raises CallLost or Unreachable.
        """
        child = await self._running_child()
        number = b'"gw-%d"' % next(self._numbers)
        sent, request = _translated(message, number, hearer)
        del message  # it is sent once, and a call need not keep it
        self._requests[number] = request
        try:
            await child.send(sent)
            del sent
            loop, idle_seconds = asyncio.get_running_loop(), self._launcher.client.timeouts.idle_seconds
            # A subscription may be silent for as long as nothing changes.
            left = None if request.method == mcp.LISTEN else idle_seconds
            while not await child.answers(request.answered, left):
                left = request.heard + idle_seconds - loop.time()
                if left <= 0:
                    raise CallSilent.by(child.route.where, "was silent for timeouts.idle_seconds")
            request.answered.result()
        finally:
            # TypeScript SDK 2.4: a notification before the first call makes the connection a legacy one.
            if not request.answered.done() and request.method != mcp.DISCOVER:
                child.write(jsonrpc.notification(mcp.CANCELLED, {"requestId": Raw(number)}))
            del self._requests[number]
            request.answered.cancel()
            self._end_if_unused()

    async def _running_child(self) -> Child:
        seconds = self._launcher.client.timeouts.handshake_seconds
        try:
            async with asyncio.timeout(seconds), self._opening:
                if self.child is None or self.child.over.done():
                    child = await self._launcher.take()
                    self._launcher.works(child)  # it needs no handshake
                    self.use(child)
                assert self.child is not None
                return self.child
        except TimeoutError:
            raise ChildUnreachable(
                f"{self._launcher.route.where} did not start a process for modern requests in {seconds:g} s "
                "(timeouts.handshake_seconds): raise upstream.max_children if sessions of legacy clients use it up"
            ) from None

    # -- what the server says ---------------------------------------------------------------------------------------

    def _hear(self, _line: bytes, message: jsonrpc.Message) -> None:
        if message.method is None:
            request = self._requests.get(bytes(message.id)) if isinstance(message.id, Raw) else None
            if request is not None and not request.answered.done():  # else it was cancelled
                request.respond(message)
        elif isinstance(message.id, Raw):
            # A modern server sends none.
            self._metrics.nested_requests[self._launcher.route.path, message.method, NestedOutcome.UNSOLICITED].inc()
        else:
            self._notify(message.method, message.params)

    def _notify(self, method: str, raw: Raw | msgspec.UnsetType) -> None:
        params = jsonrpc.fields(raw) if isinstance(raw, Raw) else {}
        if method == mcp.LOG:
            wanting = [request for request in self._requests.values() if request.wants_logs]
            request = wanting[0] if len(wanting) == 1 or (wanting and self._launcher.serves_host) else None
        elif method in _NAMED_BY:
            request = self._requests.get(bytes(params.get(_NAMED_BY[method], b"")))
        else:
            meta = jsonrpc.fields(params.get("_meta", jsonrpc.EMPTY))
            request = self._requests.get(bytes(meta.get(mcp.META_SUBSCRIPTION, b"")))
        if request is None or request.answered.done():
            return
        named: Mapping[str, object] = params
        if method == mcp.CANCELLED:
            if request.method == mcp.LISTEN:
                # The server ended a subscription without a response, which HTTP cannot do gracefully.
                done = jsonrpc.encode(_named(_DONE, request.id))
                request.hand_over(jsonrpc.result(request.id, done), is_last=True)
            return
        if method == mcp.PROGRESS and request.token is not None:
            named = {**params, "progressToken": request.token}
        elif request.method == mcp.LISTEN:
            named = _named(params, request.id)
        request.hand_over(jsonrpc.notification(method, named))


def _translated(message: bytes, number: bytes, hearer: Hearer) -> tuple[bytes, _InFlight]:
    """Return the request as the child gets it, and what is remembered of it."""
    opened = jsonrpc.message(message)
    assert isinstance(opened.id, Raw), "notifications are not translated"
    assert opened.method is not None
    params = jsonrpc.fields(opened.params) if isinstance(opened.params, Raw) else {}
    meta = jsonrpc.fields(params.get("_meta", jsonrpc.EMPTY))
    token = meta.get(mcp.META_PROGRESS_TOKEN)
    if token is not None:
        params["_meta"] = Raw(jsonrpc.encode({**meta, mcp.META_PROGRESS_TOKEN: Raw(number)}))
    loop, wants_logs = asyncio.get_running_loop(), mcp.META_LOG_LEVEL in meta
    request = _InFlight(opened.id, opened.method, token, wants_logs, hearer, loop.create_future(), loop.time())
    return jsonrpc.request(number, opened.method, params), request


def _named(fields: jsonrpc.Fields, subscription: Raw) -> dict[str, object]:
    """Return a result or params with the client's id of the subscription in `_meta`."""
    meta = jsonrpc.fields(fields.get("_meta", jsonrpc.EMPTY))
    return {**fields, "_meta": {**meta, mcp.META_SUBSCRIPTION: subscription}}
