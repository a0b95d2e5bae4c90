"""Who the replicas are: ids, where each is reached, and in which order they inherit a call.

A member is one process. A host with one process is the member `gw-1`; with `workers: 3` it is `gw-1#0` to `gw-1#2`,
which reach one another over unix sockets and share the host's peer listener. Addresses come from the configuration or
from the name service, never from a message (threat 17).

Every replica puts the heirs of a call into the same order (rendezvous hashing), so that two retries which arrive at
two replicas in the same moment still meet at one.
"""

import asyncio
import hashlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec

from gateway.config import Config, Replica, split_address
from gateway.protocol.errors import OwnerSilent
from gateway.runtime.tasks import Tasks

Address = str
"""host:port, or unix:/path of a worker of this host."""
Resolve = Callable[[str, int], Awaitable[list[Address]]]
AskName = Callable[[Address], Awaitable[str | None]]

_FRESH_SECONDS: Final = 5.0
"""How long an answer of the name service is good, unless it lacks the name that is looked for."""
_PAUSE_SECONDS: Final = 0.5
"""The name service is asked no more often than this."""
_RESOLVE_SECONDS: Final = 1.0
_GREETED_SECONDS: Final = 60.0
"""How long a greeting stands in for a name that the name service does not have yet."""
_NAMELESS_SECONDS: Final = 10.0
"""How long after its own start a process takes one that it never heard of for too new to have a name."""
_SILENT_SECONDS: Final = 2.0
"""How long an heir is passed over at whose address nobody even refused a connection.

One that was refused is asked again at once, since that costs nothing: it may be back."""


_SEEN_KEPT: Final = 1000
"""Members that are remembered for who looks; names of replicas that are gone pile up elsewhere."""


State = Literal["answered", "dead", "silent", "stalled"]


class Seen(msgspec.Struct):
    """What came of dealing with a member."""

    state: State
    """The last time."""
    answered: float | None = None
    """Monotonic time of its last answer."""


class Worker(msgspec.Struct, frozen=True):
    """One of several processes that share `listen`: what its supervisor tells it.

    `directory` (mode 0700) holds the unix sockets `peer-<number>.sock` and `admin-<number>.sock`; `key` seals states
    when the configuration has no keys. `read` reads the configuration file again, for SIGHUP.
    """

    number: int
    count: int
    directory: str
    key: bytes
    read: Callable[[], Config] | None = None

    @property
    def mark(self) -> bytes:
        """A secret that all workers share and that opens nothing: callers look the same in what each tells of them."""
        return hashlib.sha256(b"mrtr-gateway/status/" + self.key).digest()

    def socket(self, purpose: str, number: int | None = None) -> Address:
        """The unix socket of a worker, this one's own without a number."""
        return f"unix:{self.directory}/{purpose}-{self.number if number is None else number}.sock"


