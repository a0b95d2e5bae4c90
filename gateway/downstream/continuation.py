"""Serves the further rounds of a call, held here or elsewhere, or continued by this replica.

A retry brings the state that an earlier round sealed. If this replica holds the call, the call gets the answers here.
If not, the replica that holds it serves the retry, or this one takes the call over. The same holds for a path whose
route is gone, except that a call is not taken over there: that would be to serve the route.
"""

from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field

from gateway import world
from gateway.auth.authenticator import Authenticator
from gateway.bridge.driver import Driver
from gateway.cluster.router import Held, TakeOver
from gateway.downstream.legs import Legs
from gateway.downstream.rejections import no_route
from gateway.downstream.round import Round, new_round
from gateway.exchange.commands import TTL
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.parking import orphans
from gateway.parking.cold_calls import ColdCall
from gateway.parking.lot import Lot
from gateway.protocol.errors import DownstreamError, InvalidState
from gateway.routes.live_route import LiveRoute, ProcessScope
from gateway.seal.request_state import Envelope, check
from gateway.sessions.pool.authorisation import authorise, has_authorised
from gateway.tasks.live_task import TaskTable
from gateway.tasks.task_call import TaskCall
from gateway.telemetry import ColdEnding, Step


@dataclass(eq=False)
class Continuation:
    """The further rounds that reach one listener."""

    _process: ProcessScope
    lot: Lot[Driver]
    tasks: TaskTable
    _authenticator: Authenticator
    legs: Legs = field(init=False)

    def __post_init__(self) -> None:
        self.legs, self._router = Legs(self._process.tasks), self._process.router

    def serve(self, round_: Round) -> Awaitable[Response]:
        """Serve a further round on a route; raises InvalidState or NoHandshake if its state does not open.

        Like the methods that it calls, it is no coroutine as long as nothing has to be awaited.
        """
        incoming, envelope = round_.incoming, self._opened(round_)
        if incoming.span is not None:
            incoming.span.note("round", envelope.round + 1)
            incoming.span.link(envelope.trace or b"")
        here = self._held(envelope) or self._cold(envelope)
        if here is None:
            return self._serve_elsewhere(round_, envelope)
        self._check_arguments(round_, envelope)
        if isinstance(here, ColdCall) and envelope.round != here.round:
            raise InvalidState("answered")
        if here.live.upstream.pool is not round_.live.upstream.pool:
            # A reload gave the path another upstream; the call continues where it began.
            round_ = new_round(incoming, round_.request, round_.reply, here.live, round_.caller, round_.started)
        if isinstance(here, ColdCall):
            return self._take_over(round_, envelope, is_proven=True, cold=here)
        # Before anything is answered: from then on, this client gets the messages of the upstream.
        if has_authorised(round_.live.upstream.pool, round_.key, round_.headers):
            return self._answer(round_, envelope, here)
        return self._authorise_first(round_, envelope, here)

    async def _serve_elsewhere(self, round_: Round, envelope: Envelope) -> Response:
        """Have another replica serve a round, or take its call over."""
        incoming = round_.incoming
        size = 2 * len(incoming.body)  # as it came, and sealed for the other replica
        with self._process.calls.take(round_.caller.principal, size, is_continued=True):
            found = await self._elsewhere(envelope, incoming, round_.reply)
        if isinstance(found, TakeOver):
            self._check_arguments(round_, envelope)
            return await self._take_over(round_, envelope, is_proven=found.proven)
        return found

    def give_up(self, incoming: Incoming) -> None:
        """End the call whose next round this would be, since its client cannot come back."""
        assert incoming.caller is not None, "a further round has the caller of the round before"
        with suppress(DownstreamError):
            driver = self.lot.find(incoming.open_state(self._process.states, incoming.caller).exchange)
            if driver is not None:
                driver.fire(TTL)

    async def find_route(self, incoming: Incoming, reply: ReplyWriter) -> LiveRoute | Response:
        """Return the removed route under which a call of this replica began, or the reply of another replica.

        The route is not remembered: the state opens or it does not, on every replica. Raises MethodNotFound, as for
        a path that never had a route.
        """
        started = world.monotonic()
        try:
            request, states = incoming.request(), self._process.states
            try:
                caller = await self._authenticator.caller(incoming, is_checked=True)
                envelope = incoming.open_state(states, caller)
            except InvalidState:
                if self._authenticator.verifies:
                    raise
                # It is not known any more whether the upstream saw the credential.
                incoming.caller = None
                caller = await self._authenticator.caller(incoming, is_checked=False)
                envelope = incoming.open_state(states, caller)
        except DownstreamError:
            raise no_route(incoming.path) from None  # only at a route does a state count as rejected
        here = self._held(envelope) or self._cold(envelope)
        if here is not None:
            return here.live
        found = await self._elsewhere(envelope, incoming, reply)
        if isinstance(found, TakeOver):
            raise no_route(incoming.path)
        if incoming.peer_request is None:
            # The state was sealed for this path, so it was a route once: the client did not choose the label.
            metrics, seconds = self._process.metrics, world.monotonic() - started
            metrics.operations[incoming.path, request.method, request.said.version, *found.ending].observe(seconds)
        return found

    def _opened(self, round_: Round) -> Envelope:
        """Open the state of a round; raises InvalidState, or NoHandshake.

        If another replica seems to hold the call, that one checks the arguments: their digest would cost a tenth of
        what forwarding costs here. Before such a round is served here, `_check_arguments` does it. Params in the very
        spelling of the call that is held here need no digest either.
        """
        if round_.incoming.state is not None:
            return round_.incoming.state
        try:
            envelope = self._process.states.open(round_.request.request_state or "")
        except InvalidState as exc:
            round_.check_era(exc)
            raise
        round_.incoming.exchange_id = envelope.exchange
        leaves = self._leaves(round_, envelope)
        held = None if leaves else self.lot.find(envelope.exchange)
        are_known = leaves or (held is not None and held.has_params(round_.request))
        arguments = envelope.binding.arguments if are_known else None
        check(envelope, round_.incoming.bearer(round_.caller), round_.request, arguments)
        return envelope

    def _leaves(self, round_: Round, envelope: Envelope) -> bool:
        """Whether another replica seems to hold the call."""
        return round_.incoming.peer_request is None and envelope.owner not in (self._process.owner, "")

    def _check_arguments(self, round_: Round, envelope: Envelope) -> None:
        """Check what `_opened` has left to the call's owner, if it did."""
        if round_.incoming.state is None and self._leaves(round_, envelope):
            check(envelope, round_.incoming.bearer(round_.caller), round_.request)

    async def _elsewhere(self, envelope: Envelope, incoming: Incoming, reply: ReplyWriter) -> Response | TakeOver:
        """Have another replica serve a retry whose call is not here, or learn that this one may take the call over."""
        if self._process.is_own(envelope.owner, envelope.epoch) and not self._is_let_go(envelope.exchange):
            raise InvalidState("ended")  # a call of this very process would be here
        is_former = envelope.owner == self._process.owner  # a former process of this id held the call
        held = Held(envelope.owner, envelope.exchange, envelope.is_resumable, may_have_moved=is_former)
        return await self._router.route(held, incoming, reply)

    def _is_let_go(self, exchange: str) -> bool:
        """Whether this process held a call that others may continue, now that it has parted."""
        return exchange in self._process.draining.let_go or (
            self._router.has_parted and self.lot.cold.find(exchange) is not None
        )

    async def _authorise_first(self, round_: Round, envelope: Envelope, driver: Driver) -> Response:
        with round_.weigh(is_continued=True):
            await driver.authorise(round_.key, round_.headers)
        # The call may have ended while the upstream checked the credential, or been let go.
        found = self.lot.find(envelope.exchange)
        if found is None and self._is_let_go(envelope.exchange):
            return await self._serve_elsewhere(round_, envelope)
        return await self._answer(round_, envelope, found or driver)  # one that has ended says so

    def _held(self, envelope: Envelope) -> Driver | None:
        """Return the held call of a state, unless another run has continued it: the state is of a newer round."""
        if (task := self.tasks.find(envelope.exchange)) is not None:
            return task  # of whose handle the client need not have heard
        driver = self.lot.find(envelope.exchange)
        if driver is None or envelope.owner == self._process.owner or not driver.is_behind(envelope):
            return driver
        driver.lose(envelope)
        return None

    def _cold(self, envelope: Envelope) -> ColdCall | None:
        """Return the cold call of a state, unless others continue it.

        One has if the state is of a newer round, and one will if this process has parted.
        """
        cold = self.lot.cold.find(envelope.exchange)
        if cold is not None and cold.round < envelope.round:
            _ = self.lot.cold.take(cold)
            self._process.metrics.cold_calls_ended[cold.live.route.path, ColdEnding.CONTINUED].inc()
            remains, headers = cold.unpacked()
            if not envelope.is_of_call_at(remains.upstream):  # they have run it again, and nobody cancels this run
                reason = "another replica has run the call again"
                ending = orphans.give_up(cold.live, cold.id, remains, reason, headers)
                self._process.tasks.spawn(ending, "send upstream")
            return None
        return None if self._router.has_parted else cold

    async def _take_over(
        self, round_: Round, envelope: Envelope, *, is_proven: bool, cold: ColdCall | None = None
    ) -> Response:
        """Continue a call from its state: one that no replica within reach holds, or a `cold` one of this replica.

        Nothing but the record shows that the answers to a cold call were not sent yet.
        """
        live, upstream = round_.live, envelope.upstream
        await authorise(live.upstream.pool, round_.key, round_.headers, elsewhere=upstream)
        driver = self.lot.find(envelope.exchange)
        if driver is not None:  # another retry continued the call meanwhile
            return await self._answer(round_, envelope, driver)
        if self._router.has_parted:  # while the upstream checked the credential
            return await self._serve_elsewhere(round_, envelope)
        if cold is not None and not self.lot.cold.take(cold):
            raise InvalidState("ended")  # it expired meanwhile
        round_.incoming.keep_once()
        queue = round_.queue()
        is_task = upstream is not None and upstream.task is not None
        driver = Driver(round_, self.lot, TaskCall if is_task else None)
        try:
            driver.take_over(envelope, queue, is_proven=is_proven, cold=cold)
        except BaseException:
            if cold is not None:
                self.lot.cold.add(cold)
            raise
        if cold is not None:
            self._process.metrics.cold_calls_ended[live.route.path, ColdEnding.RESUMED].inc()
        return await self.legs.write(round_, driver, queue)

    def _answer(self, round_: Round, envelope: Envelope, driver: Driver) -> Awaitable[Response]:
        queue = round_.queue()
        round_.step(Step.HELD)
        driver.answer(queue, round_.request, envelope.round, round_.headers)
        round_.drop_body()
        return self.legs.write(round_, driver, queue)
