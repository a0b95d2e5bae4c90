"""The ways in which another replica fails to serve a request."""

from gateway.protocol.errors import OwnerStalled


class PeerFailed(Exception):
    """Another replica did not serve a request; the reply may have begun."""


class PeerDead(PeerFailed):
    """The peer's address refuses connections, or the process does not exist: nothing was sent."""


class PeerReplaced(PeerFailed):
    """Another process answers in the peer's name, or the peer has parted: it holds no call, and nothing was run."""


class ReplyBroken(PeerFailed):
    """The peer took the request, and the connection broke before the reply was complete."""


class PeerStuck(OwnerStalled):
    """The peer took the request and fell silent: unlike other stalled peers, it may be working on the request."""
