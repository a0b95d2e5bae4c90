"""The front of one host, which tells the host's era by its messages.

A modern host is served by the request handler, as clients over HTTP are. A legacy host is served by a backend: the
relay to a legacy server, or the mirror of a modern one, if that refuses `initialize`.
"""

import asyncio
from typing import Final

from gateway.downstream.handler import RequestHandler
from gateway.http.outbox import error_response
from gateway.http.upstream_headers import own_headers
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, ParseError, Stopping
from gateway.protocol.json_text.json_bounds import check_bounds
from gateway.protocol.reply_messages import is_response
from gateway.routes.live_route import LiveRoute
from gateway.stdio_front.host import Host
from gateway.stdio_front.legacy_host import LegacyHost
from gateway.stdio_front.modern_host import ModernHost
from gateway.telemetry import Direction, bodies

_POLL_SECONDS: Final = 0.05


class StdioFront:
    """Serves one host until it closes its end."""

    def __init__(self, host: Host, handler: RequestHandler, live: LiveRoute) -> None:
        self._host = host
        self._handler = handler
        self._live = live
        self._modern: ModernHost | None = None
        self._legacy: LegacyHost | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server has ended the session."""

    @property
    def was_asked(self) -> bool:
        """Whether the host has sent a message for its server."""
        return self._legacy is not None or self._modern is not None

    async def run(self) -> None:
        """Serve the host until it sends nothing more."""
        async for line in self._host.lines():
            if self._legacy is not None:
                await self._legacy.room(len(line or b""))  # a pipe can wait, where a client over HTTP is refused
            try:
                self._receive(line)
            except GatewayError as exc:
                self._host.send(error_response(exc.request_id, exc))

    def _receive(self, line: bytes | None) -> None:
        if line is None:
            limit = self._live.config.limits.body_bytes
            said = f"The message is larger than {limit} bytes (limits.body_bytes), so it was not read"
            raise ParseError(said, brief="The message is too large")
        if bodies.on:
            bodies.show(Direction.FROM_CLIENT, line, route=self._live.route.path, about={"request_id": None})
        try:
            check_bounds(line)
            opened = jsonrpc.message(line)
        except ValueError as exc:
            raise ParseError(f"The line is not one JSON-RPC message (a batch is not served): {exc}") from exc
        is_greeting = opened.method == mcp.INITIALIZE and opened.rpc_id is not None
        if self._legacy is None and (is_greeting or self._modern is None):
            # No legacy host names its version in `_meta`; one whose probe took too long goes on with the handshake of
            # legacy servers.
            meta = jsonrpc.members(jsonrpc.members(opened.params).get("_meta"))
            if is_greeting or not (opened.method == mcp.DISCOVER or mcp.META_VERSION in meta):
                self._legacy = LegacyHost(self._host, self._live, self.ended)
            else:
                self._modern = ModernHost(self._host, self._handler, self._live)
        if self._legacy is not None:
            self._legacy.receive(ClientMessage(line, opened, own_headers(self._live.route)))
        elif self._modern is not None and not (opened.method is None and is_response(opened)):
            self._modern.receive(line)  # a response that nothing asked for gets no answer

    # -- the end ----------------------------------------------------------------------------------------------------

    async def finish(self, seconds: float) -> None:
        """The host sends nothing more: running calls may finish, but questions to the host are cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            self._cancel_questions()  # each time: a call that goes on may ask again
            is_busy = any(each is not None and each.is_busy for each in (self._modern, self._legacy))
            if not is_busy:
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel what is left."""
        if self._modern is not None:
            self._modern.close()
        if self._legacy is not None:
            await self._legacy.end()
        self._cancel_questions()

    def _cancel_questions(self) -> None:
        """End the calls that wait for answers, which will not come."""
        for driver in tuple(self._handler.continuation.lot):
            driver.stop(Stopping("The host has left; the call was cancelled and may have had effects"))
