"""Continues calls from their requestState alone: those of other replicas, or cold ones that this one let go of."""

import math

from msgspec.structs import replace

from gateway import world
from gateway.bridge.call_context import Context
from gateway.config import Config
from gateway.exchange.machine import REFERRED
from gateway.parking import orphans
from gateway.parking.cold_calls import ColdCall, packed
from gateway.parking.orphans import Remains
from gateway.protocol import mcp
from gateway.protocol.errors import OwnerLost
from gateway.routes.deadlines import wait_seconds
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, Whereabouts


class Takeover:
    """The call of another replica, which may be dead or only silent, or a cold call of this one.

    As long as its death is not proven, that replica may still hold the call. So this one neither cancels the call nor
    declares it lost, and gives the exchange back if it cannot resume the call.
    """

    __slots__ = ("_may_be_sent_already", "cold", "envelope", "owner_is_dead")

    def __init__(self, envelope: Envelope, cold: ColdCall | None, *, owner_is_dead: bool, may_run_twice: bool) -> None:
        """`owner_is_dead` if no other process holds the call, so also if this one kept it as a `cold` call."""
        self.owner_is_dead = owner_is_dead
        self.cold = cold
        self._may_be_sent_already = envelope.state == REFERRED and not may_run_twice
        """By the owner, since it asked for visits to URLs."""
        self.envelope = handoff.only_for_its_owner(envelope) if self._may_be_sent_already else envelope
        """The state from which the call is continued, as far as this process may continue it."""

    def left(self, config: Config) -> Envelope | None:
        """What the state says of the owner as long as the call is not picked up; None if this process let go of it.

        A state that named this replica would be refused once the call was given back. The owner may still hold the
        call, unless it is dead, and does so no longer than the state said.
        """
        if self.cold is not None:
            return None
        if not self.owner_is_dead:
            return self.envelope
        return replace(self.envelope, expires=world.wall() + wait_seconds(config))

    def renew(self, config: Config) -> None:
        """The client has a newer state of the same round, so that a record of the call lasts as long as that one."""
        if self.cold is not None:
            self.cold = replace(self.cold, due=math.ceil(world.monotonic() + wait_seconds(config)))

    def upstream(self, *, is_recorded: bool) -> Whereabouts:
        """Where to resume the call; raises OwnerLost. `is_recorded` if its state had room for the answers so far."""
        upstream = self.envelope.upstream
        if upstream is not None and upstream.is_resumable:
            return upstream
        fate = "Its server is told to cancel it, and it may have had effects"
        if self._may_be_sent_already:
            gone = (
                "its server asked for a visit to a URL, and nothing tells whether the call has been sent again since"
            )
            fate, is_recorded = "It may have had effects", True
        elif upstream is None:
            gone = (
                "its requestState does not say where it runs: it had no session yet, its server has none, or it had "
                "no room for that"
            )
            fate = "It may have had effects"  # nothing tells what to cancel
        elif upstream.task is not None:
            gone = "its server had sent neither the id of its task nor an event id to resume its stream from"
            fate = "Its server is told to cancel it, but a task that it had made before may still run"
        else:
            gone = "its server had sent no event id to resume its stream from"
        once = (
            "the tool does not say that it may run twice"
            if is_recorded
            else "its answers did not fit into its requestState"
        )
        raise OwnerLost(
            self.envelope.owner,
            f"The replica {self.envelope.owner} that held this call is gone, and the call cannot be picked up or run "
            f"again: {gone}, and {once}. {fate}; check before you call again without requestState",
        )

    def end(self, context: Context, reason: str, *, asks: bool = False) -> None:
        """Cancel a call that was not picked up, if no other process holds it; it `asks` if nobody will answer that."""
        upstream = self.envelope.upstream
        if upstream is None or not self.owner_is_dead:
            return
        asked = self.envelope.open if asks and not upstream.task else ()
        questions = tuple((each.upstream_id, each.method) for each in asked if each.upstream_id)
        remains = Remains(upstream, questions)
        ending = orphans.give_up(context.live, context.exchange_id, remains, reason, context.headers)
        context.live.process.tasks.spawn(ending, "send upstream")


def cooled(
    context: Context, upstream: Whereabouts | None, due: float, *, is_taken_over: bool, is_apart: bool
) -> ColdCall | None:
    """The record of a parked call that is due at a monotonic time; None if the call must stay held.

    A call without open questions still works, and its client comes back at once. A state that was shortened, or that
    is older than the first event id, lacks what a retry may need: the text of a question that is still open then, or
    the way to the call. Of all states of the round, the client may have read only that one. A task may be younger than
    the state, and its stream is not that of the call: only its follower can go on with it, or cancel it.
    """
    exchange = context.exchange
    is_lacking = not exchange.questions or context.lacking_round == exchange.round
    if upstream is None or upstream.task is not None or is_lacking:
        return None
    questions = [(each.upstream_id, each.method) for each in exchange.questions.values() if each.upstream_id]
    # A trace and an id differ from call to call, while the calls of one caller are to share one text.
    own = {*mcp.TRACE_KEYS, context.live.route.upstream.request_id_header}
    headers = {name: value for name, value in context.headers.items() if name not in own}
    # The server's own description of itself is in the state.
    upstream = Whereabouts(upstream.session, upstream.version, upstream.call, b"", upstream.cursor)
    texts = packed(Remains(upstream, tuple(questions)), headers)
    return ColdCall(
        context.exchange_id,
        exchange.round,
        math.ceil(due),
        context.live,
        context.key.principal,
        is_taken_over,
        is_apart,
        *texts,
    )
