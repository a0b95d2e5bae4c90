"""Forwards the requests of a session to the process that has it.

A request is sent there once. If that process has ended, its sessions have ended too, and clients begin new ones.
"""

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.peer_errors import ReplyBroken
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.session import session_gone
from gateway.protocol import mcp
from gateway.protocol.errors import OwnerStalled, SessionStalled, TakenCallLost


async def forward(at: Arrival, owner: str, given: str) -> Response:
    """Have the owner of a session serve a request; raises GatewayError, or PeerFailed for one of another replica.

    `given` is the id of the session.
    """
    incoming, reply = at.incoming, at.reply
    headers = CIMultiDict(incoming.headers)
    headers[mcp.SESSION_ID] = given  # a client of HTTP+SSE has it in its address
    # `known` has the values of the client's own headers.
    named = msgspec.structs.replace(incoming, headers=CIMultiDictProxy(headers), known=None)
    # A stream can be opened again, but a request gets its one response.
    relayed = reply.as_one_stream() if incoming.rpc_id is None else reply
    try:
        replied = await at.live.process.router.to_holder(owner, named, relayed)
    except ReplyBroken as exc:
        if incoming.peer_request is not None:
            raise
        raise TakenCallLost(owner, "which has this session", status=502) from exc
    except OwnerStalled as exc:
        raise SessionStalled(owner, exc) from exc  # no 404, which would end a session that may live on
    if replied is None:
        raise session_gone()
    return replied
