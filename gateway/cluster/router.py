"""Routes a request to the replica that serves it: the owner of its call, the home of its session, or any other one.

The owner of a retry is asked first. If it is proven dead (its address refuses connections, or another process answers
in its name), the call fails over to the first living member in the order of `Membership.candidates`, which is the same
on every replica.

A silent owner may be alive. Its call fails over only if another replica cannot reach the owner either, or if a
successful lookup does not list it. The candidate then tries to reach the owner itself. If that fails too, it resumes
the call, or runs it again if the tool is ephemeral; it neither cancels the call nor declares it lost. Otherwise the
client is told to retry. The same holds behind a silent candidate, which may have taken the call over before. A call
that no replica holds (`continuation: replay`) is served by the replica that gets the retry.

A replica that has parted (its drain is over, and it let its calls go) answers as a process that is gone: it holds none
of them, and takes none over in the moment that it still lives. So does a process whose keys end with it: there is no
time left to run the call, or to cancel it.

A session that ends at the gateway has one process, and ends with it. What a mirrored session has besides calls (its
standalone stream, its subscriptions) is at its home, which every replica knows without asking: the first living
candidate of the session's key. Its log level, cancellations and its end go to all replicas.

A new call of a draining replica is sent to the replicas one after the other until one takes it. A replica that does
not take it has run nothing: it cannot be reached, it refuses the message, or it drains as well. A call that was taken
is never sent again.
"""

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from gateway import world
from gateway.cluster.draining import Draining
from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerDead, PeerFailed, PeerReplaced, PeerStuck
from gateway.cluster.witness import Witness
from gateway.cluster.worker import host_of
from gateway.http.incoming import Incoming
from gateway.http.reply import Discarded, ReplyWriter
from gateway.http.server.response import Response
from gateway.protocol.errors import OwnerSilent, OwnerStalled, ShuttingDown, TakenCallLost
from gateway.seal import peer_messages as messages
from gateway.telemetry import Metrics, Step

_NO_REPLICA: Final = ""


class Held(NamedTuple):
    """What a replica holds, as its sealed state says: a call, or a task."""

    owner: str
    exchange: str
    is_resumable: bool = False
    """Whether another replica could have gone on with it."""
    may_have_moved: bool = False
    """Whether another process may follow it since its owner was restarted, though its client has no newer state."""


class TakeOver(msgspec.Struct, frozen=True):
    """This replica is to take the call over; `proven` if no other process can hold the call any more."""

    proven: bool


