"""What replicas testify to one another: whether they reach a third one, and whether they have taken a call over.

A witness tries a connection of its own and asks no other replica, so questions never go in a circle. It says "unknown"
where the cause may be on its own host, and so does not testify. The workers of one host share a network: they are no
witnesses for one another.
"""

import asyncio
import time
from typing import Final, Protocol

from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import Dead, PeerClient, PeerFailed
from gateway.protocol.errors import OwnerStalled
from gateway.runtime.tasks import Tasks
from gateway.seal.peer_messages import Hop

_MOST_WITNESSES: Final = 8
_GOOD_SECONDS: Final = 2.0
"""How long a verdict is good: retries of many calls of one silent owner cost one round of questions."""
_MOST_VERDICTS: Final = 1000
_MOST_INQUIRIES: Final = 16
"""Expired calls that other replicas are asked about at the same time."""


class Held(Protocol):
    """What the lot of this replica knows of an exchange."""

    def has_taken_over(self, round_: int) -> bool:
        """Whether this replica went on with it after that round, in the same upstream call."""


class Holds(Protocol):
    """The parking lot."""

    def find(self, exchange_id: str) -> Held | None:
        """The exchange of that id."""


class Witness:
    """One replica's questions to the others, and its answers to theirs."""

    def __init__(self, members: Membership, peers: PeerClient, lot: Holds, tasks: Tasks) -> None:
        self._members = members
        self._peers = peers
        self._lot = lot
        self._tasks = tasks
        self._verdicts: dict[str, tuple[float, bool]] = {}
        """By host: until when it is good, and whether the host is out of every replica's reach."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._inquiries = asyncio.Semaphore(_MOST_INQUIRIES)

    @property
    def is_needed(self) -> bool:
        """Whether there are, or may be, other hosts that could take a call over."""
        return self._members.is_unsure or bool(self._members.other_hosts())

    # -- questions ----------------------------------------------------------------------------------------------

    async def confirms(self, member: str) -> bool:
        """Whether another living replica does not reach `member` either, and none does."""
        host = member.partition("#")[0]
        if self._members.is_own_host(member):
            return False
        until, verdict = self._verdicts.get(host, (0.0, False))
        if time.monotonic() < until:
            return verdict
        task = self._asking.get(host)
        if task is None:
            task = self._asking[host] = self._tasks.start(self._hear_witnesses(host), "ask witnesses")
        _ = await asyncio.wait((task,))  # whoever stops waiting does not stop it for the others
        return self._verdicts.get(host, (0.0, False))[1]

    async def _hear_witnesses(self, host: str) -> None:
        try:
            others = [name for name in self._members.other_hosts() if name != host][:_MOST_WITNESSES]
            words = await asyncio.gather(*(self._ask(name, host) for name in others))
            verdict = "silent" in words and "reached" not in words
            if len(self._verdicts) >= _MOST_VERDICTS:
                self._verdicts.clear()
            self._verdicts[host] = (time.monotonic() + _GOOD_SECONDS, verdict)
        finally:
            del self._asking[host]

    async def _ask(self, witness: str, host: str) -> str:
        try:
            return await self._peers.ask("reach", witness, host)
        except (PeerFailed, OwnerStalled):
            return "unknown"

    async def may_be_taken(self, exchange: str, round_: int) -> bool:
        """Whether another replica has, or may have, taken over this replica's exchange after that round."""
        if self._members.is_unsure:
            return True
        async with self._inquiries:
            hosts = self._members.other_hosts()
            words = await asyncio.gather(*(self._holds(name, exchange, round_) for name in hosts))
        return any(word != "no" for word in words)

    async def _holds(self, member: str, exchange: str, round_: int) -> str:
        try:
            return await self._peers.ask("holds", member, exchange, b"%d" % round_)
        except Dead:
            return "no"
        except (PeerFailed, OwnerStalled):
            return "unknown"

    # -- answers ------------------------------------------------------------------------------------------------

    async def tell(self, hop: Hop, is_local: bool) -> str:  # noqa: FBT001  (a callback of the peer listener)
        """Answer another replica's question."""
        if hop.kind == "reach":
            own_host = self._members.is_own_host(hop.path)
            return "unknown" if own_host else await self._peers.reach(hop.path)
        own = self._own_word(hop)
        if own == "yes" or is_local:
            return own
        siblings = [name for name in self._members.siblings(hop.path) if name != self._members.own]
        round_ = int(hop.body or b"0")
        words = [own, *await asyncio.gather(*(self._holds(name, hop.path, round_) for name in siblings))]
        return next((word for word in ("yes", "unknown") if word in words), "no")

    def _own_word(self, hop: Hop) -> str:
        found = self._lot.find(hop.path)
        return "yes" if found is not None and found.has_taken_over(int(hop.body or b"0")) else "no"
