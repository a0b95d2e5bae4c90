"""The members of the cluster: their ids, their addresses, the order in which a call fails over to them.

A member is one process. A host with one process is the member `gw-1`; with `workers: 3` it is `gw-1#0` to `gw-1#2`,
which reach each other over unix sockets and share the host's peer listener.

The other hosts are those of `replica.peers`, or those behind the DNS name `replica.peers_dns`. A lookup returns
addresses, and each address is asked for the id of its replica. The question also introduces the asking replica,
because a process can start before the name service lists it. An introduction is a hint: its sender's address is asked
for its id before it is believed, so an address never comes from a message (threat 17).

Every replica puts the failover candidates of a call into the same order (rendezvous hashing). So two retries that
arrive at two replicas at the same time still meet at one.
"""

import asyncio
import hashlib
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway import world
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.peer_errors import PeerFailed
from gateway.cluster.worker import Address, Worker, host_of, member_id
from gateway.config import InForce, Replica, split_address
from gateway.protocol.errors import OwnerSilent, OwnerStalled
from gateway.runtime.newest import Newest
from gateway.runtime.tasks import Tasks
from gateway.telemetry.process_status import PeerState

_SILENT_SECONDS: Final = 2.0
"""How long a candidate is skipped after its address neither accepted nor refused a connection.

A candidate that refused one is asked again at once: that costs nothing, and it may be back."""
_FRESH_SECONDS: Final = 5.0
"""How long the result of a lookup is used, unless it lacks the id that is needed."""
_PAUSE_SECONDS: Final = 0.5
"""The shortest time between two lookups."""
_RESOLVE_SECONDS: Final = 1.0
_GREETED_SECONDS: Final = 60.0
"""How long an introduction stands in for a record that the name service does not have yet."""
_NAMELESS_SECONDS: Final = 10.0
"""How long after its own start a process takes an unknown id for a replica too new to have a record."""
MAX_REMEMBERED: Final = 1000
"""Replicas that are remembered; in a long-lived process the ids of former replicas pile up."""


class Seen(msgspec.Struct, frozen=True):
    """The result of the last contact with a member."""

    state: PeerState
    at: float | None = None
    """Its monotonic time."""
    answered: float | None = None
    """Monotonic time of its last answer."""
    skipped_until: float = 0.0
    """Monotonic time until which it is no candidate, because its address was silent."""


UNSEEN: Final = Seen("not asked")


async def resolve(host: str, port: int) -> list[Address]:
    """The A and AAAA records of a name; raises OSError."""
    found = await world.resolve(host, port)
    return list(dict.fromkeys(_joined(str(to[0]), port) for *_, to in found))


