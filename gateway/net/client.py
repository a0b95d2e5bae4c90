"""HTTP towards upstreams: one client for the process, its bounds, and what the errors of its library mean."""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import aiohttp
from yarl import URL

from gateway.config import Limits, Timeouts
from gateway.errors import CallLost, Unreachable, UpstreamError

_KEEP_ALIVE_SECONDS: Final = 4.0
"""Node and uvicorn close idle connections after 5 s; a connection that is older may close under a request, and a
`tools/call` must not be sent twice."""
_READ_BYTES: Final = 65_536
FOREIGN: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What aiohttp raises; none of it leaves the files that speak to upstreams."""


class Client:
    """The process's one HTTP client towards upstreams, and the bounds of all that comes through it."""

    def __init__(self, limits: Limits, timeouts: Timeouts) -> None:
        self.change(limits, timeouts)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_READ_BYTES,
            headers={"Accept-Encoding": "identity", "User-Agent": "mrtr-gateway"},
            skip_auto_headers=("Content-Type",),
        )

    def change(self, limits: Limits, timeouts: Timeouts) -> None:
        """Bound what begins from now on by these."""
        self.limits = limits
        self.timeouts = timeouts
        # Upstream streams live as long as a person thinks; every wait has its own deadline instead.
        self._wait = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds, sock_read=None)

    def exchange(self, method: str, url: URL, headers: dict[str, str], body: bytes | None, where: str) -> "Exchange":
        """One HTTP request, to be entered for its response."""
        context = self._http.request(
            method, url, data=body, headers=headers, allow_redirects=False, timeout=self._wait
        )
        return Exchange(context, where)

    async def open(self, method: str, url: URL, headers: dict[str, str], body: bytes | None) -> aiohttp.ClientResponse:
        """One HTTP request, whose response the caller releases; raises one of FOREIGN."""
        return await self._http.request(
            method, url, data=body, headers=headers, allow_redirects=False, timeout=self._wait
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


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


def mapped(exc: BaseException, where: str) -> UpstreamError:
    """What a foreign exception means to the caller."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return Unreachable(
            f"{where} cannot be reached ({exc.strerror or exc.os_error}); check that the server runs and "
            "that upstream.url is right"
        )
    if isinstance(exc, aiohttp.ConnectionTimeoutError):
        return Unreachable(
            f"{where} did not accept a connection within timeouts.connect_seconds; check address and firewall"
        )
    return CallLost(f"{where} broke the connection ({type(exc).__name__}); the request may have had effects")


class Endpoint:
    """One upstream URL and what was learnt about it; shared by all its channels."""

    def __init__(self, route: str, url: str) -> None:
        self.url = URL(url)
        self.where = f"The upstream {url} of route {route}"

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
