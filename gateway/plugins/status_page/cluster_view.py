"""Asks the other replicas for their part of the status page, or tells them this one's.

The status of another replica is foreign input: it is bounded in bytes, it may only speak of that replica, and it is
checked before anything of it is shown.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.admin.process_parts import ProcessParts
from gateway.cluster.peer_client import PeerClient, verdict
from gateway.cluster.peer_errors import PeerDead, PeerFailed
from gateway.cluster.worker import host_of
from gateway.plugins.status_page.merge_statuses import Heard, cut, of_cluster, of_host
from gateway.plugins.status_page.snapshot import known_peers, take_snapshot
from gateway.protocol.errors import IF_HUNG, WRONG_ADDRESS, OwnerStalled
from gateway.telemetry.process_status import Status

STATUS_BYTES: Final = 1_048_576
"""The longest status that one replica takes from another, sealed. Its lists are bounded, so it fits."""
_MOST: Final = 2**53
"""The largest plausible number: up to it, floating-point numbers represent every integer."""
_ANSWER_SECONDS: Final = 1.0
_SIBLING_SECONDS: Final = 0.5
"""For a worker of this host, because another replica or the supervisor waits for the answer meanwhile."""
_MOST_ASKED: Final = 64


class ClusterView:
    """The other replicas as the status page of this process shows them."""

    def __init__(self, source: ProcessParts, peers: PeerClient) -> None:
        """`source` is what there is to tell of this process."""
        self._source = source
        self._members = source.members
        self._peers = peers

    async def status(self, replica: str | None) -> Status:
        """Return the status of the whole cluster, or that of one replica if it is known."""
        if replica == self._members.host:
            return await self.host()  # without a wait for a replica that is silent
        others = sorted(self._members.other_hosts())[:_MOST_ASKED]
        asking = self._source.tasks.share(self, self._ask(others, _ANSWER_SECONDS), "ask for statuses")
        own, asked = await asyncio.gather(self.host(), asking)
        heard = asked.result()
        found = heard.get(replica or "")
        if found is not None and found.status is not None:
            return found.status
        return of_cluster(replace(own, peers=tuple(known_peers(self._members))), heard) if heard else own

    async def host(self) -> Status:
        """Return the status of this host; its other workers have half a second to tell theirs."""
        own, members = take_snapshot(self._source), self._members
        siblings = [name for name in members.others() if members.is_own_host(name)]
        return of_host(own, await self._ask(siblings, _SIBLING_SECONDS), members.host) if siblings else own

    async def tell(self, *, is_local: bool) -> str:
        """Return the status of this host for another replica; of this process alone for a worker of this host."""
        # A worker that asked its siblings again would have them all ask each other without end.
        status = take_snapshot(self._source) if is_local else await self.host()
        if not is_local:
            # If the replica that asks is older, it knows no other word for a worker that told nothing.
            processes = (each if each.pid else replace(each, state="silent") for each in status.processes)
            status = replace(status, processes=tuple(processes))
        return msgspec.json.encode(status).decode()

    async def _ask(self, names: Sequence[str], seconds: float) -> dict[str, Heard]:
        heard = dict(zip(names, await asyncio.gather(*(self._ask_one(name, seconds) for name in names)), strict=True))
        for name, each in heard.items():
            self._members.saw(name, each.state)
        return heard

    async def _ask_one(self, member: str, seconds: float) -> Heard:
        fix, file = "Check whether it runs, and read its log", self._source.recent_errors.config_file
        if file and not self._members.is_own_host(member):
            fix += f"; `mrtr-gateway doctor --config {file}` on {self._members.host} asks it"
        try:
            async with asyncio.timeout(seconds):
                text = await self._peers.ask("status", member, "", most=STATUS_BYTES)
        except PeerDead:
            if (address := self._members.known().get(member)) is not None:  # as a worker has none
                fix += f". {WRONG_ADDRESS}"
            return Heard(state="dead", why=f"No process listens at {address or 'its address'}", fix=fix)
        except TimeoutError:
            # By then, a connection was made, or would have failed.
            is_connected = self._source.config.timeouts.peer_connect_seconds <= seconds
            why = f"It did not answer within {seconds:g} s"
            return Heard(state="stalled" if is_connected else "silent", why=why, fix=f"{fix}. {IF_HUNG}")
        except OwnerStalled as exc:
            is_known = exc.fix != OwnerStalled.fix
            return Heard(state=verdict(exc)[1], why=f"It {exc.why}", fix=exc.fix if is_known else f"{fix}. {IF_HUNG}")
        except PeerFailed:
            return Heard(state="stalled", why="It broke off its answer", fix=fix)
        status = read(text, member)
        why = "" if status else "Its answer was not a status (is its address in replica.peers that of another one?)"
        return Heard(state="answered" if status else "stalled", why=why, fix=fix, status=status)


def read(text: str, member: str) -> Status | None:
    """Return the status that a replica or worker reported of itself; None if it is not one."""
    try:
        raw = msgspec.json.decode(text)
        status = msgspec.convert(raw, Status)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    host = host_of(member)
    is_own = status.replica == member and all(host_of(each.id) == host for each in status.processes)
    return cut(replace(status, covers="replica")) if is_own and _is_plausible(raw) else None


def _is_plausible(value: object) -> bool:
    match value:
        case dict():
            return all(map(_is_plausible, value.values()))
        case list():
            return all(map(_is_plausible, value))
        case int() | float():
            return abs(value) <= _MOST
        case _:
            return True
