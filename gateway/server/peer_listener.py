"""Serves the requests of other replicas."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway import world
from gateway.cluster.peer_connections import CONTENT_TYPE, PATH
from gateway.cluster.peer_errors import PeerFailed, PeerReplaced
from gateway.cluster.witness import Witness
from gateway.config import Config, InForce
from gateway.downstream.handler import RequestHandler
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import ReplyWriter
from gateway.http.server.body import read_body
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, StreamResponse, WholeResponse
from gateway.http.server.traffic import Traffic
from gateway.protocol.errors import GatewayError, InvalidState, OutOfTime, clock_fix
from gateway.runtime.budget import Share
from gateway.runtime.pieces import cut
from gateway.seal import peer_messages as messages
from gateway.seal.claims import SKEW_SECONDS
from gateway.seal.peer_messages import Frames, PeerRequest, PeerSealer
from gateway.telemetry import Ending, Event, LineLimit, get_logger

if TYPE_CHECKING:
    from gateway.plugins.status_page.pages import StatusPages

log = get_logger()

_OVERHEAD_BYTES: Final = 262_144
"""The most that a request's headers and its seal may add to its body."""
_PIECE_BYTES: Final = 65_536
_ROUND_DIGITS: Final = 9  # `int` raises ValueError for thousands of digits
_REJECTED_FIX: Final = "if it is a replica, give it the same state.keys; else let only replicas reach replica.listen"

_ACCEPT_PART: Final = 0.1
"""The part of `timeouts.peer_accept_seconds` for which the reply to a retry may be what accepts it."""
_ACCEPT_SECONDS: Final = 1.0
"""It is never longer: the other replica may be less patient."""

_OF_A_PROCESS: Final = ("owner", "session")
"""Requests for what a process holds, which names that process by its epoch. Their age proves nothing: a wall clock may
jump, and "this call is not mine" is the proof that its owner is dead."""


@dataclass(eq=False, repr=False)
class PeerListener:
    """Opens the requests of other replicas, and hands them to what serves or answers them."""

    _in_force: InForce[Config]
    _sealer: PeerSealer
    _handler: RequestHandler
    _witness: Witness
    _pages: "StatusPages | None"
    _traffic: Traffic
    _lines: LineLimit = field(default_factory=LineLimit)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = world.monotonic()  # not as a default, which would be the clock of another world

    async def handle(self, http: HttpRequest, *, is_local: bool = False) -> Response:
        """Serve one request from the network, or from another process of this host.

        A request that is not sealed with a state key gets a refusal without a reason.
        """
        if http.head.method != "POST" or http.head.path != PATH:
            return WholeResponse(status=404)
        config = self._in_force.value
        limits, timeouts = config.limits, config.timeouts
        try:
            limit = limits.body_bytes + _OVERHEAD_BYTES
            sealed = await read_body(http, limit, limits.receive_seconds, self._traffic.receiving)
            peer_request = self._open(sealed)
        except InvalidState as exc:
            self._traffic.metrics.peer_rejections[exc.reason,].inc()
            if self._lines.take() is not None:
                remote = http.wire.remote
                log.warning(Event.PEER_REJECTED, reason=exc.reason, remote=remote, fix=_fix(exc, remote))
            return WholeResponse(status=403)
        except GatewayError as exc:
            return WholeResponse(status=exc.status)
        # The reply to a retry nearly always comes at once, as one message, which tells too that it was accepted.
        is_retry = peer_request.kind == "owner"
        seconds = min(_ACCEPT_PART * timeouts.peer_accept_seconds, _ACCEPT_SECONDS) if is_retry else 0.0
        reply = PeerReply(http, self._sealer.frames(peer_request), accept_seconds=seconds)
        try:
            await self._reply(peer_request, reply, http, is_local=is_local)
        finally:
            reply.stop_timer()
        return await reply.close()

    def _open(self, sealed: bytes) -> PeerRequest:
        """Open a request; raises InvalidState. One that is older than this process may have run in the one before."""
        now = world.wall()
        peer_request = self._sealer.open(sealed, now)
        age, own_age = now - peer_request.issued, world.monotonic() - self._started
        if peer_request.kind not in _OF_A_PROCESS and age > own_age:
            raise InvalidState("older_than_process")
        return peer_request

    async def _reply(
        self, peer_request: PeerRequest, reply: "PeerReply", http: HttpRequest, *, is_local: bool
    ) -> None:
        """Serve a request that is authentic, if it is for this process or for another one of this host."""
        kind, membership = peer_request.kind, self._witness.membership
        # Before `is_meant`: the replica that asks knows this address, and not yet whose it is.
        if kind == "who":  # it asks which one this is
            if peer_request.path:
                membership.greeted(peer_request.path, http.wire.remote)
            await reply.frame(messages.Identity(membership.host))
        elif not membership.is_meant(peer_request.to, is_local=is_local):
            await reply.frame(messages.Gone(membership.host))
        elif kind == "status":
            told = "" if self._pages is None else await self._pages.cluster.tell(is_local=is_local)
            await reply.frame(messages.Told(told))
        elif kind == "reach":
            await reply.frame(messages.Told(await self._witness.reach(peer_request.path)))
        elif kind == "holds":
            await reply.frame(messages.Told(await self._holds(peer_request, is_local=is_local)))
        else:
            headers = CIMultiDict([(_text(name), _text(value)) for name, value in peer_request.headers])
            incoming = Incoming(
                peer_request.path,
                CIMultiDictProxy(headers),
                peer_request.remote,
                peer_request.body,
                peer_request,
                peer_request.request_id,
                peer_request.exchange_id,
                peer_request.method,
            )
            try:
                _ = await self._handler.handle_hop(incoming, reply)
            except PeerReplaced:
                await reply.frame(messages.Gone(membership.host))
            except PeerFailed as exc:
                log.warning(Event.PEER_FAILED, cause=str(exc), **incoming.about)
                http.wire.abort()  # the other replica must see that the reply is incomplete

    async def _holds(self, peer_request: PeerRequest, *, is_local: bool) -> str:
        """Tell whether this host took an exchange over, or follows a task."""
        if not peer_request.body.isdigit() or len(peer_request.body) > _ROUND_DIGITS:
            return "unknown"
        exchange, round_ = peer_request.path, int(peer_request.body)
        if self._handler.has_taken_over(exchange, round_):
            return "yes"
        return "no" if is_local else await self._witness.any_sibling_holds(exchange, round_)


