"""The HTTP client towards upstreams: one for each route, with the route's limits.

All clients of a process share its connections (aiohttp separates connections by TLS context). `mapped` translates the
exceptions of aiohttp.
"""

import os
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, NamedTuple

import aiohttp
from aiohttp.client import _RequestContextManager  # what `request` returns: to be awaited or entered
from yarl import URL

from gateway.config import InForce, Limits, Timeouts
from gateway.http_client.tls_errors import certificate_cause, handshake_cause
from gateway.protocol.errors import CallLost, Unreachable, UpstreamError

_KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s. An older connection may close during a request, and a
`tools/call` must not be sent twice."""
_READ_BYTES: Final = 65_536
FOREIGN: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""The exceptions of aiohttp. Only files that speak to upstreams catch them; `mapped` translates them for others."""
REDIRECTS: Final = (301, 302, 303, 307, 308)
"""Statuses whose Location header names another address of the same resource."""


class Bounds(NamedTuple):
    """The bounds of a client's requests."""

    limits: Limits
    timeouts: Timeouts
    tls: ssl.SSLContext | None = None
    """If None, the authorities of the system are trusted."""
    server_name: str | None = None
    """The name that the certificate must have, if it is not that of the URL."""


class Client:
    """An HTTP client towards upstreams, with the limits and timeouts of its requests."""

    def __init__(self, bounds: InForce[Bounds], http: aiohttp.ClientSession | None = None) -> None:
        """Use the connections of `http` if given; the client that made them closes them."""
        self._bounds = bounds
        self._http = http or _session()

    def sibling(self, bounds: InForce[Bounds]) -> "Client":
        """Make a client of other bounds that shares the connections of this one. This one closes them."""
        return Client(bounds, self._http)

    @property
    def limits(self) -> Limits:
        """The limits of new requests."""
        return self._bounds.value.limits

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts of new requests."""
        return self._bounds.value.timeouts

    def exchange(self, method: str, url: URL, headers: dict[str, str], body: bytes | None, where: str) -> "Exchange":
        """Make one HTTP request, a context manager that yields the response."""
        return Exchange(self._request(method, url, headers, body), where)

    async def open(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Send one HTTP request. The caller releases the response. Raises one of FOREIGN."""
        return await self._request(method, url, headers, body)

    def _request(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None
    ) -> _RequestContextManager:
        bounds = self._bounds.value
        # A stream stays open while a person thinks, so there is no total timeout: every wait has its own deadline.
        wait = aiohttp.ClientTimeout(total=None, sock_connect=bounds.timeouts.connect_seconds, sock_read=None)
        return self._http.request(
            method,
            url,
            data=body,
            headers=headers,
            allow_redirects=False,
            timeout=wait,
            ssl=True if bounds.tls is None else bounds.tls,
            server_hostname=bounds.server_name,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=_READ_BYTES,
        headers={"Accept-Encoding": "identity", "User-Agent": "mrtr-gateway"},
        skip_auto_headers=("Content-Type",),
    )


class Exchange:
    """One HTTP request, which raises Unreachable if nothing was sent, or else CallLost, in place of FOREIGN.

    A class, because two generators for each request cost a measurable part of a plain call.
    """

    __slots__ = ("_context", "_where")

    def __init__(self, context: AbstractAsyncContextManager[aiohttp.ClientResponse], where: str) -> None:
        self._context = context
        self._where = where

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            return await self._context.__aenter__()
        except FOREIGN as exc:
            raise mapped(exc, self._where) from exc

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, exc, traceback)
        if isinstance(exc, FOREIGN):
            raise mapped(exc, self._where) from exc


def mapped(exc: BaseException, where: str) -> UpstreamError:
    """Translate an exception of aiohttp into an UpstreamError."""
    cause = tls_cause(exc)
    if cause is not None:
        return Unreachable(f"{where} cannot be reached over TLS: {cause}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        number = exc.os_error.errno
        # The message of the event loop repeats the address, which `where` names already.
        why = os.strerror(number) if number is not None and number > 0 else exc.strerror or exc.os_error
        return Unreachable(
            f"{where} cannot be reached ({why}); check that the server runs and that upstream.url is right"
        )
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return Unreachable(
            f"{where} did not accept a connection within timeouts.connect_seconds; check address and firewall"
        )
    return CallLost(f"{where} broke the connection ({type(exc).__name__}); the request may have had effects")


def tls_cause(exc: BaseException) -> str | None:
    """Explain a connection that failed in TLS, with the fix. Returns None for any other exception."""
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return certificate_cause(exc.certificate_error)
    if isinstance(exc, aiohttp.ClientConnectorSSLError):
        return handshake_cause(getattr(exc.os_error, "reason", None) or str(exc.os_error))
    return None


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Return the whole body, or None if it is larger than `limit` bytes. Raises one of FOREIGN."""
    if response.content_length is not None and response.content_length <= limit:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)
