"""The rules by which several calls of a principal share one upstream session: pure.

The *owner* is the session object that opened the upstream session and reads its side stream. A *joiner* speaks in the
same upstream session for one further call, over a channel of its own. It opens no side stream and never ends the
session.

Rule 1: a question belongs to the call on whose stream it came. A question on the side stream names no call, so it has
an owner only while one call is in flight. Rule 2: a further call therefore waits until the one before it has ended, or
waits for its user in a session whose questions named their calls so far. Rule 3: a call that nothing reads any more
may still ask on the side stream, so there it counts as one more call in flight.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gateway.protocol.jsonrpc import Message


class Member(Protocol):
    """A session object, as its pool sees it."""

    lost: bool
    """The upstream does not know the session any more."""
    resting: bool
    """Its call waits for its user."""

    @property
    def shared(self) -> "SharedSession[Any]":
        """The upstream session with all that speak in it."""

    @property
    def pending(self) -> bool:
        """Whether its call is in flight."""

    @property
    def can_be_joined(self) -> bool:
        """Whether the upstream session is open and has an id."""

    def is_answered_by(self, message: Message) -> bool:
        """Whether a message answers its call."""


S = TypeVar("S", bound=Member)


@dataclass(slots=True, eq=False)
class SharedSession(Generic[S]):
    """One upstream session with the session objects that speak in it."""

    owner: S
    joiners: Collection[S] = ()
    """Replaced with each change: nearly all sessions have none."""
    asked_in_call: bool = False
    """The server has asked on the stream of a call, which names the call."""
    asked_aside: bool = False
    """The server has asked on the side stream, where nothing names the call."""
    has_stray: bool = False
    """A call of it that nothing here reads may still ask."""
    must_not_end: bool = False
    """A call may run in it that nothing here reads, or the server has forgotten it."""

    @property
    def names_calls(self) -> bool:
        """Whether the server has asked on the streams of its calls, and never elsewhere."""
        return self.asked_in_call and not self.asked_aside

    @property
    def can_begin(self) -> bool:
        """Whether the owner, which has no call now, may begin one: all joiners wait for their users."""
        return not self.joiners or (self.names_calls and all(each.resting for each in self.joiners))

    @property
    def has_room(self) -> bool:
        """Whether a joiner may begin a call: that of the owner waits for its user, and is named or has ended."""
        owner = self.owner
        is_clear = owner.resting and (self.names_calls or not owner.pending)
        return is_clear and self.can_begin and owner.can_be_joined

    def speaker(self, message: Message) -> tuple[S, bool]:
        """Whose call a message of the side stream is about, and whether another call may own it just as well."""
        speaking = [each for each in (self.owner, *self.joiners) if each.pending]
        speaking = [each for each in speaking if each.is_answered_by(message)] or speaking
        return (speaking[0] if len(speaking) == 1 else self.owner), len(speaking) + self.has_stray > 1

    def asked(self, *, aside: bool) -> None:
        """The server has asked on the side stream, or on the stream of a call."""
        self.asked_aside |= aside
        self.asked_in_call |= not aside

    def stray(self, *, may_ask: bool) -> None:
        """A call that nothing here reads may run on in it, and also ask if it `may_ask`."""
        self.must_not_end = True
        self.has_stray |= may_ask

    def join(self, joiner: S) -> None:
        """Let a joiner in."""
        self.joiners = frozenset((*self.joiners, joiner))

    def leave(self, joiner: S, *, is_lost: bool = False) -> None:
        """Take a joiner out; what it found lost, or leaves behind as lost, is lost for the owner."""
        self.joiners = frozenset(each for each in self.joiners if each is not joiner)
        self.owner.lost |= joiner.lost or is_lost
