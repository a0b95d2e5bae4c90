"""Decides which entry of a full place gives way: the oldest one of the caller that has most of it.

If the oldest one of all gave way, a caller that adds entries would evict those of everybody else. A caller that is
alone has all the room.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class Holdings(Generic[K]):
    """The entries of each owner, the oldest first, with how much room they take together.

    Owners whose room has as many bits count as equal, because the largest rank is looked for among all that there are.
    """

    _entries: dict[bytes, dict[K, None]] = field(default_factory=dict)
    _taken: dict[bytes, int] = field(default_factory=dict)
    _ranks: dict[int, dict[bytes, None]] = field(default_factory=dict)

    def add(self, owner: bytes, key: K, room: int) -> None:
        """Add an entry as the owner's newest."""
        self._entries.setdefault(owner, {})[key] = None
        self.grow(owner, room)

    def grow(self, owner: bytes, room: int) -> None:
        """An entry of this owner takes more room, or less."""
        before = self._taken.get(owner)
        after = self._taken[owner] = (before or 0) + room
        rank = after.bit_length()
        if before is not None:
            former = before.bit_length()
            if former == rank:
                return
            self._leave(owner, former)
        self._ranks.setdefault(rank, {})[owner] = None

    def remove(self, owner: bytes, key: K, room: int) -> None:
        """Remove an entry, with the room that it takes."""
        self.grow(owner, -room)
        entries = self._entries[owner]
        del entries[key]
        if not entries:
            self._leave(owner, self._taken.pop(owner).bit_length())
            del self._entries[owner]

    def _leave(self, owner: bytes, rank: int) -> None:
        owners = self._ranks[rank]
        del owners[owner]
        if not owners:
            del self._ranks[rank]

    def first(self, owner: bytes) -> K:
        """The entry that gives way to one of this owner: its own oldest, unless others have more, or it has no other.

        There must be an entry.
        """
        largest = self._ranks[max(self._ranks)]
        if owner not in largest or len(self._entries[owner]) == 1:
            owner = next(iter(largest))
        return next(iter(self._entries[owner]))


@dataclass(eq=False)
class FairTable(Generic[K, V]):
    """At most `most` entries of all owners, each under a key of its own."""

    _most: int
    _entries: dict[K, tuple[bytes, V]] = field(default_factory=dict)
    _holdings: Holdings[K] = field(default_factory=Holdings)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def values(self) -> list[V]:
        """All values."""
        return [value for _, value in self._entries.values()]

    def get(self, key: K) -> V | None:
        """The value under a key, if there is one."""
        return self._entries.get(key, (b"", None))[1]

    def keep(self, owner: bytes, key: K, value: V) -> V | None:
        """Set a value as the newest of its owner; return the one that had to make room for it."""
        _ = self.pop(key)
        self._entries[key] = owner, value
        self._holdings.add(owner, key, 1)
        return self.pop(self._holdings.first(owner)) if len(self._entries) > self._most else None

    def pop(self, key: K) -> V | None:
        """Take a value out, if it is there."""
        owner, value = self._entries.pop(key, (None, None))
        if owner is not None:
            self._holdings.remove(owner, key, 1)
        return value
