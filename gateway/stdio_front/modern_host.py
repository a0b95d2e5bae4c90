"""The requests of a modern host, of which several are in flight at the same time."""

import asyncio  # noqa: TC003  (one import style; it costs nothing here)
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from msgspec import Raw

from gateway.http.outbox import error_response
from gateway.protocol import jsonrpc, mcp, request
from gateway.protocol.errors import DownstreamError, GatewayError, IdInUse
from gateway.protocol.jsonrpc import RequestId, request_id
from gateway.protocol.reply_messages import is_response
from gateway.protocol.request import ParsedBody
from gateway.runtime.tasks import Tasks, telling
from gateway.stdio_front.host import Host

Serve = Callable[[ParsedBody, bytes], Awaitable[None]]
"""Serves one request, given as it was read and as it was sent; writes its messages to the host."""


class ModernHost:
    """One modern host."""

    def __init__(self, host: Host, serve: Serve, tasks: Tasks) -> None:
        self._host = host
        self._serve = serve
        self._tasks = tasks
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._listening: set[RequestId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a request is worked on; a subscription ends only with its host."""
        return len(self._running) > len(self._listening)

    def receive(self, line: bytes) -> None:
        """Take one message of the host."""
        try:
            parsed = request.read(line)
            if parsed.id is None:
                if parsed.method == mcp.CANCELLED:
                    self._cancel(parsed.params.get("requestId"))
                return
            id_ = request_id(parsed.id)
            if id_ in self._running:
                raise IdInUse  # without the id, for that would end the other request
        except DownstreamError as exc:
            if not _is_response(line):
                self._refuse(exc.request_id, exc)
            return
        if parsed.method == mcp.LISTEN:
            self._listening.add(id_)
        task = self._running[id_] = self._tasks.start(self._run(parsed, line), "request of the host")
        task.add_done_callback(lambda _: self._ended(id_))

    async def _run(self, parsed: ParsedBody, line: bytes) -> None:
        with telling(partial(self._refuse, parsed.id)), suppress(ConnectionError):  # then the host is gone
            await self._serve(parsed, line)

    def _refuse(self, id_: Raw | bytes | None, error: GatewayError) -> None:
        self._host.send(error_response(id_, error))

    def _ended(self, id_: RequestId) -> None:
        del self._running[id_]
        self._listening.discard(id_)

    def _cancel(self, id_: Raw | None) -> None:
        """Stop a request; the host gets nothing more of it. An unknown one has been answered."""
        task = None if id_ is None else self._running.get(request_id(id_))
        if task is not None:
            _ = task.cancel()

    def close(self) -> None:
        """Cancel everything."""
        for task in self._running.values():
            _ = task.cancel()


def _is_response(line: bytes) -> bool:
    """Whether a message answers a request, so that it gets no answer itself."""
    try:
        message = jsonrpc.message(line)
    except ValueError:
        return False
    return message.method is None and is_response(message)
