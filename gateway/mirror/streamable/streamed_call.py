"""One call at a modern server with the stream on which its legacy client waits.

The events of a client of 2025-11-25 have ids, so a client whose stream broke comes back with the last one, here or at
another replica. What it must not miss (the questions of the round, the response) is kept for that. Older clients take
events with ids for errors, and never come back.

Source: specification 2025-11-25 basic/transports (Resumability and Redelivery).
"""

import asyncio
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from gateway import world
from gateway.config import Hold, InForce
from gateway.exchange import events as on
from gateway.exchange.commands import LINGER
from gateway.exchange.events import Leg
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import AWAY, Policy, Snapshot
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage, Item, Outbox
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.call_rounds import Progress, Rounds
from gateway.mirror.client_requests import answer_of
from gateway.mirror.mirrored_call import MirroredCall
from gateway.mirror.server_client import RouteServer, ServerClient
from gateway.mirror.streamable import sep_1685_state
from gateway.mirror.streamable.session_homes import Homes
from gateway.mirror.streamable.tokens import EVENT, NESTED, STATE, CallPlace, MirroredSession, Tokens
from gateway.parking.lot import Lot
from gateway.protocol import jsonrpc, mcp, sse
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.runtime.fair_shares import FairTable
from gateway.runtime.tasks import Tasks

_PRIME_SECONDS: Final = 0.25
"""How long the status of a reply stays open for an error of the upstream, which may be a challenge to sign in."""
_MAX_ENDED: Final = 10_000


class Shared:
    """What the streamed calls of one front share."""

    def __init__(self, tokens: Tokens, hold: InForce[Hold], results: Budget, tasks: Tasks) -> None:
        """`results` limits what is kept of calls and of subscriptions, together with the results of other calls."""
        self.tokens = tokens
        self.lot: Lot[StreamedCall] = Lot(hold, results, tasks)
        """The calls that may ask, and their responses for a while."""
        self.homes = Homes(tokens, results)
        self.running: dict[tuple[str, bytes], StreamedCall] = {}
        """All calls without a response, by the session's key with the JSON of the request's id."""
        self.ended: FairTable[str, None] = FairTable(_MAX_ENDED)
        """Calls of dead replicas that were continued here, and are over: an old id continues none of them again."""

    def owns(self, incoming: Incoming) -> bool:
        """Whether a request belongs to a session of the front."""
        return self.tokens.sessions.opens(incoming.headers.get(mcp.SESSION_ID))


class CallStream(Outbox, Leg):
    """A reply on which a client waits for its call."""

    def __init__(self, reply: ReplyWriter, live: LiveRoute) -> None:
        super().__init__(live.deadlines.silence)
        self.reply = reply

    def notify(self, message: bytes) -> None:
        """Send a notification."""
        self.send(sse.encode(message))


