"""Makes the InputRequiredResult of a round with its sealed requestState."""

from typing import Final

from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import Context
from gateway.exchange import input_requests
from gateway.exchange.commands import Ask
from gateway.identity.principal import of_headers
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from gateway.routes.deadlines import wait_seconds
from gateway.seal import handoff
from gateway.seal.claims import Bearer
from gateway.seal.request_state import Envelope, Whereabouts, bind, pack_record

_SERVER_INFO: Final = mcp.META_SERVER_INFO.encode()


def input_required(context: Context, ask: Ask, upstream: Whereabouts | None, left: Envelope | None = None) -> bytes:
    """The InputRequiredResult of a round; one without questions only hands the state to the client.

    `upstream` is where another replica would find the call. `left` is the state of a call that another process left,
    and that is not picked up yet: the new state leads to that process, too. Raises CallLost if the state is too large
    and the gateway keeps nothing of the call.
    """
    live, exchange, span = context.live, context.exchange, context.span
    process, route, headers, now = live.process, live.route, context.headers, world.wall()
    # With the credentials in the headers of the newest leg; bound headers always go upstream.
    bearer = Bearer(route.path, context.key.principal, now, lambda names: of_headers(names, headers.get))
    envelope = Envelope(
        issued=now,
        expires=now + wait_seconds(live.config),
        binding=bind(bearer, context.request, route.bound_headers),
        exchange=context.exchange_id,
        round=ask.round,
        owner=process.owner if ask.held else "",
        epoch=process.epoch,
        state=ask.state,
        sheds=exchange.sheds,
        open=tuple([handoff.opened(question) for question in ask.questions.values()]),
        upstream=upstream if ask.held else None,
        record=pack_record(record) if (record := exchange.record) is not None else None,
        trace=span.token if span is not None else None,
        repeatable=context.is_repeatable,
    )
    if left is not None:
        envelope = replace(envelope, owner=left.owner, epoch=left.epoch, expires=left.expires)
    process.metrics.seals.inc()
    for smaller in handoff.ever_smaller(envelope, held=ask.held):
        if (state := process.states.fitting(smaller)) is not None:
            break
    else:
        raise CallLost(
            "The answers of this call do not fit into its requestState (limits.state_bytes), and the route keeps them "
            "nowhere else (continuation: replay)"
        )
    context.sealed(smaller, is_whole=smaller is envelope)
    asked = b'"inputRequests":%b,' % input_requests.input_requests(ask.questions) if ask.questions else b""
    meta = b',"_meta":{"%b":%b}' % (_SERVER_INFO, context.server_info) if context.server_info else b""
    # The state is base64url with dots, so nothing in it needs an escape.
    return b'{"resultType":"input_required",%b"requestState":"%b"%b}' % (asked, state.encode(), meta)
