"""Passes requests through unchanged: legacy clients to their server, modern clients to a modern server.

Rule 1: nothing is remembered. Sessions, event ids and states are the upstream's, so any replica serves any request.
Rule 2: the body of a reply is neither delayed nor changed; a reply that is cut short upstream is cut short here.
Rule 3: headers are rebuilt, not copied (`header_rules.py`).
"""

from collections.abc import Collection
from typing import Final

from gateway.http.incoming import Incoming
from gateway.http.server.response import Response, WholeResponse
from gateway.legacy_front.arrival import Arrival
from gateway.passthrough.header_rules import on_behalf
from gateway.passthrough.passage import REFUSAL_BYTES, HttpPassage
from gateway.passthrough.sse_endpoint import PARAMETER
from gateway.protocol import era as eras
from gateway.protocol import mcp, reply_messages
from gateway.protocol.errors import DownstreamError, InvalidRequest, ShuttingDown, not_served
from gateway.telemetry import Passed, TrafficEra

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


async def pass_legacy(at: Arrival, *, withheld: Collection[int] = ()) -> Response:
    """Relay the upstream's reply to a legacy request; raises GatewayError if there is none.

    A reply with one of the `withheld` statuses is returned unsent, without its body if that is long.
    """
    incoming = at.incoming
    if at.live.upstream.era is None:
        raise _not_passable(incoming)
    if at.live.process.draining.has_begun and incoming.method == "GET":
        raise ShuttingDown("open the stream again")
    if incoming.method not in _METHODS:
        raise not_served(incoming.method, ", ".join(sorted(_METHODS)))
    if mcp.SESSION_ID in incoming.headers and PARAMETER not in incoming.url.query:
        incoming.found_session()  # as far as the gateway can tell: the session is the upstream's
    with HttpPassage(at, TrafficEra.LEGACY) as passage:
        said = await passage.open()
        return await (passage.refusal() if said.status in withheld else passage.relay())


async def finds_modern(at: Arrival) -> bool:
    """Return whether a server that refused a legacy request is modern."""
    probe = at.live.upstream.era
    return probe is not None and await probe.is_modern(on_behalf(at.incoming, at.live), waits=True)


async def pass_modern(at: Arrival, *, waits: bool = False) -> Response | None:
    """Relay a modern upstream's reply; None if the upstream is not modern, or not any more.

    `waits`: until a probe of the upstream may start, if none may now.
    """
    probe, draining = at.live.upstream.era, at.live.process.draining
    assert probe is not None, "a child process is never modern"
    if not (probe.known or await probe.is_modern(on_behalf(at.incoming, at.live), waits=waits)):
        return None
    passage = HttpPassage(at, TrafficEra.MODERN)
    if draining.has_begun and (draining.refuses_calls or passage.is_long_lived):
        raise ShuttingDown("call again")
    with passage:
        said = await passage.open()
        size = said.head.content_length
        if said.status in eras.REFUTING and size is not None and size <= REFUSAL_BYTES:
            return await _refused(passage)
        return await passage.relay()


async def _refused(passage: HttpPassage) -> WholeResponse | None:
    """Return a refusal, unless a new probe finds that the upstream is not modern any more."""
    probe, response = passage.probe, await passage.refusal()
    if eras.refutes(response.status, response.body):
        probe.doubt()
        # If the upstream may have run this request, only the next one is bridged.
        incoming = passage.incoming
        headers = on_behalf(incoming, passage.live)
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
