"""The exchange of a legacy client before a modern server: nested requests on one side, further calls on the other."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

from msgspec import Raw

from gateway.engine.engine import Engine
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import LINGER, Timer
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import Exchange, Policy
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.mirror.call_rounds import CallServer, Progress, Rounds
from gateway.mirror.client_requests import Profile, Request
from gateway.protocol import jsonrpc
from gateway.protocol.errors import GatewayError
from gateway.telemetry import COMPLETE, Ending, Outcome
from gateway.upstream.channel import Headers

_LET_GO: Final = FinalMessage(b"", ending=Ending(Outcome.CANCELLED))
"""Ends a stream without a response, because the client has another one or may open one elsewhere."""


class MirroredCall(Engine):
    """One call; a subclass knows the client's transport, whose legs take notifications and the final message."""

    is_in_session = True
    streams = True
    """Whether the client reads notifications and comments while it waits."""

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        upstream: CallServer,
        exchange: str,
        request: Request,
        profile: Profile,
        headers: Headers,
        log_level: str | None,
        policy: Policy,
        progress: Progress = Progress(),  # noqa: B008  (frozen)
        incoming: Incoming | None = None,
    ) -> None:
        """See `Rounds`."""
        super().__init__(upstream.live, Exchange(profile.declared, policy))
        self._rounds = Rounds(upstream, self, exchange, request, profile, headers, progress, log_level, incoming)
        self.report = self._rounds.report

    @property
    def request_id(self) -> str:
        """See `Listener`."""
        return self.report.request_id

    def hear(self, event: on.Event) -> None:
        """Take one event of the server's side."""
        match event:
            case on.Sent():
                self._move()
            case on.Notified(message=message):
                legs: tuple[Any, ...] = self._exchange.legs if self.streams else ()
                for leg in legs:
                    leg.notify(message)
            case _:
                self._feed(event)

    # -- from the client's side -----------------------------------------------------------------------------------

    def open(self, leg: on.Leg) -> None:
        """A leg waits for the call: the first one, which starts it, or another one."""
        self._legs = (leg,)
        self._feed(on.Opened(leg))

    def respond(self, key: str, answer: Raw | jsonrpc.Error, headers: Headers) -> None:
        """Take the answer to a question; the last one of a round goes upstream with its own headers."""
        self._rounds.headers = headers
        self._feed(on.Responded(key, answer))

    def want_level(self, level: str) -> None:
        """The client wants the log messages of another level from the next round on."""
        self._rounds.log_level = level

    def cancel(self) -> None:
        """Give the call up, because its client wants it no longer."""
        self._feed(on.Cancelled())

    def stop(self, error: GatewayError) -> None:
        """End the call with an error."""
        self._feed(on.Stopped(error))

    # -- the exchange ---------------------------------------------------------------------------------------------

    def fire(self, timer: Timer) -> None:
        """See `Engine`; both timers limit how long the client may be away."""
        self._feed(on.Expired())
        if timer is LINGER:
            self._forget()

    def _drop(self, reason: str = "") -> None:  # noqa: ARG002  (a modern server gets no reason)
        """See `Engine`."""
        self._rounds.cancel()
        self._over(Ending(Outcome.CANCELLED))

    def _fail(self, legs: Iterable[Any], error: GatewayError | jsonrpc.Error) -> None:
        """See `Engine`."""
        id_ = self._rounds.request.id
        if isinstance(error, GatewayError):
            self._over(error=error)
            final = FinalMessage.of_error(error, id_, self.report.request_id, in_session=self.is_in_session)
            self._finish(legs, final)
        else:
            self._answer(legs, jsonrpc.failure(id_, error))

    def _answer(self, legs: Iterable[Any], message: bytes, status: int = 200) -> None:
        """End legs with the server's response."""
        self._over()
        self._finish(legs, FinalMessage(message, status))

    def _over(self, ending: Ending = COMPLETE, error: GatewayError | None = None) -> None:
        self.report.finished(self._rounds.progress.round + 1, ending, error)

    def _finish(self, legs: Iterable[Any], final: FinalMessage) -> None:
        for leg in legs:
            leg.finish(final)

    @abstractmethod
    def _put(self, questions: tuple[Question, ...]) -> None:
        """Ask the client, as soon as it has a leg."""

    def _move(self) -> None:
        """The place has moved at which the client could come back to its stream."""

    OBEY: ClassVar[dict[type[do.Command], Callable[[Any, Any], None]]] = {
        do.CancelCall: lambda self, it: self._drop(it.reason),
        do.Close: lambda self, it: self._finish(it.legs, _LET_GO),
        do.Count: lambda self, it: self.report.count(it),
        do.Fail: lambda self, it: self._fail(it.legs, it.error),
        do.Put: lambda self, it: self._put(it.questions),
        do.ReleaseSession: lambda self, _: self._rounds.release(),
        do.Reply: lambda self, it: self._answer(it.legs, jsonrpc.result(self._rounds.request.id, it.result)),
        do.SendAnswers: lambda self, it: self._rounds.deliver(it.answers, is_whole=not self._exchange.questions),
        do.SendCall: lambda self, _: self._rounds.start(),
    }
