"""Asks other replicas whether they reach a third one, or whether they have taken a call or a task over.

A witness tries a connection of its own and asks no other replica, so questions never go in a circle. It answers
"unknown" if the cause of a failure may be on its own host. The workers of one host share a network, so they are not
witnesses for each other.
"""

import asyncio
from typing import Final

from gateway import world
from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerDead, PeerFailed
from gateway.cluster.worker import host_of
from gateway.protocol.errors import OwnerStalled
from gateway.runtime.newest import Newest
from gateway.runtime.tasks import Tasks
from gateway.seal.peer_messages import Kind

_MOST_WITNESSES: Final = 8
_GOOD_SECONDS: Final = 2.0
"""How long a verdict is cached: retries of many calls of one silent owner cost one round of questions."""
_MOST_VERDICTS: Final = 1000
_MOST_INQUIRIES: Final = 16
"""Expired calls that other replicas are asked about at the same time."""
ASK_AGAIN_SECONDS: Final = (10.0, 60.0, 300.0)
"""The pauses after which the replicas are asked about an expired call again, if one of them could not be asked."""


class Witness:
    """Asks the other replicas questions, and other processes of this host for what a replica asks."""

    def __init__(self, membership: Membership, peers: PeerClient, tasks: Tasks) -> None:
        self.membership = membership
        self._peers = peers
        self._tasks = tasks
        self._verdicts: Newest[str, tuple[float, bool]] = Newest(_MOST_VERDICTS)
        """By host: the time until which the verdict is cached, and whether no replica reaches the host."""
        self._inquiries = asyncio.Semaphore(_MOST_INQUIRIES)

    @property
    def is_needed(self) -> bool:
        """Whether other hosts that could take a call over exist, or may exist."""
        return self.membership.is_unsure or bool(self.membership.other_hosts())

    # -- questions ----------------------------------------------------------------------------------------------

    async def confirms(self, member: str) -> bool:
        """Whether at least one other replica finds `member` silent, and none reaches it."""
        host = host_of(member)
        if self.membership.is_own_host(member):
            return False
        until, verdict = self._verdicts.get(host, (0.0, False))
        if world.monotonic() < until:
            return verdict
        _ = await self._tasks.share((self, host), self._hear_witnesses(host), "ask witnesses")
        return self._verdicts.get(host, (0.0, False))[1]

    async def _hear_witnesses(self, host: str) -> None:
        began = world.monotonic()
        others = [name for name in self.membership.other_hosts() if name != host][:_MOST_WITNESSES]
        words = await asyncio.gather(*(self._ask("reach", name, host) for name in others))
        # If this process has stood still meanwhile, what it heard before says nothing of now.
        is_fresh = world.monotonic() - began < self._peers.question_seconds + _GOOD_SECONDS
        verdict = is_fresh and "silent" in words and "reached" not in words
        _ = self._verdicts.keep(host, (world.monotonic() + _GOOD_SECONDS, verdict))

    async def is_taken(self, exchange: str, round_: int) -> bool | None:
        """Whether another replica took over this replica's exchange after that round; None if one cannot be asked."""
        if self.membership.is_unsure:  # a replica that is unknown here may have it
            return None
        async with self._inquiries:
            hosts = self.membership.other_hosts()
            words = await asyncio.gather(*(self._holds(name, exchange, round_) for name in hosts))
        if "yes" in words:
            return True
        return False if all(word == "no" for word in words) else None

    async def follower(self, task: str) -> str | None:
        """The other process that follows a task whose owner is gone; None if none of those that answer does."""
        others = [name for name in self.membership.others() if not self.membership.was_silent(name)]
        words = await asyncio.gather(*(self._holds(name, task, 0) for name in others))
        return next((name for name, word in zip(others, words, strict=True) if word == "yes"), None)

    async def _holds(self, member: str, exchange: str, round_: int) -> str:
        return await self._ask("holds", member, exchange, b"%d" % round_)

    async def _ask(self, kind: Kind, member: str, about: str, detail: bytes = b"") -> str:
        try:
            return await self._peers.ask(kind, member, about, detail)
        except (PeerFailed, OwnerStalled) as exc:
            # A dead process holds nothing. As the answer to `reach`, this word counts for nothing.
            return "no" if isinstance(exc, PeerDead) else "unknown"

    # -- answers ------------------------------------------------------------------------------------------------

    async def reach(self, member: str) -> str:
        """Tell another replica whether this one reaches a third one: reached, silent or unknown."""
        return await self._peers.reach(host_of(member))

    async def any_sibling_holds(self, exchange: str, round_: int) -> str:
        """Tell whether another process of this host took an exchange over after that round: yes, no or unknown."""
        siblings = [name for name in self.membership.local_candidates(exchange) if name != self.membership.own]
        words = await asyncio.gather(*(self._holds(name, exchange, round_) for name in siblings))
        return next((word for word in ("yes", "unknown") if word in words), "no")
