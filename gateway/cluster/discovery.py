"""Knows the other hosts: those of `replica.peers`, or those behind the DNS name `replica.peers_dns`.

A lookup returns addresses, and each address is asked for the id of its replica. The question also introduces the
asking replica, because a process can start before the name service lists it. An introduction is a hint: its sender's
address is asked for its id before it is believed, so an address never comes from a message (threat 17).
"""

import asyncio
from typing import Final, Literal

import msgspec

from gateway import world
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.worker import Address, host_id
from gateway.config import InForce, Replica, split_address
from gateway.runtime.newest import Newest
from gateway.runtime.tasks import Tasks

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

State = Literal["answered", "dead", "silent", "stalled"]


class Seen(msgspec.Struct):
    """The result of the last contact with a member."""

    state: State
    answered: float | None = None
    """Monotonic time of its last answer."""


async def resolve(host: str, port: int) -> list[Address]:
    """The A and AAAA records of a name; raises OSError."""
    found = await world.resolve(host, port)
    return list(dict.fromkeys(_joined(str(to[0]), port) for *_, to in found))


def _joined(host: str, port: int) -> Address:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Discovery:
    """The other hosts, as far as this process knows them."""

    def __init__(self, replica: InForce[Replica], connections: PeerConnections, tasks: Tasks) -> None:
        self._host = host_id(replica.value)
        self._name, self._configured = replica.value.peers_dns, replica.value.peers
        replica.after_replace(self._use)
        self._tasks = tasks
        self._connections = connections
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
        self._lookup: asyncio.Task[None] | None = None
        self._is_repeating = False
        self.is_unsure = False
        """Whether a replica may be missing: the last lookup failed, or an address did not tell its id."""

    def _use(self, replica: Replica) -> None:
        """Look for peers under the DNS name of a new configuration; forget those of another name."""
        self._configured = replica.peers
        if replica.peers_dns != self._name:
            self._name = replica.peers_dns
            self._looked = float("-inf")
            self.found = {}
            self._greeted.clear()
            self._last.clear()
            self.is_unsure = self._name is not None
        self._tasks.spawn(self.begin(), "look for peers")

    async def begin(self) -> None:
        """Look the peers up now and periodically: of two replicas that start together, the later lookup finds both."""
        if self._name is not None and not self._is_repeating:
            self._is_repeating = True
            await self.look()
            self._tasks.spawn(self._repeat(), "look for peers")

    async def _repeat(self) -> None:
        try:
            while self._name is not None:
                await asyncio.sleep(_FRESH_SECONDS)
                await self.look()
        finally:
            self._is_repeating = False

    def address(self, host: str) -> Address | None:
        """The address of a host that is configured, that the last lookup found, or that introduced itself recently."""
        return self.known().get(host)

    def last_address(self, host: str) -> Address | None:
        """The last known address of a host, however old."""
        return self._last.get(host)

    def may_be_new(self, host: str) -> bool:
        """Whether an unknown host may be too new for the name service; only a young process has to assume so."""
        is_young = world.monotonic() - self._born < _NAMELESS_SECONDS
        return self._name is not None and host not in self._last and is_young

    def listed(self) -> dict[str, Address]:
        """The hosts that are configured, or that the last lookup found."""
        return {**self._configured, **self.found}

    def known(self) -> dict[str, Address]:
        """The hosts that are listed, and those that introduced themselves recently."""
        greeted = {host: address for host, (address, until) in self._greeted.items() if world.monotonic() < until}
        return {**greeted, **self.listed()}

    def forget(self, host: str) -> None:
        """Look a host up again before its address is used: by then the address may belong to another replica."""
        _ = self.found.pop(host, None), self._greeted.pop(host, None)

    def note(self, member: str, state: State) -> None:
        """Remember the result of a contact with a member, for the status page."""
        host = member.partition("#")[0]
        name = member if host == self._host else host
        seen = self.seen.get(name)
        if state == "answered" and seen is not None and seen.state == state:
            seen.answered = world.monotonic()
            return
        answered = world.monotonic() if state == "answered" else seen.answered if seen is not None else None
        _ = self.seen.keep(name, Seen(state, answered))

    # -- introductions ------------------------------------------------------------------------------------------

    def greeted(self, host: str, remote: str | None) -> None:
        """Verify the introduction of a process at the address `remote` that claims to be `host`."""
        if self._name is None or remote is None or host == self._host:
            return
        _, port = split_address(self._name)
        address = _joined(remote, port)
        if self.found.get(host) != address:
            self._tasks.spawn(self._verify(host, address), "verify a greeting")

    async def _verify(self, host: str, address: Address) -> None:
        try:
            name = await self._connections.ask_name(address, "")
        except TimeoutError:
            return
        if name == host:
            self._greeted[host] = (address, world.monotonic() + _GREETED_SECONDS)
            _ = self._last.keep(host, address)

    # -- lookups ------------------------------------------------------------------------------------------------

    async def look_if_stale(self) -> None:
        """Look the peers up, unless the last lookup is still fresh."""
        if self._name is not None and world.monotonic() - self._looked > _FRESH_SECONDS:
            await self.look()

    async def look(self) -> None:
        """Look the peers up, unless they are configured; calls share a lookup, and a pause separates two of them."""
        if self._name is None:
            return
        if self._lookup is None:
            pause = self._looked + _PAUSE_SECONDS - world.monotonic()
            self._lookup = self._tasks.start(self._look_up(pause), "resolve peers")
        _ = await asyncio.wait((self._lookup,))  # a caller that is cancelled does not cancel the lookup

    async def _look_up(self, pause: float) -> None:
        try:
            await asyncio.sleep(max(pause, 0))
            asked = self._name
            host, port = split_address(asked or "")
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    addresses = await resolve(host, port)
            except (OSError, TimeoutError):
                self.is_unsure = True
                return  # the hosts found before stay known
            names = await asyncio.gather(
                *(self._connections.ask_name(each, self._host) for each in addresses), return_exceptions=True
            )
            if asked != self._name:
                return  # a reload changed it meanwhile
            self.is_unsure = any(isinstance(name, BaseException) for name in names)
            self.found = {
                name: address
                for name, address in zip(names, addresses, strict=True)
                if isinstance(name, str) and name != self._host
            }
            for name, address in self.found.items():
                _ = self._last.keep(name, address)
                self.note(name, "answered")
        finally:
            self._looked = world.monotonic()
            self._lookup = None
