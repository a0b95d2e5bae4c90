"""Makes the record of a parked call that is let go of, because its requestState has everything that continues it."""

import math

from gateway.bridge.exchange_context import Context
from gateway.protocol import mcp
from gateway.routes.cold_calls import ColdCall, Remains, packed
from gateway.seal.request_state import Upstream


def cooled(
    id_: str, context: Context, upstream: Upstream | None, due: float, *, is_taken_over: bool
) -> ColdCall | None:
    """The record of a parked call that is due at a monotonic time; None if the call must stay held.

    A call without open questions still works, and its client comes back at once. A state that was shortened lacks
    what a retry may need: the text of a question that is still open then, or the way to the call.
    """
    exchange = context.exchange
    if upstream is None or not exchange.questions or not context.is_state_whole:
        return None
    questions = [(bytes(each.upstream_id), each.method) for each in exchange.questions.values() if each.upstream_id]
    headers = {name: value for name, value in context.headers.items() if name not in mcp.TRACE_KEYS}
    # The server's own description of itself is in the state.
    upstream = Upstream(upstream.session, upstream.version, upstream.call, b"", upstream.cursor)
    texts = packed(Remains(upstream, tuple(questions)), headers)
    return ColdCall(
        id_,
        exchange.round,
        math.ceil(due),
        context.live,
        context.key.principal,
        context.address,
        is_taken_over,
        *texts,
    )
