"""Opens connections to upstreams.

The addresses of a host are tried as RFC 8305 says (aiohappyeyeballs, which aiohttp uses too). A host is looked up for
each connection, or for all that are opened at the same time. No proxy is looked for, neither in the environment nor
anywhere else.
"""

import asyncio
import os
import ssl
from contextlib import suppress
from functools import lru_cache
from typing import Final

from aiohappyeyeballs import addr_to_addr_infos, start_connection

from gateway import world
from gateway.http_client.connection import Connection
from gateway.http_client.errors import ConnectTimedOut, NotConnected, TlsRefused
from gateway.http_client.tls_errors import certificate_cause, handshake_cause
from gateway.identity.principal import parsed_address

_NEXT_ADDRESS_SECONDS: Final = 0.25
"""When the next address is tried beside one that has not answered yet."""


class Connector:
    """Opens connections within a deadline, name lookup and TLS handshake included."""

    def __init__(self, source: str | None = None, *, bounds_lookups: bool = True) -> None:
        """Connect from the address `source`, if given.

        If not `bounds_lookups`, the deadline begins after the name lookup, which the caller has to bound.
        """
        self._bounds_lookups = bounds_lookups
        self._lookups: dict[tuple[str, int], asyncio.Task[list[world.AddressInfo]]] = {}
        self._source = addr_to_addr_infos(None if source is None else (source, 0))

    async def connect(self, connection: Connection, seconds: float) -> None:
        """Open a connection to its origin. Raises NotConnected."""
        origin = connection.origin
        is_unix = origin.host.startswith("/")
        deadline = asyncio.timeout(seconds if self._bounds_lookups or is_unix else None)
        try:
            async with deadline:
                if is_unix:
                    loop = asyncio.get_running_loop()
                    _ = await loop.create_unix_connection(lambda: connection, origin.host)
                    return
                addresses = await self.addresses(origin.host, origin.port)
                if not self._bounds_lookups:
                    deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                await self._connect(connection, addresses)
        except (OSError, UnicodeError) as exc:
            if deadline.expired():
                raise ConnectTimedOut from exc
            raise _failure(exc) from exc

    def close(self) -> None:
        """End the name lookups that still run."""
        for lookup in self._lookups.values():
            lookup.cancel()

    async def addresses(self, host: str, port: int) -> list[world.AddressInfo]:
        """The addresses of a host, at least one. Raises OSError or UnicodeError."""
        if _is_literal(host):
            # The resolver has a few threads for all hosts, and a name server that is silent can occupy them all.
            return addr_to_addr_infos((host, port)) or []
        lookup = self._lookups.get((host, port))
        if lookup is None:

            def done(lookup: asyncio.Task[object]) -> None:
                del self._lookups[host, port]
                _ = lookup.cancelled() or lookup.exception()  # perhaps nothing waits for it any more

            # Its own task: the request that comes first may be aborted while others wait for the same lookup.
            asking = world.resolve(host, port, flags=world.ONLY_REACHABLE)
            lookup = asyncio.get_running_loop().create_task(asking, name="resolve upstream")
            self._lookups[host, port] = lookup
            lookup.add_done_callback(done)
        return await asyncio.shield(lookup)

    async def _connect(self, connection: Connection, addresses: list[world.AddressInfo]) -> None:
        origin = connection.origin
        loop = asyncio.get_running_loop()
        sock = await start_connection(
            addresses,
            local_addr_infos=self._source,
            happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
            interleave=1,
            loop=loop,
            socket_factory=world.new_socket,
        )
        try:
            _ = await loop.create_connection(
                lambda: connection, sock=sock, ssl=origin.tls, server_hostname=origin.server_name
            )
        except BaseException:
            connection.abort()  # before the socket is closed, so that the event loop lets go of its number
            with suppress(OSError):  # the event loop may have closed it
                sock.close()
            raise


@lru_cache(256)
def _is_literal(host: str) -> bool:
    """Whether a host is an address; one with the name of an interface has to be looked up."""
    return parsed_address(host) is not None and "%" not in host


def _failure(exc: Exception) -> NotConnected:
    """Explain why there is no connection."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return TlsRefused(certificate_cause(exc))
    if isinstance(exc, ssl.SSLError):
        return TlsRefused(handshake_cause(exc.reason or str(exc)))
    if isinstance(exc, UnicodeError):
        return NotConnected("its name is not a host name")
    assert isinstance(exc, OSError)
    if exc.errno is not None and exc.errno > 0:
        # The message of the event loop repeats the address, which the error for the client names already.
        return NotConnected(os.strerror(exc.errno))
    return NotConnected(exc.strerror or str(exc) or type(exc).__name__)
