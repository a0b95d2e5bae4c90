"""Serves the clients of SEP-1442: stateless requests, whose questions are requests on the response stream.

Each request becomes a call of 2026-07-28, whose rounds are run here: by the bridge of this gateway, or at a modern
server. Rule 1: each request's own credentials identify the caller, whatever ids it brings. Rule 2: an answer that
reaches another replica is forwarded to the one that holds the call, which its id names.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.client_requests import LegacyRequest, Profile, of_initialize, params_of, request_of
from gateway.mirror.server_client import RouteServer, ServerClient, initialize, is_modern
from gateway.mirror.streamable import call_continuation
from gateway.mirror.streamable.streamed_call import Shared
from gateway.mirror.streamable.tokens import MirroredSession, NoSession
from gateway.plugins.sep_1442 import vocabulary
from gateway.plugins.sep_1442.listening import Listening
from gateway.plugins.sep_1442.own_server import OwnServer, Serve
from gateway.plugins.sep_1442.stateless_call import StatelessCall
from gateway.plugins.sep_1442.vocabulary import Declared, InvalidSession
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, IdInUse, MethodNotFound
from gateway.routes.live_route import LiveRoute
from gateway.seal.keyring import IN_JSON
from gateway.upstream.channel import NO_HEADERS, Headers

_KEY: Final = vocabulary.VERSION.encode()
_NOBODY: Final = Profile(mcp.LEGACY, b"{}", b"{}")


class Stateless:
    """The dialect in one process."""

    def __init__(self, shared: Shared, serve: Serve, give_up: Callable[[Incoming], None]) -> None:
        """`serve` serves a request of 2026-07-28; `give_up` ends the call whose next round a request would be."""
        self._own_server = partial(OwnServer, serve, give_up)
        self._shared, self.lot = shared, shared.lot

    def claims(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether a request speaks the dialect: by its key, by its session, or by the id that it answers."""
        if vocabulary.DIALECT not in live.route.dialects or incoming.method != "POST":
            return False
        if self._shared.owns(incoming):
            return True
        body = incoming.body
        if _KEY not in body and IN_JSON not in body and b"\\" not in body:
            return False  # without an escape, both can only be written as they are
        try:
            message = jsonrpc.message(body)
        except ValueError:
            return False
        if message.method is not None:
            return vocabulary.is_declared(message)
        return isinstance(message.id, Raw) and self._shared.tokens.is_question(jsonrpc.text(message.id))

    async def serve(self, came: Arrival) -> Response:
        """Serve a request that `claims` is of the dialect; raises GatewayError."""
        sent = came.message()
        at, message = replace(came, headers=sent.headers), sent.opened
        id_ = message.rpc_id
        del sent
        if message.method is None:
            return await call_continuation.answer(self._shared, at, _stateless(at), message)
        if id_ is None:  # the paper gives no other notification of a client than a cancellation a meaning
            session = self._session(at)
            if message.method == mcp.CANCELLED and session is not None:
                await call_continuation.cancel(self._shared, at, session, message)
            return await at.accept()
        serving = self._request(at, id_, message)
        del message  # a call keeps the params alone, and these coroutines wait for its end
        return await serving

    def end_all(self, error: GatewayError) -> None:
        """End the calls that wait for answers: nobody could go on with them."""
        for call in list(self.lot):
            call.stop(error)

    # -- requests -----------------------------------------------------------------------------------------------

    async def _request(self, at: Arrival, id_: bytes, message: jsonrpc.Message) -> Response:
        params, declared = vocabulary.declared(params_of(message), at.incoming.headers)
        session = self._session(at) if message.method != mcp.INITIALIZE else None
        if session is not None:
            # Only `initialize` says who the client is.
            declared = replace(declared, profile=replace(declared.profile, info=session.profile.info))
        match message.method:
            case mcp.PING:
                return await _result(at, id_, b"{}")
            case mcp.INITIALIZE:
                profile = replace(of_initialize(params_of(message)), version=declared.profile.version)
                server, headers = await self._server(at)
                found = await initialize(server, profile, headers)
                token = self._shared.tokens.new_session(at.bearer, profile)
                return await _result(at, id_, vocabulary.initialize_result(found, token), {mcp.SESSION_ID: token})
            case mcp.DISCOVER:
                server, headers = await self._server(at)
                found = await initialize(server, declared.profile, headers)
                return await _result(at, id_, vocabulary.discover_result(found))
            case vocabulary.LISTEN:
                at.live.process.draining.check("listen again", is_stream=True)
                server, headers = await self._server(at)
                return await Listening(at, id_).serve(server, declared.profile, headers)
            case method if method in mcp.BRIDGED:
                outgoing = request_of(id_, replace(message, params=params))
                del message, params
                at.incoming.drop_body(id_)
                return await self._call(at, outgoing, declared, session)
            case method:
                raise MethodNotFound(f"Method not found: {(method or '')[:80]}")

    async def _call(
        self, at: Arrival, request: LegacyRequest, declared: Declared, session: MirroredSession | None
    ) -> Response:
        at.live.process.draining.check("call again")
        server, headers = await self._server(at)
        # After the last await before the call is entered there.
        if session is not None and (session.key, request.id) in self._shared.running:
            raise IdInUse
        binding = _stateless(at, replace(declared.profile, echoes_state=False))
        at = replace(at, headers=headers)
        call = StatelessCall(self._shared, at, binding, request, declared, server, session)
        return await call.write(at)

    # -- sessions, servers --------------------------------------------------------------------------------------

    def _session(self, at: Arrival) -> MirroredSession | None:
        """The session that a request names in its header; raises InvalidSession."""
        token = at.incoming.headers.get(mcp.SESSION_ID)
        if token is None:
            return None
        try:
            return self._shared.tokens.session(token, at.bearer, at.live.config.state.session_ttl_seconds)
        except NoSession as exc:
            raise InvalidSession from exc.__cause__

    async def _server(self, at: Arrival) -> tuple[ServerClient, Headers]:
        """Return the server for the rounds of a request, with the headers for it."""
        live = at.live
        if live.route.era == "mirror" or (live.route.era == "auto" and await is_modern(live, at.headers)):
            return RouteServer(live, at.caller.principal), at.headers
        return self._own_server(at), at.incoming.headers


def _stateless(at: Arrival, profile: Profile = _NOBODY) -> MirroredSession:
    """Return the binding of the ids of nested requests: not a session, but the route with the caller."""
    bound = hashlib.sha256(b"%b\0%b" % (at.incoming.path.encode(), at.caller.principal)).hexdigest()
    return MirroredSession(bound, at.incoming.path, at.caller.principal, 0.0, profile)


async def _result(at: Arrival, id_: bytes, result: bytes, headers: Headers = NO_HEADERS) -> Response:
    return await at.reply.only(FinalMessage(jsonrpc.result(id_, result), headers=headers))
