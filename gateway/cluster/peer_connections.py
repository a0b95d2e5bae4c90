"""Sends sealed requests to other replicas over HTTP.

The request's body is sent only after the peer has answered `100 Continue`. A process that accepts connections but does
nothing (stopped, or stuck) has then received nothing that it could still run when it wakes up.

Only two things prove here that a process is dead: its address refuses a connection, or its unix socket does not exist
or refuses one. Every other failure to connect is silence, which may have its cause on this host.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from gateway.cluster.peer_errors import PeerDead, PeerFailed, PeerStuck, ReplyBroken, StaleConnection
from gateway.cluster.worker import Address
from gateway.config import InForce, Timeouts, split_address
from gateway.protocol.errors import InvalidState, OwnerSilent, OwnerStalled
from gateway.seal import peer_messages as messages
from gateway.seal.peer_messages import Frames, PeerRequest, PeerSealer

PATH: Final = "/peer"
CONTENT_TYPE: Final = "application/octet-stream"
FRAME_BYTES: Final = 16_777_216
ANSWER_BYTES: Final = 65_536
"""The longest answer to a question: a process that is not a replica must not fill the memory."""
NETWORK_ERRORS: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
_UNIX: Final = "unix:"
_NAME_SECONDS: Final = 2
"""How long a resolved name is cached: a peer that moved is found at its new address soon."""
_UNUSED_SOCKET: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors that prove that no process listens on a unix socket."""
_REMOTE_CAUSES: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ECONNRESET, errno.ECONNABORTED)
"""Failures to connect whose cause need not be on this host."""


class PeerHttpRequest(aiohttp.ClientRequest):
    """A request whose body is written in a task of aiohttp, which nothing awaits.

    If the connection ends before `100 Continue`, reading the reply fails too and explains it. The exception of the
    task would only be logged with a traceback ("Task exception was never retrieved").
    """

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: aiohttp.connector.Connection, content_length: int | None = None
    ) -> None:
        """Send the body; return as well if the connection is lost."""
        with suppress(*NETWORK_ERRORS):
            await super().write_bytes(writer, conn, content_length)

    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        """Send the request; raises ClientConnectionError if the connection has ended.

        Since Python 3.12, the task begins at once. What fails then closes the connection, from which aiohttp would
        read the reply nevertheless (AttributeError).
        """
        response = await super().send(conn)
        if conn.protocol is None:
            raise aiohttp.ClientConnectionError("The connection ended before the request was sent")
        return response


