"""One round: a checked request on its way to its one reply."""

from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import ClientCall
from gateway.config import Route
from gateway.http.incoming import TRACE_VALUE, Caller, Incoming, client_address
from gateway.http.outbox import FinalMessage, Outbox
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.http.upstream_headers import AUTHORIZATION, for_call, joined, own_headers, with_request_id
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import InvalidState, NoHandshake, Unreachable
from gateway.protocol.request import Request
from gateway.protocol.request_meta import Declarations
from gateway.routes.live_route import LiveRoute
from gateway.seal import sep_1655_items
from gateway.sessions.call import PoolKey
from gateway.telemetry import Ending, with_context
from gateway.telemetry.process_status import CallStatus
from gateway.upstream.channel import NO_HEADERS, Headers

SESSION_ITEM: Final = "mrtr-gateway/upstream-session"


class Round(ClientCall, eq=False, kw_only=True):
    """One checked request, with everything that serving it needs."""

    incoming: Incoming
    reply: ReplyWriter
    caller: Caller
    started: float
    """Monotonic."""
    is_counted: bool = False
    item: str = ""
    """What its result tells the client to bring along, if the client is pinned to the session (SEP-1655)."""
    heard: ClassVar[None] = None
    at_end: ClassVar[None] = None
    """See `Driver`: a drain refuses what has not begun upstream, and its client may send it again."""

    @property
    def asked(self) -> ClientCall:
        """The call that it makes."""
        return self

    def running_seconds(self, now: float) -> float:
        """For how long it has been prepared."""
        return now - self.started

    def glance(self, now: float) -> CallStatus:
        """The call on the status page while it is prepared; `now` is the monotonic time."""
        return self.running_status(self.running_seconds(now), None, self.at_end)

    @property
    def seconds_left(self) -> float | None:
        """How long the replica that relays this round still waits for it; None if it does not end before."""
        came = self.incoming.peer_request
        if came is None or came.leg_seconds is None:
            return None
        return max(0.0, came.leg_seconds - (world.monotonic() - self.started))

    def check_era(self, error: InvalidState) -> None:
        """Raise NoHandshake if what this request brought may be a modern upstream's own.

        No probe was conclusive yet. A call without a state learns from the handshake what that means.
        """
        route = self.live.route
        if error.is_foreign and route.era != "bridge" and self.live.upstream.is_modern is None:
            raise NoHandshake(
                f"{route.where} has not said yet whether it is modern, so this requestState or taskId may be its own; "
                "nothing was run: send the same request again",
                fix=Unreachable.fix,
            ) from error

    def drop_body(self) -> None:
        """Keep nothing of the answers once the call has them."""
        self.request = self.request.taken()
        self.incoming.drop_body(bytes(self.request.id))

    async def answer(self, result: bytes) -> Response:
        """Write a result that no call had to be made for."""
        return await self.finish(FinalMessage(jsonrpc.result(self.request.id, result)))

    async def finish(self, final: FinalMessage) -> Response:
        """Write the final message."""
        if self.item:
            final = replace(final, body=sep_1655_items.with_item(final.body, SESSION_ITEM, self.item))
        return await self.reply.whole(final)

    async def write(self, queue: Outbox) -> Response:
        """Write messages as they come: one JSON body if the final message comes first, else a stream.

        Raises NoHandshake if the request may be passed through.
        """
        last = await self.reply.deliver(queue, encode=sse.encode)
        if isinstance(last.cause, NoHandshake) and not self.reply.started:
            raise last.cause  # the upstream may be modern, and answer this very request
        return await self.finish(last)

    def count(self, ending: Ending) -> None:
        """Count this round, once; the replica to which the client spoke counts a forwarded one."""
        if self.is_counted:
            return
        self.is_counted = True
        if self.span is not None:
            self.span.end(ending)
        if self.incoming.peer_request is None:
            count(self, self.started, ending)


def count(call: ClientCall, started: float, ending: Ending) -> None:
    """Count how a request ended that began then (monotonic)."""
    request, live, seconds = call.request, call.live, world.monotonic() - started
    live.process.metrics.operations[live.route.path, request.method, request.said.version, *ending].observe(seconds)


class _Sender(msgspec.Struct, frozen=True):
    """What the requests of one client have in common that come with the same head and the same `_meta`."""

    said: Declarations
    route: Route
    """As it was configured."""
    key: PoolKey
    headers: Headers


def new_round(  # noqa: PLR0913  (what a round consists of)
    incoming: Incoming, request: Request, reply: ReplyWriter, live: LiveRoute, caller: Caller, started: float
) -> Round:
    """Make a round of a checked request."""
    known = incoming.known
    if known is not None and (known.caller is not caller or incoming.span is not None):
        known = None  # the head alone does not tell the sender
    sender = None if known is None else known.sender
    if sender is None or sender.said is not request.said or sender.route is not live.route:
        headers, said = _upstream_headers(incoming, request, live, caller), request.said
        names = live.route.pooled_headers if live.route.forward_headers else ()
        forwarded = tuple([(name, headers[name]) for name in names if name in headers])
        key = PoolKey(caller.principal, bytes(said.client_info), bytes(said.capabilities), forwarded)
        sender = _Sender(said, live.route, key, headers)
        if known is not None and request.said.is_shared:  # else the next request has another object
            known.sender = sender
    headers = sender.headers
    if live.route.upstream.request_id_header is not None:
        headers = with_request_id(live.route, headers, incoming.request_id)
    remote, proxies = incoming.remote, live.config.principal.trusted_proxies
    if proxies:
        remote = client_address(remote, incoming.headers, proxies)
    return Round(
        live,
        request,
        sender.key,
        headers,
        len(incoming.body),
        remote,
        incoming.request_id,
        incoming.span,
        incoming.exchange_id,
        has_no_way_back=not incoming.has_headers,
        incoming=incoming,
        reply=reply,
        caller=caller,
        started=started,
    )


def _upstream_headers(incoming: Incoming, request: Request, live: LiveRoute, caller: Caller) -> Headers:
    """Return the headers of this request that go upstream; all others stay here."""
    route = live.route
    selects = (
        bool(route.forward_headers or route.bind_headers or route.set_headers) or route.credentials.mode == "replace"
    )
    known = incoming.known
    if known is not None and known.is_bare and not (selects or request.said.user_meta or incoming.span):
        return NO_HEADERS
    is_any = selects or AUTHORIZATION in incoming.headers
    sent = for_call(route, incoming.headers, caller.distrusted_header) if is_any else {}
    meta = request.said.user_meta
    for name in mcp.TRACE_KEYS:
        if name not in incoming.headers and name not in meta:
            continue
        header = joined(incoming.headers, name)
        value = (jsonrpc.text(meta.get(name)) if meta else None) or header  # `_meta` comes first (SEP-414)
        if value is not None and TRACE_VALUE.fullmatch(value):
            sent[name] = value
    if incoming.span is not None:
        # The span has the client's trace context, as far as it is valid; baggage goes upstream in any case.
        sent = with_context(sent, incoming.span.headers())
    if selects:
        sent.update(own_headers(route))
    return sent or NO_HEADERS  # held calls keep them
