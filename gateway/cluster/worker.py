"""One process of the cluster: its id, its unix sockets, the secret that it shares with its siblings."""

import msgspec

from gateway import world
from gateway.config import Replica

Address = str
"""host:port, or unix:/path of a worker of this host."""


class Worker(msgspec.Struct, frozen=True):
    """One of several processes that share `listen`, as its supervisor describes it.

    `directory` (mode 0700) holds the unix sockets `peer-<number>.sock` and `admin-<number>.sock`; `key` seals states
    if the configuration has no keys.
    """

    number: int
    count: int
    directory: str
    key: bytes

    def socket(self, purpose: str, number: int | None = None) -> Address:
        """The unix socket of worker `number`, by default of this one."""
        return f"unix:{self.directory}/{purpose}-{self.number if number is None else number}.sock"


def member_id(replica: Replica, worker: Worker | None) -> str:
    """The id of this process: `gw-1`, or `gw-1#0` for the first of several workers."""
    host = replica.id or world.host_name()
    return host if worker is None else f"{host}#{worker.number}"


def host_of(member: str) -> str:
    """The host of a member."""
    return member.partition("#")[0]
