"""A FAKE name service with FAKE processes at its addresses, and memberships that use it."""

import asyncio  # noqa: TC003  (one import style)

from gateway.cluster.membership import Membership
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.worker import Address, Worker
from gateway.config import InForce, Replica
from gateway.runtime.tasks import Tasks

IDS = tuple(f"gw-{number}" for number in range(1, 6))
PEERS = {name: f"127.0.0.1:{9000 + number}" for number, name in enumerate(IDS)}
EXCHANGES = [f"exchange-{number}" for number in range(500)]


class FakeClock:
    """Replaces `world` in the module under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeNameService(PeerConnections):
    """A name service and the processes at its addresses; an exception instead of an answer is raised."""

    def __init__(self) -> None:
        # It has no connections.
        self.records: list[Address] | Exception = []
        self.names: dict[Address, str | Exception] = {}
        self.resolved: list[tuple[str, int]] = []
        self.asked: list[Address] = []
        self.greeted: list[Address] = []
        self.hold: asyncio.Event | None = None

    def has(self, **names: str) -> None:
        """Set the records from now on: address by id, `gw_1` for gw-1."""
        self.names = {address: name.replace("_", "-") for name, address in names.items()}
        self.records = list(self.names)

    async def resolve(self, host: str, port: int) -> list[Address]:
        self.resolved.append((host, port))
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.records, Exception):
            raise self.records
        return self.records

    async def ask_name(self, address: Address, introduced: str) -> str | None:
        self.asked.append(address)
        if introduced:
            self.greeted.append(address)
        name = self.names.get(address)
        if isinstance(name, Exception):
            raise name
        return name


def static(own: str, tasks: Tasks, peers: dict[str, Address] = PEERS, worker: Worker | None = None) -> Membership:
    return Membership(InForce(Replica(id=own, listen="127.0.0.1:1", peers=peers)), worker, FakeNameService(), tasks)


def worker(number: int, count: int = 3) -> Worker:
    return Worker(number, count, "/run/gw", bytes(32))
