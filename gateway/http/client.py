"""HTTP towards upstreams: one client for each route, its bounds, and what the errors of its library mean.

All clients of a process share its connections (aiohttp keeps those of different TLS contexts apart).
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

from gateway.config import InForce, Limits, Timeouts, redacted_url
from gateway.protocol.errors import CallLost, Unreachable, UpstreamError

_KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s; a connection that is older may close under a request, and a
`tools/call` must not be sent twice."""
_READ_BYTES: Final = 65_536
_SHORTEST_SECRET: Final = 4
"""A shorter value of a query is no secret, and to hide it would garble what an upstream says."""
_QUOTED_CHARACTERS: Final = 200
FOREIGN: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What aiohttp raises; none of it leaves the files that speak to upstreams."""
REDIRECTS: Final = (301, 302, 303, 307, 308)
"""Statuses whose Location is another address of what was asked for."""


class Bounds(NamedTuple):
    """The bounds of a client's requests."""

    limits: Limits
    timeouts: Timeouts
    tls: ssl.SSLContext | None = None
    """If None, the authorities of the system are trusted."""
    server_name: str | None = None
    """The name that the certificate must have, if it is not that of the URL."""


class Client:
    """An HTTP client towards upstreams, and the bounds of all that comes through it."""

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
        """One HTTP request, to be entered for its response."""
        return Exchange(self._request(method, url, headers, body), where)

    async def open(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """One HTTP request, whose response the caller releases; raises one of FOREIGN."""
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
    """One HTTP request; foreign exceptions become Unreachable (nothing was sent) or CallLost.

    A class, because two generators for every request are a measurable part of a plain call.
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


_CERTIFICATE_CAUSES: Final = {
    9: "its certificate is not valid yet; check the clocks",
    10: "its certificate has expired; renew it there",
    18: "its certificate is self-signed; put it into upstream.tls.ca_file if it is the right one",
    19: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file",
    20: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file, and check that "
    "the server sends its intermediate certificates",
    21: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file",
    62: "its certificate is for another name; correct upstream.url, or give the name in upstream.tls.server_name",
    64: "its certificate is for another address; give the name that it is for in upstream.tls.server_name",
}
"""By the X509_V_ERR number that OpenSSL gives."""


def tls_cause(exc: BaseException) -> str | None:
    """What went wrong with TLS before anything was sent, in an operator's words; None where it is no such error."""
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return certificate_cause(exc.certificate_error)
    if isinstance(exc, aiohttp.ClientConnectorSSLError):
        return handshake_cause(getattr(exc.os_error, "reason", None) or str(exc.os_error))
    return None


def certificate_cause(failure: Exception) -> str:
    """What is wrong with a certificate, and after a semicolon what to do."""
    code = getattr(failure, "verify_code", 0)
    said = getattr(failure, "verify_message", "") or "it is not accepted"
    return _CERTIFICATE_CAUSES.get(code, f"its certificate is refused ({said})")


def handshake_cause(reason: str) -> str:
    """What OpenSSL's word for a failed handshake means, and what to do."""
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return f"it does not speak TLS there ({reason}); check https and the port of upstream.url"
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"it refused the handshake ({reason}); check upstream.tls.cert_file, if it asks for client certificates"
    return f"the handshake failed ({reason}); check what the server demands"


def mapped(exc: BaseException, where: str) -> UpstreamError:
    """What a foreign exception means to the caller."""
    cause = tls_cause(exc)
    if cause is not None:
        return Unreachable(f"{where} cannot be reached over TLS: {cause}")
    if isinstance(exc, aiohttp.ClientConnectorError):
        number = exc.os_error.errno
        # What the event loop says of a refused connection is a call of its own with an address that is known already.
        why = os.strerror(number) if number is not None and number > 0 else exc.strerror or exc.os_error
        return Unreachable(
            f"{where} cannot be reached ({why}); check that the server runs and that upstream.url is right"
        )
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return Unreachable(
            f"{where} did not accept a connection within timeouts.connect_seconds; check address and firewall"
        )
    return CallLost(f"{where} broke the connection ({type(exc).__name__}); the request may have had effects")


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The whole body; None when it is larger than `limit` bytes. Raises one of FOREIGN."""
    if response.content_length is not None and response.content_length <= limit:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


class Endpoint:
    """One upstream URL and what was learnt about it; shared by all its channels."""

    def __init__(self, route: str, url: str, *, as_client: bool = True) -> None:
        """`as_client`: the client's own credential goes there."""
        self.as_client = as_client
        self.url = URL(url)
        values = (self.url.raw_query_string, *self.url.query.values())
        # The longest first: one value may be part of another.
        self._secrets = sorted({value for value in values if len(value) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self.where = f"The upstream {redacted_url(url)} of route {route}"

    def quoted(self, said: str) -> str:
        """What an error may quote of the upstream's own words, which may repeat the query that it was asked with."""
        for secret in self._secrets:
            said = said.replace(secret, "[hidden]")
        return said[:_QUOTED_CHARACTERS]

    def follow(self, location: str | None) -> None:
        """Take a redirect within the origin (`/mcp` to `/mcp/`); anything else is refused."""
        target = self.within(location) if location else None
        if target is None:
            raise Unreachable(f"{self.where} redirects to another origin; set upstream.url to the final address")
        self.url = target

    def within(self, address: str, base: URL | None = None) -> URL | None:
        """The URL that an upstream names, None when it leads out of the origin or is none.

        Credentials and bodies must not travel to another origin because an upstream says so.
        """
        try:
            target = (base or self.url).join(URL(address))
            return target.with_user(None) if target.origin() == self.url.origin() else None
        except ValueError:
            return None
