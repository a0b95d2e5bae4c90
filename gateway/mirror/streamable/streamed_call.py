"""One call at a modern server with the stream on which its legacy client waits.

The events of a client of 2025-11-25 have ids, so a client whose stream broke comes back with the last one, here or at
another replica. What it must not miss (the questions of the round, the response) is kept for that. Older clients take
events with ids for errors, and never come back.

Source: specification 2025-11-25 basic/transports (Resumability and Redelivery).
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from msgspec.structs import replace

from gateway import world
from gateway.cluster.peer_exchange import Replied
from gateway.exchange.commands import Timer
from gateway.http import reply_stream
from gateway.http.outbox import FinalMessage, Item, Outbox
from gateway.http.reply import ReplyWriter
from gateway.mirror.call_rounds import MirroredCall, Progress, Question, Request
from gateway.mirror.call_runner import Runner
from gateway.mirror.server_client import ServerClient
from gateway.mirror.streamable import sep_1685_state
from gateway.mirror.streamable.call_report import CallReport
from gateway.mirror.streamable.mirror_arrival import MirrorArrival
from gateway.mirror.streamable.tokens import CallPlace, Mark, NestedId, Session, Tokens
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.mirror.upstream import CallServer
from gateway.parking.lot import Lot
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallLost, GatewayError
from gateway.runtime.fair_shares import FairTable
from gateway.telemetry import Ending, Outcome
from gateway.upstream.channel import Headers

_PRIME_SECONDS: Final = 0.25
"""How long the status of a reply stays open for an error of the upstream, which may be a challenge to sign in."""
_MAX_ENDED: Final = 10_000
_LET_GO: Final = FinalMessage(b"", ending=Ending(Outcome.CANCELLED))
"""Ends a stream without a response, because the client has another one or may open one elsewhere."""


Call = TypeVar("Call", bound="StreamedCall")


class Shared(Generic[Call]):
    """What the streamed calls of one process share."""

    def __init__(self, tokens: Tokens, lot: Lot[Call]) -> None:
        """`lot` has the calls that may ask, and their responses for a while."""
        self.tokens, self.lot = tokens, lot
        self.catalog = ToolCatalog()
        self.running: dict[tuple[str, bytes], Call] = {}
        """All calls without a response, by the session's key with the JSON of the request's id."""
        self.ended: FairTable[str, None] = FairTable(_MAX_ENDED)
        """Calls of dead replicas that were continued here, and are over: an old id continues none of them again."""


class StreamedCall:
    """One call of this replica (`Hears`, `Parked`)."""

    keeps_alive = True
    """Whether the stream of a client that waits for long gets comments."""
    is_in_session = True

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        shared: Shared[Any],
        at: MirrorArrival,
        session: Session,
        exchange: str,
        request: Request,
        log_level: str | None,
        progress: Progress | None = None,
        server: ServerClient | None = None,
    ) -> None:
        """`progress` is set if this continues a call that a dead replica began.

        `server` is the route's own if it is not given.
        """
        self.id = exchange
        self.principal = at.caller.principal
        self.session = session
        self._shared = shared
        self._live = at.live
        self._place = at.new_place(session.key, exchange)
        self._is_continued = progress is not None
        upstream = CallServer.of(at.live, at.caller_key, shared.catalog, server)
        progress = progress or Progress()
        drives = upstream.drives_tasks
        self.call = call = MirroredCall(request, session.profile, exchange, progress, drives_tasks=drives)
        self.runner = Runner(call, upstream, self, lambda: log_level)
        self._number = 0
        self._mark_now = self._mark_running = self._mark()
        """The place after everything that was put on the stream, and the one at which the round went upstream."""
        self._queue: Outbox | None = None
        self._asked: list[tuple[int, bytes]] = []
        """The events of the round's questions, with the number of the last one in each."""
        is_continued = self._is_continued
        self._weight = at.live.process.calls.take(self.principal, 2 * call.kept_bytes, is_continued=is_continued)
        """Released when the call is over."""
        try:
            if request.method in mcp.ASKING:
                shared.lot.park(self)
            self.report = self._new_report(at)
        except BaseException:
            self._weight.release()
            shared.lot.remove(self)
            raise
        self._final: FinalMessage | None = None
        self._final_event = b""
        self._reply: ReplyWriter | None = None
        """The reply that the client reads, while it does."""
        shared.running[self._key] = self

    def _new_report(self, at: MirrorArrival) -> CallReport:
        report = CallReport(at.live, self.session, self.call)
        report.trace(at.incoming)
        return report

    @property
    def _key(self) -> tuple[str, bytes]:
        """What no other open call of the client has."""
        return self.session.key, self.call.request.id

    @property
    def _may_ask(self) -> bool:
        return self.call.request.method in mcp.ASKING

    @property
    def _resumes(self) -> bool:
        """Whether the client comes back for this call, if its stream breaks."""
        return self.session.profile.resumes and self._may_ask

    # -- the client's side of the call (`Hears`) ----------------------------------------------------------------

    def notify(self, message: bytes) -> None:
        """See `Hears`."""
        if self._queue is not None:
            self._queue.send(sse.encode(message))

    def ask(self, questions: tuple[Question, ...]) -> None:
        """See `Hears`."""
        if self._queue is None and not self._resumes:
            self.abandon()  # its client has left, and nobody else could answer
            return
        self.report.asked(questions)
        self._number += 1
        self._mark_now = self._mark_asking()
        events = [sse.encode(self._asking(question)) for question in questions]
        # One id, after the last question: a client that got only some of them has not reached this place.
        events[-1] = self._with_id(events[-1], self._mark_now)
        self._asked.append((self._number, b"".join(events)))
        self._weigh()
        if self._queue is not None:
            self._queue.ask(self._asked[-1][1])

    def sending(self) -> Headers:
        """See `Hears`."""
        self._asked.clear()
        self._move(self._mark)
        self._mark_running = self._mark_now
        self._weigh()
        return self.report.sending()

    def end(self, message: bytes) -> None:
        """See `Hears`."""
        self.report.finished()
        self._finish(FinalMessage(message))

    def fail(self, error: GatewayError) -> None:
        """See `Hears`."""
        self.report.failed(error)
        self._finish_with(error)

    def _finish_with(self, error: GatewayError) -> None:
        id_, request_id = self.call.request.id, self.report.request_id
        self._finish(FinalMessage.of_error(error, id_, request_id, in_session=self.is_in_session))

    def _finish(self, final: FinalMessage) -> None:
        self._number += 1
        self._asked.clear()
        self._final = final
        place = self._placed()
        mark = Mark(place, self._number, self.call.request.id, is_final=True)
        self._final_event = self._with_id(sse.encode(final.body), mark)
        if self._queue is not None:
            self._queue.finish(final)
        self._unregister()
        self._live.deadlines.shared[Timer.TTL].disarm(self)
        if self._resumes:
            self._shared.lot.keep(self)
            self._live.deadlines.shared[Timer.LINGER].arm(self, self.abandon)
        else:
            self._shared.lot.remove(self)

    def _weigh(self) -> None:
        """Weigh what the call keeps now; while a round is upstream, it keeps the request that went there too."""
        kept = self.call.kept_bytes * (2 if self.runner.is_running else 1)
        self._weight.change(kept + sum([len(events) for _, events in self._asked]))

    def _unregister(self) -> None:
        self._weight.release()
        if self._shared.running.get(self._key) is self:
            del self._shared.running[self._key]
        if self._is_continued:
            self._shared.ended.keep(self.principal, self.id, None)

    # -- places -------------------------------------------------------------------------------------------------

    def _placed(self) -> CallPlace:
        return replace(self._place, issued=world.wall())

    def _mark(self) -> Mark:
        """The place of a call that runs upstream. A plain one can only begin again, but a task goes on."""
        call = self.call
        progress = call.progress if call.live_task is not None else Progress()
        return Mark(self._placed(), self._number, call.request.id, request=call.request, progress=progress)

    def _mark_asking(self) -> Mark:
        """The place of a call whose client is asked, with all questions of the round."""
        call, before = self.call, self._mark_now
        is_same_round = before.progress.round == call.progress.round
        asking = (before.asking if is_same_round else ()) or tuple(call.open.values())
        answered = tuple(question.key for question in asking if question.key not in call.open)
        mark = Mark(self._placed(), self._number, call.request.id, request=call.request, progress=call.progress)
        return replace(mark, asking=asking, answered=answered)

    def _move(self, mark: Callable[[], Mark]) -> None:
        """Tell the client of a new place in the stream."""
        self._number += 1
        self._mark_now = mark()
        if self._queue is not None and self._reply is not None and self._reply.started and self._resumes:
            self._queue.send(self._prime(self._mark_now))

    def _prime(self, mark: Mark) -> bytes:
        """An event that only marks a place."""
        return self._with_id(b"data: \n\n", mark)

    def _with_id(self, event: bytes, mark: Mark) -> bytes:
        if not self._resumes:
            return event
        return b"id: %b\n%b" % (self._shared.tokens.event_id(mark).encode(), event)

    def _asking(self, question: Question) -> bytes:
        """The nested request of a question."""
        call, tokens = self.call, self._shared.tokens
        has_state = self.session.profile.echoes_state and sep_1685_state.DIALECT in self._live.route.dialects
        nested = NestedId(
            self._placed(),
            call.progress.round,
            question.key,
            call.request,
            call.progress,
            tuple(call.open),
            has_state=has_state,
        )
        if not self._resumes:  # nobody could continue the call
            nested = nested.brief
        if has_state:
            question = sep_1685_state.with_state(question, tokens.state(nested))
        return question.asked(tokens.nested_id(nested))

    # -- from the client ----------------------------------------------------------------------------------------

    def is_open(self, nested: NestedId) -> bool:
        """Whether a nested request waits for its response."""
        return nested.round == self.call.progress.round and nested.key in self.call.open

    def answer(self, nested: NestedId, message: jsonrpc.Message, headers: Headers) -> None:
        """Take a response to a nested request; one to a question that is not open any more is dropped."""
        if not self.is_open(nested):
            return
        was_open = len(self.call.open)
        self.report.answered(self.call.open[nested.key])
        self.runner.answer(nested.key, message, headers)
        self._weigh()
        if not self.runner.is_over and 0 < len(self.call.open) < was_open:
            self._move(self._mark_asking)

    def continued(self, mark: Mark) -> None:
        """Ask again what the client answered to a replica that has died; `mark` is its place in the stream."""
        if mark.progress.round != self.call.progress.round or self.runner.is_over:
            return
        self._mark_now = mark
        lost = tuple(each for each in mark.asking if each.key in mark.answered and each.key in self.call.open)
        self.call.open.update({each.key: each for each in mark.asking if each.key in self.call.open})
        if lost:
            self._asked.clear()
            self.ask(lost)

    def reopen(self, questions: Iterable[Question], headers: Headers) -> None:
        """Go on where the client has these questions, which a replica asked that has died."""
        self.runner.headers = headers
        self.call.open.update({question.key: question for question in questions})
        self._weigh()

    def wait(self) -> None:
        """Wait for the client to come back, but not for ever."""
        self._live.deadlines.shared[Timer.TTL].arm(self, self.abandon)

    def abandon(self) -> None:
        """Give the call up: nobody waits for it any more."""
        self.runner.cancel()
        self.report.abandoned()
        self._unregister()
        deadlines = self._live.deadlines.shared
        deadlines[Timer.TTL].disarm(self)
        deadlines[Timer.LINGER].disarm(self)
        self._shared.lot.remove(self)
        self._detach_queue()

    def forget(self) -> None:
        """See `Parked`."""
        self._live.deadlines.shared[Timer.LINGER].disarm(self)

    @property
    def kept_bytes(self) -> int:
        """See `Parked`."""
        return len(self._final_event) * 2 + len(self.call.request.params)

    def _detach_queue(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None and self._final is None:
            queue.finish(_LET_GO)

    # -- the stream ---------------------------------------------------------------------------------------------

    async def write(self, reply: ReplyWriter, request_id: str, after: int | None = None) -> Replied:
        """Write the call's messages until its response.

        `after` is the number of the client's last event, if the client has come back.
        """
        self._detach_queue()
        self._reply = reply
        live, self.report.request_id = self._live, request_id
        queue = self._queue = Outbox(live.deadlines.silence, live.config.limits.behind_bytes)
        live.deadlines.shared[Timer.TTL].disarm(self)
        missed = [events for number, events in self._asked if number > (after or 0)]
        for events in missed:
            queue.send(events)
        if self._final is not None:
            queue.finish(self._final)
        try:
            first = self._first(queue, reply, after, has_missed=bool(missed))
            last = await reply_stream.write(queue, reply, first, keeps_alive=self.keeps_alive)
            return await reply_stream.finish(reply, last, self._final_event)
        finally:
            if self._queue is queue:
                self._queue = self._reply = None
                self._left()

    def _left(self) -> None:
        """The client's stream is gone."""
        if self._final is not None:
            return
        if self._resumes or (self._may_ask and self.runner.is_running):
            # A broken connection is no cancellation (2025-11-25 basic/transports); a tool may have effects.
            self.wait()
        else:
            self.abandon()

    async def _first(self, queue: Outbox, reply: ReplyWriter, after: int | None, *, has_missed: bool) -> Item:
        """The first item, after a priming event if the client may have to come back for the others."""
        if after is not None:
            await reply.start()
            if not has_missed and self._final is None:
                await reply.write(self._prime(self._mark_now))
        if after is not None or has_missed or not self._resumes:
            return await queue.take()
        item = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_PRIME_SECONDS):
                item = await queue.take()
        if not isinstance(item, FinalMessage):
            await reply.start()
            await reply.write(self._prime(self._mark_running))
        return item or await queue.take()


def owner_lost(owner: str) -> CallLost:
    """The error for a call whose replica has died while it ran upstream."""
    return CallLost(
        f"The replica {owner} ended while it ran this call; the call may have had effects: check them before calling "
        "again",
        data={"reason": "owner_lost"},
    )