class Router:
    """Routes what this replica does not serve itself: retries whose call it does not hold, new calls in its drain."""

    def __init__(
        self, membership: Membership, peers: PeerClient, witness: Witness, draining: Draining, metrics: Metrics
    ) -> None:
        self._membership = membership
        self._peers = peers
        self._witness = witness
        self._draining = draining
        self._metrics = metrics
        self._turn = 0

    @property
    def has_parted(self) -> bool:
        """Whether calls of this process are for others, or cannot be continued at all.

        A process without other replicas serves those that wait for their clients until it ends.
        """
        draining = self._draining
        return draining.has_parted and not (self._membership.alone and draining.is_resumable)

    async def route(self, held: Held, incoming: Incoming, reply: ReplyWriter) -> Response | TakeOver:
        """Have another replica serve this retry, or have this one take the call over.

        Raises OwnerStalled, or ShuttingDown if this process has parted and no other takes the call over; for a
        request that came through another replica also PeerReplaced.
        """
        found = await self._route(held, incoming, reply)
        if isinstance(found, TakeOver) and found.proven and held.may_have_moved:
            found = await self._follower_serves(held.exchange, incoming, reply) or found
        if not isinstance(found, TakeOver) and incoming.peer_request is None:  # counted where the client is
            self._metrics.continuations[incoming.path, Step.FORWARDED].inc()
            if incoming.span is not None:
                incoming.span.note("step", Step.FORWARDED)
        return found

    async def _route(self, held: Held, incoming: Incoming, reply: ReplyWriter) -> Response | TakeOver:
        if incoming.peer_request is None:
            if held.owner == _NO_REPLICA and not self._draining.has_parted:
                return TakeOver(proven=True)
            return await self._ask_owner(held, incoming, reply)
        kind, to = incoming.peer_request.kind, incoming.peer_request.to
        if to == self._membership.own:
            if kind == "owner" or self._draining.has_parted:
                raise PeerReplaced(to)  # a former process of this id held the call, or this one did until it parted
            return await self._take_over(kind, held.owner, incoming, reply)
        if kind != "owner":
            candidates = self._membership.local_candidates(held.exchange)
            return await self._fail_over(kind, held, candidates, incoming, reply)
        try:
            return await self._peers.forward("owner", to, incoming, reply)
        except PeerDead as exc:
            raise PeerReplaced(to) from exc

    async def _ask_owner(self, held: Held, incoming: Incoming, reply: ReplyWriter) -> Response | TakeOver:
        """Have the owner serve this retry, else a failover candidate."""
        owner = held.owner
        kind: messages.Kind = "heir"
        if owner not in (_NO_REPLICA, self._membership.own):
            try:
                return await self._peers.forward("owner", owner, incoming, reply)
            except PeerFailed:
                pass
            except OwnerSilent as exc:
                # Evidence that no replica reaches a silent owner; a fault of this replica is none.
                is_unlisted = await self._membership.is_unlisted(owner)
                if not is_unlisted and (exc.is_local or not await self._witness.confirms(owner)):
                    raise
                kind = "resume"
        candidates = await self._membership.candidates(held.exchange)
        if kind == "resume":
            candidates = [candidate for candidate in candidates if candidate != host_of(owner)]
        return await self._fail_over(kind, held, candidates, incoming, reply)

    async def _fail_over(
        self, kind: messages.Kind, held: Held, candidates: list[str], incoming: Incoming, reply: ReplyWriter
    ) -> Response | TakeOver:
        """Have the first living candidate serve this retry, which may be this replica."""
        resumable = held.is_resumable
        for member in candidates:
            if member == self._membership.own:
                if self._draining.has_parted:
                    continue
                break
            try:
                return await self._peers.forward(kind, member, incoming, reply)
            except PeerStuck:  # it may be serving the request, so no other one may get it
                raise
            except PeerFailed:
                continue
            except OwnerStalled:
                # It may have resumed the call before. Without a cursor there was nothing to resume.
                kind = "resume" if resumable else kind
        if not self._draining.has_parted:
            return await self._take_over(kind, held.owner, incoming, reply)
        if incoming.peer_request is not None:
            raise PeerReplaced(incoming.peer_request.to)
        raise ShuttingDown("call again with the same requestState and inputResponses")

    async def _take_over(
        self, kind: messages.Kind, owner: str, incoming: Incoming, reply: ReplyWriter
    ) -> Response | TakeOver:
        """Take the call over, unless this replica reaches an owner that is silent to the one that got the retry.

        That one may be cut off itself, and not have heard from those that reach the owner.
        """
        is_hearsay = kind == "resume" and incoming.peer_request is not None
        if is_hearsay and owner not in (_NO_REPLICA, self._membership.own) and not self._membership.was_silent(owner):
            with suppress(PeerDead, PeerReplaced, OwnerSilent):
                return await self._peers.forward("owner", owner, incoming, reply)
        return TakeOver(proven=kind == "heir")

    async def _follower_serves(self, exchange: str, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have the process that follows a task already serve a request that would have this one take it over.

        A task keeps its handle, so when its owner is restarted, or a process is added, that one may be the first
        candidate, though another one has gone on with the task. So may a restarted owner of a call whose client did
        not read what another one told it. None if no process in reach follows it.
        """
        member = await self._witness.follower(exchange)
        if member is not None:
            with suppress(PeerDead, PeerReplaced, OwnerSilent):
                return await self._peers.forward("heir", member, incoming, reply)
        return None

    # -- sessions ---------------------------------------------------------------------------------------------------

    async def to_holder(self, owner: str, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have the only process that can serve a request serve it, once; None if that process has ended.

        Raises ReplyBroken and OwnerStalled; for a request that came through another replica also PeerReplaced.
        """
        own, came = self._membership.own, incoming.peer_request
        # One hop suffices, but for that to another worker of this host.
        if own != (owner if came is None else came.to):
            with suppress(PeerDead, PeerReplaced):
                return await self._peers.forward_once("session", owner, incoming, reply)
        if came is not None:
            raise PeerReplaced(owner)
        return None

    async def to_home(self, key: str, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have the home of a session serve a request; None if that is this process."""
        for member in await self._in_reach(key, incoming):
            if member == self._membership.own:
                break
            try:
                return await self._peers.forward("heir", member, incoming, reply)
            except PeerStuck:  # it may be serving the request
                raise
            except (PeerFailed, OwnerStalled):
                continue
        return None

    async def to_all(self, incoming: Incoming) -> None:
        """Have every other process that can be reached serve a request too."""
        members = await self._in_reach("", incoming) if incoming.peer_request else self._membership.others()
        others = [member for member in members if member != self._membership.own]
        _ = await asyncio.gather(*(self._tell(member, incoming) for member in others))

    async def _tell(self, member: str, incoming: Incoming) -> None:
        with suppress(PeerFailed, OwnerStalled):  # what it serves of the session then has a bound of its own
            _ = await self._peers.forward("heir", member, incoming, Discarded())

    async def _in_reach(self, key: str, incoming: Incoming) -> list[str]:
        """The processes to which a request may go, this one included, in the order of the failover of `key`."""
        came = incoming.peer_request
        if came is None:
            return await self._membership.candidates(key)
        return [came.to] if came.to == self._membership.own else self._membership.local_candidates(key)

    # -- new calls ------------------------------------------------------------------------------------------------

    async def send_on(self, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have another replica serve a call; None if none takes it. Raises TakenCallLost if one broke off."""
        hosts = sorted(self._membership.other_hosts())
        self._turn = (self._turn + 1) % max(len(hosts), 1)  # each time another one is the first
        for host in hosts[self._turn :] + hosts[: self._turn]:
            replied = await self.send_to(host, incoming, reply)
            if replied is not None:
                self._metrics.calls_sent_on.inc()
                return replied
        return None

    async def send_to(self, member: str, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have a certain replica serve a call; None if it does not take it. Raises TakenCallLost as `send_on`."""
        ends_at = self._draining.ends_at
        if ends_at is not None and world.monotonic() >= ends_at:
            # This process has stood still: the reply would come too late, and the call may not be sent again.
            return None
        _ = incoming.identify()  # else only the other replica would know it
        try:
            return await self._peers.forward("new", member, incoming, reply)
        except PeerStuck as exc:
            raise TakenCallLost(member) from exc
        except (PeerFailed, OwnerStalled):
            return None

    async def pass_on(self, incoming: Incoming, reply: ReplyWriter) -> Response | None:
        """Have the worker serve a call that another replica sent to this host; None if that is this process.

        Raises PeerFailed if that worker does not serve it.
        """
        came = incoming.peer_request
        if came is None or came.kind != "new":
            return None
        member = self._membership.worker_of(came.to, came.once)
        if member == self._membership.own:
            return None
        try:
            return await self._peers.forward("new", member, incoming, reply)
        except PeerDead as exc:
            raise PeerReplaced(member) from exc
