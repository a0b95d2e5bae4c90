"""The HTTP listener: aiohttp's server with the bounds it lacks.

aiohttp keeps a connection open for ever that sends half a request head, and takes any number of connections.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.config import Limits, split_address

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_KEEP_ALIVE_SECONDS = 75.0


class _BoundedHandler(RequestHandler):
    """One connection: a request head must be complete within a deadline."""

    __slots__ = ("_head_seconds", "_head_timer")

    def __init__(self, manager: web.Server, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # No request is being served and none is complete: what came is part of a head.
        if self._current_request is None and not self._messages:
            self._watch_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(self._head_seconds, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self.transport.abort()


class _BoundedServer(web.Server):
    """Refuses connections past limits.connections."""

    def __init__(self, handler: Handler, limits: Limits, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._limits = limits

    def __call__(self) -> RequestHandler:
        if len(self.connections) >= self._limits.connections:
            return _Refuser(self)
        return _BoundedHandler(self, self._limits.receive_seconds, loop=self._loop, **self._kwargs)


class _Refuser(RequestHandler):
    """A connection over the limit: closed at once, so that the ones that are open stay well."""

    def __init__(self, manager: web.Server) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport.
        cast("asyncio.Transport", transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        pass


class Listener:
    """One address that is served."""

    def __init__(self, handler: Handler, address: str, limits: Limits) -> None:
        self._host, self._port = split_address(address)
        server = _BoundedServer(
            handler, limits, handler_cancellation=True, keepalive_timeout=_KEEP_ALIVE_SECONDS, access_log=None
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)

    async def start(self) -> str:
        """Listen; the address that was really taken. Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Close the listener and its connections."""
        await self._runner.cleanup()
