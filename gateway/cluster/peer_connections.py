"""Sends sealed requests to other replicas over HTTP.

The request's body is sent only after the peer has answered `100 Continue`. A process that accepts connections but does
nothing (stopped, or stuck) has then received nothing that it could still run when it wakes up.

Only two things prove here that a process is dead: its address refuses a connection, or its unix socket does not exist
or refuses one. Every other failure to connect is silence, which may have its cause on this host.
"""

import asyncio
import errno
import os
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Final

from gateway import world
from gateway.cluster.peer_errors import NoReplica, PeerDead, PeerRefused, PeerStuck, ReplyBroken
from gateway.cluster.peer_exchange import PeerExchange
from gateway.cluster.worker import Address
from gateway.config import InForce, Timeouts, split_address
from gateway.http.upstream_reply import AwaitedReply, clock_ahead
from gateway.http_client.client import HttpClient
from gateway.http_client.connection import PendingRequest
from gateway.http_client.connector import Connector
from gateway.http_client.errors import ConnectTimedOut, NotConnected, RequestFailed
from gateway.http_client.origin import Origin
from gateway.identity.principal import parsed_address
from gateway.protocol.errors import InvalidState, OwnerSilent, OwnerStalled, ahead_or_behind
from gateway.runtime.tasks import Tasks
from gateway.seal import peer_messages as messages
from gateway.seal.claims import SKEW_SECONDS
from gateway.seal.peer_messages import PeerRequest, PeerSealer

