"""A stream that may stay open for hours without belonging to a request: a drain ends it instead of waiting for it."""

import aiohttp
from aiohttp import web

from gateway.protocol import mcp
from gateway.telemetry import TrafficEra


class LongLivedStream:
    """One such stream, from the request for it until its end."""

    def __init__(self) -> None:
        self.ended = False
        self._response: aiohttp.ClientResponse | None = None

    def begin(self, response: aiohttp.ClientResponse) -> None:
        """The upstream has sent the head."""
        self._response = response
        if self.ended:
            response.close()

    def end(self) -> None:
        """End the stream: its reader finds the connection to the upstream closed."""
        self.ended = True
        if self._response is not None:
            self._response.close()


def is_long_lived(http: web.BaseRequest, era: TrafficEra) -> bool:
    """Whether a request opens a standalone GET stream (legacy) or a subscription (modern)."""
    if era is TrafficEra.LEGACY:
        return http.method == "GET"
    return http.headers.get(mcp.METHOD_HEADER) == mcp.LISTEN
