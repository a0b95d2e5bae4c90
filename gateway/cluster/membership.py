"""The members of the cluster: their ids, their addresses, the order in which a call fails over to them.

A member is one process. A host with one process is the member `gw-1`; with `workers: 3` it is `gw-1#0` to `gw-1#2`,
which reach each other over unix sockets and share the host's peer listener. Addresses come from the configuration or
from the name service, never from a message (threat 17).

Every replica puts the failover candidates of a call into the same order (rendezvous hashing). So two retries that
arrive at two replicas at the same time still meet at one.
"""

import hashlib
from typing import Final

from gateway import world
from gateway.cluster.discovery import Discovery
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.worker import Address, Worker, host_id, member_id
from gateway.config import InForce, Replica
from gateway.protocol.errors import OwnerSilent
from gateway.runtime.tasks import Tasks

_SILENT_SECONDS: Final = 2.0
"""How long a candidate is skipped after its address neither accepted nor refused a connection.

A candidate that refused one is asked again at once: that costs nothing, and it may be back."""


class Membership:
    """All members as one of them sees them."""

    def __init__(
        self, replica: InForce[Replica], worker: Worker | None, connections: PeerConnections, tasks: Tasks
    ) -> None:
        self.host = host_id(replica.value)
        self.own = member_id(replica.value, worker)
        self._in_force = replica
        self._worker = worker
        self.discovery = Discovery(replica, connections, tasks)
        self._silent: dict[str, float] = {}
        replica.after_replace(lambda _: self._silent.clear())

    @property
    def _replica(self) -> Replica:
        return self._in_force.value

    # -- members ------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the configuration rules out any other member."""
        replica = self._replica
        others = replica.peers.keys() - {self.host}
        return not others and replica.peers_dns is None and (self._worker is None or self._worker.count == 1)

    @property
    def is_unsure(self) -> bool:
        """Whether there may be unknown members: the last lookup failed, or an address did not tell its id."""
        return self.discovery.is_unsure

    def is_own_host(self, member: str) -> bool:
        """Whether a member is a worker of this host, or the host itself."""
        return member.partition("#")[0] == self.host

    def is_meant(self, to: str, *, is_local: bool) -> bool:
        """Whether a message for `to` is for this process, or for this host if it did not come from this host.

        So a request is forwarded once between hosts, and once more to another worker; further hops could be a loop.
        """
        return to == self.own or (not is_local and self.is_own_host(to))

    def worker_of(self, to: str, message: bytes) -> str:
        """The worker of this host that serves a message for `to`, by the nonce of the message if that is the host.

        The kernel gives a connection to any worker, so a recorded message could otherwise run once in each.
        """
        if self._worker is None or to != self.host:
            return to
        return f"{self.host}#{int.from_bytes(message) % self._worker.count}"

    def others(self) -> dict[str, Address]:
        """The other members that are known now, with their addresses."""
        found, worker = self.discovery.known(), self._worker
        found.pop(self.host, None)
        siblings = range(worker.count) if worker is not None else ()
        found |= {f"{self.host}#{number}": "this host" for number in siblings}
        found.pop(self.own, None)
        return found

    def other_hosts(self) -> list[str]:
        """The other hosts that are known now."""
        return [name for name in self.others() if not self.is_own_host(name)]

    async def is_unlisted(self, member: str) -> bool:
        """Whether a lookup that succeeded just now does not list a member."""
        host = member.partition("#")[0]
        if host == self.host:
            return False
        await self.discovery.look()
        is_unknown = self.discovery.address(host) is None and not self.discovery.is_unsure
        return is_unknown and not self.discovery.may_be_new(host)

    # -- failover -----------------------------------------------------------------------------------------------

    async def candidates(self, exchange: str) -> list[str]:
        """The members in the order in which this exchange fails over to them; other hosts without their workers."""
        await self.discovery.look_if_stale()
        hosts = {self.host, *self.discovery.listed()}
        order: list[str] = []
        for host in sorted(hosts, key=lambda host: _weight(host, exchange)):
            order += self.local_candidates(exchange) if host == self.host else [host]
        return order

    def local_candidates(self, exchange: str) -> list[str]:
        """The processes of this host in the order in which this exchange fails over to them."""
        if self._worker is None:
            return [self.own]
        workers = [f"{self.host}#{number}" for number in range(self._worker.count)]
        return sorted(workers, key=lambda member: _weight(member, exchange))

    # -- addresses ----------------------------------------------------------------------------------------------

    async def address(self, member: str) -> Address | None:
        """The address of a member; None if it belongs to this host and does not exist.

        Raises OwnerSilent if no address is known: a member that is not listed may still be alive.
        """
        host, _, number = member.partition("#")
        if host == self.host:
            worker = self._worker
            exists = worker is not None and number.isdecimal() and int(number) < worker.count
            return worker.socket("peer", int(number)) if worker is not None and exists else None
        address = self.discovery.address(host)
        if address is None:
            await self.discovery.look()
            address = self.discovery.address(host) or self.discovery.last_address(host)
        if address is None:
            raise self._not_found(member)
        return address

    def _not_found(self, member: str) -> OwnerSilent:
        if self._replica.peers_dns is None:
            return OwnerSilent(member, f"is not among replica.peers of {self.own}")
        where = f"by {self.own} (does replica.peers_dns name it, and does it answer?)"
        return OwnerSilent(member, f"cannot be found {where}", is_local=self.discovery.is_unsure)

    async def is_back(self, member: str) -> bool:
        """Whether a new lookup finds a member that refused a connection, at the same address or another one.

        Raises OwnerSilent if the lookup is inconclusive.
        """
        if self._replica.peers_dns is None or self.is_own_host(member):
            return False
        await self.discovery.look()
        found = self.discovery.address(member.partition("#")[0]) is not None
        if not found and self.discovery.is_unsure:
            raise self._not_found(member)
        return found

    def forget_address(self, member: str) -> None:
        """Look a member up again before the next request: by then its address may belong to another replica."""
        self.discovery.forget(member.partition("#")[0])

    # -- contacts -----------------------------------------------------------------------------------------------

    def was_silent(self, member: str) -> bool:
        """Whether the member's address neither accepted nor refused a connection a moment ago."""
        return world.monotonic() < self._silent.get(member, float("-inf"))

    def note_silent(self, member: str) -> None:
        """Remember that the member's address neither accepted nor refused a connection."""
        self._silent = {name: until for name, until in self._silent.items() if until > world.monotonic()}
        self._silent[member] = world.monotonic() + _SILENT_SECONDS
        self.forget_address(member)


def _weight(member: str, exchange: str) -> bytes:
    return hashlib.sha256(f"{member}\n{exchange}".encode()).digest()