PATH: Final = "/peer"
CONTENT_TYPE: Final = "application/octet-stream"
ANSWER_BYTES: Final = 65_536
"""The longest answer to a question: a process that is not a replica must not fill the memory."""
_UNIX: Final = "unix:"
# Longer than to an upstream: the body waits for 100 Continue, so a stale connection loses nothing.
_KEEP_ALIVE_SECONDS: Final = 15.0
_UNUSED_SOCKET: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""Errors that prove that no process listens on a unix socket."""
_REMOTE_CAUSES: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ECONNRESET, errno.ECONNABORTED)
"""Failures to connect whose cause need not be on this host."""


class PeerConnections:
    """The HTTP connections to other replicas."""

    def __init__(
        self, timeouts: InForce[Timeouts], listen: Address | None, own: str, sealer: PeerSealer, tasks: Tasks
    ) -> None:
        """`listen` is `replica.listen`; `own` is the id of this process, for the texts of errors."""
        self._timeouts = timeouts
        self._own = own
        self._sealer = sealer
        host = split_address(listen)[0] if listen is not None else ""
        # The peers see this address as the source of requests, and take it for this process's address.
        interface = parsed_address(host)
        is_source = interface is not None and not interface.is_unspecified
        # A slow name service says nothing about the peer, so a lookup does not use up the time to connect.
        connector = Connector(host if is_source else None, bounds_lookups=False)
        self._http = HttpClient(tasks, _KEEP_ALIVE_SECONDS, connector)

    @property
    def timeouts(self) -> Timeouts:
        """The timeouts in force."""
        return self._timeouts.value

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # -- requests -----------------------------------------------------------------------------------------------

    async def ask_name(self, address: Address, introduced: str) -> str | None:
        """Ask the process at an address for its host's id, and introduce the host `introduced` (none if empty).

        Returns None if no process is there. Raises PeerFailed or OwnerStalled if one does not tell its id.
        """
        question = messages.question(self._own, "who", address, introduced)
        try:
            answer = await self.question(address, question, self.timeouts.peer_accept_seconds)
        except PeerDead:
            return None
        if not isinstance(answer, messages.Identity):
            raise ReplyBroken(f"{address} does not tell its id")
        return answer.id

    async def question(
        self,
        address: Address,
        peer_request: PeerRequest,
        seconds: float,
        *,
        fresh: bool = False,
        most: int = ANSWER_BYTES,
    ) -> messages.Frame | None:
        """The frame that answers a question within so many seconds; raises what `accepted` raises."""
        try:
            async with asyncio.timeout(seconds):
                exchange = await self.accepted(address, peer_request, fresh=fresh)
                with closing(exchange.reply):
                    answer = await exchange.reply.read_at_most(most)
                if answer is not None:
                    return next(iter(exchange.frames.feed(answer)), None)
        except (RequestFailed, TimeoutError, InvalidState) as exc:
            if isinstance(exc, InvalidState) and exc.reason == "unknown_key":  # a rotation skipped a phase
                raise PeerRefused(peer_request.to, "seals its answers with a key that this replica lacks") from exc
            raise ReplyBroken(f"{peer_request.to}: {type(exc).__name__}") from exc
        raise OwnerStalled(peer_request.to, f"answers a question with more than {most} bytes")

    async def accepted(self, address: Address, peer_request: PeerRequest, *, fresh: bool) -> PeerExchange:
        """Send a request, over a new connection if `fresh`, and wait until the peer has accepted it.

        It is sent once more if nothing was sent yet when the connection ended, with its process or by its age.
        """
        member = peer_request.to
        for is_fresh in (fresh, True):
            exchange, pending = self._begin(address, peer_request, fresh=is_fresh)
            try:
                await exchange.accepted(pending)
            except TimeoutError as exc:
                if exchange.is_sent:
                    raise PeerStuck(member) from exc
                if not exchange.is_connected:
                    raise self._unresolved(member, "did not resolve in time") from exc
                raise OwnerSilent(member, "does not react", is_connected=True) from exc
            except RequestFailed as exc:
                if exchange.is_sent:
                    raise ReplyBroken(f"{member}: {type(exc).__name__}") from exc
                error = await self._not_connected(address, member, exc)
                if error is not None:
                    raise error from exc
                continue
            if exchange.reply.status != HTTPStatus.OK:
                exchange.reply.close()
                # The process is alive, so no other replica may take its calls over.
                raise self._refused(member, exchange.reply)
            return exchange
        # A process accepts connections, so it lives.
        raise OwnerStalled(member, "closes its connections (is it at limits.connections?)")

    def _begin(
        self, address: Address, peer_request: PeerRequest, *, fresh: bool
    ) -> tuple[PeerExchange, PendingRequest]:
        is_local = address.startswith(_UNIX)
        origin = Origin(address.removeprefix(_UNIX), 0) if is_local else Origin(*split_address(address))
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {'peer' if is_local else address}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            "Expect: 100-continue\r\n"
        ).encode()
        sealed, timeouts = self._sealer.seal(peer_request), self.timeouts
        exchange = PeerExchange(peer_request, self._sealer.frames(peer_request), timeouts)
        pending = PendingRequest(
            origin,
            exchange.reply,
            b"%bContent-Length: %d\r\n\r\n" % (head, len(sealed)),
            sealed,
            timeouts.peer_connect_seconds,
            sending="fresh" if fresh else "usual",
            awaits_continue=True,
        )
        self._http.begin(pending)
        return exchange, pending

    # -- failures -----------------------------------------------------------------------------------------------

    def slow(self, member: str) -> OwnerSilent:
        """The error for a member that did not accept a connection in time."""
        where = f"a connection from {self._own} within timeouts.peer_connect_seconds"
        return OwnerSilent(member, f"does not accept {where}")

    def _refused(self, member: str, reply: AwaitedReply) -> PeerRefused | NoReplica:
        """The error for a member that refuses a request, or for another program, which gets it instead."""
        if reply.status != HTTPStatus.FORBIDDEN or reply.headers.get("Content-Length") != "0":
            why = f"answers HTTP {reply.status} (is its address in replica.peers that of another program?)"
            return NoReplica(member, why)
        refuses = f"refuses requests from {self._own} (HTTP {reply.status})"
        ahead = clock_ahead(reply.headers)
        # `Date` has whole seconds, so it may differ by one less than the member found.
        if ahead is None:
            return PeerRefused(member, f"{refuses}: compare the clocks and state.keys of both")
        if abs(ahead) >= SKEW_SECONDS - 1:
            return PeerRefused(member, f"{refuses}: its clock is {ahead_or_behind(ahead)} that of {self._own}", ahead)
        return PeerRefused(member, f"{refuses}: compare state.keys of both, whose clocks agree")

    def _unresolved(self, member: str, what: str) -> OwnerSilent:
        why = f"cannot be reached from {self._own} (its name in replica.peers {what})"
        return OwnerSilent(member, why, is_local=True)

    async def _not_connected(
        self, address: Address, member: str, failure: RequestFailed
    ) -> PeerDead | OwnerSilent | None:
        """The error that the failure of a request stands for of which the peer got no more than the head.

        None if there was a connection. The process is dead only if that is proven.
        """
        cause = failure.__cause__
        if isinstance(failure, ConnectTimedOut):
            return self.slow(member)
        if isinstance(cause, world.LookupFailed | UnicodeError):
            return self._unresolved(member, "does not resolve")
        if not (isinstance(failure, NotConnected) and isinstance(cause, OSError)):
            return None
        number = cause.errno
        if address.startswith(_UNIX):
            is_proof = number in _UNUSED_SOCKET
        elif parsed_address(split_address(address)[0]) is not None and number != errno.ECONNRESET:
            is_proof = number == errno.ECONNREFUSED
        else:  # a process that ends resets what its kernel has accepted for it, and then its port refuses
            is_proof = await self._all_refuse(address)
        if is_proof:
            return PeerDead(member)
        said = os.strerror(number) if number is not None and number > 0 else cause.strerror or str(cause)
        why = f"cannot be reached from {self._own} ({said})"
        return OwnerSilent(member, why, is_local=number not in _REMOTE_CAUSES)

    async def _all_refuse(self, address: Address) -> bool:
        """Whether each address, resolved anew, refuses connections now: the first one may have been outdated."""
        host, port = split_address(address)
        try:
            async with asyncio.timeout(self.timeouts.peer_connect_seconds):
                for info in await world.resolve(host, port):
                    with world.new_socket(info) as attempt, suppress(ConnectionRefusedError):
                        attempt.setblocking(False)
                        await asyncio.get_running_loop().sock_connect(attempt, info[4])
                        return False
        except (OSError, TimeoutError):
            return False
        return True
