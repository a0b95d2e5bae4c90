"""Serves legacy clients of streamable HTTP before a modern server.

Rule 1: nothing that a session needs is in this process alone. The session id, the ids of nested requests and of
events carry it, so any replica serves any request. Rule 2: the caller is told by each request's own credentials,
whatever ids it brings.

Source: specification 2025-11-25 basic/transports (Streamable HTTP).
"""

from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from gateway import world
from gateway.cluster.peer_errors import PeerReplaced
from gateway.http.outbox import FinalMessage
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.call_rounds import Rounds
from gateway.mirror.client_requests import level_of, of_initialize, params_of, request_of, uri_of
from gateway.mirror.server_client import RouteServer, initialize
from gateway.mirror.streamable import call_continuation, sep_1655_item
from gateway.mirror.streamable.session_homes import Home
from gateway.mirror.streamable.streamed_call import Shared, StreamedCall
from gateway.mirror.streamable.tokens import MirroredSession
from gateway.passthrough.header_rules import on_behalf
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, IdInUse, InvalidRequest, not_served
from gateway.seal import sep_1655_items

_METHODS: Final = "POST, GET, DELETE"
_MAX_ID_BYTES: Final = 1_000
"""The ids of events carry the id of their call."""


async def serve(shared: Shared, came: Arrival) -> Response:
    """Serve one request of a legacy client; raises GatewayError."""
    at, draining = replace(came, headers=on_behalf(came.incoming, came.live)), came.live.process.draining
    match at.incoming.method:
        case "POST":
            return await _post(shared, at)
        case "GET":
            session = _session(shared, at)
            place, subscribed = at.incoming.headers.get(mcp.LAST_EVENT_ID), None
            if place is not None and (subscribed := shared.tokens.subscribed(place, session)) is None:
                return await call_continuation.resume(shared, at, session, place)
            if at.incoming.peer_request is None:  # `_home` passes forwarded ones on
                draining.check("open the stream again", is_stream=True)
            with draining.leaving_out():
                home = await _home(shared, at, session)
                return await home.write(at.reply, at.headers, subscribed) if isinstance(home, Home) else home
        case "DELETE":
            # A replica that starts later, or cannot be reached now, still takes the id of the session.
            session = _session(shared, at)
            for held in [held for (key, _), held in shared.running.items() if key == session.key]:
                held.cancel()
            shared.homes.end(session)
            await at.live.process.router.to_all(at.incoming)
            return await at.reply.only(FinalMessage(b""))
        case _:
            raise not_served(at.incoming.method, _METHODS)


async def _post(shared: Shared, at: Arrival) -> Response:
    try:
        message = at.opened()
    except GatewayError:
        with suppress(GatewayError):
            _ = _session(shared, at)  # an unreadable message does not end the session in which it came
        raise
    id_ = message.rpc_id
    if message.method == mcp.INITIALIZE and id_ is not None:
        at.live.process.draining.check("try again")
        keeps_state = sep_1655_items.DIALECT in at.live.route.dialects
        profile = of_initialize(params_of(message), keeps_state=keeps_state)
        result = await initialize(RouteServer(at.live, at.caller.principal), profile, at.headers)
        token = shared.tokens.new_session(at.bearer, profile)
        return await at.reply.only(FinalMessage(jsonrpc.result(id_, result), headers={mcp.SESSION_ID: token}))
    session = _session(shared, at)
    if message.method is None:
        return await call_continuation.answer(shared, at, session, message)
    if id_ is None:
        if message.method == mcp.CANCELLED:
            await call_continuation.cancel(shared, at, session, message)
        return await at.accept()
    serving = _request(shared, at, session, id_, message)
    del message  # a call keeps the params alone, and these coroutines wait for its end
    return await serving


def _session(shared: Shared, at: Arrival) -> MirroredSession:
    token = at.incoming.headers.get(mcp.SESSION_ID)
    if token is None:
        raise InvalidRequest("The header Mcp-Session-Id is missing; send initialize first, and then its session id")
    version = at.incoming.headers.get(mcp.PROTOCOL_VERSION)
    if version is not None and version not in mcp.LEGACY_VERSIONS:
        raise InvalidRequest(f"MCP-Protocol-Version {version[:40]!r} is not one that this session can have")
    session = shared.tokens.session(token, at.bearer, at.live.config.state.session_ttl_seconds)
    shared.homes.check(session)
    at.incoming.found_session()
    return session


async def _request(
    shared: Shared, at: Arrival, session: MirroredSession, id_: bytes, message: jsonrpc.Message
) -> Response:
    if (session.key, id_) in shared.running:  # of this replica alone: none has all calls of a session
        raise IdInUse
    response = jsonrpc.result(id_, b"{}")
    keeps_level = session.profile.keeps_state and sep_1655_items.DIALECT in at.live.route.dialects
    if keeps_level:
        message = sep_1655_item.taken(message, at, session, shared.homes)
    match message.method:
        case mcp.PING:
            pass
        case mcp.SET_LEVEL:
            level = sep_1655_item.new(level_of(message), session)
            shared.homes.set_level(session, level)
            await at.live.process.router.to_all(at.incoming)
            if keeps_level:
                response = sep_1655_item.given(response, level, at.live)
        case mcp.SUBSCRIBE | mcp.UNSUBSCRIBE:
            home = await _home(shared, at, session)
            if not isinstance(home, Home):
                return home
            await home.subscribe(message.method, uri_of(message), at.headers)
        case _:
            if len(id_) > _MAX_ID_BYTES:
                raise InvalidRequest(f"The id of a call has at most {_MAX_ID_BYTES} bytes; use a shorter one")
            request = request_of(id_, message)
            del message
            at.incoming.drop_body(id_)
            at.live.process.draining.check("call again")
            exchange, wanted = world.token_urlsafe(9), shared.homes.level(session)
            rounds = Rounds(at.live, exchange, request, session.profile, at.headers, wanted)
            return await StreamedCall(shared, at, session, rounds).write(at)
    return await at.reply.whole(FinalMessage(response))


async def _home(shared: Shared, at: Arrival, session: MirroredSession) -> Home | Response:
    """The home of a session if this replica is that, else the reply of the replica that is."""
    peer_request = at.incoming.peer_request
    if peer_request is not None and at.live.process.draining.has_begun:
        raise PeerReplaced(peer_request.to)  # the replica that forwarded the request goes on to the next home
    found = await at.live.process.router.to_home(session.key, at.incoming, at.reply.as_one_stream())
    return shared.homes.of(session, at.live) if found is None else found
