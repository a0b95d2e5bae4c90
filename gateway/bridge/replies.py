"""Sends each leg of one exchange its notifications, then exactly one final message."""

from typing import Final

from gateway.bridge.call_context import Context
from gateway.bridge.call_report import Report
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.exchange import commands as do
from gateway.exchange.events import Leg
from gateway.protocol import jsonrpc
from gateway.protocol.errors import GatewayError, LocalProtocolError
from gateway.telemetry import Ending, Outcome

_ASKED: Final = Ending(Outcome.INPUT_REQUIRED)
_STATE_ONLY: Final = Ending(Outcome.STATE_ONLY)


class Replies:
    """The queues of the legs that wait."""

    __slots__ = ("_context", "_queues", "_report", "last_bytes")

    def __init__(self, context: Context, report: Report) -> None:
        self._context = context
        self._report = report
        self._queues: tuple[ResponseQueue, ...] = ()
        """Nearly always one or none."""
        self.last_bytes = 0
        """The size of the newest reply."""

    def add(self, queue: ResponseQueue) -> None:
        """A leg waits from now on; it is the newest."""
        self._queues += (queue,)
        self._context.request_id, self._context.span = queue.request_id, queue.span

    def discard(self, leg: Leg) -> None:
        """A leg no longer waits, or never did."""
        if self._queues:
            self._queues = tuple([queue for queue in self._queues if queue.leg is not leg])

    def _queue(self, leg: Leg) -> ResponseQueue:
        for queue in self._queues:
            if queue.leg is leg:
                return queue
        raise LocalProtocolError("a message for a leg that does not wait")

    def forward(self, leg: Leg, message: bytes) -> None:
        """Send a leg one notification."""
        self._queue(leg).send(message)

    def end(self, command: do.Reply | do.FailWith) -> None:
        """End legs with what the upstream said."""
        if isinstance(command, do.Reply):
            for leg in command.legs:
                self._finish(leg, FinalMessage(jsonrpc.result(leg.id, command.result), ending=self._report.ending))
            return
        ending = self._report.failed_with(command.error)
        for leg in command.legs:
            self._finish(leg, FinalMessage(jsonrpc.failure(leg.id, command.error), ending=ending))

    def fail(self, legs: tuple[Leg, ...], error: GatewayError) -> None:
        """End legs with an error of the gateway."""
        self._report.failed(error)
        for leg in legs:
            self._finish(leg, FinalMessage.of_error(error, leg.id, self._queue(leg).request_id))

    def fail_all(self, error: GatewayError) -> None:
        """End every leg that waits with an error of the gateway."""
        self.fail(tuple([queue.leg for queue in self._queues]), error)

    def ask(self, ask: do.Ask, body: bytes) -> None:
        """End legs with an InputRequiredResult."""
        ending = _ASKED if ask.questions else _STATE_ONLY
        for leg in ask.legs:
            self._finish(leg, FinalMessage(jsonrpc.result(leg.id, body), ending=ending))

    def _finish(self, leg: Leg, last: FinalMessage) -> None:
        queue = self._queue(leg)
        if len(self._queues) == 1:
            self._queues = ()
        else:
            self.discard(leg)
        queue.finish(last)
        self.last_bytes = len(last.body)
        if queue.dropped:
            live = self._context.live
            live.process.metrics.notifications_dropped(live.route.path, queue.dropped)