async def resolve(host: str, port: int) -> list[Address]:
    """The A and AAAA records of a name; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(f"[{to[0]}]:{port}" if ":" in str(to[0]) else f"{to[0]}:{port}" for *_, to in found))


class Membership:
    """All members as one of them sees them."""

    def __init__(self, replica: Replica, worker: Worker | None, tasks: Tasks, resolve: Resolve = resolve) -> None:
        self.host = replica.id or socket.gethostname()
        self.own = self.host if worker is None else f"{self.host}#{worker.number}"
        self._replica = replica
        self._worker = worker
        self._tasks = tasks
        self._resolve = resolve
        self.greet: AskName
        """As `ask_name`, and says who asks."""
        self.ask_name: AskName
        """Asks the process at an address for its host's id, None where there is no process; TimeoutError when it
        does not say. Set by who can speak to peers."""
        self._unsure = False
        """Whether somebody may be there whose name could not be learnt."""
        self._found: dict[str, Address] = {}
        self._greeted: dict[str, tuple[Address, float]] = {}
        """Who said where it is, by id; names come later than processes."""
        self._last: dict[str, Address] = {}
        """Where each was found or greeted last, also those that the name service has dropped: they may live there."""
        self._born = time.monotonic()
        self._keeps_looking = False
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._silent: dict[str, float] = {}
        self.seen: dict[str, Seen] = {}
        """By worker on this host, and by host elsewhere."""

    def change(self, replica: Replica) -> None:
        """Other peers from now on."""
        if replica.peers_dns != self._replica.peers_dns:
            self._found, self._looked = {}, float("-inf")
            self._greeted.clear()
            self._last.clear()
        if replica != self._replica:
            self._silent.clear()
        self._replica = replica
        self._tasks.spawn(self.begin(), "look for peers")

    @property
    def alone(self) -> bool:
        """Whether there is nobody else who could ever be reached."""
        replica = self._replica
        others = replica.peers.keys() - {self.host}
        return not others and replica.peers_dns is None and (self._worker is None or self._worker.count == 1)

    def is_own_host(self, member: str) -> bool:
        """Whether a member is a worker of this host, or the host itself."""
        return member.partition("#")[0] == self.host

    async def address(self, member: str) -> Address | None:
        """Where a member is reached; None when it is of this host and does not exist.

        Raises OwnerSilent when no address is known: a member that is not listed may live all the same.
        """
        host, _, number = member.partition("#")
        if host == self.host:
            return self._sibling(number)
        if self._replica.peers_dns is None:
            address = self._replica.peers.get(host)
            if address is None:
                raise OwnerSilent(member, f"is not among replica.peers of {self.own}")
            return address
        if self._known(host) is None:
            await self._look()
        address = self._known(host) or self._last.get(host)
        if address is None:
            raise self._unfound(member)
        return address

    def _unfound(self, member: str) -> OwnerSilent:
        where = f"by {self.own} (does replica.peers_dns name it, and does it answer?)"
        return OwnerSilent(member, f"cannot be found {where}", is_local=self._unsure)

    async def lacks(self, member: str) -> bool:
        """Whether a lookup that succeeded just now does not list a member."""
        host = member.partition("#")[0]
        if host == self.host:
            return False
        if self._replica.peers_dns is None:
            return host not in self._replica.peers
        await self._look()
        young = host not in self._last and time.monotonic() - self._born < _NAMELESS_SECONDS
        return self._known(host) is None and not self._unsure and not young

    def _known(self, host: str) -> Address | None:
        address, until = self._greeted.get(host, ("", 0.0))
        return self._found.get(host) or (address if time.monotonic() < until else None)

    @property
    def is_unsure(self) -> bool:
        """Whether there may be members that are not known: the last lookup failed, or one did not say its name."""
        return self._replica.peers_dns is not None and self._unsure

    async def is_back(self, member: str) -> bool:
        """Whether a member that refused a connection is found again, there or elsewhere.

        Raises OwnerSilent when that cannot be told.
        """
        if self._replica.peers_dns is None or self.is_own_host(member):
            return False
        await self._look()
        found = self._known(member.partition("#")[0]) is not None
        if not found and self._unsure:
            raise self._unfound(member)
        return found

    def greeted(self, host: str, remote: str | None) -> None:
        """A process says that it is `host`. It is believed when it says so at the address where it should be."""
        if self._replica.peers_dns is None or remote is None or host == self.host:
            return
        _, port = split_address(self._replica.peers_dns)
        address = f"[{remote}]:{port}" if ":" in remote else f"{remote}:{port}"
        if self._found.get(host) != address:
            self._tasks.spawn(self._verify(host, address), "verify a greeting")

    async def _verify(self, host: str, address: Address) -> None:
        try:
            name = await self.ask_name(address)
        except TimeoutError:
            return
        if name == host:
            self._greeted[host] = (address, time.monotonic() + _GREETED_SECONDS)
            self._remember(host, address)

    async def begin(self) -> None:
        """Find and greet the others, and go on with that: each of two that start together is found."""
        if self._replica.peers_dns is not None and not self._keeps_looking:
            self._keeps_looking = True
            await self._look()
            self._tasks.spawn(self._keep_looking(), "look for peers")

    async def _keep_looking(self) -> None:
        try:
            while self._replica.peers_dns is not None:
                await asyncio.sleep(_FRESH_SECONDS)
                await self._look()
        finally:
            self._keeps_looking = False

    def _sibling(self, number: str) -> Address | None:
        worker = self._worker
        if worker is None or not number.isdecimal() or int(number) >= worker.count:
            return None
        return worker.socket("peer", int(number))

    async def heirs(self, exchange: str) -> list[str]:
        """All members in the order in which they inherit this exchange; of other hosts, only the host."""
        if self._replica.peers_dns is not None and time.monotonic() - self._looked > _FRESH_SECONDS:
            await self._look()
        hosts = {self.host, *self._replica.peers, *self._found}
        order: list[str] = []
        for host in sorted(hosts, key=lambda host: _weight(host, exchange)):
            order += self.siblings(exchange) if host == self.host else [host]
        return order

    def siblings(self, exchange: str) -> list[str]:
        """The processes of this host in the order in which they inherit."""
        if self._worker is None:
            return [self.own]
        workers = [f"{self.host}#{number}" for number in range(self._worker.count)]
        return sorted(workers, key=lambda member: _weight(member, exchange))

    def was_silent(self, member: str) -> bool:
        """Whether a moment ago nobody even refused a connection there."""
        return time.monotonic() < self._silent.get(member, float("-inf"))

    def note_silent(self, member: str) -> None:
        """Nobody accepted a connection, or refused it."""
        self._silent = {name: until for name, until in self._silent.items() if until > time.monotonic()}
        self._silent[member] = time.monotonic() + _SILENT_SECONDS
        self.forget_address(member)

    def forget_address(self, member: str) -> None:
        """Look a member up again before the next request: its address may be another replica's by then."""
        host = member.partition("#")[0]
        _ = self._found.pop(host, None), self._greeted.pop(host, None)

    def _remember(self, host: str, address: Address) -> None:
        self._last.pop(host, None)
        self._last[host] = address
        if len(self._last) > _SEEN_KEPT:
            del self._last[next(iter(self._last))]

    def other_hosts(self) -> list[str]:
        """The other hosts that are known now; the workers of this one are not among them."""
        return [name for name in self.others() if not self.is_own_host(name)]

    def others(self) -> dict[str, Address]:
        """Who else there is, as far as is known now, and where."""
        replica, worker = self._replica, self._worker
        greeted = {host: address for host, (address, until) in self._greeted.items() if time.monotonic() < until}
        found = {**greeted, **self._found} if replica.peers_dns is not None else dict(replica.peers)
        found.pop(self.host, None)
        siblings = range(worker.count) if worker is not None else ()
        found |= {f"{self.host}#{number}": "this host" for number in siblings}
        found.pop(self.own, None)
        return found

    def note(self, member: str, state: State) -> None:
        """Remember what came of dealing with a member, for who looks."""
        name = member if self.is_own_host(member) else member.partition("#")[0]
        seen = self.seen.pop(name, None)
        answered = time.monotonic() if state == "answered" else seen.answered if seen is not None else None
        self.seen[name] = Seen(state, answered)
        if len(self.seen) > _SEEN_KEPT:
            del self.seen[next(iter(self.seen))]

    async def _look(self) -> None:
        """Ask the name service, once for all who want to know; what it said a moment ago is not news."""
        if self._looking is None:
            pause = self._looked + _PAUSE_SECONDS - time.monotonic()
            self._looking = self._tasks.start(self._look_up(pause), "resolve peers")
        _ = await asyncio.wait((self._looking,))

    async def _look_up(self, pause: float) -> None:
        try:
            await asyncio.sleep(max(pause, 0))
            asked = self._replica.peers_dns
            host, port = split_address(asked or "")
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    addresses = await self._resolve(host, port)
            except (OSError, TimeoutError):
                self._unsure = True
                return  # what was known stays known
            names = await asyncio.gather(*(self.greet(each) for each in addresses), return_exceptions=True)
            if asked != self._replica.peers_dns:
                return  # a reload was faster
            self._unsure = any(isinstance(name, BaseException) for name in names)
            self._found = {
                name: address
                for name, address in zip(names, addresses, strict=True)
                if isinstance(name, str) and name != self.host
            }
            for name, address in self._found.items():
                self._remember(name, address)
                self.note(name, "answered")
        finally:
            self._looked = time.monotonic()
            self._looking = None


def _weight(member: str, exchange: str) -> bytes:
    return hashlib.sha256(f"{member}\n{exchange}".encode()).digest()
