"""One request of a legacy client, on its way to what serves it."""

import msgspec

from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import HttpReply, ReplyWriter
from gateway.http.server.response import Response
from gateway.routes.live_route import LiveRoute
from gateway.seal.claims import Bearer
from gateway.telemetry import COMPLETE
from gateway.upstream.channel import NO_HEADERS


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """A request with the reply to it, and what was found out about both."""

    incoming: Incoming
    reply: ReplyWriter
    live: LiveRoute
    caller: Caller

    def http_reply(self) -> HttpReply:
        """The reply to a client of this replica."""
        assert isinstance(self.reply, HttpReply), "no other replica forwards such a request"
        return self.reply

    @property
    def bearer(self) -> Bearer:
        """Who brings the claims in the request, or gets those in the reply."""
        return self.incoming.bearer(self.caller)

    def is_own(self, owner: str, epoch: str) -> bool:
        """Whether this process has what the request is about, or had it."""
        process = self.live.process
        return (owner, epoch) == (process.owner, process.epoch)

    async def accept(self) -> Response:
        """Reply that a notification or a response was taken."""
        return await self.reply.only(b"", 202, NO_HEADERS, COMPLETE)
