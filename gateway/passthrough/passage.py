"""One request that passes through, from its check until the end of its reply."""

import aiohttp

from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.protocol import mcp
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Passed, TrafficEra
from gateway.upstream.era_probe import EraProbe


class Passage:
    """One request with its reply.

    It may open a stream that stays open for hours without belonging to a call: a standalone GET stream (legacy) or a
    subscription (modern). A drain ends such a stream instead of waiting for it.
    """

    def __init__(
        self, incoming: Incoming, reply: HttpReply, live: LiveRoute, probe: EraProbe, era: TrafficEra
    ) -> None:
        self.incoming = incoming
        self.reply = reply
        self.live = live
        self.probe = probe
        self.era = era
        self.outcome = Passed.LEFT
        self.is_long_lived = (
            incoming.method == "GET"
            if era is TrafficEra.LEGACY
            else incoming.headers.get(mcp.METHOD_HEADER) == mcp.LISTEN
        )
        self.is_ended = False
        """Whether `end` was called."""
        self._response: aiohttp.ClientResponse | None = None

    def begin(self, response: aiohttp.ClientResponse) -> None:
        """Take the upstream's reply, whose head has arrived."""
        self._response = response
        if self.is_ended:
            response.close()

    def end(self) -> None:
        """End a long-lived stream: its reader finds the connection to the upstream closed."""
        self.is_ended = True
        if self._response is not None:
            self._response.close()
