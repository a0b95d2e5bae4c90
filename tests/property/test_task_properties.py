"""Random exchanges that become tasks: the holder of a handle, its server and the clock do whatever they may.

Until then, an exchange lives in the world of `test_exchange_properties`. From then on `TaskWorld` stands for
`LiveTask` and both sides. Another process, which knows nothing but the handle, may go on with the task at any moment.

- Whoever waits, or comes back with a state that led here, gets the handle; other answers are refused.
- A question takes one answer, that of the holder. One that was not delivered is open again, unless it was withdrawn.
- A task has one end. It is cancelled only for its holder, and none of its questions outlives it.
"""

from collections.abc import Callable  # noqa: TC003  (one import block)
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import input_requests as inputs
from gateway.exchange.commands import Timer
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import Exchange, Snapshot, State
from gateway.protocol.errors import (
    CallLost,
    DownstreamError,
    InvalidParams,
    InvalidState,
    Stopping,
    TaskCancelled,
    Unreachable,
)
from tests.property.test_exchange_properties import ANSWERS, World, live
from tests.support.playbook import attributes, url, url_required

BECOMES = (State.RUNNING, State.ASKING, State.PARKED, State.DETACHED)


class TaskWorld(World):
    def __init__(self, random: Random) -> None:
        self.is_task = self.is_adopted = False
        self.held: dict[bytes, Question] = {}  # what the holder was asked, here or by another process
        self.told: dict[bytes, set[bytes]] = {}  # what it answered
        self.ends: list[do.Reply | do.Fail] = []
        super().__init__(random)

    def step(self) -> None:
        state = self.exchange.state
        if not self.is_task:
            if self.policy.may_ask and self.running and state in BECOMES and self.random.random() < 0.2:
                self.become()
            else:
                super().step()
            return
        is_owned = state is State.OWNED
        may: list[tuple[int, bool, Callable[[], None]]] = [
            (12 if is_owned else 2, not self.ended, self.hear),
            (12 if is_owned else 2, bool(self.held) and not self.ended, self.update),
            (3, is_owned and any(map(self.is_heard, self.nested)), self.withdraw),
            (6, is_owned and bool(self.sent), self.fail_to_deliver),
            (2, bool(self.asked) and not self.ended, self.answer),
            (2, bool(self.said) and not self.ended, self.repeat),
            (1, is_owned, self.finish_call),
            (1, is_owned, self.refer),
            (2, not self.ended, self.cancel),
            (1, not self.ended, self.pass_time),
            (1, not self.ended, self.stop),
            (2, True, self.adopt),
        ]
        self.random.choice([what for weight, can, what in may if can for _ in range(weight)])()
        self.check()

    def check(self) -> None:
        for question in self.exchange.questions.values():
            self.held[question.upstream_id] = question
        self.the_exchange_knows_who_waits()
        self.nothing_waits_for_ever()
        self.an_end_leaves_nothing_open()
        assert len(self.ends) == (self.exchange.state is State.SETTLED or (self.ended and bool(self.ends)))

    # -- what may happen ----------------------------------------------------------------------------------------

    def become(self) -> None:
        self.is_task = True
        self.take(on.Became("t"))
        assert self.exchange.state is State.OWNED
        self.check()

    def adopt(self) -> None:
        """Another process goes on with the task, and knows of no answer to a question that the holder has."""
        self.nested = dict.fromkeys(self.held, "open")
        self.theirs.clear()
        for known in (self.claims, self.sent, self.given, self.given_up, self.armed, self.asked, self.said, self.ends):
            known.clear()
        self.timers, self.round, self.cancels, self.ended = (), 0, 0, False
        self.running = self.session = self.is_adopted = True
        self.exchange = Exchange(self.declared, self.policy)
        self.exchange.restore(Snapshot(State.OWNED, 0, {}, None, 0))
        self.obey([])

    def hear(self) -> None:
        """A question; not even one that no client of this kind can answer ends a task."""
        state = self.exchange.state
        self.ask()
        assert self.exchange.state is state

    def is_heard(self, id_: bytes) -> bool:
        return self.exchange.nested_requests.has_heard(id_)

    def end_call(self) -> None:
        # Of those that only another process has heard, this one does not know that they are open.
        self.nested |= {id_: "withdrawn" for id_ in self.nested if self.is_task and not self.is_heard(id_)}
        super().end_call()

    def withdraw(self) -> None:
        if not self.is_task:
            super().withdraw()
            return
        known, self.nested = self.nested, {id_: how for id_, how in self.nested.items() if self.is_heard(id_)}
        super().withdraw()
        self.nested = known | self.nested

    def update(self) -> None:
        """Answer some questions, among them such as are closed, or were answered already."""
        answers, wanted, is_wrong = [], dict[bytes, bytes](), False
        here = {each.upstream_id: each for each in self.exchange.questions.values()}
        for id_ in self.random.choices(sorted(self.held), k=self.random.choice((1, 1, 2, 3))):
            question = here.get(id_) or self.held[id_]
            if id_ not in here and self.is_adopted:
                question = Question(f"sealed {id_!r}", question.method, id_)
            answer = self.random.choice(ANSWERS[question.method])
            answers.append((question, answer))
            if self.exchange.state is not State.OWNED or self.nested.get(id_) != "open" or id_ in wanted:
                continue
            try:
                wanted[id_] = bytes(inputs.check_answer(question, answer))
            except InvalidParams:
                is_wrong = True
                break
        event = on.Updated(tuple(answers))
        if is_wrong:
            self.is_refused(event, InvalidParams)
            return
        for id_, said in wanted.items():
            self.told.setdefault(id_, set()).add(said)
        commands = self.exchange.handle(event)
        sent = [each for command in commands if isinstance(command, do.SendAnswers) for each in command.answers]
        assert {question.upstream_id: bytes(answer) for question, answer in sent} == wanted
        self.obey(commands)

    def fail_to_deliver(self) -> None:
        if not self.is_task:
            super().fail_to_deliver()
            return
        call, questions = self.sent.pop(self.random.randrange(len(self.sent)))
        if call != self.calls:
            return  # `UpstreamCall` says nothing of an earlier run
        commands = self.exchange.handle(on.Undelivered(questions, Unreachable("no"), retryable=True))
        assert commands == []
        for question in questions:
            id_ = question.upstream_id
            if question.params is None:
                _ = self.theirs.pop(id_, None)
            self.nested[id_] = "withdrawn" if id_ in self.given_up else "open"

    def is_refused(self, event: on.Event, error: type[DownstreamError]) -> None:
        before = attributes(self.exchange)
        try:
            commands = self.exchange.handle(event)
        except error:
            assert attributes(self.exchange) == before, "a refused request changed something"
        else:
            raise AssertionError(commands)

    def retry(self, event: on.Answered) -> None:
        if not self.is_task:
            super().retry(event)
            return
        claimed = self.claims.get(event.round)
        is_new = claimed is None and event.round == self.exchange.round
        if not (is_new or claimed == event.digest):
            self.is_refused(event, InvalidState)
            self.finish((event.leg,))
            return
        self.claims[event.round] = event.digest
        commands = self.exchange.handle(event)
        assert [type(each) for each in commands] == [do.Give]
        self.obey(commands)
        assert event.leg in self.done

    def refer(self) -> None:
        self.end_call()
        if not self.is_task:
            super().refer()
            return
        self.take(url_required(url()))
        assert isinstance(self.ends[-1], do.Fail)

    def cancel(self) -> None:
        was_owned = self.exchange.state is State.OWNED
        self.take(on.Cancelled())
        if was_owned:
            assert isinstance(self.ends[-1], do.Fail)
            assert isinstance(self.ends[-1].error, TaskCancelled)
            assert self.cancels == 1

    def stop(self) -> None:
        if not self.is_task:
            super().stop()
            return
        cancels, self.letting_go = self.cancels, True
        self.take(on.Stopped(Stopping("the task is left to others")))
        self.letting_go = False
        assert self.cancels == cancels
        assert self.ended

    def fire(self, timer: Timer) -> None:
        if not self.is_task:
            super().fire(timer)
            return
        if self.exchange.state is State.OWNED:
            self.end_call()
            self.take(on.Broke(CallLost("the time of the handle is over")))
        self.stop()

    # -- what must follow ---------------------------------------------------------------------------------------

    def obey(self, commands: list[do.Command]) -> None:
        super().obey([each for each in commands if not isinstance(each, do.Give | do.Keep)])
        for command in commands:
            if isinstance(command, do.Give):
                self.finish(command.legs)
            elif isinstance(command, do.Keep):
                assert not self.running, "the end of a task that runs"
                self.ends.append(command.final)

    def check_answer(self, question: Question, answer: Raw) -> None:
        if bytes(answer) not in self.told.get(question.upstream_id, ()):
            super().check_answer(question, answer)  # it was given before there was a task

    # -- what always holds ----------------------------------------------------------------------------------------

    def nothing_waits_for_ever(self) -> None:
        if self.is_task:
            assert self.armed == (set() if self.ended else {Timer.TTL})
        else:
            super().nothing_waits_for_ever()

    def an_end_leaves_nothing_open(self) -> None:
        if not self.is_task:
            super().an_end_leaves_nothing_open()
            return
        is_owned = self.exchange.state is State.OWNED
        assert self.running is self.session is is_owned
        is_open = {id_ for id_, how in self.nested.items() if how == "open" and self.is_heard(id_)}
        assert {each.upstream_id for each in self.exchange.questions.values()} == is_open
        assert is_owned or not is_open


@given(seed=st.integers(0, 2**32), steps=st.integers(10, 80))
@settings(max_examples=1000, deadline=None)
def test_whatever_happens_to_a_task_every_promise_is_kept(seed: int, steps: int) -> None:
    live(seed, steps, TaskWorld)
