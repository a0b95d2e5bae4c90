"""Serves legacy clients of streamable HTTP before a modern server.

Rule 1: nothing that a session needs is in this process alone. The session id, the ids of nested requests and of
events carry it, so any replica serves any request. Rule 2: the caller is told by each request's own credentials,
whatever ids it brings.

Source: specification 2025-11-25 basic/transports (Streamable HTTP).
"""

import secrets
import time
from collections import OrderedDict
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Raw
from msgspec.structs import replace

from gateway.cluster.peer_errors import PeerReplaced
from gateway.cluster.retry_routing import TakeOver
from gateway.config import Config, InForce
from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import ReplyWriter
from gateway.legacy_front import batch
from gateway.legacy_front.backend import Connect, request_id
from gateway.legacy_front.session import error_response
from gateway.mirror.backend import MirrorBackend
from gateway.mirror.call import Progress, Question, Request
from gateway.mirror.catalog import ToolCatalog
from gateway.mirror.profile import of_initialize
from gateway.mirror.requests import (
    DEFAULT_LEVEL,
    cancelled_id,
    initialize,
    level_of,
    params_of,
    request_of,
    uri_of,
)
from gateway.mirror.streamable import batch_reply, kept_log_level, nested_state
from gateway.mirror.streamable.held_call import HeldCall, Shared, owner_lost
from gateway.mirror.streamable.homes import Homes
from gateway.mirror.streamable.kept_log_level import Level
from gateway.mirror.streamable.nested_state import InvalidRequestState
from gateway.mirror.streamable.replicas import Replicas
from gateway.mirror.streamable.tokens import Mark, Nested, NoSession, Place, Session, Tokens
from gateway.mirror.upstream import Upstream, server_of
from gateway.passthrough.header_rules import HeaderRules, probe_headers
from gateway.passthrough.rejections import not_allowed
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import (
    DownstreamError,
    GatewayError,
    InvalidRequest,
    InvalidState,
    OwnerStalled,
    ParseError,
    Stopping,
)
from gateway.routes.held_calls import Lot
from gateway.routes.live_route import LiveRoute, ProcessScope
from gateway.runtime.budget import Budget
from gateway.seal import client_state
from gateway.telemetry import COMPLETE, Step
from gateway.upstream.channel import NO_HEADERS, Headers

_METHODS: Final = "POST, GET, DELETE"
_MAX_ID_BYTES: Final = 1_000
"""The ids of events carry the id of their call."""


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """One request of a legacy client."""

    incoming: Incoming
    reply: ReplyWriter
    live: LiveRoute
    caller: Caller
    headers: Headers
    """The headers that go upstream."""


