"""Which replica serves a retry that this one does not hold: the call's owner, else its heir.

The owner is asked first. When it is proven dead (its address refuses connections, or another process answers in its
name), the call goes to the first living member in the order of `Members.heirs`, which is the same everywhere.

A silent owner may live. Its call goes to an heir only if the owner is out of another replica's reach too, or if a
successful lookup does not list it; and then the heir resumes the call, or runs it again if the tool is ephemeral, but
neither cancels it nor declares it lost. Otherwise the client is told to come again. The same holds behind a silent
heir, which may have taken the call over before. What no replica holds (`continuation: replay`) is served where it
comes.
"""

from typing import Final

import msgspec

from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import Dead, Gone, PeerClient, PeerFailed, Replied, Stuck
from gateway.cluster.witness import Witness
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter
from gateway.protocol.errors import OwnerSilent, OwnerStalled
from gateway.seal import peer_messages as hops
from gateway.seal.request_state import Envelope

_NO_REPLICA: Final = ""


class Inherited(msgspec.Struct, frozen=True):
    """This replica is the call's heir; `proven` if no other process can hold the call any more."""

    proven: bool


class RetryRouting:
    """The other replicas as the serving of retries sees them."""

    def __init__(self, members: Membership, peers: PeerClient, witness: Witness) -> None:
        self._members = members
        self._peers = peers
        self._witness = witness

    async def elsewhere(self, envelope: Envelope, incoming: Incoming, wire: ReplyWriter) -> Replied | Inherited:
        """Have another replica serve this retry, or learn that this one is the call's heir.

        Raises OwnerStalled; for a request that came through another replica also Gone.
        """
        if incoming.hop is None:
            if envelope.owner == _NO_REPLICA:
                return Inherited(proven=True)
            return await self._succeed(envelope, incoming, wire)
        kind, to = incoming.hop.kind, incoming.hop.to
        if to == self._members.own:
            if kind == "owner":
                raise Gone(to)  # it was held by the process before this one
            return Inherited(proven=kind == "heir")
        if incoming.is_local or not self._members.is_own_host(to):
            raise Gone(to)  # one hop is enough for everything; a second one would be a loop
        if kind != "owner":
            return await self._heir(kind, envelope, self._members.siblings(envelope.exchange), incoming, wire)
        try:
            return await self._peers.forward("owner", to, incoming, wire)
        except Dead as exc:
            raise Gone(to) from exc

    async def _succeed(self, envelope: Envelope, incoming: Incoming, wire: ReplyWriter) -> Replied | Inherited:
        """The reply of the owner, or of its heir."""
        owner = envelope.owner
        kind: hops.Kind = "heir"
        if owner != self._members.own:
            try:
                return await self._peers.forward("owner", owner, incoming, wire)
            except PeerFailed:
                pass
            except OwnerSilent as exc:
                if not await self._may_resume(exc, owner):
                    raise
                kind = "resume"
        heirs = await self._members.heirs(envelope.exchange)
        if kind == "resume":
            heirs = [heir for heir in heirs if heir != owner.partition("#")[0]]
        return await self._heir(kind, envelope, heirs, incoming, wire)

    async def _may_resume(self, silence: OwnerSilent, owner: str) -> bool:
        """Whether there is a witness that a silent owner is out of reach; a fault of this replica is no evidence."""
        if await self._members.lacks(owner):
            return True
        return not silence.is_local and await self._witness.confirms(owner)

    async def _heir(
        self, kind: hops.Kind, envelope: Envelope, heirs: list[str], incoming: Incoming, wire: ReplyWriter
    ) -> Replied | Inherited:
        resumable = envelope.upstream is not None and envelope.upstream.cursor is not None
        for member in heirs:
            if member == self._members.own:
                break
            try:
                return await self._peers.forward(kind, member, incoming, wire)
            except Stuck:
                raise
            except PeerFailed:
                continue
            except OwnerStalled:
                # It may have resumed the call before. Without a cursor there was nothing to resume.
                kind = "resume" if resumable else kind
        return Inherited(proven=kind == "heir")
