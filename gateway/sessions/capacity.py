"""What each caller of a route has of its sessions, and who waits for room: found without looking at anybody else.

A release happens with every call, and there may be thousands of callers: whoever can be woken stands first in a queue
(`Parties.hungry`), and the session that was idle longest stands first among the idle ones.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

G = TypeVar("G")
S = TypeVar("S")
Waiter = asyncio.Future[S | None]
"""Gets a session, or (None) leave to try again."""


class Party(Generic[G, S]):
    """One principal."""

    def __init__(self) -> None:
        self.count = 0
        """Its sessions, idle ones included."""
        self.idle: dict[S, None] = {}
        """Its idle sessions, those first that were idle first."""
        self.waiting: dict[Waiter[S], G] = {}
        """Who waits, with the group that the session would be of; in the order in which they came."""


class Parties(Generic[G, S]):
    """All principals of one pool that have a session or wait for one."""

    def __init__(self, cap: Callable[[], int]) -> None:
        """`cap`: how many sessions one principal may have."""
        self._cap = cap
        self._parties: dict[bytes, Party[G, S]] = {}
        self._hungry: dict[bytes, Party[G, S]] = {}
        """Those with somebody waiting who could use room: below the cap, or with an idle session to give for it."""
        self.idle: dict[S, None] = {}
        """The idle sessions of all, those first that were idle first."""

    def __len__(self) -> int:
        return len(self._parties)

    def of(self, principal: bytes) -> Party[G, S]:
        """What a principal has; an empty one is not kept."""
        return self._parties.get(principal) or Party()

    def count(self, principal: bytes, change: int) -> None:
        """A session was opened or dropped."""
        party = self._parties.setdefault(principal, Party())
        party.count += change
        self._settle(principal, party)

    def rest(self, principal: bytes, session: S) -> None:
        """A session is idle from now on."""
        party = self._parties[principal]
        party.idle[session] = self.idle[session] = None
        self._settle(principal, party)

    def wake(self, principal: bytes, session: S) -> None:
        """A session is not idle any more; it need not have been."""
        if session in self.idle:
            party = self._parties[principal]
            del party.idle[session], self.idle[session]
            self._settle(principal, party)

    def wait(self, principal: bytes, waiter: Waiter[S], group: G) -> None:
        """Somebody waits."""
        party = self._parties.setdefault(principal, Party())
        party.waiting[waiter] = group
        self._settle(principal, party)

    def leave(self, principal: bytes, waiter: Waiter[S]) -> None:
        """Somebody waits no more; nothing happens when that is known."""
        party = self._parties.get(principal)
        if party is not None and party.waiting.pop(waiter, None) is not None:
            self._settle(principal, party)

    def hungry(self) -> tuple[bytes, G] | None:
        """Whose turn it is to use room, and the group of its first who waits; the next time it is another one's."""
        if not self._hungry:
            return None
        principal = next(iter(self._hungry))
        party = self._hungry[principal] = self._hungry.pop(principal)
        return principal, next(iter(party.waiting.values()))

    def _settle(self, principal: bytes, party: Party[G, S]) -> None:
        if party.waiting and (party.count < self._cap() or party.idle):
            self._hungry.setdefault(principal, party)
        else:
            self._hungry.pop(principal, None)
        if not party.count and not party.waiting:
            del self._parties[principal]
