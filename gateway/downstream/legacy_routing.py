"""Decides how a legacy client's request reaches its server: passed through, or relayed over the server's transport."""

from typing import Final

from aiohttp import web

from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import HttpReply
from gateway.legacy_front.front import LegacyFront, beginning
from gateway.legacy_front.session import session_gone
from gateway.legacy_front.session_ids import Front, given_id
from gateway.passthrough.forwarder import Passthrough
from gateway.passthrough.sse_endpoint import PARAMETER
from gateway.protocol import lost_session
from gateway.protocol.errors import NoHandshake
from gateway.routes.live_route import LiveRoute
from gateway.session_relay.relay import connect

_TRANSPORTS: Final[dict[Front, str]] = {"http": "streamable-http", "sse": "sse"}
_OTHER_TRANSPORT: Final = (400, 404, 405, 406)
"""Statuses with which a server refuses a client of another transport."""


class LegacyRouting:
    """The ways of one listener's legacy requests."""

    def __init__(self, passthrough: Passthrough, front: LegacyFront) -> None:
        self._passthrough = passthrough
        self._front = front

    async def serve(self, incoming: Incoming, reply: HttpReply, live: LiveRoute, caller: Caller) -> web.StreamResponse:
        """Serve a request of a legacy client; raises GatewayError."""
        served = await self._front.continued(incoming, reply, live, caller)
        if served is not None:
            return served
        is_addressed = PARAMETER in incoming.url.query  # the server's own address for messages
        spoken, front = live.upstream.transport, None if is_addressed else beginning(incoming)
        if given_id(incoming) is not None and spoken not in (None, "streamable-http"):
            raise session_gone()
        if front is None or spoken == _TRANSPORTS[front]:
            return await self._passthrough.legacy(incoming, reply, live)
        if spoken is not None:
            return await self._front.begin(front, incoming, reply, live, caller, connect(live))
        return await self._found_out(front, incoming, reply, live, caller)

    async def _found_out(
        self, front: Front, incoming: Incoming, reply: HttpReply, live: LiveRoute, caller: Caller
    ) -> web.StreamResponse:
        """Serve a request that begins a session while the server's transport is not known: its refusal tells."""
        passed = await self._passthrough.legacy(incoming, reply, live, withheld=_OTHER_TRANSPORT)
        if not isinstance(passed, web.Response) or passed.status not in _OTHER_TRANSPORT:
            return passed
        if front == "http" and lost_session.is_answered(_body(passed), incoming.body):
            return passed  # a server of streamable HTTP has read the request
        try:
            return await self._front.begin(front, incoming, reply, live, caller, connect(live))
        except NoHandshake:
            return passed


def _body(response: web.Response) -> bytes:
    return response.body if isinstance(response.body, bytes) else b""
