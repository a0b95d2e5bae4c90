"""The exchange of a legacy client before a modern server: nested requests on one side, further calls on the other."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, Final

from msgspec import Raw

from gateway import world
from gateway.engine.engine import Engine
from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import LINGER, Timer
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import Exchange, Policy
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.mirror.call_report import CallReport
from gateway.mirror.call_rounds import AT_ONCE, Rounds
from gateway.mirror.server_client import ModernRequest, ServerClient, ask
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, Refused, Unreachable
from gateway.routes.deadlines import TASK_AGAIN_SECONDS
from gateway.runtime.tasks import telling
from gateway.telemetry import GIVEN_UP
from gateway.upstream.channel import NO_HEADERS, Headers, Hearer

_LET_GO: Final = FinalMessage(b"", ending=GIVEN_UP)
"""Ends a stream without a response, because the client has another one or may open one elsewhere."""


class MirroredCall(Engine, Hearer):
    """One call; a subclass knows the client's transport, whose legs take notifications and the final message."""

    is_in_session = True
    """Whether errors have the statuses of a session, in which the call goes on if its stream breaks: its client may
    still answer, and a newer one comes back for it."""
    streams = True
    """Whether the client reads notifications and comments while it waits."""

    def __init__(self, rounds: Rounds, server: ServerClient, policy: Policy, incoming: Incoming | None = None) -> None:
        """`incoming` is the client's request, if the call is reported."""
        super().__init__(rounds.live, Exchange(rounds.profile.declared, policy))
        self.report = CallReport(rounds, incoming)
        self._rounds, self._server = rounds, server
        self._work: asyncio.Task[None] | None = None
        """Runs rounds, unless the client has to answer."""
        self._pause: float | None = None
        """Seconds until the next round; None if the client is to answer first."""
        self._failures = 0
        """How many requests about the task have failed in a row."""

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

    def _drop(self, reason: str) -> None:
        """See `Engine`; a modern server gets no reason."""
        self._release()
        if self._work is not None and self._work is not asyncio.current_task():
            _ = self._work.cancel()
        self.report.finished(GIVEN_UP, cause=reason)

    def _fail(self, legs: Iterable[Any], error: GatewayError | jsonrpc.Error) -> None:
        """See `Engine`."""
        id_ = self._rounds.request.id
        if isinstance(error, GatewayError):
            sender = self.live.sender(self.report.principal)
            final = FinalMessage.of_error(error, id_, self.report.request_id, sender, in_session=self.is_in_session)
        else:
            # SEP-1442 has 404 for unknown methods; in a session, clients take 404 for its end.
            is_unknown = error.code == mcp.METHOD_NOT_FOUND and not self.is_in_session
            final = FinalMessage(jsonrpc.failure(id_, error), 404 if is_unknown else 200)
        self._finish(legs, final)

    def _finish(self, legs: Iterable[Any], final: FinalMessage) -> None:
        """End legs, with which the call is over."""
        self.report.finished(error=final.cause)
        for leg in legs:
            leg.finish(final)

    def _close(self, legs: Iterable[Any]) -> None:
        for leg in legs:
            leg.finish(_LET_GO)

    @abstractmethod
    def _put(self, questions: tuple[Question, ...]) -> None:
        """Ask the client, as soon as it has a leg."""

    def _move(self) -> None:
        """The place has moved at which the client could come back to its stream."""

    # -- the server's side ----------------------------------------------------------------------------------------

    def _run_rounds(self) -> None:
        """Run rounds from the present one on, until the client has to answer."""
        self._pause = AT_ONCE
        if self._work is None or self._work.done():  # else it goes on: it has not seen the end of the round before
            self._work = self.live.process.tasks.start(self._run(), "mirrored call")

    async def _run(self) -> None:
        """Send the requests that are due, one after another."""
        rounds = self._rounds
        with telling(self._broke):
            while (pause := self._pause) is not None:
                self._pause = None  # `hear` sets it if another request is to follow
                if pause:
                    await asyncio.sleep(pause)
                limit = self.live.config.tasks.ttl_seconds
                if rounds.progress.task is not None and world.monotonic() > rounds.began + limit:
                    raise CallLost(
                        "The task did not end within tasks.ttl_seconds; it was cancelled and may have had effects"
                    )
                trace = NO_HEADERS if rounds.aim[0] == mcp.TASKS_GET else self._sending()
                sending = self._server.send(rounds.outgoing(trace), self)
                try:
                    await sending
                except GatewayError as exc:
                    self._try_again(exc)

    def _sending(self) -> Headers:
        """The server may run the call from here on; returns the trace context."""
        self._move()
        return self.report.sending()

    def hear(self, data: bytes, /) -> bool:
        """Take a message of the server; raises ValueError for a malformed one."""
        if not self._exchange.calling:
            return False
        rounds, before = self._rounds, self._rounds.progress.task
        try:
            said = rounds.received(data)
        except CallLost as exc:
            self._try_again(exc)
            return True
        if said is None:
            return False
        self._failures = 0
        if before is None and rounds.progress.task is not None:
            _ = self._sending()  # the call has become a task
        match said:
            case float():
                self._pause = said
            case bytes():
                legs: tuple[Any, ...] = self._exchange.legs if self.streams else ()
                for leg in legs:
                    leg.notify(said)
                return False
            case _:
                self._feed(said)
        return True

    def _try_again(self, error: GatewayError) -> None:
        """Try again after a request that failed, if the server works on a task; else the call fails."""
        if isinstance(error, Unreachable) and self._rounds.progress.round:  # it says that nothing has run
            error = CallLost(f"{error.message}; the rounds before may have had effects")
        is_hopeless = isinstance(error, Refused | InvalidParams) or self._failures >= len(TASK_AGAIN_SECONDS)
        if self._rounds.progress.task is None or is_hopeless:
            self._broke(error)
            return
        # The server works on the task all the same, and takes answers that it has taken already.
        self._pause = TASK_AGAIN_SECONDS[self._failures]
        self._failures += 1

    def _broke(self, error: GatewayError) -> None:
        self._feed(on.Broke(error))

    def _deliver(self, answers: Iterable[tuple[Question, Raw | jsonrpc.Error]]) -> None:
        """Take answers of the client; the last ones of a round go upstream with all others."""
        ending = self._rounds.take(answers)
        if ending is not None:
            self._feed(ending)
        elif not self._exchange.questions:
            self._run_rounds()

    def _release(self) -> None:
        """End a task that is not over, because nobody waits for it any more."""
        cancelling = self._rounds.cancellation()
        if cancelling is not None:
            self.live.process.tasks.spawn(self._cancel_task(cancelling), "send upstream")

    async def _cancel_task(self, request: ModernRequest) -> None:
        """Tell the server that nobody waits for the task; its own time limit ends it otherwise."""
        with suppress(GatewayError):
            _ = await ask(self._server, request)

    OBEY: ClassVar[dict[type[do.Command], Callable[[Any, Any], None]]] = {
        do.CancelCall: lambda self, it: self._drop(it.reason),
        do.Close: lambda self, it: self._close(it.legs),
        do.Count: lambda self, it: self.report.count(it),
        do.Fail: lambda self, it: self._fail(it.legs, it.error),
        do.Put: lambda self, it: self._put(it.questions),
        do.ReleaseSession: lambda self, _: self._release(),
        do.Reply: lambda self, it: self._finish(
            it.legs, FinalMessage(jsonrpc.result(self._rounds.request.id, it.result))
        ),
        do.SendAnswers: lambda self, it: self._deliver(it.answers),
        do.SendCall: lambda self, _: self._run_rounds(),
    }
