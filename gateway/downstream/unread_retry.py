"""A retry that goes to the replica that holds its call without being read here."""

from typing import Final

import msgspec
from msgspec import Raw

from gateway import world
from gateway.downstream.round import NO_REPLY, Round, new_round
from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import ReplyWriter
from gateway.protocol.errors import DownstreamError
from gateway.routes.live_route import LiveRoute
from gateway.seal.keyring import IN_JSON
from gateway.seal.request_state import Envelope
from gateway.telemetry import Ending, Step

_MOST_BYTES: Final = 65_536
"""A larger retry is read: to glance at it would cost as much."""


class _Params(msgspec.Struct, gc=False):
    state: str = msgspec.field(name="requestState")


class Glance(msgspec.Struct, gc=False):
    """What the body of a retry says at first glance, before it is checked."""

    id: Raw
    """Without it, this would be a notification."""
    method: str
    params: _Params

    @property
    def state(self) -> str:
        """The `requestState`."""
        return self.params.state


_decode: Final = msgspec.json.Decoder(Glance).decode


def glance(body: bytes, max_depth: int) -> Glance | None:
    """Find the state in the body of a request; None if there is none, or if only a whole reading can tell.

    None also for a body that may be nested deeper than `max_depth`: the other replica does not know this limit.
    """
    if len(body) > _MOST_BYTES or IN_JSON not in body or body.count(b"{") + body.count(b"[") > max_depth:
        return None
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class UnreadRetry(msgspec.Struct, eq=False):
    """A retry of which the caller, the route, the method and the bound headers were compared with its state.

    Everything else is checked by the replica that holds the call; by this one only if it takes the call over.
    """

    incoming: Incoming
    live: LiveRoute
    caller: Caller
    envelope: Envelope
    version: str
    """As the header names it; one that the gateway speaks."""
    started: float
    """Monotonic."""
    reply: ReplyWriter = NO_REPLY
    is_counted: bool = False

    def read(self) -> Round:
        """The round that this retry is, after all checks; raises the DownstreamError of what is wrong."""
        try:
            request = self.incoming.request()
        except DownstreamError:
            self.is_counted = True  # it is refused before it is an operation
            raise
        round_ = new_round(self.incoming, request, self.reply, self.live, self.caller, self.started)
        round_.envelope = self.envelope
        return round_

    def continued(self, step: Step) -> None:
        """Count how this retry found its call."""
        self.live.process.metrics.continued(self.live.route.path, step)

    def count(self, ending: Ending) -> None:
        """Count this round, once."""
        if self.is_counted:
            return
        self.is_counted = True
        path, metrics, seconds = self.live.route.path, self.live.process.metrics, world.monotonic() - self.started
        metrics.operation_finished(path, self.envelope.binding.method, self.version, ending, seconds)
