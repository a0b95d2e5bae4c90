"""The network addresses of a host, looked up once for all connections of a few seconds."""

import asyncio
from functools import lru_cache
from typing import Final

from aiohappyeyeballs import addr_to_addr_infos

from gateway import world
from gateway.identity.principal import parsed_address
from gateway.runtime.newest import Newest

FRESH_SECONDS: Final = 10.0
_MAX_HOSTS: Final = 256


class Addresses:
    """Looks hosts up. Connections that are opened at the same time share one lookup."""

    def __init__(self, fresh_seconds: float = FRESH_SECONDS) -> None:
        """Addresses are kept for so long."""
        self._fresh_seconds = fresh_seconds
        self._known: Newest[tuple[str, int], tuple[float, list[world.AddressInfo]]] = Newest(_MAX_HOSTS)
        self._lookups: dict[tuple[str, int], asyncio.Task[list[world.AddressInfo]]] = {}

    async def of(self, host: str, port: int) -> list[world.AddressInfo]:
        """The addresses of a host, at least one. Raises OSError or UnicodeError."""
        if _is_literal(host):
            # The resolver has a few threads for all hosts, and a name server that is silent can occupy them all.
            return addr_to_addr_infos((host, port)) or []
        key = (host, port)
        known = self._known.get(key)
        if known is not None and known[0] > world.monotonic():
            return known[1]
        lookup = self._lookups.get(key)
        if lookup is None:
            # Its own task: the request that comes first may be aborted while others wait for the same lookup.
            lookup = asyncio.get_running_loop().create_task(_look_up(host, port), name="resolve upstream")
            self._lookups[key] = lookup
            lookup.add_done_callback(lambda task: self._keep(key, task))
        return await asyncio.shield(lookup)

    def forget(self, host: str, port: int) -> None:
        """Look this host up again: its addresses cannot be reached."""
        self._known.pop((host, port), None)

    def close(self) -> None:
        """End the lookups that still run."""
        for lookup in self._lookups.values():
            lookup.cancel()

    def _keep(self, key: tuple[str, int], task: asyncio.Task[list[world.AddressInfo]]) -> None:
        del self._lookups[key]
        if task.cancelled() or task.exception() is not None:
            return
        _ = self._known.keep(key, (world.monotonic() + self._fresh_seconds, task.result()))


@lru_cache(_MAX_HOSTS)
def _is_literal(host: str) -> bool:
    """Whether a host is an address; one with the name of an interface has to be looked up."""
    return parsed_address(host) is not None and "%" not in host


async def _look_up(host: str, port: int) -> list[world.AddressInfo]:
    """Ask the resolver of the system."""
    return await world.resolve(host, port, flags=world.ONLY_REACHABLE)
