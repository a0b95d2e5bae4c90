"""Plain calls that a connection begins with the bytes of their requests, and that no coroutine serves.

Their heads and bodies have forms that came before, so each stage would find what it found then; a session is idle; and
nothing but the result comes. Whatever deviates is served in a task, as all else is (decision 61).
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec

from gateway import world
from gateway.bridge.call_context import ClientCall
from gateway.bridge.driver import Driver
from gateway.bridge.plain_call import PlainCall
from gateway.cluster.draining import Draining
from gateway.downstream.access_log import access
from gateway.downstream.legs import Legs
from gateway.downstream.round import Round, count, new_round
from gateway.http.incoming import Caller, client_address, received
from gateway.http.known_call import KnownCall
from gateway.http.reply import Challenge, HttpReply
from gateway.http.server.connection import Connection
from gateway.http.server.request import ALL_READ, HttpRequest, ReceivedHead
from gateway.http.server.response import Response
from gateway.http.server.wire import PIECE_BYTES
from gateway.http.upstream_headers import with_request_id
from gateway.parking.lot import Lot
from gateway.protocol.errors import Busy
from gateway.protocol.tool_list import Tool
from gateway.routes.live_route import LiveRoute
from gateway.sessions.call import PoolKey
from gateway.sessions.group import Group
from gateway.sessions.session import Session
from gateway.telemetry import GIVEN_UP, Ending, bodies
from gateway.upstream.channel import Headers


class KnownWay(msgspec.Struct, frozen=True, eq=False):
    """What serving a plain call found out, and holds for the next one of the same head and form.

    A reload forgets all heads, and with them this.
    """

    live: LiveRoute
    caller: Caller
    form: KnownCall
    key: PoolKey
    headers: Headers
    group: Group[Session]
    tools: dict[str, Tool] | None
    """Those of the group; others are in their place once they change."""


def learn(round_: Round, group: Group[Session]) -> None:
    """Note the way of a plain call that has begun, for the next one with its head."""
    live, known = round_.live, round_.incoming.known
    if known is None or known.caller is None or known.call is None or live.route.dialects:
        return  # without a caller of its own, the head does not tell that its token still counts
    if known.call.said is round_.request.said:
        known.way = KnownWay(live, round_.caller, known.call, round_.key, round_.headers, group, group.tools.by_name)


class DirectCall(PlainCall, eq=False, kw_only=True):
    """One such call, until it is answered, or a task takes it over."""

    calls: "DirectCalls"
    http: HttpRequest
    connection: Connection
    caller: Caller
    body: bytes
    started: float
    """Monotonic."""

    def _answered(self, body: bytes, ending: Ending) -> None:
        """Reply with the result of the call, unless a task has to do that."""
        # A larger body goes out in pieces, each when the client has read the one before: a coroutine waits for that.
        if bodies.on or len(body) > PIECE_BYTES or not self.connection.reply(body):
            self.connection.serve_rest()
        else:
            self.calls.let_go(self)
            count(self.asked, self.started, ending)

    def _deviated(self) -> None:
        """Have a task serve the rest of the call."""
        self.connection.serve_rest()

    def rest(self) -> Awaitable[Response]:
        """See `Begun`; what it returns must be awaited at once, because a drain does not wait for it."""
        self.calls.let_go(self)
        if self.final is None:
            _ = self.promote()
        asked = self.asked
        incoming, self.body = received(self.http, self.caller, self.body, asked.request), b""
        reply = HttpReply(self.http, self.calls.challenge)
        round_ = new_round(incoming, asked.request, reply, asked.live, self.caller, self.started)
        return self.calls.serve(round_, self)

    def leave(self) -> None:
        """The client has closed its connection."""
        self.calls.let_go(self)
        self.abandon()
        count(self.asked, self.started, GIVEN_UP)


@dataclass(slots=True, eq=False)
class DirectCalls:
    """Begins them at one listener."""

    _draining: Draining
    challenge: Challenge
    _legs: Legs
    _lot: Lot[Driver]
    _own_ids: Iterator[str]
    serve: Callable[[Round, PlainCall], Awaitable[Response]]
    """Replies to a call that a task takes over."""
    in_flight: int = 0
    """Calls that are not answered, and that no task serves."""

    def begin(self, head: ReceivedHead, body: bytes, connection: Connection) -> DirectCall | None:
        """Begin the call of a request; returns None if it has to be served as any other."""
        known = head.values
        way: KnownWay | None = None if known is None else known.way
        if way is None or bodies.on or access.on or self._draining.has_begun:
            return None
        live, group = way.live, way.group
        era = live.upstream.era
        if not group.idle or group.tools.by_name is not way.tools or not (era is None or era.known is False):
            return None
        request = way.form.read(body)
        if request is None:
            return None
        started = world.monotonic()
        http = HttpRequest(head, ALL_READ, connection.wire)
        request_id, headers = http.identify(self._own_ids), way.headers
        if live.route.upstream.request_id_header is not None:
            headers = with_request_id(live.route, headers, request_id)
        remote, proxies = connection.wire.remote, live.config.principal.trusted_proxies
        if proxies:
            remote = client_address(remote, head.headers, proxies)
        call = DirectCall(
            ClientCall(live, request, way.key, headers, len(body), remote, request_id),
            self._lot,
            calls=self,
            http=http,
            connection=connection,
            caller=way.caller,
            body=body,
            started=started,
        )
        try:
            self._lot.check(way.key.principal)
            if not call.begin(group):
                return None
        except Busy:
            return None  # whoever serves it now says so
        self.in_flight += 1
        self._legs.begun(call, started + live.deadlines.plain_seconds)
        return call

    def let_go(self, call: DirectCall) -> None:
        """Forget a call that is answered, left, or a task's from now on."""
        del self._legs.plain[call]
        self.in_flight -= 1