class Mirror:
    """The mirror of one process."""

    def __init__(
        self,
        in_force: InForce[Config],
        tokens: Tokens,
        replicas: Replicas,
        process: ProcessScope,
        results: Budget,
    ) -> None:
        """`results` limits the responses that are kept, together with those of other calls."""
        self.stopping = False
        self.refuses_calls = False
        """Whether new calls are refused, because no other replica could go on with them."""
        self._config = in_force
        self._tokens = tokens
        self._replicas = replicas
        self._process = process
        self._headers = HeaderRules(in_force, process.epoch)
        self._catalog = ToolCatalog()
        cold = in_force.part(lambda it: it.limits.cold_bytes)
        self.lot: Lot[HeldCall] = Lot(in_force.part(lambda it: it.hold), results, cold)
        self._homes = Homes(tokens, results)
        self._shared = Shared(tokens, self.lot, {}, OrderedDict())
        self.long_lived = 0
        """Standalone streams, which a drain does not wait for."""

    def owns(self, incoming: Incoming) -> bool:
        """Whether a request belongs to a mirrored session."""
        return self._tokens.is_session(incoming.headers.get(mcp.SESSION_ID))

    async def serve(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> web.StreamResponse:
        """Serve one request of a legacy client, whose caller is known; raises GatewayError."""
        assert incoming.caller is not None, "the caller is told before"
        headers = probe_headers(self._headers.upstream(incoming, live.route))
        at = Arrival(incoming, reply, live, incoming.caller, headers)
        match incoming.method:
            case "POST":
                return await self._post(at)
            case "GET":
                return await self._get(at)
            case "DELETE":
                return await self._delete(at)
            case _:
                raise not_allowed(incoming.method, _METHODS)

    # -- POST ---------------------------------------------------------------------------------------------------

    async def _post(self, at: Arrival) -> web.StreamResponse:
        incoming = at.incoming
        if not batch.is_batch(incoming.body):
            return await self._take(at)
        found = batch.members(incoming.body, incoming.json_depth, self._session(at).profile.version)

        async def take(member: bytes, reply: ReplyWriter) -> web.StreamResponse:
            return await self._take(replace(at, incoming=incoming.with_body(member), reply=reply))

        return await batch_reply.answer(at.reply, found, take)

    async def _take(self, at: Arrival) -> web.StreamResponse:
        message = _message(at.incoming)
        id_ = request_id(message.id) if isinstance(message.id, Raw) else None
        try:
            if message.method == mcp.INITIALIZE and id_ is not None:
                return await self._initialize(at, id_, message)
            session = self._session(at)
            if message.method is None:
                return await self._answered(at, session, message)
            if id_ is None:
                return await self._notified(at, session, message)
            return await self._request(at, session, id_, message)
        except GatewayError as exc:
            exc.request_id = exc.request_id or id_
            raise

    def _session(self, at: Arrival) -> Session:
        token = at.incoming.headers.get(mcp.SESSION_ID)
        if token is None:
            raise InvalidRequest(
                "The header Mcp-Session-Id is missing; send initialize first, and then its session id"
            )
        version = at.incoming.headers.get(mcp.PROTOCOL_VERSION)
        if version is not None and version not in mcp.LEGACY_VERSIONS:
            raise InvalidRequest(f"MCP-Protocol-Version {version[:40]!r} is not one that this session can have")
        seconds = self._config.value.state.session_ttl_seconds
        try:
            session = self._tokens.session(token, at.incoming.path, at.caller.principal, time.time(), seconds)
            self._homes.check(session)
        except NoSession as exc:
            self._process.metrics.state_rejected(exc.reason)
            raise
        return session

    async def _initialize(self, at: Arrival, id_: bytes, message: jsonrpc.Message) -> web.StreamResponse:
        if self.refuses_calls:
            raise Stopping("The gateway is shutting down; try again, another replica or a new process will answer")
        profile = of_initialize(params_of(message), keeps_state=client_state.DIALECT in at.live.route.dialects)
        result = await initialize(server_of(at.live), profile, at.headers)
        token = self._tokens.new_session(at.incoming.path, at.caller.principal, profile, time.time())
        return await at.reply.only(jsonrpc.result(id_, result), 200, {mcp.SESSION_ID: token}, COMPLETE)

    async def _notified(self, at: Arrival, session: Session, message: jsonrpc.Message) -> web.StreamResponse:
        if message.method == mcp.CANCELLED:
            held = self._shared.running.get((session.key, cancelled_id(message) or b""))
            if held is not None:
                held.abandon()
            else:
                await self._replicas.tell_all(at.incoming)
        return await _accepted(at.reply)

    async def _request(
        self, at: Arrival, session: Session, id_: bytes, message: jsonrpc.Message
    ) -> web.StreamResponse:
        response = jsonrpc.result(id_, b"{}")
        keeps_level = kept_log_level.is_kept(at.live, session)
        if keeps_level:
            message, known = kept_log_level.taken(message, at.live, session)
            if known is not None:
                self._homes.learn_level(session, known)
        match message.method:
            case mcp.PING:
                pass
            case mcp.SET_LEVEL:
                level = Level(level_of(params_of(message)), time.time())
                self._homes.set_level(session, level)
                await self._replicas.tell_all(at.incoming)
                if keeps_level:
                    response = kept_log_level.given(response, level, at.live, session)
            case mcp.SUBSCRIBE | mcp.UNSUBSCRIBE:
                self._check_home(at)
                found = await self._replicas.at_home(session.key, at.incoming, at.reply)
                if found is not None:
                    return found[0]
                home = self._homes.of(session, at.live, server_of(at.live))
                await home.subscribe(message.method, uri_of(params_of(message)), at.headers)
            case _:
                if len(id_) > _MAX_ID_BYTES:
                    raise InvalidRequest(f"The id of a call has at most {_MAX_ID_BYTES} bytes; use a shorter one")
                return await self._call(at, session, request_of(id_, message))
        return await at.reply.whole(response, 200, NO_HEADERS, COMPLETE)

    async def _call(self, at: Arrival, session: Session, request: Request) -> web.StreamResponse:
        if self.refuses_calls:
            raise Stopping("The gateway is shutting down; call again, another replica or a new process will answer")
        held = self._held(at, session, secrets.token_urlsafe(9), request)
        held.runner.run(at.headers)
        replied, _ = await held.write(at.reply, at.incoming.request_id)
        return replied

    def _held(
        self,
        at: Arrival,
        session: Session,
        exchange: str,
        request: Request,
        progress: Progress | None = None,
    ) -> HeldCall:
        held = HeldCall(
            self._shared,
            at.live,
            session,
            Place(session.key, exchange, self._process.owner, self._process.epoch, time.time()),
            request,
            self._upstream(at, session),
            level=self._homes.level(session, DEFAULT_LEVEL),
            progress=progress,
            address=at.caller.address,
        )
        held.report.trace(at.incoming)
        return held

    # -- answers ------------------------------------------------------------------------------------------------

    async def _answered(self, at: Arrival, session: Session, message: jsonrpc.Message) -> web.StreamResponse:
        """Take the response to a nested request, or have the replica take it that holds the call."""
        token = jsonrpc.text(message.id) if isinstance(message.id, Raw) else None
        try:
            nested = self._tokens.nested(token or "", session)
        except InvalidState as exc:
            self._process.metrics.state_rejected(exc.reason)
            raise InvalidRequest("The id of this response is not that of a request of the gateway") from exc
        is_echo = nested_state.is_echo(nested, message)
        if is_echo or nested_state.DIALECT in at.live.route.dialects:
            nested, message = nested_state.taken(nested, message, self._tokens)
        held = self.lot.find(nested.place.exchange)
        if held is None:
            if self._is_own(nested.place):
                if is_echo:
                    raise InvalidRequestState("ended")
                return await _accepted(at.reply)  # the call is over
            found = await self._replicas.route(nested.place, at.incoming, at.reply)
            if not isinstance(found, TakeOver):
                self._continued_by(at, Step.FORWARDED)
                return found[0]
            held = self.lot.find(nested.place.exchange)
            if held is None:
                held = self._restored(at, session, nested, is_proven=found.proven)
                self._continued_by(at, Step.LOST if held is None else Step.RESUMED)
        else:
            self._continued_by(at, Step.HELD)
        if is_echo:
            self._check_open(at, held, nested)
        if held is not None:
            held.answer(nested, message, at.headers)
        return await _accepted(at.reply)

    def _check_open(self, at: Arrival, held: HeldCall | None, nested: Nested) -> None:
        """Check that a state counts now; raises InvalidRequestState."""
        if held is None:
            is_old = self._is_old(nested.place, nested.progress, at.live)
            raise InvalidRequestState("expired" if is_old else "ended")
        if not held.is_open(nested):
            raise InvalidRequestState("answered")

    def _continued_by(self, at: Arrival, step: Step) -> None:
        """Count how an answer, or a client that came back, found its call; only where the client spoke to."""
        if step is not Step.FORWARDED or at.incoming.peer_request is None:
            self._process.metrics.continued(at.live.route.path, step)

    def _restored(self, at: Arrival, session: Session, nested: Nested, *, is_proven: bool) -> HeldCall | None:
        """The call of a replica that has died, as far as a nested request's id tells; None if it cannot go on."""
        if nested.request is None or self._is_over(nested.place, nested.progress, at.live):
            return None
        held = self._held(at, session, nested.place.exchange, nested.request, nested.progress)
        held.call.open.update({key: Question(key, "", b"{}") for key in nested.keys})
        held.report.taken_over(nested.place.owner, nested.round, owner_is_dead=is_proven)
        held.wait()
        return held

    def _is_own(self, place: Place) -> bool:
        return (place.owner, place.epoch) == (self._process.owner, self._process.epoch)

    def _is_over(self, place: Place, progress: Progress, live: LiveRoute) -> bool:
        """Whether a call of a replica that has died cannot go on."""
        return place.exchange in self._shared.ended or self._is_old(place, progress, live)

    def _is_old(self, place: Place, progress: Progress, live: LiveRoute) -> bool:
        config = live.config
        seconds = config.state.ttl_seconds if progress.task is None else config.tasks.ttl_seconds
        return place.issued + seconds < time.time()

    # -- GET ----------------------------------------------------------------------------------------------------

    async def _get(self, at: Arrival) -> web.StreamResponse:
        session = self._session(at)
        place, subscribed = at.incoming.headers.get(mcp.LAST_EVENT_ID), None
        if place is not None and (subscribed := self._tokens.subscribed(place, session)) is None:
            return await self._resume(at, session, place)
        self._check_home(at)
        if self.stopping:
            raise Stopping("The gateway is shutting down; open the stream again, another replica will serve it")
        self.long_lived += 1
        try:
            found = await self._replicas.at_home(session.key, at.incoming, at.reply)
            if found is None:
                home = self._homes.of(session, at.live, server_of(at.live))
                found = await home.write(at.reply, at.headers, at.incoming.request_id, subscribed)
        finally:
            self.long_lived -= 1
        return found[0]

    def _check_home(self, at: Arrival) -> None:
        """Have the replica that forwarded a request go on to the next home, if this one is about to end."""
        if self.stopping and at.incoming.peer_request is not None:
            raise PeerReplaced(self._replicas.own)

    async def _resume(self, at: Arrival, session: Session, token: str) -> web.StreamResponse:
        """Go on with a stream that broke."""
        try:
            mark = self._tokens.mark(token, session)
        except InvalidState as exc:
            self._process.metrics.state_rejected(exc.reason)
            raise InvalidRequest("This Last-Event-ID belongs to no stream of this session") from exc
        if mark.is_final:
            raise not_allowed("GET", "POST, DELETE")  # some clients ask for more after an error
        is_own, is_proven = self._is_own(mark.place), True
        if self.lot.find(mark.place.exchange) is None and not is_own:
            found = await self._replicas.route(mark.place, at.incoming, at.reply)
            if not isinstance(found, TakeOver):
                self._continued_by(at, Step.FORWARDED)
                return found[0]
            is_proven = found.proven
        # What follows goes to whoever holds this credential, so the upstream sees it first.
        _ = await initialize(server_of(at.live), session.profile, at.headers)
        may_run = not is_own and await self._may_run_on(at, session, mark, is_proven=is_proven)
        held = self.lot.find(mark.place.exchange)
        step = Step.HELD
        if held is None and not is_own:
            held = self._continued(at, session, mark, may_run=may_run)
            if held is None and not is_proven and mark.place.exchange not in self._shared.ended:
                raise OwnerStalled(mark.place.owner, "does not react, and may still run the call")
            if held is not None:
                held.report.taken_over(mark.place.owner, mark.progress.round, owner_is_dead=is_proven)
                step = Step.RESUMED if mark.asking or mark.progress.task is not None else Step.REPLAYED
        self._continued_by(at, Step.LOST if held is None else step)
        if held is None:
            return await self._lost(at, mark)
        if not is_own:
            held.continued(mark)
        replied, _ = await held.write(at.reply, at.incoming.request_id, mark.number if is_own else 0)
        return replied

    def _continued(self, at: Arrival, session: Session, mark: Mark, *, may_run: bool) -> HeldCall | None:
        """The call of a replica that has died; None if it is lost.

        `may_run`: it may run from its beginning, or go on if it is a task.
        """
        request = mark.request
        if request is None or self._is_over(mark.place, mark.progress, at.live):
            return None
        if mark.asking:
            held = self._held(at, session, mark.place.exchange, request, mark.progress)
            held.runner.headers = at.headers
            held.call.open.update({question.key: question for question in mark.asking})
            return held
        if not may_run:
            return None
        held = self._held(at, session, mark.place.exchange, request, mark.progress)
        held.runner.run(at.headers)
        return held

    async def _may_run_on(self, at: Arrival, session: Session, mark: Mark, *, is_proven: bool) -> bool:
        """Whether a call that was upstream may run from its beginning, or go on if it is a task.

        A task has one driver, because the second one would cancel it when its client stays away.
        """
        request, route, upstream = mark.request, at.live.route, self._upstream(at, session)
        if request is None or mark.progress.task is not None:
            return request is not None and is_proven
        if request.method != mcp.TOOLS_CALL or route.continuation == "replay":
            return True
        if any(fnmatchcase(request.target, pattern) for pattern in route.ephemeral):
            return True
        if not upstream.catalog.knows(upstream.caller, request.target):
            await upstream.catalog.read(upstream.caller, upstream.server, session.profile, at.headers)
        return upstream.catalog.find(upstream.caller, request.target).ephemeral

    async def _lost(self, at: Arrival, mark: Mark) -> web.StreamResponse:
        """Tell the client that its call is lost, as the response to it."""
        await at.reply.start()
        body = error_response(mark.rpc_id, owner_lost(mark.place.owner))
        return await at.reply.whole(body, 200, NO_HEADERS, COMPLETE)

    # -- DELETE -------------------------------------------------------------------------------------------------

    async def _delete(self, at: Arrival) -> web.StreamResponse:
        """End a session with its calls. A replica that starts later, or cannot be reached now, still takes its id."""
        session = self._session(at)
        for held in [held for (key, _), held in self._shared.running.items() if key == session.key]:
            held.abandon()
        self._homes.end(session)
        await self._replicas.tell_all(at.incoming)
        return await at.reply.only(b"", 200, NO_HEADERS, COMPLETE)

    # -- the upstream -------------------------------------------------------------------------------------------

    def connect(self, live: LiveRoute, path: str, principal: bytes) -> Connect:
        """Make backends for links that hold their own state."""
        return partial(MirrorBackend, Upstream.of(live, (path, principal), self._catalog))

    def _upstream(self, at: Arrival, session: Session) -> Upstream:
        return Upstream.of(at.live, (at.incoming.path, session.principal), self._catalog)


def _message(incoming: Incoming) -> jsonrpc.Message:
    """The one message of a body; raises DownstreamError."""
    body = incoming.body
    try:
        jsonrpc.check_bounds(body, incoming.json_depth)
        _ = jsonrpc.distinct(body)
        message = jsonrpc.message(body)
    except DownstreamError:
        raise
    except jsonrpc.RepeatedKey as exc:
        raise InvalidRequest("The message repeats a key; send each key once") from exc
    except msgspec.ValidationError as exc:
        raise InvalidRequest("The body must be one JSON-RPC object") from exc
    except ValueError as exc:
        raise ParseError(f"The body is not valid JSON: {exc}") from exc
    if message.jsonrpc != "2.0" or (message.id is not msgspec.UNSET and not jsonrpc.is_id(message.id)):
        raise InvalidRequest('A message needs "jsonrpc": "2.0", and a string or an integer as "id" if it has one')
    if message.method is None and not (isinstance(message.result, Raw) or isinstance(message.error, Raw)):
        raise InvalidRequest("A message needs a method, a result or an error")
    return message


async def _accepted(reply: ReplyWriter) -> web.StreamResponse:
    return await reply.only(b"", 202, NO_HEADERS, COMPLETE)
