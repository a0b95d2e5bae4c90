"""Has another replica serve a request, or asks it a question."""

import asyncio
from typing import Final

from gateway import world
from gateway.cluster.draining import Draining
from gateway.cluster.membership import Membership
from gateway.cluster.peer_connections import ANSWER_BYTES, PeerConnections
from gateway.cluster.peer_errors import PeerDead, PeerFailed, PeerRefused, PeerReplaced, PeerStuck, ReplyBroken
from gateway.cluster.worker import Address
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.protocol.errors import OwnerSilent, OwnerStalled
from gateway.seal import peer_messages as messages
from gateway.seal.peer_messages import PeerRequest
from gateway.telemetry import Metrics, PeerOutcome
from gateway.telemetry.process_status import PeerState

_TRIES: Final = 3
"""How often a member that refuses connections is looked up anew and asked again."""


class PeerClient:
    """Speaks to the other members by their ids."""

    def __init__(
        self, connections: PeerConnections, membership: Membership, metrics: Metrics, draining: Draining
    ) -> None:
        self._connections = connections
        self._membership = membership
        self._metrics = metrics
        self._draining = draining

    # -- requests of clients ------------------------------------------------------------------------------------

    async def forward(self, kind: messages.Kind, member: str, incoming: Incoming, reply: ReplyWriter) -> Response:
        """Have `member` serve the request, and write what it replies to `reply`.

        Raises PeerDead and PeerReplaced, OwnerSilent if the member received nothing and may be alive, and OwnerStalled
        if it is alive but does not serve the request. For a request of another replica, also raises ReplyBroken.
        """
        try:
            return await self.forward_once(kind, member, incoming, reply)
        except ReplyBroken as exc:
            if kind == "new":
                raise PeerStuck(member, "broke off its reply") from exc  # sent twice, the call would run twice
            if incoming.peer_request is not None:
                raise  # that process takes the message once, and the replica that sent it sends another one
            # The process died, or only the connection did. If it is alive, it joins both requests: a round's answers
            # are used once.
            try:
                return await self.forward_once(kind, member, incoming, reply, fresh=True)
            except ReplyBroken as exc:
                raise PeerStuck(member, "breaks off its replies") from exc

    async def forward_once(
        self, kind: messages.Kind, member: str, incoming: Incoming, reply: ReplyWriter, *, fresh: bool = False
    ) -> Response:
        """As `forward`, for a request that must not reach the member twice; also raises ReplyBroken."""
        for _ in range(_TRIES):
            address = await self._address(kind, member)
            try:
                return await self._relay(address, self._request(kind, member, incoming), reply, fresh=fresh)
            except PeerDead:
                self._membership.forget_address(member)
                if not await self._membership.is_back(member):
                    raise
                fresh = True
            except PeerFailed:
                reply.orphaned()
                raise
        raise self._connections.slow(member)

    def _request(self, kind: messages.Kind, member: str, incoming: Incoming) -> PeerRequest:
        """A client's request as a message to another replica."""
        came, ends_at = incoming.peer_request, self._draining.ends_at
        return PeerRequest(
            kind=kind,
            to=member,
            # A message that is passed on keeps its time and nonce, so a recorded one runs in one process only.
            issued=world.wall() if came is None else came.issued,
            first=b"" if came is None else came.once,
            nonce=messages.nonce(),
            method=incoming.method,
            path=incoming.path,
            headers=tuple([(_bytes(name), _bytes(value)) for name, value in incoming.headers.items()]),
            remote=incoming.remote,
            body=incoming.body,
            request_id=incoming.request_id,
            trace=incoming.span.token if incoming.span is not None else b"",
            # Seconds, because a monotonic time means nothing on another host.
            leg_seconds=max(0.0, ends_at - world.monotonic()) if ends_at is not None else None,
            sender=self._membership.own,
            exchange_id=incoming.exchange_id,
        )

    async def _address(self, kind: messages.Kind, member: str) -> Address:
        """The address to send a request to; raises and counts PeerDead and OwnerSilent."""
        try:
            address = await self._membership.address(member)
        except OwnerSilent:
            self._metrics.peer_requests[PeerOutcome.SILENT,].inc()
            raise
        if address is None:
            self._metrics.peer_requests[PeerOutcome.DEAD,].inc()
            raise PeerDead(member)
        # An owner that was silent a moment ago may be back, so it is asked again; a failover candidate is skipped.
        if kind not in ("owner", "session") and self._membership.was_silent(member):
            self._metrics.peer_requests[PeerOutcome.SILENT,].inc()
            raise OwnerSilent(member, "did not accept a connection a moment ago")
        return address

    async def _relay(
        self, address: Address, peer_request: PeerRequest, reply: ReplyWriter, *, fresh: bool
    ) -> Response:
        """Relay the reply to a request, and record its outcome."""
        outcome, is_local = PeerOutcome.SERVED, False
        state: PeerState = "answered"
        try:
            exchange = await self._connections.accepted(address, peer_request, fresh=fresh)
            try:
                replied = await exchange.relay(reply, self._draining.ends_at)
            except BaseException:  # the peer learns of a client that leaves by the end of the connection
                exchange.reply.close()
                raise
            if not exchange.reply.is_read:  # the end of the HTTP body may follow its last frame in a packet of its own
                seconds = self._connections.timeouts.peer_accept_seconds
                _ = asyncio.get_running_loop().call_later(seconds, exchange.reply.close)
        except BaseException as exc:
            outcome, state = verdict(exc)
            is_local = isinstance(exc, OwnerSilent) and exc.is_local
            raise
        finally:
            self._metrics.peer_requests[outcome,].inc()
            self._membership.note(peer_request.to, state, is_local=is_local)
        return replied

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def question_seconds(self) -> float:
        """How long `ask` waits: the other replica may first have to try a connection of its own."""
        timeouts = self._connections.timeouts
        return 2 * timeouts.peer_connect_seconds + 3 * timeouts.peer_accept_seconds

    async def ask(
        self, kind: messages.Kind, member: str, about: str, detail: bytes = b"", *, most: int = ANSWER_BYTES
    ) -> str:
        """The word with which another replica answers a question; raises PeerFailed and OwnerStalled."""
        address = await self._membership.address(member)
        if address is None:
            raise PeerDead(member)
        question = messages.question(self._membership.own, kind, member, about, detail)
        answer = await self._connections.question(address, question, self.question_seconds, most=most)
        return answer.word if isinstance(answer, messages.Told) else "unknown"

    async def reach(self, host: str) -> str:
        """Try to connect to another host, as a witness: reached, silent or unknown."""
        try:
            address = await self._membership.address(host)
        except OwnerSilent:
            address = None
        if address is None:
            return "unknown"
        timeouts = self._connections.timeouts
        # Longer than the connection's own timeouts, whose errors say more precisely what was silent.
        seconds = timeouts.peer_connect_seconds + 2 * timeouts.peer_accept_seconds
        try:
            # A kept connection does not show whether the member accepts a new one.
            question = messages.question(self._membership.own, "who", address, "")
            answer = await self._connections.question(address, question, seconds, fresh=True)
        except PeerDead:
            return "silent"
        except OwnerSilent as exc:
            self._membership.note(host, "silent", is_local=exc.is_local)
            return "unknown" if exc.is_local else "silent"
        except OwnerStalled:
            return "reached"  # it refuses the request, so it is alive
        except PeerFailed:
            return "unknown"
        return "reached" if answer == messages.Identity(host) else "unknown"


def verdict(exc: BaseException) -> tuple[PeerOutcome, PeerState]:
    """What became of a request that a peer did not serve, and what that says of the peer."""
    match exc:
        case PeerDead():
            return PeerOutcome.DEAD, "dead"
        case PeerReplaced():
            return PeerOutcome.GONE, "answered"
        case OwnerSilent(is_connected=False):
            return PeerOutcome.SILENT, "silent"
        case PeerRefused():
            return PeerOutcome.REFUSED, "refused"
        case OwnerStalled():
            return PeerOutcome.STALLED, "stalled"
        case _:
            return PeerOutcome.BROKE, "stalled"


def _bytes(text: str) -> bytes:
    """What was sent: bytes that are not UTF-8 came in as surrogates."""
    return text.encode("utf-8", "surrogateescape")
