"""Sends the new calls of a draining replica to another one.

A new call is sent to the replicas one after the other until one takes it. A replica that does not take it has run
nothing: it cannot be reached, it refuses the message, or it drains as well. A call that was taken is never sent again.
"""

from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerDead, PeerFailed, PeerReplaced, PeerStuck
from gateway.cluster.peer_exchange import Replied
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter
from gateway.protocol.errors import OwnerStalled, TakenCallLost
from gateway.telemetry import Metrics


class NewCalls:
    """The new calls of this replica while it drains."""

    def __init__(self, membership: Membership, peers: PeerClient, metrics: Metrics) -> None:
        self._membership = membership
        self._peers = peers
        self._metrics = metrics
        self._turn = 0

    async def send_on(self, incoming: Incoming, reply: ReplyWriter) -> Replied | None:
        """Have another replica serve a call; None if none takes it. Raises TakenCallLost if one broke off."""
        hosts = sorted(self._membership.other_hosts())
        self._turn = (self._turn + 1) % max(len(hosts), 1)  # each time another one is the first
        for host in hosts[self._turn :] + hosts[: self._turn]:
            replied = await self.send_to(host, incoming, reply)
            if replied is not None:
                self._metrics.sent_on()
                return replied
        return None

    async def send_to(self, member: str, incoming: Incoming, reply: ReplyWriter) -> Replied | None:
        """Have a certain replica serve a call; None if it does not take it. Raises TakenCallLost as `send_on`."""
        try:
            return await self._peers.forward("new", member, incoming, reply)
        except PeerStuck as exc:
            raise TakenCallLost(member) from exc
        except (PeerFailed, OwnerStalled):
            return None

    async def pass_on(self, incoming: Incoming, reply: ReplyWriter) -> Replied | None:
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
