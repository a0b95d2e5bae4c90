"""An address that accepts connections, whose certificates can be replaced meanwhile."""

import asyncio
import errno
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gateway import world
from gateway.config import split_address
from gateway.http.server.connection import Begin, Connection, Handler, Service
from gateway.http.server.traffic import Traffic

UNIX: Final = "unix:"
"""The prefix of a unix socket's address; its path follows."""
_BACKLOG: Final = 1024
_HANDSHAKE_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 2.0
"""How long requests that are served, and the last handshakes, may take once the listener closes."""
FORGET_SECONDS: Final = 300.0
"""How often the heads of requests are forgotten."""


class Listener(Service):
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
        begin: Begin | None = None,
        leaves_spares: bool = True,
    ) -> None:
        """`begin` begins what it can of the requests whose heads and bodies have come, before `handler` is asked."""
        super().__init__(handler, traffic, begin, leaves_spares=leaves_spares)
        self._address = address
        self._path = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self._made: Path | None = None
        self._reuse_port = reuse_port
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._securing = asyncio.Lock()
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a reply has not reached the kernel yet. Over TLS a single False may be wrong: ask a second time."""
        return any(each.wire.is_writing for each in self.connections)

    async def start(self) -> str:
        """Listen and return the address with its actual port. Raises OSError."""
        address, path = self._address, self._path
        if path is not None:
            # The event loop would remove an existing socket file, even if another process still listens there.
            if await _answers(path):
                raise OSError(errno.EADDRINUSE, f"another process listens at {path}")
            loop = asyncio.get_running_loop()
            self._servers = [await loop.create_unix_server(self._connection, path, backlog=_BACKLOG)]
            self._made = path
            # Until now only the mode of the folder kept other users out, as that of a worker's folder does.
            path.chmod(0o600)
        else:
            host, port = split_address(address)
            self._servers = [await self._accept(self._tls, host=host, port=port, reuse_port=self._reuse_port or None)]
            host, port = self._servers[0].sockets[0].getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._forget_heads()
        return address

    async def _accept(self, tls: ssl.SSLContext | None, **place: Any) -> asyncio.Server:
        """Accept connections at an address, or from a socket that already listens."""
        if tls is not None:
            # The deadline of a request head begins only after the handshake.
            place["ssl_handshake_timeout"] = _HANDSHAKE_SECONDS
        return await asyncio.get_running_loop().create_server(self._connection, ssl=tls, backlog=_BACKLOG, **place)

    def _connection(self) -> Connection:
        return Connection(self)

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
            before, self._tls, self._servers = self._servers, tls, []
            for server in before:
                for listening in server.sockets:
                    self._servers.append(await self._accept(tls, sock=listening.dup()))
            for server in before:
                server.close()

    async def stop_accepting(self) -> None:
        """Refuse new connections; open ones are served on.

        So are those that only the kernel has accepted: it would reset them, whatever they have sent.
        """
        async with self._securing:
            waiting = [each for server in self._servers for at in server.sockets for each in _waiting(at)]
            for server in self._servers:
                server.close()
            self._servers = []
            seconds = None if self._tls is None else _CLOSE_SECONDS  # a silent client must not hold up a drain
            loop, tls = asyncio.get_running_loop(), self._tls
            begun = [
                loop.connect_accepted_socket(self._connection, each, ssl=tls, ssl_handshake_timeout=seconds)
                for each in waiting
            ]
        _ = await asyncio.gather(*begun, return_exceptions=True)  # as for others, a failed handshake ends one

    def forget_heads(self) -> None:
        """Forget the heads of requests, with what is known of them by the configuration."""
        self.heads.forget()

    def _forget_heads(self) -> None:
        """Forget the heads now, and again and again until the listener closes."""
        self.forget_heads()
        self._forgetting = asyncio.get_running_loop().call_later(FORGET_SECONDS, self._forget_heads)

    async def close(self) -> None:
        """Close the listener and its connections, the busy ones after two seconds at most."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self.is_closed = True
        await self.stop_accepting()
        await asyncio.sleep(0)  # what the kernel has accepted is made and closed now
        for connection in list(self.connections):
            connection.close()
        if tasks := [each.task for each in self.connections if each.task is not None]:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in late:
                _ = task.cancel()
            if late:
                _ = await asyncio.wait(late, timeout=_CLOSE_SECONDS)
        for connection in list(self.connections):
            connection.wire.end()
        if self._made is not None:
            self._made.unlink(missing_ok=True)


def _waiting(at: Any) -> list[world.Socket]:
    """The connections that the kernel has accepted at a listening socket, and the event loop has not.

    No more than fit into its queue: others may come for as long as this goes on.
    """
    found: list[world.Socket] = []
    with at.dup() as listening, suppress(OSError):  # there is none left
        for _ in range(_BACKLOG):
            found.append(listening.accept()[0])
            found[-1].setblocking(False)
    return found


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:  # its queue is full, so a process listens
        return True
    writer.close()
    return True
