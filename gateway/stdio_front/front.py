"""The front of one host, which tells the host's era by its messages.

A modern host is served by the request handler, as clients over HTTP are. A legacy host is served by a backend: the
relay to a legacy server, or the mirror of a modern one, if that refuses `initialize`.
"""

import asyncio
from typing import Final

from msgspec import Raw

from gateway.bridge.driver import Driver
from gateway.downstream.handler import RequestHandler
from gateway.http.outbox import error_response
from gateway.http.upstream_headers import own_headers
from gateway.legacy_front.backend import Backend, ClientLink, ClientMessage
from gateway.mirror.call_rounds import CallServer
from gateway.mirror.fallback import FallbackBackend
from gateway.mirror.linked_backend import MirrorBackend
from gateway.mirror.server_client import server_of
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.parking.lot import Lot
from gateway.protocol import era as eras
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, ParseError, Stopping
from gateway.protocol.json_text.json_bounds import check_bounds
from gateway.routes.live_route import LiveRoute
from gateway.stdio_front.child_backend import ChildBackend
from gateway.stdio_front.host import HOST, Host
from gateway.stdio_front.legacy_host import LegacyHost
from gateway.stdio_front.modern_host import ModernHost
from gateway.telemetry import Direction, bodies
from gateway.transport_relay.session_relay import SessionRelay

_POLL_SECONDS: Final = 0.05


class StdioFront:
    """Serves one host until it closes its end."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute, lot: Lot[Driver]) -> None:
        """`lot` has the calls of a modern host that wait for its answers."""
        self._host = host
        self._handler = handler
        self._live = live
        self._lot = lot
        self._tasks = live.process.tasks
        self._modern: ModernHost | None = None
        self._legacy: LegacyHost | None = None
        self._child: ChildBackend | None = None
        """The child of a legacy host."""
        self._fallback: FallbackBackend | None = None
        """What serves a legacy host whose server may turn out to be modern."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server has ended the session."""

    async def run(self) -> None:
        """Serve the host until it sends nothing more."""
        async for line in self._host.lines():
            try:
                self._receive(line)
            except GatewayError as exc:
                self._host.send(error_response(exc.request_id, exc))
            if self._child is not None:
                await self._child.ready()

    def _receive(self, line: bytes | None) -> None:
        if line is None:
            limit = self._live.config.limits.body_bytes
            raise ParseError(f"The message is larger than {limit} bytes (limits.body_bytes), so it was not read")
        if bodies.on:
            bodies.show(Direction.FROM_CLIENT, line, route=self._live.route.path, request_id=None)
        try:
            check_bounds(line)
            opened = jsonrpc.message(line)
        except ValueError as exc:
            raise ParseError(f"The line is not one JSON-RPC message (a batch is not served): {exc}") from exc
        is_greeting = opened.method == mcp.INITIALIZE and isinstance(opened.id, Raw)
        if self._legacy is None and (is_greeting or (self._modern is None and not _speaks_modern(opened))):
            # A host whose probe took too long goes on with the handshake of legacy servers.
            self._legacy = self._new_legacy()
        elif self._modern is None and self._legacy is None:
            self._modern = ModernHost(self._host, self._handler, self._live)
        if self._legacy is not None:
            self._legacy.receive(ClientMessage(line, opened, own_headers(self._live.route)))
        elif self._modern is not None:
            self._modern.receive(line)

    # -- legacy hosts -----------------------------------------------------------------------------------------------

    def _new_legacy(self) -> LegacyHost:
        era = self._live.route.era
        connect = {"mirror": self._mirror, "bridge": self._relay, "auto": self._relay_or_mirror}[era]
        return LegacyHost(self._host, connect, self._end, self._live.process.calls)

    def _relay(self, link: ClientLink) -> Backend:
        stdio = self._live.upstream.stdio
        if stdio is None:
            return SessionRelay(self._live, link)
        self._child = ChildBackend(stdio, link, self._tasks, self._live.config.limits.body_bytes)
        return self._child

    def _mirror(self, link: ClientLink) -> Backend:
        caller = (self._live.route.path, HOST)
        return MirrorBackend(CallServer(self._live, server_of(self._live), ToolCatalog(), caller), link)

    def _relay_or_mirror(self, link: ClientLink) -> Backend:
        self._fallback = FallbackBackend(self._live, self._relay, self._mirror, link, self._tells_modern)
        return self._fallback

    def _tells_modern(self, refusing: Backend, greeting: ClientMessage, response: bytes) -> bool:
        """Whether the response of the child shows that it is modern; it serves the mirror then."""
        stdio, self._child = self._live.upstream.stdio, None
        found = bool(response) and eras.verdict(200, "application/json", response, greeting.request_id or b"")
        if found and stdio is not None and isinstance(refusing, ChildBackend):
            child = refusing.give_up_child()
            if child is not None and not child.over.done():
                stdio.found_modern(child)
        return bool(found)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    # -- the end ----------------------------------------------------------------------------------------------------

    async def finish(self, seconds: float) -> None:
        """The host sends nothing more: running calls may finish, but questions to the host are cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        fallback = self._fallback
        while fallback is not None and fallback.is_undecided and not self.ended.done() and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        if self._child is not None:
            await self._child.finish(deadline - loop.time())
            return
        while loop.time() < deadline:
            self._cancel_questions()
            if not self._is_busy:
                return
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def _is_busy(self) -> bool:
        return (self._modern is not None and self._modern.is_busy) or (
            self._legacy is not None and self._legacy.is_busy
        )

    async def close(self) -> None:
        """Cancel what is left."""
        if self._modern is not None:
            self._modern.close()
        if self._legacy is not None:
            await self._legacy.end()
        self._cancel_questions()

    def _cancel_questions(self) -> None:
        """End the calls that wait for answers, which will not come."""
        for driver in tuple(self._lot):
            driver.stop(Stopping("The host has left; the call was cancelled and may have had effects"))


def _speaks_modern(opened: jsonrpc.Message) -> bool:
    """Whether the first message of a host is one of 2026-07-28: no legacy host names its version in `_meta`."""
    meta = jsonrpc.members(jsonrpc.members(opened.params).get("_meta"))
    return opened.method == mcp.DISCOVER or mcp.META_VERSION in meta
