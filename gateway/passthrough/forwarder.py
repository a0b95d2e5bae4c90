"""Passes requests through unchanged: legacy clients to their server, modern clients to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is neither delayed nor changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied (`header_rules.py`).
"""

from collections.abc import Collection
from typing import Final

from yarl import URL

from gateway.config import Config, InForce
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.http.server.response import Response, WholeResponse
from gateway.http_client.request_head import HeaderLines
from gateway.passthrough.header_rules import HeaderRules
from gateway.passthrough.passage import REFUSAL_BYTES, HttpPassage
from gateway.passthrough.sse_endpoint import PARAMETER, EndpointRewriter
from gateway.protocol import era as eras
from gateway.protocol import mcp, reply_messages
from gateway.protocol.errors import DownstreamError, InvalidRequest, ShuttingDown, not_served
from gateway.routes.live_route import LiveRoute, ProcessScope
from gateway.telemetry import Passed, TrafficEra

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Passthrough:
    """Forwards the requests of one listener."""

    def __init__(self, in_force: InForce[Config], endpoints: EndpointRewriter, process: ProcessScope) -> None:
        self._draining = process.draining
        self._headers = HeaderRules(in_force, process.epoch)
        self._endpoints = endpoints

    async def legacy(
        self, incoming: Incoming, reply: HttpReply, live: LiveRoute, *, withheld: Collection[int] = ()
    ) -> Response:
        """Relay the upstream's reply to a legacy request; raises GatewayError if there is none.

        A reply with one of the `withheld` statuses is returned unsent, without its body if that is long.
        """
        if live.upstream.era is None:
            raise _not_passable(incoming)
        if self._draining.has_begun and incoming.method == "GET":
            raise ShuttingDown("open the stream again")
        if incoming.method not in _METHODS:
            raise not_served(incoming.method, ", ".join(sorted(_METHODS)))
        if mcp.SESSION_ID in incoming.headers and PARAMETER not in incoming.url.query:
            incoming.found_session()  # as far as the gateway can tell: the session is the upstream's
        passage = HttpPassage(incoming, reply, live, TrafficEra.LEGACY)
        with passage:
            said = await passage.open(*self._request(passage))
            if withheld and said.status in withheld:
                return await passage.refusal()
            is_stream = incoming.method == "GET"
            return await passage.relay(
                self._endpoints.first_event(incoming, passage.probe.endpoint) if is_stream else None
            )

    async def finds_modern(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Return whether a server that refused a legacy request is modern."""
        probe = live.upstream.era
        return probe is not None and await probe.is_modern(self._headers.on_behalf(incoming, live.route), waits=True)

    async def modern(
        self, incoming: Incoming, reply: HttpReply, live: LiveRoute, *, waits: bool = False
    ) -> Response | None:
        """Relay a modern upstream's reply; None if the upstream is not modern, or not any more.

        `waits`: until a probe of the upstream may start, if none may now.
        """
        probe = live.upstream.era
        assert probe is not None, "a child process is never modern"
        if not (probe.known or await probe.is_modern(self._headers.on_behalf(incoming, live.route), waits=waits)):
            return None
        passage = HttpPassage(incoming, reply, live, TrafficEra.MODERN)
        if self._draining.has_begun and (self._draining.refuses_calls or passage.is_long_lived):
            raise ShuttingDown("call again")
        with passage:
            said = await passage.open(*self._request(passage))
            size = said.head.content_length
            if said.status in eras.REFUTING and size is not None and size <= REFUSAL_BYTES:
                return await self._refused(passage)
            return await passage.relay(None)

    def _request(self, passage: HttpPassage) -> tuple[URL | None, HeaderLines]:
        """Return where a request goes, as `HttpPassage.open` takes it, with its headers."""
        incoming = passage.incoming
        target = self._endpoints.target(incoming, passage.probe.endpoint)
        return target, self._headers.lines(incoming, passage.live.route)

    async def _refused(self, passage: HttpPassage) -> WholeResponse | None:
        """Return a refusal, unless a new probe finds that the upstream is not modern any more."""
        probe, response = passage.probe, await passage.refusal()
        if eras.refutes(response.status, response.body):
            probe.doubt()
            # If the upstream may have run this request, only the next one is bridged.
            incoming = passage.incoming
            headers = self._headers.on_behalf(incoming, passage.live.route)
            if not reply_messages.is_answered(response.body, incoming.body) and not await probe.is_modern(headers):
                passage.outcome = Passed.BRIDGED
                return None
        return response


def _not_passable(incoming: Incoming) -> DownstreamError:
    """The error for a legacy request that neither begins nor names a session, before a server that is a process."""
    if incoming.method != "POST":
        return not_served(incoming.method, "POST")
    try:
        _ = incoming.parsed()
    except DownstreamError as exc:
        return exc
    return InvalidRequest(
        f"The request names no session of route {incoming.path}: begin with `initialize`, and send the Mcp-Session-Id "
        "that its reply brings with every further request"
    )