class PeerConnections:
    """The HTTP connections to other replicas."""

    def __init__(self, timeouts: InForce[Timeouts], listen: Address | None, own: str, sealer: PeerSealer) -> None:
        """`listen` is `replica.listen`; `own` is the id of this process, for the texts of errors."""
        self._timeouts = timeouts
        self._own = own
        self._sealer = sealer
        self._clients: dict[tuple[Address, bool], aiohttp.ClientSession] = {}
        host = split_address(listen)[0] if listen is not None else ""
        # The peers see this address as the source of requests, and take it for this process's address.
        interface = _literal(host)
        self._source = (host, 0) if interface is not None and not interface.is_unspecified else None

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts in force."""
        return self._timeouts.value

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()

    # -- requests -----------------------------------------------------------------------------------------------

    async def ask_name(self, address: Address, introduced: str) -> str | None:
        """Ask the process at an address for its host's id, and introduce the host `introduced` (none if empty).

        Returns None if no process is there. Raises TimeoutError if the process does not answer.
        """
        peer_request = PeerRequest(kind="who", to=address, issued=time.time(), nonce=messages.nonce(), path=introduced)
        try:
            async with asyncio.timeout(self.timeouts.peer_accept_seconds):
                answers = await self.question(address, peer_request, fresh=False)
        except PeerDead:
            return None
        except (*NETWORK_ERRORS, PeerFailed, OwnerStalled, InvalidState) as exc:
            raise TimeoutError from exc
        found = [frame for frame in answers if isinstance(frame, messages.Identity)]
        if not found:
            raise TimeoutError
        return found[0].id

    async def question(
        self, address: Address, peer_request: PeerRequest, *, fresh: bool, most: int = ANSWER_BYTES
    ) -> list[messages.Frame]:
        """The frames that answer a question; raises what `open` and reading raise."""
        async with await self.open(address, peer_request, fresh=fresh) as response:
            if response.status != 200:
                raise OwnerStalled(peer_request.to, f"refuses a question (HTTP {response.status})")
            answer = await _read_at_most(response, most)
            if answer is None:
                raise OwnerStalled(peer_request.to, f"answers a question with more than {most} bytes")
            return self.frames(peer_request).feed(answer)

    def frames(self, peer_request: PeerRequest) -> Frames:
        """The decoder of the reply to a request."""
        return Frames(self._sealer.keyring, peer_request.nonce, FRAME_BYTES)

    async def open(self, address: Address, peer_request: PeerRequest, *, fresh: bool) -> aiohttp.ClientResponse:
        """Send a request, over a new connection if `fresh`; return when the head of the reply is here."""
        try:
            return await self._post(address, peer_request, fresh=fresh)
        except StaleConnection:
            # A kept connection ended with its process, or by its age: nothing was sent on it.
            try:
                return await self._post(address, peer_request, fresh=True)
            except StaleConnection as exc:
                # A process accepts connections, so it lives.
                raise OwnerStalled(peer_request.to, "closes its connections (is it at limits.connections?)") from exc

    async def _post(self, address: Address, peer_request: PeerRequest, *, fresh: bool) -> aiohttp.ClientResponse:
        client, url = self._client(address, fresh=fresh)
        sealed = self._sealer.seal(peer_request)
        sent = False
        connected = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            sent = True
            yield sealed

        timeouts = self.timeouts
        try:
            async with asyncio.timeout(timeouts.peer_connect_seconds + timeouts.peer_accept_seconds):
                return await client.post(
                    url,
                    data=body(),
                    headers={"Content-Type": CONTENT_TYPE},
                    expect100=True,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=timeouts.peer_connect_seconds, sock_read=None
                    ),
                    trace_request_ctx=connected,
                )
        except aiohttp.ConnectionTimeoutError as exc:
            raise self.slow(peer_request.to) from exc
        except aiohttp.ClientConnectorDNSError as exc:
            raise self._unresolved(peer_request.to, "does not resolve") from exc
        except aiohttp.ClientConnectorError as exc:
            raise await self._not_connected(address, peer_request.to, exc.os_error) from exc
        except TimeoutError as exc:
            if sent:
                raise PeerStuck(peer_request.to) from exc
            if connected.is_set():
                raise OwnerSilent(peer_request.to, "does not react", is_connected=True) from exc
            raise self._unresolved(peer_request.to, "did not resolve in time") from exc
        except NETWORK_ERRORS as exc:
            raise (ReplyBroken if sent else StaleConnection)(f"{peer_request.to}: {type(exc).__name__}") from exc

    def _client(self, address: Address, *, fresh: bool) -> tuple[aiohttp.ClientSession, str]:
        """The client for all TCP peers, or for one unix socket, with the URL to post to."""
        is_unix = address.startswith(_UNIX)
        name = (address if is_unix else "", fresh)
        client = self._clients.get(name)
        if client is None:
            connector: aiohttp.BaseConnector
            if is_unix:
                connector = aiohttp.UnixConnector(address.removeprefix(_UNIX), limit=0, force_close=fresh)
            else:
                connector = aiohttp.TCPConnector(
                    limit=0, force_close=fresh, ttl_dns_cache=_NAME_SECONDS, local_addr=self._source
                )
            client = self._clients[name] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                request_class=PeerHttpRequest,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                trace_configs=[_connection_trace()],
            )
        return client, f"http://{'peer' if is_unix else address}{PATH}"

    # -- failures -----------------------------------------------------------------------------------------------

    def slow(self, member: str) -> OwnerSilent:
        """The error for a member that did not accept a connection in time."""
        where = f"a connection from {self._own} within timeouts.peer_connect_seconds"
        return OwnerSilent(member, f"does not accept {where}")

    def _unresolved(self, member: str, what: str) -> OwnerSilent:
        why = f"cannot be reached from {self._own} (its name in replica.peers {what})"
        return OwnerSilent(member, why, is_local=True)

    async def _not_connected(self, address: Address, member: str, failure: OSError) -> PeerFailed | OwnerSilent:
        """The error that a failure to connect stands for: the process is dead only if that is proven."""
        number = failure.errno
        if address.startswith(_UNIX):
            is_proof = number in _UNUSED_SOCKET
        elif _literal(split_address(address)[0]) is not None:
            is_proof = number == errno.ECONNREFUSED
        else:
            is_proof = await self._all_refuse(address)
        if is_proof:
            return PeerDead(member)
        cause = os.strerror(number) if number is not None and number > 0 else failure.strerror or str(failure)
        why = f"cannot be reached from {self._own} ({cause})"
        return OwnerSilent(member, why, is_local=number not in _REMOTE_CAUSES)

    async def _all_refuse(self, address: Address) -> bool:
        """Whether each address of a name, resolved anew, refuses connections: the first one may have been outdated."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeouts.peer_connect_seconds):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return all([await _refuses(family, where) for family, _, _, _, where in found])
        except (OSError, TimeoutError):
            return False


async def _refuses(family: int, address: tuple[object, ...]) -> bool:
    """Whether an address refuses a connection; raises OSError if the attempt shows neither."""
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(attempt, address)
        except ConnectionRefusedError:
            return True
    return False


def _connection_trace() -> aiohttp.TraceConfig:
    """Sets the event that is a request's trace context as soon as the request has a connection."""

    async def note(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.set()

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(note)
    config.on_connection_reuseconn.append(note)
    return config


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Return the whole body, or None if it is larger than `limit` bytes. Raises one of NETWORK_ERRORS."""
    if response.content_length is not None and response.content_length <= limit:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)
