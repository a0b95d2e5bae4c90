"""Detects which HTTP transport an upstream speaks.

Source: specification 2025-11-25 basic/transports (Backwards Compatibility). Streamable HTTP is tried first. If the
upstream answers `initialize` with 400, 404 or 405, HTTP+SSE is tried. A successful handshake is remembered per route
and process: it decides which transport is tried first next time, until it proves wrong.
"""

from collections.abc import Callable

from msgspec import Raw

from gateway.protocol.errors import NoHandshake
from gateway.upstream.channel import Channel, Headers
from gateway.upstream.http.era_probe import EraProbe
from gateway.upstream.http.http_errors import WrongTransport
from gateway.upstream.http.http_sse import HttpSseChannel
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.streamable_http import StreamableChannel


def connector(transport: str, upstream: HttpUpstream, era: EraProbe | None = None) -> Callable[[], Channel]:
    """Return the factory of a route's channels, one for each session; `transport` is the configured one.

    `era` remembers the transport that was found.
    """
    if transport == "streamable-http":
        return lambda: StreamableChannel(upstream)
    if transport == "sse":
        return lambda: HttpSseChannel(upstream)
    return lambda: AutoDetectChannel(upstream, era)


class AutoDetectChannel(StreamableChannel):
    """Streamable HTTP unless `open` detects HTTP+SSE. A session that another process opened is streamable HTTP."""

    __slots__ = ("_era",)

    def __init__(self, upstream: HttpUpstream, era: EraProbe | None) -> None:
        super().__init__(upstream)
        self._era = era

    async def open(self, message: bytes, headers: Headers) -> tuple[Channel, Raw]:
        """Open a session over the transport that was detected last, or else over the other one."""
        detected, failures = self._era is not None and bool(self._era.speaks_sse), dict[bool, WrongTransport]()
        for speaks_sse in (detected, not detected):
            channel = HttpSseChannel(self._session.upstream) if speaks_sse else self
            try:
                result = await channel.initialize(message, headers)
            except BaseException as exc:
                if channel is not self:  # the session does not know this one yet, so it cannot close it
                    await channel.close(end_session=True)
                if not isinstance(exc, WrongTransport):
                    raise
                failures[speaks_sse] = exc
            else:
                if self._era is not None:
                    self._era.note_transport(speaks_sse=speaks_sse)
                return channel, result
        why = failures[True].message.removeprefix(f"{self._endpoint.where} ")
        said = f"{failures[False].message}; nor does it speak HTTP+SSE: it {why}"
        raise NoHandshake(said) from failures[not detected]
