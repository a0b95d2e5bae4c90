"""The front of one host: finds out the era of the host by its messages, and that of its server when it has to.

A host and a server of one era are joined by plain relay, if the server is a child. A modern host of a legacy server
is bridged. A legacy host of a modern server, or of a server over HTTP, is served by a backend.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.downstream.handler import RequestHandler
from gateway.legacy_front.backend import Connect
from gateway.process.child import Child
from gateway.protocol import jsonrpc, mcp, request
from gateway.protocol.errors import DownstreamError, GatewayError, ParseError
from gateway.routes.live_route import LiveRoute
from gateway.stdio_front.host import Host
from gateway.stdio_front.legacy_host import LegacyHost
from gateway.stdio_front.modern_host import ModernHost
from gateway.stdio_front.relay import Relay
from gateway.telemetry import Event, get_logger
from gateway.upstream.stdio import is_message

log = get_logger()

_POLL_SECONDS: Final = 0.05


class Backends(msgspec.Struct, frozen=True):
    """What serves a legacy host that no plain relay serves."""

    relay: Connect | None = None
    """For a legacy server."""
    mirror: Connect | None = None
    """For a modern server."""


class StdioFront:
    """Serves one host until it closes its end."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute, backends: Backends) -> None:
        self._host = host
        self._live = live
        self._backends = backends
        self._modern = ModernHost(host, handler, live)
        self._legacy: LegacyHost | None = None
        self._relay: Relay | None = None
        self._is_bridged = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server has ended the session."""

    async def run(self) -> None:
        """Serve the host until it sends nothing more."""
        async for line in self._host.lines():
            try:
                await self._receive(line)
            except GatewayError as exc:
                self._answer(line, exc)

    async def _receive(self, line: bytes | None) -> None:
        if line is None:
            limit = self._live.config.limits.body_bytes
            raise ParseError(f"A line is larger than {limit} bytes (limits.body_bytes), and was not read")
        try:
            opened = jsonrpc.message(line)
        except (ValueError, msgspec.MsgspecError) as exc:
            raise ParseError(f"The line is not one JSON-RPC message: {exc}") from exc
        if self._relay is None and self._legacy is None and not self._is_bridged:
            await self._begin(line, opened)
        elif self._is_bridged and opened.method == mcp.INITIALIZE:
            # A host gives up its probe if a server starts slowly, and goes on with the handshake of legacy servers.
            self._is_bridged = False
            await self._begin(line, opened)
        if self._relay is not None:
            await self._relay.send(line)
        elif self._legacy is not None:
            self._legacy.receive(line, opened)
        else:
            self._modern.receive(line)

    async def _begin(self, line: bytes, opened: jsonrpc.Message) -> None:
        """Choose how this host is served, by its first message."""
        if opened.method == mcp.INITIALIZE:
            await self._begin_legacy()
        else:
            await self._begin_modern()

    async def _begin_modern(self) -> None:
        stdio, era = self._live.upstream.stdio, self._live.route.era
        if stdio is not None and era != "bridge" and await stdio.is_modern() and stdio.modern.child is not None:
            self._relay_to(stdio.modern.child)
        else:
            self._is_bridged = True

    async def _begin_legacy(self) -> None:
        stdio = self._live.upstream.stdio
        if stdio is not None:
            self._relay_to(await stdio.launcher.take())
        elif self._backends.relay is not None:
            self._legacy = LegacyHost(self._host, self._backends.relay, self._end)

    def _relay_to(self, child: Child) -> None:
        def receive(line: bytes) -> None:
            if is_message(line):
                self._host.send(line)

        def ended(_: object) -> None:
            if not child.asked:
                log.warning(Event.CHILD_ENDED, route=self._live.route.path, why=child.over.result())
            self._end()

        child.receive_with(receive)
        child.over.add_done_callback(ended)
        self._relay = Relay(self._host, child, self._live.config.timeouts.answer_seconds)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _answer(self, line: bytes | None, exc: GatewayError) -> None:
        """Answer a line that could not be served with an error, if it is a request or nobody can tell."""
        id_: bytes | None = None
        if line is not None and not isinstance(exc, ParseError):
            try:
                parsed = request.read(line, self._live.config.limits.json_depth)
            except DownstreamError:
                return
            if parsed.id is None:
                return
            id_ = bytes(parsed.id)
        self._host.send(jsonrpc.failure(id_, jsonrpc.Error(exc.code, exc.message)))

    async def finish(self, seconds: float, cancel_questions: Callable[[], None]) -> None:
        """The host sends nothing more: running calls may finish, questions that wait for the host are cancelled."""
        if self._relay is not None:
            await self._relay.finish(seconds)
            return
        deadline = asyncio.get_running_loop().time() + seconds
        while self._is_busy() and asyncio.get_running_loop().time() < deadline and not self._host.gone.done():
            cancel_questions()
            await asyncio.sleep(_POLL_SECONDS)

    def _is_busy(self) -> bool:
        return bool(self._modern.calls) or (self._legacy is not None and self._legacy.is_busy)

    async def close(self) -> None:
        """Cancel what is left."""
        self._modern.close()
        if self._legacy is not None:
            await self._legacy.end()
