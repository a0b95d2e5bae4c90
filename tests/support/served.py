"""What the FAKE servers that speak HTTP have in common: a server of aiohttp on the test's own event loop."""

import ssl
from types import TracebackType
from typing import Self

from aiohttp import web


class Served:
    """Serves `handle` on a port of loopback, from `start` to `close`."""

    path = "/mcp"
    url = origin = ""
    _runner: web.ServerRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        server = web.Server(self.handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._accept(self._runner, port, tls)
        host, port = self._runner.addresses[0][:2]
        self.origin = f"http{'' if tls is None else 's'}://{host}:{port}"
        self.url = self.origin + self.path

    async def _accept(self, runner: web.ServerRunner, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await self._site.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        raise NotImplementedError
