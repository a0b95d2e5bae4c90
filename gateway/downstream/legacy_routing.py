"""Decides how a legacy client's request reaches its server: passed through, relayed, or by the mirror.

A server of the client's own transport gets its requests unchanged. One of another transport is relayed to, a session
at a time. A server that refuses `initialize` because it is modern is mirrored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.http.incoming import Incoming
from gateway.http.server.response import Response, WholeResponse
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.backend import Connect
from gateway.legacy_front.front import begin, beginning, continued
from gateway.legacy_front.session import session_gone
from gateway.legacy_front.session_ids import Front, given_id
from gateway.legacy_front.session_table import SessionTable
from gateway.mirror.linked_backend import MirrorBackend
from gateway.mirror.server_client import RouteServer
from gateway.mirror.streamable import front as mirror
from gateway.mirror.streamable.streamed_call import Shared
from gateway.passthrough.forwarder import pass_legacy
from gateway.passthrough.header_rules import on_behalf
from gateway.passthrough.sse_endpoint import PARAMETER
from gateway.protocol import era as eras
from gateway.protocol import mcp, reply_messages
from gateway.protocol.era import names_modern
from gateway.protocol.errors import NoHandshake
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Passed, TrafficEra
from gateway.transport_relay.session_relay import SessionRelay

if TYPE_CHECKING:
    from gateway.plugins.sep_1442.front import Stateless

_TRANSPORTS: Final[dict[Front, str]] = {"http": "streamable-http", "sse": "sse"}
_OTHER_TRANSPORT: Final = (400, 404, 405, 406)
"""Statuses with which a server refuses a client of another transport, or of another era."""
_NO_SESSION: Final[Mapping[str, tuple[int, ...]]] = {"POST": (400,), "GET": (405,), "DELETE": (405,)}
"""The statuses with which a server that is modern only refuses the requests of a legacy session."""


@dataclass(slots=True, eq=False)
class LegacyRouting:
    """The ways of one listener's legacy requests."""

    sessions: SessionTable
    mirrored: Shared
    stateless: "Stateless | None" = None
    """The dialect SEP-1442, as soon as a route has it."""

    async def serve(self, at: Arrival) -> Response:
        """Serve a request of a legacy client; raises GatewayError."""
        incoming, upstream, era = at.incoming, at.live.upstream, at.live.route.era
        has_given_id = given_id(incoming) is not None
        if has_given_id:  # it looks like one of the gateway's, and may be another's
            if self.mirrored.owns(incoming):
                return await self._mirrored(None, at)
            if (served := await continued(self.sessions, at)) is not None:
                return served
        is_addressed = PARAMETER in incoming.url.query  # the server's own address for messages
        front = None if is_addressed else beginning(incoming)
        stdio = upstream.stdio if era == "auto" else None
        if era == "mirror" or (stdio is not None and await stdio.is_modern_only()):
            return await self._mirrored(front, at)
        names_session = has_given_id or (mcp.SESSION_ID in incoming.headers and not is_addressed)
        spoken = upstream.transport if names_session or front is not None else None
        if names_session and spoken not in (None, "streamable-http"):
            raise session_gone()
        if front is not None and spoken is not None and spoken != _TRANSPORTS[front]:
            return await begin(self.sessions, front, at, self._connect(at))
        probe = upstream.era
        if front is None:
            may_refuse = names_session and era == "auto" and probe is not None and probe.known is not False
        else:
            may_refuse = spoken != "sse"
        if may_refuse:
            return await self._passed_unless_refused(front, at)
        return await pass_legacy(at)

    def names_session(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether a request seems to be one in a session of a legacy client; its caller or its body is unknown."""
        headers = incoming.headers
        if mcp.SESSION_ID not in headers or names_modern(headers.get(mcp.PROTOCOL_VERSION)):
            return False
        if self.stateless is not None and self.stateless.claims(incoming, live):
            return False
        return live.upstream.era is not None or given_id(incoming) is not None

    async def hop(self, at: Arrival, *, is_relayed: bool) -> Response | None:
        """Serve a request of a session that another replica received; None if it belongs to no session."""
        if is_relayed:
            served = await continued(self.sessions, at)
            if served is None:
                raise session_gone()
            return served
        return await mirror.serve(self.mirrored, at) if self.mirrored.owns(at.incoming) else None

    async def _passed_unless_refused(self, front: Front | None, at: Arrival) -> Response:
        """Pass a request to the server, unless its refusal tells of another transport, or another era.

        A server that is modern only has no sessions. Which it is, only its refusals tell: one of both eras is known as
        modern too, and a server may become one of both.
        """
        incoming, probe = at.incoming, at.live.upstream.era
        assert probe is not None, "nothing passes to a child process"
        withheld = _NO_SESSION.get(incoming.method, ()) if front is None else _OTHER_TRANSPORT
        passed = await pass_legacy(at, withheld=withheld)
        is_post = incoming.method == "POST"
        if passed.status not in withheld or not isinstance(passed, WholeResponse):
            if is_post and passed.status == 200:
                probe.note_legacy(is_refused=False)
            return passed
        if is_post and (front == "http" or eras.refuses_legacy(passed.content_type, passed.body)):
            may_be_modern = at.live.route.era != "bridge"
            if may_be_modern and await probe.is_modern(on_behalf(incoming, at.live), waits=True):
                probe.note_legacy(is_refused=True)
                return await (mirror.serve(self.mirrored, at) if front is None else self._mirrored(front, at))
        if front is None:
            is_mirrored = not is_post and probe.known and probe.refuses_legacy
            return await mirror.serve(self.mirrored, at) if is_mirrored else passed
        is_spoken = at.live.upstream.transport == _TRANSPORTS[front]
        if is_spoken or (front == "http" and reply_messages.is_answered(passed.body, incoming.body)):
            return passed  # a server of streamable HTTP has read the request
        try:
            return await begin(self.sessions, front, at, self._connect(at))
        except NoHandshake:
            return passed

    async def _mirrored(self, front: Front | None, at: Arrival) -> Response:
        """Serve a request by the mirror; a client of HTTP+SSE has a session that its link holds."""
        if front == "sse":
            server = RouteServer(at.live, at.caller.principal)
            return await begin(self.sessions, front, at, partial(MirrorBackend, at.live, server))
        at.live.process.metrics.passed[at.live.route.path, TrafficEra.LEGACY, Passed.MIRRORED].inc()
        return await mirror.serve(self.mirrored, at)

    def _connect(self, at: Arrival) -> Connect:
        """Return what serves a relayed session, or mirrors it where the server is modern."""
        is_decided = at.live.route.era == "bridge" or at.live.upstream.stdio is not None
        return partial(
            SessionRelay, at.live, mirror_of=None if is_decided else RouteServer(at.live, at.caller.principal)
        )
