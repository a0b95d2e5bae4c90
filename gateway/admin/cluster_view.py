"""Asks the other replicas for their part of the status page, or tells them this one's."""

import asyncio
from collections.abc import Iterable
from typing import Final

from gateway.admin.cluster_status import STATUS_BYTES, read, told
from gateway.admin.merge_statuses import Heard, of_host
from gateway.admin.snapshot import SnapshotSource, take_snapshot
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerDead, PeerFailed
from gateway.protocol.errors import OwnerSilent, OwnerStalled
from gateway.telemetry.process_status import Status

_ANSWER_SECONDS: Final = 1.0
_SIBLING_SECONDS: Final = 0.5
"""For a worker of this host, because another replica or the supervisor waits for the answer meanwhile."""
_MOST_ASKED: Final = 64


class ClusterView:
    """The other replicas as the status page of this process shows them."""

    def __init__(self, source: SnapshotSource, peers: PeerClient) -> None:
        """`source` is what there is to tell of this process."""
        self._source = source
        self._members = source.members
        self._peers = peers
        self._asking: asyncio.Task[None] | None = None
        self._heard: dict[str, Heard] = {}

    async def others(self) -> dict[str, Heard]:
        """Ask the other replicas, each for a second at most; concurrent callers share the answers."""
        if self._asking is None:
            self._asking = self._source.tasks.start(self._ask_others(), "ask for statuses")
        _ = await asyncio.wait((self._asking,))  # a caller that is cancelled does not cancel the questions
        return self._heard

    async def host(self) -> Status:
        """Return the status of this host; its other workers have half a second to tell theirs."""
        own, members = take_snapshot(self._source), self._members
        siblings = [name for name in members.others() if members.is_own_host(name)]
        return of_host(own, await self._ask(siblings, _SIBLING_SECONDS), members.host) if siblings else own

    async def tell(self, is_local: bool) -> str:  # noqa: FBT001  (as the peer listener calls it)
        """Return the status of this host for another replica; of this process alone for a worker of this host."""
        return told(take_snapshot(self._source) if is_local else await self.host())

    async def _ask_others(self) -> None:
        try:
            self._heard = await self._ask(sorted(self._members.other_hosts())[:_MOST_ASKED], _ANSWER_SECONDS)
        finally:
            self._asking = None

    async def _ask(self, names: Iterable[str], seconds: float) -> dict[str, Heard]:
        names = list(names)
        return dict(zip(names, await asyncio.gather(*(self._ask_one(name, seconds) for name in names)), strict=True))

    async def _ask_one(self, member: str, seconds: float) -> Heard:
        try:
            async with asyncio.timeout(seconds):
                text = await self._peers.ask("status", member, "", most=STATUS_BYTES)
        except PeerDead:
            return Heard(state="dead", why="Its address refuses connections")
        except (OwnerSilent, TimeoutError):
            return Heard(state="silent", why=f"It did not answer within {seconds:g} s")
        except (PeerFailed, OwnerStalled):
            why = "It refuses to tell, as an older version does: compare the versions, the clocks and state.keys"
            return Heard(state="stalled", why=why)
        status = read(text, member)
        return Heard(state="answered", why="" if status else "Its answer was not a status", status=status)
