"""One request that passes through, from its check until the end of its reply."""

from gateway.http.awaited_reply import AwaitedReply
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.protocol import mcp
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Passed, TrafficEra
from gateway.upstream.http.era_probe import EraProbe


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
        self._upstream_reply: AwaitedReply | None = None

    def begin(self, upstream_reply: AwaitedReply) -> None:
        """Take the upstream's reply, whose head has arrived."""
        self._upstream_reply = upstream_reply
        if self.is_ended:
            upstream_reply.cut()

    def end(self) -> None:
        """End a long-lived stream: the upstream's reply is cut off."""
        self.is_ended = True
        if self._upstream_reply is not None:
            self._upstream_reply.cut()