class StreamedCall(MirroredCall):
    """One call of this replica (`Parked`)."""

    is_reported = True

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        shared: Shared,
        at: Arrival,
        session: MirroredSession,
        rounds: Rounds,
        *,
        is_continued: bool = False,
        server: ServerClient | None = None,
        key: str | None = None,
    ) -> None:
        """`is_continued` if a dead replica began the call.

        `server` is the route's own if it is not given, and `key` that of the session.
        """
        self.id = rounds.exchange
        self.principal = at.caller.principal
        self.session = session
        self._key = key or session.key, rounds.request.id
        """What no other open call of the client has."""
        self._shared = shared
        self._is_continued = is_continued
        may_park = rounds.request.method in mcp.ASKING
        may_ask = may_park and self.is_in_session
        self._resumes = may_ask and session.profile.resumes
        """Whether the client comes back for this call, if its stream breaks."""
        size = 2 * rounds.kept_bytes
        self._weight = at.live.process.calls.take(self.principal, size, is_continued=is_continued)
        """Released when the call is over."""
        try:
            if may_park:
                shared.lot.park(self)
            super().__init__(
                rounds,
                server or RouteServer(at.live, self.principal),
                Policy(may_ask=may_ask, returns=self._resumes),
                at.incoming if self.is_reported else None,
            )
        except BaseException:
            self._forget()
            raise
        self._number = 0
        self._now = self._running = self._place_running()
        """The place after everything that was put on the stream, and the one at which the round went upstream."""
        self._asked: list[tuple[int, bytes]] = []
        """The events of the round's questions, with the number of the last one in each."""
        # The client may have given the id of a dead replica's call to a newer one, and means that one now.
        _ = shared.running.setdefault(self._key, self)

    # -- the client's side of the call ----------------------------------------------------------------------------

    def _put(self, questions: tuple[Question, ...]) -> None:
        self.report.asked()
        self._number += 1
        self._now = self._place_asking()
        rounds, tokens, events = self._rounds, self._shared.tokens, []
        has_state = self.session.profile.echoes_state and sep_1685_state.DIALECT in self.live.route.dialects
        # Whoever answers has the questions, and their params would fill the id.
        asking = tuple([replace(each, params=None) for each in self._exchange.questions.values()])
        for each in questions:
            place = self._place(
                key=each.key, has_state=has_state, request=rounds.request, progress=rounds.progress, asking=asking
            )
            if not self._resumes:  # nobody could continue the call
                place = place.brief
            asked = sep_1685_state.with_state(each, tokens.of_place(STATE, place)) if has_state else each
            events.append(sse.encode(asked.nested(jsonrpc.encode(tokens.of_place(NESTED, place)))))
        # One id, after the last question: a client that got only some of them has not reached this place.
        events[-1] = self._with_id(events[-1], self._now)
        self._asked.append((self._number, b"".join(events)))
        for leg in self._legs:
            leg.ask(self._asked[-1][1])

    def _move(self) -> None:
        """A round goes upstream, or the server has made a task of the call."""
        self._asked.clear()
        self._tell(self._place_running())
        self._running = self._now
        self._weigh()

    # -- the exchange ---------------------------------------------------------------------------------------------

    def _feed(self, event: on.Event) -> None:
        """See `Engine`."""
        super()._feed(event)
        self._weigh()

    def _weigh(self) -> None:
        """Weigh what the call keeps now; while a round is upstream, it keeps the request that went there too."""
        exchange = self._exchange
        is_running = exchange.calling and not exchange.questions
        kept = (self._rounds.kept_bytes + exchange.kept_bytes) * (2 if is_running else 1)
        self._weight.change(kept + sum([len(events) for _, events in self._asked]))

    def _ended(self) -> None:
        self._weight.release()
        self._asked.clear()
        shared = self._shared
        if shared.running.get(self._key) is self:  # a call that was continued here may have the same id
            del shared.running[self._key]
        if self._is_continued:
            shared.ended.keep(self.principal, self.id, None)
        if LINGER in self._armed:
            shared.lot.keep(self)
        else:
            shared.lot.remove(self)

    def _forget(self) -> None:
        self._weight.release()
        self._shared.lot.remove(self)

    @property
    def kept_bytes(self) -> int:
        """See `Parked`."""
        return self._exchange.kept_bytes + len(self._rounds.request.params)

    # -- places -------------------------------------------------------------------------------------------------

    def _place(self, **more: Any) -> CallPlace:
        """A place in this call as it is now; its content is named in `CallPlace`."""
        process = self.live.process
        return CallPlace(self.session.key, self.id, process.owner, process.epoch, world.wall(), self._number, **more)

    def _place_running(self) -> CallPlace:
        """The place of a call that runs upstream. A plain one can only begin again, but a task goes on."""
        rounds = self._rounds
        progress = rounds.progress if rounds.progress.task is not None else Progress()
        return self._place(rpc_id=rounds.request.id, request=rounds.request, progress=progress)

    def _place_asking(self) -> CallPlace:
        """The place of a call whose client is asked, with all questions of the round."""
        progress, before, still_open = self._rounds.progress, self._now, self._exchange.questions
        # Answered questions stay in the place: if this replica dies, they are asked again (`continued`).
        is_same_round = before.progress.round == progress.round
        asking = (before.asking if is_same_round else ()) or tuple(still_open.values())
        answered = tuple(question.key for question in asking if question.key not in still_open)
        return replace(self._place_running(), progress=progress, asking=asking, answered=answered)

    def _tell(self, place: CallPlace) -> None:
        """Tell the client of a new place in the stream."""
        self._number += 1
        self._now = replace(place, number=self._number)
        for leg in self._legs:
            if leg.reply.started and self._resumes:
                leg.send(self._prime(self._now))

    def _prime(self, place: CallPlace) -> bytes:
        """An event that only marks a place."""
        return self._with_id(b"data: \n\n", place)

    def _with_id(self, event: bytes, place: CallPlace) -> bytes:
        if not self._resumes:
            return event
        return b"id: %b\n%b" % (self._shared.tokens.of_place(EVENT, place).encode(), event)

    # -- from the client ----------------------------------------------------------------------------------------

    def is_open(self, asked: CallPlace) -> bool:
        """Whether a nested request waits for its response."""
        return asked.progress.round == self._rounds.progress.round and asked.key in self._exchange.questions

    def answer(self, asked: CallPlace, message: jsonrpc.Message, at: Arrival) -> None:
        """Take a response to a nested request; one to a question that is not open any more is dropped."""
        if self.is_open(asked):
            self.respond(asked.key, answer_of(message), at.headers)
            if self._exchange.questions:
                self._tell(self._place_asking())

    def restore(self, left: CallPlace) -> None:
        """Go on with the call of a dead replica: its client has questions, or the server works on it."""
        self._restore(Snapshot(AWAY, 0, {each.key: each for each in left.asking}, None, 0))
        self._weigh()
        if not left.asking:
            self._run_rounds()

    def continued(self, left: CallPlace) -> None:
        """Ask again what the client answered to a replica that has died; `left` is its place in the stream."""
        if not left.asking or left.progress.round != self._rounds.progress.round or not self._exchange.calling:
            return
        self._now = left
        lost = tuple(
            [each for each in left.asking if each.key in left.answered and each.key in self._exchange.questions]
        )
        if lost:
            self._asked.clear()
            self._feed(on.Asked(lost))

    # -- the stream -----------------------------------------------------------------------------------------------

    async def write(self, at: Arrival, after: int | None = None) -> Response:
        """Write the call's messages until its response.

        `after` is the number of the client's last event, if the client has come back.
        """
        if after is not None:
            await at.reply.start()
        self.report.request_id, at.incoming.exchange_id = at.incoming.request_id, self.id
        leg = CallStream(at.reply, self.live)
        missed = [events for number, events in self._asked if number > (after or 0)]
        if after is not None and not missed and self._exchange.calling:
            # No event has told it of a step while it was away: another replica would take the step again.
            missed = [self._prime(self._now)]
        for events in missed:
            leg.ask(events)
        self.open(leg)
        try:
            first = self._first(leg) if after is None and self._resumes else None
            last = await leg.reply.deliver(leg, first, keeps_alive=self.streams)
            self._number += 1
            end = self._place(rpc_id=self._rounds.request.id, is_final=True)
            return await leg.reply.finish(last, self._with_id(sse.encode(last.body), end))
        finally:
            self._waits_no_more(leg)
            self._feed(on.Left(leg))

    async def _first(self, leg: CallStream) -> Item:
        """The first item, after a priming event if the client may have to come back for the others."""
        item = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_PRIME_SECONDS):
                item = await leg.take()
        if not isinstance(item, FinalMessage):
            # At the place before the item, which may be a question: a client that loses it has to be asked again.
            await leg.reply.start()
            await leg.reply.write(self._prime(self._running))
        return item or await leg.take()
