"""Who serves a retry that this replica does not hold: the call's owner, else its heir.

The owner is asked first. When it is dead (nobody accepts connections in its name, or another process does), the call
goes to the first living member in the order of `Members.heirs`, which is the same everywhere. An owner that is
connected but silent may hold the call still: then nobody takes it over, and the client is told to come again. A
silent heir that was given nothing is passed over. What nobody holds (`continuation: replay`) is served where it comes.
"""

from typing import Final

from gateway.errors import OwnerStalled
from gateway.net.members import Members
from gateway.net.peers import Dead, Gone, PeerFailed, Peers, Replied, Stuck
from gateway.net.wire import Incoming, Wire
from gateway.seal.envelope import Envelope

_NO_REPLICA: Final = ""


class Succession:
    """The other replicas as the serving of retries sees them."""

    def __init__(self, members: Members, peers: Peers) -> None:
        self._members = members
        self._peers = peers

    async def elsewhere(self, envelope: Envelope, incoming: Incoming, wire: Wire) -> Replied | None:
        """Have another replica serve this retry; None when this one is the call's heir.

        Raises OwnerStalled; for a request that came through another replica also Gone.
        """
        if incoming.hop is None:
            if envelope.owner == _NO_REPLICA:
                return None
            return await self._owner(envelope, incoming, wire) or await self._heir(
                await self._members.heirs(envelope.exchange), incoming, wire
            )
        kind, to = incoming.hop.kind, incoming.hop.to
        if to == self._members.own:
            if kind == "owner":
                raise Gone(to)  # it was held by the process before this one
            return None
        if incoming.is_local or not self._members.is_own_host(to):
            raise Gone(to)  # one hop is enough for everything; a second one would be a loop
        if kind == "heir":
            return await self._heir(self._members.siblings(envelope.exchange), incoming, wire)
        try:
            return await self._peers.forward("owner", to, incoming, wire)
        except Dead as exc:
            raise Gone(to) from exc

    async def _owner(self, envelope: Envelope, incoming: Incoming, wire: Wire) -> Replied | None:
        """The owner's reply; None when it is dead."""
        if envelope.owner == self._members.own:
            return None
        try:
            return await self._peers.forward("owner", envelope.owner, incoming, wire)
        except PeerFailed:
            return None

    async def _heir(self, heirs: list[str], incoming: Incoming, wire: Wire) -> Replied | None:
        for member in heirs:
            if member == self._members.own:
                break
            try:
                return await self._peers.forward("heir", member, incoming, wire)
            except Stuck:
                raise
            except (PeerFailed, OwnerStalled):
                continue
        return None
