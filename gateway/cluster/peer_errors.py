"""The ways in which another replica fails to serve a request."""

from gateway.protocol.errors import OwnerStalled, clock_fix


class PeerFailed(Exception):
    """Another replica did not serve a request; the reply may have begun."""


class PeerDead(PeerFailed):
    """The peer's address refuses connections, or the process does not exist: nothing was sent."""


class PeerReplaced(PeerFailed):
    """Another process answers in the peer's name, or the peer has parted: it holds no call, and nothing was run."""


class ReplyBroken(PeerFailed):
    """The peer took the request, and the connection broke before the reply was complete."""


class PeerRefused(OwnerStalled):
    """The peer answers, and refuses the message: it is alive, and a restart of it would lose calls."""

    fix = "compare state.keys and versions of both; restart it only for a key of its environment, since it loses calls"

    def __init__(self, member: str, why: str, ahead_seconds: float | None = None) -> None:
        """`ahead_seconds` if, by its reply, the peer's clock is so far off that it refuses messages for that."""
        super().__init__(member, why)
        self.ahead_seconds = ahead_seconds
        if ahead_seconds is not None:
            self.fix = clock_fix(member, ahead_seconds)


class NoReplica(OwnerStalled):
    """What answers at the peer's address is another program, or a replica that fails."""

    fix = "correct its address in replica.peers; if the replica is there, read its log"


class PeerStuck(OwnerStalled):
    """The peer took the request and fell silent: unlike other stalled peers, it may be working on the request."""
