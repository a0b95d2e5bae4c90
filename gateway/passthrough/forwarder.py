"""Passes requests through unchanged: legacy clients to their server, modern clients to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is neither delayed nor changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied (`header_rules.py`).
"""

from collections.abc import Collection
from typing import Final

from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.passthrough.header_rules import on_behalf
from gateway.passthrough.passage import REFUSAL_BYTES, HttpPassage
from gateway.passthrough.sse_endpoint import PARAMETER
from gateway.protocol import era as eras
from gateway.protocol import mcp, reply_messages
from gateway.protocol.errors import InvalidRequest, not_served
from gateway.telemetry import Passed, TrafficEra

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


async def pass_legacy(at: Arrival, *, withheld: Collection[int] = ()) -> Response:
    """Relay the upstream's reply to a legacy request; raises GatewayError if there is none.

    A reply with one of the `withheld` statuses is returned unsent, without its body if that is long.
    """
    incoming = at.incoming
    if at.live.upstream.era is None:  # a process serves a legacy request only if that begins or names a session
        if incoming.method != "POST":
            raise not_served(incoming.method, "POST")
        _ = incoming.parsed()
        raise InvalidRequest(
            f"The request names no session of route {incoming.path}: begin with `initialize`, and send the "
            "Mcp-Session-Id that its reply brings with every further request"
        )
    if incoming.method == "GET":
        at.live.process.draining.check("open the stream again", is_stream=True)
    if incoming.method not in _METHODS:
        raise not_served(incoming.method, ", ".join(sorted(_METHODS)))
    if mcp.SESSION_ID in incoming.headers and PARAMETER not in incoming.url.query:
        incoming.found_session()  # as far as the gateway can tell: the session is the upstream's
    with HttpPassage(at, TrafficEra.LEGACY) as passage:
        said = await passage.open()
        return await (passage.refusal(said) if said.status in withheld else passage.relay(said))


async def pass_modern(at: Arrival, *, waits: bool = False) -> Response | None:
    """Relay a modern upstream's reply; None if the upstream is not modern, or a new probe finds that it is no longer.

    `waits`: until a probe of the upstream may start, if none may now.
    """
    incoming, live = at.incoming, at.live
    probe = live.upstream.era
    assert probe is not None, "a child process is never modern"
    if not (probe.known or await probe.is_modern(on_behalf(incoming, live), waits=waits)):
        return None
    passage = HttpPassage(at, TrafficEra.MODERN)
    live.process.draining.check("call again", is_stream=passage.is_long_lived)
    with passage:
        said = await passage.open()
        size = said.head.content_length
        if said.status not in eras.REFUTING or size is None or size > REFUSAL_BYTES:
            return await passage.relay(said)
        response = await passage.refusal(said)
        if eras.refutes(response.status, response.body):
            probe.doubt()
            # If the upstream may have run this request, only the next one is bridged.
            is_run = reply_messages.is_answered(response.body, incoming.body)
            if not is_run and not await probe.is_modern(on_behalf(incoming, live)):
                passage.outcome = Passed.BRIDGED
                return None
        return response
