"""Which transport an upstream speaks: as configured, or found out when a session is opened.

Source: specification 2025-11-25 basic/transports (Backwards Compatibility). Streamable HTTP is tried first; an
upstream that answers `initialize` with 400, 404 or 405 is asked for the stream of HTTP+SSE. Only a handshake that
succeeded is remembered, per route and process: it says what to try first next time, and is replaced when it proves
wrong.
"""

from collections.abc import Callable

from msgspec import Raw

from gateway.http.client import Client
from gateway.http.endpoint import Endpoint
from gateway.protocol.errors import NoHandshake
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import Channel, Headers
from gateway.upstream.http_errors import NotSpoken
from gateway.upstream.http_sse import HttpSseChannel
from gateway.upstream.streamable_http import StreamableChannel


def connector(
    transport: str, client: Client, endpoint: Endpoint, tasks: Tasks, found: Callable[[bool], None]
) -> Callable[[], Channel]:
    """What makes a channel for each session of a route; `transport` is the configured one.

    `found` hears whether the upstream speaks HTTP+SSE, whenever that is known to have changed.
    """
    if transport == "streamable-http":
        return lambda: StreamableChannel(client, endpoint, tasks)
    if transport == "sse":
        return lambda: HttpSseChannel(client, endpoint, tasks)
    finding = TransportDetection(found)
    return lambda: AutoDetectChannel(client, endpoint, tasks, finding)


class TransportDetection:
    """What is known of an upstream's transport."""

    def __init__(self, found: Callable[[bool], None]) -> None:
        self.speaks_sse = False
        self._found = found

    def note(self, *, speaks_sse: bool) -> None:
        """A handshake succeeded."""
        if speaks_sse != self.speaks_sse:
            self.speaks_sse = speaks_sse
            self._found(speaks_sse)


class AutoDetectChannel(StreamableChannel):
    """Streamable HTTP until `open` finds HTTP+SSE instead; what another process opened was streamable HTTP."""

    def __init__(self, client: Client, endpoint: Endpoint, tasks: Tasks, finding: TransportDetection) -> None:
        super().__init__(client, endpoint, tasks)
        self._finding = finding

    async def open(self, message: bytes, headers: Headers) -> tuple[Channel, Raw]:
        """Open a session over the transport that was found the last time, or over the other one."""
        if self._finding.speaks_sse:
            try:
                return await self._over_sse(message, headers)
            except NotSpoken:
                result = await self.initialize(message, headers)
                self._finding.note(speaks_sse=False)
                return self, result
        try:
            return self, await self.initialize(message, headers)
        except NotSpoken as streamable:
            try:
                return await self._over_sse(message, headers)
            except NotSpoken as sse:
                why = sse.message.removeprefix(f"{self._endpoint.where} ")
                raise NoHandshake(f"{streamable.message}; nor does it speak HTTP+SSE: it {why}") from sse

    async def _over_sse(self, message: bytes, headers: Headers) -> tuple[Channel, Raw]:
        channel = HttpSseChannel(self._client, self._endpoint, self._tasks)
        try:
            result = await channel.initialize(message, headers)
        except BaseException:
            await channel.close(end_session=True)
            raise
        self._finding.note(speaks_sse=True)
        return channel, result