def _joined(host: str, port: int) -> Address:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Membership:
    """All members as one of them sees them."""

    def __init__(
        self, replica: InForce[Replica], worker: Worker | None, connections: PeerConnections, tasks: Tasks
    ) -> None:
        self.own = member_id(replica.value, worker)
        self.host = host_of(self.own)
        self._replica = replica.value
        self._worker = worker
        self._connections = connections
        self._tasks = tasks
        replica.after_replace(self._use)
        self.seen: Newest[str, Seen] = Newest(MAX_REMEMBERED)
        """By worker on this host, and by host elsewhere."""
        self.found: dict[str, Address] = {}
        """The hosts that the last lookup found."""
        self._greeted: dict[str, tuple[Address, float]] = {}
        """Replicas that introduced themselves, and until when that counts."""
        self._last: Newest[str, Address] = Newest(MAX_REMEMBERED)
        """The last address of each host, including those that the name service has dropped: they may live there."""
        self._born = world.monotonic()
        self._looked = float("-inf")
        self._is_repeating = False
        self.is_unsure = False
        """Whether there may be unknown members: the last lookup failed, or an address did not tell its id."""

    def _use(self, replica: Replica) -> None:
        """Look for peers under the DNS name of a new configuration; forget those of another name."""
        before, self._replica = self._replica, replica
        for name, seen in self.seen.items():
            self.seen[name] = replace(seen, skipped_until=0.0)  # the reload may have corrected its address
        if replica.peers_dns != before.peers_dns:
            self._looked = float("-inf")
            self.found = {}
            self._greeted.clear()
            self._last.clear()
            self.is_unsure = replica.peers_dns is not None  # until it has looked
        self._tasks.spawn(self.begin(), "look for peers")

    async def begin(self) -> None:
        """Look the peers up now and periodically: of two replicas that start together, the later lookup finds both."""
        if self._replica.peers_dns is not None and not self._is_repeating:
            self._is_repeating = True
            await self.look()
            self._tasks.spawn(self._repeat(), "look for peers")

    async def _repeat(self) -> None:
        try:
            while self._replica.peers_dns is not None:
                await asyncio.sleep(_FRESH_SECONDS)
                await self.look()
        finally:
            self._is_repeating = False

    # -- members ------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the configuration rules out any other member."""
        replica = self._replica
        others = replica.peers.keys() - {self.host}
        return not others and replica.peers_dns is None and (self._worker is None or self._worker.count == 1)

    def is_own_host(self, member: str) -> bool:
        """Whether a member is a worker of this host, or the host itself."""
        return host_of(member) == self.host

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
        found, worker = self.known(), self._worker
        found.pop(self.host, None)  # `replica.peers` lists this host too
        siblings = range(worker.count) if worker is not None else ()
        found |= {f"{self.host}#{number}": "this host" for number in siblings}
        found.pop(self.own, None)
        return found

    def other_hosts(self) -> list[str]:
        """The other hosts that are known now."""
        return [name for name in self.others() if not self.is_own_host(name)]

    async def is_unlisted(self, member: str) -> bool:
        """Whether a lookup that succeeded just now does not list a member."""
        host = host_of(member)
        if host == self.host:
            return False
        await self.look()
        if self.is_unsure or host in self.known():
            return False
        # It may be too new for the name service; only a young process has to assume so.
        is_young = world.monotonic() - self._born < _NAMELESS_SECONDS
        return self._replica.peers_dns is None or host in self._last or not is_young

    # -- failover -----------------------------------------------------------------------------------------------

    async def candidates(self, exchange: str) -> list[str]:
        """The members in the order in which this exchange fails over to them; other hosts without their workers."""
        if world.monotonic() - self._looked > _FRESH_SECONDS:
            await self.look()
        # Not `known`: an introduction reaches some replicas before others, and their orders would differ.
        hosts = {self.host, *self.listed()}
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

    def listed(self) -> dict[str, Address]:
        """The hosts that are configured, or that the last lookup found."""
        return {**self._replica.peers, **self.found}

    def known(self) -> dict[str, Address]:
        """The hosts that are listed, and those that introduced themselves recently."""
        greeted = {host: address for host, (address, until) in self._greeted.items() if world.monotonic() < until}
        return {**greeted, **self.listed()}

    async def address(self, member: str) -> Address | None:
        """The address of a member; None if it belongs to this host and does not exist.

        Raises OwnerSilent if no address is known: a member that is not listed may still be alive.
        """
        host, _, number = member.partition("#")
        if host == self.host:
            worker = self._worker
            if worker is None or not number.isdecimal() or int(number) >= worker.count:
                return None
            return worker.socket("peer", int(number))
        address = self.known().get(host)
        if address is None:
            await self.look()
            address = self.known().get(host) or self._last.get(host)  # a name service may drop one that lives
        if address is None:
            raise self._not_found(member)
        return address

    def _not_found(self, member: str) -> OwnerSilent:
        if self._replica.peers_dns is None:
            return OwnerSilent(member, f"is not among replica.peers of {self.own}")
        where = f"by {self.own} (does replica.peers_dns name it, and does it answer?)"
        return OwnerSilent(member, f"cannot be found {where}", is_local=self.is_unsure)

    async def is_back(self, member: str) -> bool:
        """Whether a new lookup finds a member that refused a connection, at the same address or another one.

        Raises OwnerSilent if the lookup is inconclusive.
        """
        if self._replica.peers_dns is None or self.is_own_host(member):
            return False
        await self.look()
        is_found = host_of(member) in self.known()
        if not is_found and self.is_unsure:
            raise self._not_found(member)
        return is_found

    def forget_address(self, member: str) -> None:
        """Look a member up again before the next request: by then its address may belong to another replica."""
        host = host_of(member)
        _ = self.found.pop(host, None), self._greeted.pop(host, None)

    # -- contacts -----------------------------------------------------------------------------------------------

    def _contact(self, member: str) -> str:
        """The name under which a member's contacts are remembered."""
        return member if self.is_own_host(member) else host_of(member)

    def note(self, member: str, state: PeerState, *, is_local: bool = False) -> None:
        """Remember the result of a request to a member; `is_local`: the cause of its silence may be on this host.

        A member whose address neither accepted nor refused a connection is looked up again before the next request.
        """
        is_silent = state == "silent"
        self.saw(member, state, world.monotonic() + _SILENT_SECONDS if is_silent and not is_local else 0.0)
        if is_silent:
            self.forget_address(member)

    def saw(self, member: str, state: PeerState, skipped_until: float | None = None) -> None:
        """Remember how a member was found; without `skipped_until`, no request goes elsewhere for that."""
        name = self._contact(member)
        before, now = self.seen.get(name, UNSEEN), world.monotonic()
        answered = now if state == "answered" else before.answered
        until = before.skipped_until if skipped_until is None else skipped_until
        _ = self.seen.keep(name, Seen(state, now, answered, until))

    def was_silent(self, member: str) -> bool:
        """Whether the member's address neither accepted nor refused a connection a moment ago."""
        return world.monotonic() < self.seen.get(self._contact(member), UNSEEN).skipped_until

    # -- introductions ------------------------------------------------------------------------------------------

    def greeted(self, host: str, remote: str | None) -> None:
        """Verify the introduction of a process at the address `remote` that claims to be `host`."""
        if self._replica.peers_dns is None or remote is None or host == self.host:
            return
        # The port of the name: the source port is that of one connection.
        address = _joined(remote, split_address(self._replica.peers_dns)[1])
        if self.found.get(host) != address:
            self._tasks.spawn(self._verify(host, address), "verify a greeting")

    async def _verify(self, host: str, address: Address) -> None:
        try:
            name = await self._connections.ask_name(address, "")  # introducing back would never stop
        except (PeerFailed, OwnerStalled):
            return
        if name == host:
            self._greeted[host] = (address, world.monotonic() + _GREETED_SECONDS)
            _ = self._last.keep(host, address)

    # -- lookups ------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Look the peers up, unless they are configured; calls share a lookup, and a pause separates two of them."""
        if self._replica.peers_dns is not None:
            _ = await self._tasks.share(self, self._look_up(), "resolve peers")

    async def _look_up(self) -> None:
        try:
            await asyncio.sleep(self._looked + _PAUSE_SECONDS - world.monotonic())
            asked = self._replica.peers_dns
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    addresses = await resolve(*split_address(asked or ""))
            except (OSError, TimeoutError):
                self.is_unsure = True
                return  # the hosts found before stay known
            names = await asyncio.gather(
                *(self._connections.ask_name(each, self.host) for each in addresses), return_exceptions=True
            )
            if asked != self._replica.peers_dns:
                return  # a reload changed it meanwhile
            self.is_unsure = any(isinstance(name, BaseException) for name in names)
            self.found = {
                name: address
                for name, address in zip(names, addresses, strict=True)
                if isinstance(name, str) and name != self.host
            }
            for name, address in self.found.items():
                _ = self._last.keep(name, address)
                self.note(name, "answered")
        finally:
            self._looked = world.monotonic()  # after a failure too, so that it is followed by a pause


def _weight(member: str, exchange: str) -> bytes:
    return hashlib.sha256(f"{member}\n{exchange}".encode()).digest()  # `hash` differs in each process
