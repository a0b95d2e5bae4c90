"""The HTTP listener: aiohttp's server with the bounds it lacks.

aiohttp never closes a connection that sends half a request head, accepts any number of connections, and does not tell
whether a reply has been sent completely.
"""

import asyncio
import errno
import fcntl
import os
import socket
import ssl
import sys
import termios
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_runner import BaseSite
from multidict import istr

from gateway.config import InForce, Limits, split_address
from gateway.http import request_id

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNIX: Final = "unix:"
"""The prefix of a unix socket's address; its path follows."""
_KEEP_ALIVE_SECONDS = 75.0
_BACKLOG: Final = 1024
_HANDSHAKE_SECONDS: Final = 10.0
_ID_HEADER: Final = istr(request_id.HEADER)


class _BoundedHandler(RequestHandler):
    """One connection: a request head must be complete within a deadline."""

    __slots__ = ("_finishing", "_head_seconds", "_head_timer", "_out", "_tls_socket")

    def __init__(self, manager: web.Server, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._finishing = False
        self._out: asyncio.Transport
        self._tls_socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # aiohttp drops its reference when it closes the transport, which is before everything is sent.
        self._out = cast("asyncio.Transport", transport)
        if transport.get_extra_info("sslcontext") is not None:
            self._tls_socket = transport.get_extra_info("socket")
        self._watch_head()

    @property
    def is_writing(self) -> bool:
        """Whether a part of a reply has not reached the kernel yet.

        The buffer of the transport below TLS cannot be read. While it is not empty, the kernel's buffer is full.
        """
        if self._finishing or self._out.get_write_buffer_size():
            return True
        return self._tls_socket is not None and _kernel_queue(self._tls_socket) > 0

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the rest of a reply when its handler is done; for most replies that is the whole reply."""
        self._finishing = True
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._finishing = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # No request is in flight and none is complete, so this is part of a head.
        if self._current_request is None and not self._messages:
            self._watch_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with the status alone: aiohttp would quote the request, or show the traceback of a debug run.

        A malformed request is not logged, because aiohttp's message quotes its header. A client that has disconnected
        gets no answer.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _ = super().handle_error(request, status, exc, message)  # logs the exception
        elif request.writer.output_size > 0:
            raise ConnectionError("The request is malformed, and a part of its reply was sent already")
        plain = web.Response(status=status, text=f"{status} {HTTPStatus(status).phrase}\n")
        plain.force_close()
        return plain

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


def _kernel_queue(of: socket.socket) -> int:
    """Return the number of bytes that the peer has not acknowledged; 0 if the system does not know."""
    try:
        return int.from_bytes(fcntl.ioctl(of.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # closed, or not a TCP socket
        return 0


class _Request(web.BaseRequest):
    """A request whose reply names the request, and not the software that serves it."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Remove the `Server` header, in which aiohttp names its own version and Python's."""
        _ = response.headers.popall(hdrs.SERVER, None)
        if request_id.KEY in self:
            response.headers[_ID_HEADER] = self[request_id.KEY]


class _BoundedServer(web.Server):
    """Refuses connections past limits.connections."""

    def __init__(self, handler: Handler, limits: InForce[Limits], **kwargs: Any) -> None:
        super().__init__(handler, request_factory=self._request, **kwargs)
        self._limits = limits

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return _Request(message, payload, protocol, writer, task, self._loop)

    def __call__(self) -> RequestHandler:
        limits = self._limits.value
        if len(self.connections) >= limits.connections:
            return _Refuser(self)
        return _BoundedHandler(self, limits.receive_seconds, loop=self._loop, **self._kwargs)


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

    def __init__(
        self,
        handler: Handler,
        address: str,
        limits: InForce[Limits],
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._path = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self._made: Path | None = None
        self._reuse_port = reuse_port
        self._tls = tls
        self._sites: list[_Site] = []
        self._securing = asyncio.Lock()
        self._server = _BoundedServer(
            handler, limits, handler_cancellation=True, keepalive_timeout=_KEEP_ALIVE_SECONDS, access_log=None
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.connections)

    @property
    def is_writing(self) -> bool:
        """Whether a reply has not reached the kernel yet. Over TLS a single False may be wrong: ask a second time."""
        return any(each.is_writing for each in self._server.connections if isinstance(each, _BoundedHandler))

    async def start(self) -> str:
        """Listen and return the address with its actual port. Raises OSError."""
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
                    shared = socket.socket(fileno=os.dup(listening.fileno()))
                    self._sites.append(_Site(self._runner, tls, sock=shared))
            for site in self._sites:
                await site.start()
            for site in before:
                await site.stop()

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