class PeerReply(ReplyWriter):
    """Sends a sealed reply to the replica that forwarded the request."""

    def __init__(self, http: HttpRequest, frames: Frames, *, accept_seconds: float) -> None:
        """Accept the request with the reply, if that comes within so many seconds; else before it."""
        self._http = http
        self._frames = frames
        self._stream = StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        self._is_accepted = False
        self._whole: WholeResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        if accept_seconds:
            self._timer = asyncio.get_running_loop().call_later(accept_seconds, self._accept_late)
        else:
            self._accept()

    def _accept(self) -> None:
        """Tell the other replica that its request was accepted; raises ConnectionError."""
        if not self._is_accepted:
            self._is_accepted = True
            self._stream.begin(self._http)

    def _accept_late(self) -> None:
        with suppress(ConnectionError):  # what serves the request is told too that the other replica has left
            self._accept()

    def stop_timer(self) -> None:
        """Accept nothing late from now on."""
        if self._timer is not None:
            self._timer.cancel()

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return self._http.wire.new_share()

    async def frame(self, *frames: messages.Frame) -> None:
        """Send frames together."""
        self._accept()
        await self._stream.write(b"".join([self._frames.seal(frame) for frame in frames]))

    async def only(self, final: FinalMessage) -> Response:
        """Send a whole reply."""
        body, headers = final.body, tuple(final.headers.items())
        if self._is_accepted or len(body) > _PIECE_BYTES:
            pieces = map(messages.Data, cut(body, _PIECE_BYTES))
            head = messages.Head(final.status, headers, streamed=False)
            await self.frame(head, *pieces, messages.End(*final.ending))
            return self._stream
        self._is_accepted = True  # by the reply itself
        sealed = self._frames.seal(messages.Whole(final.status, headers, body, *final.ending))
        self._whole = WholeResponse(sealed, headers={"Content-Type": CONTENT_TYPE})
        return self._whole

    async def start(self) -> None:
        """Send the head of a stream."""
        await self.frame(messages.Head(200, (), streamed=True))
        self.started = True

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; one message may be larger than a frame."""
        for piece in cut(data, _PIECE_BYTES):
            await self.frame(messages.Data(piece))

    async def end(self, ending: Ending) -> Response:
        """Send the end of a stream."""
        await self.frame(messages.End(*ending))
        self._stream.ending = ending
        return self._stream

    async def close(self) -> Response:
        """End the HTTP body, so that the connection can be reused."""
        if self._whole is not None:
            return self._whole
        await self._stream.finish(self._http)
        return self._stream


def _fix(exc: InvalidState, remote: str | None) -> str:
    """The operator's next step for a request that was rejected."""
    if isinstance(exc, OutOfTime) and abs(exc.ahead_seconds) > SKEW_SECONDS:
        again = "; an old message that is repeated looks the same" if exc.ahead_seconds < 0 else ""
        return clock_fix(exc.sender or f"the replica at {remote}", exc.ahead_seconds) + again
    return _REJECTED_FIX


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
