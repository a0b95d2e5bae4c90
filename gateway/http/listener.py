"""The HTTP listener: aiohttp's server with a limit of connections.

Its certificates can be replaced while it runs.
"""

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_runner import BaseSite
from multidict import istr

from gateway import world
from gateway.config import split_address
from gateway.http import request_id
from gateway.http.connection import Connection, Direct
from gateway.http.traffic import Traffic

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNIX: Final = "unix:"
"""The prefix of a unix socket's address; its path follows."""
_KEEP_ALIVE_SECONDS = 75.0
_BACKLOG: Final = 1024
_HANDSHAKE_SECONDS: Final = 10.0
FORGET_SECONDS: Final = 300.0
"""How often the heads of requests are forgotten."""
_ID_HEADER: Final = istr(request_id.HEADER)


class _Request(web.BaseRequest):
    """A request whose reply names the request, and not the software that serves it."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Remove the `Server` header, in which aiohttp names its own version and Python's."""
        _ = response.headers.popall(hdrs.SERVER, None)
        if request_id.KEY in self:
            response.headers[_ID_HEADER] = self[request_id.KEY]


class _LastRequest(_Request):
    """A request that began during a drain: its connection ends with its reply."""

    @property
    def keep_alive(self) -> bool:
        """Have aiohttp close the connection, and say so in the head of the reply."""
        return False


class _BoundedServer(web.Server):
    """Refuses connections past limits.connections."""

    def __init__(self, handler: Handler, traffic: Traffic, direct: Direct | None, **kwargs: Any) -> None:
        super().__init__(handler, request_factory=self._request, **kwargs)
        self._traffic = traffic
        self.direct = direct
        self.request_class = _Request

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return self.request_class(message, payload, protocol, writer, task, self._loop)

    def __call__(self) -> RequestHandler:
        if len(self.connections) >= self._traffic.limits.value.connections:
            return _Refuser(self)
        return Connection(self, self._traffic, self.direct, loop=self._loop, **self._kwargs)


class _Refuser(RequestHandler):
    """A connection over the limit, which is closed at once."""

    def __init__(self, manager: web.Server) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio.Transport.
        cast("asyncio.Transport", transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        pass


class _Site(BaseSite):
    """The address at which a listener accepts connections, or a socket that already listens."""

    __slots__ = ("_options",)

    def __init__(self, runner: web.ServerRunner, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(runner, ssl_context=tls, backlog=_BACKLOG)
        if tls is not None:
            # The deadline of a request head begins only after the handshake.
            options["ssl_handshake_timeout"] = _HANDSHAKE_SECONDS
        self._options = options

    @property
    def name(self) -> str:
        return "clients"

    @property
    def sockets(self) -> Sequence[Any]:
        return cast("asyncio.Server", self._server).sockets

    async def start(self) -> None:
        await super().start()
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server, ssl=self._ssl_context, backlog=_BACKLOG, **self._options
        )


class Listener:
    """Serves one address: `host:port`, or `unix:` and the path of a socket that only this user can open.

    With `reuse_port`, other processes can listen at the same port, and the kernel distributes the connections.
    """

    def __init__(  # noqa: PLR0913  (what a listener consists of)
        self,
        handler: Handler,
        address: str,
        traffic: Traffic,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        direct: Direct | None = None,
    ) -> None:
        self._address = address
        self._path = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self._made: Path | None = None
        self._reuse_port = reuse_port
        self._tls = tls
        self._sites: list[_Site] = []
        self._securing = asyncio.Lock()
        self._heads = None if direct is None else direct.heads
        self._forgetting: asyncio.TimerHandle | None = None
        self._server = _BoundedServer(
            handler, traffic, direct, handler_cancellation=True, keepalive_timeout=_KEEP_ALIVE_SECONDS, access_log=None
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.connections)

    @property
    def is_writing(self) -> bool:
        """Whether a reply has not reached the kernel yet. Over TLS a single False may be wrong: ask a second time."""
        return any(each.is_writing for each in self._server.connections if isinstance(each, Connection))

    async def start(self) -> str:
        """Listen and return the address with its actual port. Raises OSError."""
        address = await self._listen()
        self._forget_heads()
        return address

    async def _listen(self) -> str:
        await self._runner.setup()
        if self._path is not None:
            return await self._start_unix(self._path)
        host, port = split_address(self._address)
        site = _Site(self._runner, self._tls, host=host, port=port, reuse_port=self._reuse_port or None)
        await site.start()
        self._sites = [site]
        host, port = self._runner.addresses[0][:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def is_secure(self) -> bool:
        """Whether it serves TLS."""
        return self._tls is not None

    async def secure(self, tls: ssl.SSLContext | None) -> None:
        """Serve new connections with these certificates, or without TLS; open connections stay as they are.

        The context of a running server cannot be replaced. So a second server accepts from the same socket before
        the first one stops, and no connection is refused.
        """
        async with self._securing:
            before = self._sites
            self._tls, self._sites = tls, []
            for site in before:
                for listening in site.sockets:
                    shared = world.duplicate(listening)
                    self._sites.append(_Site(self._runner, tls, sock=shared))
            for site in self._sites:
                await site.start()
            for site in before:
                await site.stop()

    def send_away(self) -> None:
        """Close each connection after its next reply, so that its client opens the next one elsewhere."""
        self._server.request_class = _LastRequest
        if self._server.direct is not None:
            self._server.direct.begin = None

    async def stop_accepting(self) -> None:
        """Refuse new connections; open ones are served on."""
        async with self._securing:
            for site in self._sites:
                await site.stop()
            self._sites = []

    def _forget_heads(self) -> None:
        """Forget the heads of requests now, and again and again until the listener closes."""
        if self._heads is not None:
            self._heads.forget()
            self._forgetting = asyncio.get_running_loop().call_later(FORGET_SECONDS, self._forget_heads)

    async def _start_unix(self, path: Path) -> str:
        # The event loop would remove an existing socket file, even if another process still listens there.
        if await _answers(path):
            raise OSError(errno.EADDRINUSE, f"another process listens at {path}")
        await web.UnixSite(self._runner, path, backlog=_BACKLOG).start()
        self._made = path
        # Until now only the mode of the folder kept other users out, as that of a worker's folder does.
        path.chmod(0o600)  # noqa: ASYNC240 - it takes microseconds
        return self._address

    async def close(self) -> None:
        """Close the listener and its connections."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        async with self._securing:
            self._sites = []  # a drain that still runs has nothing left to stop
            await self._runner.cleanup()
        if self._made is not None:
            self._made.unlink(missing_ok=True)


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:  # its queue is full, so a process listens
        return True
    writer.close()
    return True
