"""Random exchanges: a client, an old server and the clock do whatever they may, in any order.

`World` stands for the driver and both sides. It obeys what a real driver obeys (a timer fires only while it is armed,
the upstream speaks only while a call runs or a little late, a client answers only what it was asked or repeats itself)
and checks every command against what it knows.
"""

from collections.abc import Callable  # noqa: TC003  (one import block)
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from gateway.core import commands as do
from gateway.core import events as on
from gateway.core import inputs, jsonrpc, mcp
from gateway.core.commands import Timer
from gateway.core.exchange import Exchange, Policy, State
from gateway.core.inputs import Capabilities, Question
from gateway.errors import CallLost, DownstreamError, GatewayError, InvalidParams, Refused, Stopping
from tests.core.playbook import ACCEPT, DECLINE, FORM, SAMPLED, SAMPLING, attributes, raw, url, url_required

OVER = (State.FINISHED, State.ENDED)
WAITING = (State.RUNNING, State.ASKING)
BAD = raw({"action": 7, "role": 7, "roots": 7})
ROOTS = raw({"roots": [{"uri": "file:///a"}]})
ANSWERS = {mcp.ELICIT: [ACCEPT, DECLINE, BAD], mcp.SAMPLE: [SAMPLED, BAD], mcp.ROOTS: [ROOTS, BAD]}
TITLED = {**FORM, "requestedSchema": {"type": "object", "properties": {}, "title": "name"}}
NESTED: list[tuple[str, Any]] = [
    (mcp.ELICIT, FORM),
    (mcp.ELICIT, TITLED),
    (mcp.ELICIT, url()),
    (mcp.SAMPLE, SAMPLING),
    (mcp.SAMPLE, {**SAMPLING, "tools": []}),
    (mcp.ROOTS, {}),
    (mcp.ELICIT, {"message": "malformed"}),
    ("ping", {}),
]
ENDS: list[on.Event] = [
    on.Resulted(b"{}"),
    on.Failed(jsonrpc.Error(1, "no")),
    on.Failed(jsonrpc.Error(-32042, "malformed")),
    on.Broke(CallLost("lost")),
]
FIRED = {
    Timer.QUIET: on.QuietPassed,
    Timer.LEG: on.LegLimitPassed,
    Timer.GRACE: on.GracePassed,
    Timer.TTL: on.Expired,
    Timer.LINGER: on.Expired,
}
FLAGS = Capabilities.__struct_fields__


class World:
    def __init__(self, random: Random) -> None:
        self.random = random
        lacking = random.choice([(), (), random.sample(FLAGS, 2)])
        declared = Capabilities(**{name: name not in lacking for name in FLAGS})
        policy = Policy(may_ask=random.random() < 0.9, refuse_undeclared=random.random() < 0.5, shed_rounds=2)
        hints = random.sample(["name", "elicitation-1", "sampling-1"], random.choice([0, 0, 2]))
        given = {key: random.choice([ACCEPT, SAMPLED]) for key in hints}
        self.declared, self.policy = declared, policy
        self.exchange = Exchange(declared, policy, given)
        self.waiting: set[on.Leg] = set()
        self.done: set[on.Leg] = set()
        self.armed: set[Timer] = set()
        self.leg_limit_seen = False
        self.running = False
        self.calls = self.referrals = self.sheds = self.cancels = self.releases = 0
        self.nested: dict[bytes, str] = {}  # open, answered, withdrawn, moot
        self.sent: list[tuple[Question, ...]] = []
        self.keys: dict[str, tuple[str, bytes, bytes | None]] = {}
        self.asked: list[tuple[int, dict[str, Question]]] = []
        self.said: list[on.Answered] = []
        self.claims: dict[int, bytes] = {}
        self.round = 0
        self.asked_again = False
        self.ended = False
        self.answering: dict[str, Raw] = dict(given)
        self.take(on.Called(self.leg()))

    def leg(self) -> on.Leg:
        number = len(self.waiting) + len(self.done) + 1
        leg = on.Leg(raw(number), raw(f"t{number}"), "info" if number % 2 else None)
        self.waiting.add(leg)
        return leg

    def step(self) -> None:
        """Let one of the things happen that may happen now; those that go on are likelier than those that end."""
        state = self.exchange.state
        over, asked = state in OVER, state in (State.PARKED, State.REFERRED)
        may: list[tuple[int, bool, Callable[[], None]]] = [
            (12, state is State.RUNNING, self.ask),
            (4, True, self.ask),
            (10 if state is State.ASKING else 2, bool(self.armed), self.pass_time),
            (16 if asked else 3, bool(self.asked), self.answer),
            (8 if state is State.DETACHED else 2, bool(self.said), self.repeat),
            (2, bool(self.nested), self.withdraw),
            (2, True, self.notify),
            (3, bool(self.sent), self.fail_to_deliver),
            (2, self.running and self.round > 0, self.finish_call),
            (1, self.running, self.refer),
            (4 if self.round else 1, bool(self.waiting), self.leave),
            (1, True, self.leave),
            (2, over or state is State.REFERRED, self.finish_call),
            (1, over or self.round > 1, self.stop),
        ]
        self.random.choice([what for weight, can, what in may if can for _ in range(weight)])()
        self.the_exchange_knows_who_waits()
        self.nothing_waits_for_ever()
        self.an_end_leaves_nothing_open()

    # -- what may happen ----------------------------------------------------------------------------------------

    def answer(self) -> None:
        round_, questions = self.random.choice(self.asked)
        answers = {
            key: self.random.choice(ANSWERS[question.method])
            for key, question in questions.items()
            if self.random.randint(0, 4)
        }
        if not self.random.randint(0, 5):
            answers["unknown"] = ACCEPT
        digest = repr(sorted((key, bytes(value)) for key, value in answers.items())).encode()
        self.retry(on.Answered(self.leg(), round_, digest, answers))

    def repeat(self) -> None:
        said = self.random.choice(self.said)
        self.retry(on.Answered(self.leg(), said.round, said.digest, said.answers))

    def retry(self, event: on.Answered) -> None:
        before, state = attributes(self.exchange), self.exchange.state
        accepted = all(bytes(event.answers.get(key, DECLINE)) == bytes(ACCEPT) for key in self.exchange.questions)
        self.said.append(event)
        current = event.round == self.exchange.round and state in (State.PARKED, State.REFERRED)
        commands: list[do.Command] = []
        refusal: DownstreamError | None = None
        try:
            commands = self.exchange.handle(event)
        except DownstreamError as error:
            refusal = error
        if refusal is not None:
            assert attributes(self.exchange) == before, "a refused retry changed something"
            assert current is isinstance(refusal, InvalidParams)
            first = state is State.FINISHED and event.round == self.exchange.round and event.round not in self.claims
            assert not first, "the kept result was refused to the first who came for it"
            self.finish((event.leg,))
            return
        claimed = self.claims.get(event.round)
        assert current or claimed is None or claimed == event.digest, "other answers for an answered round"
        if event.round != self.exchange.round or state in (*WAITING, State.DETACHED):
            assert claimed == event.digest, "a round that was never answered"
        called = any(isinstance(command, do.SendCall) for command in commands)
        assert called is (state is State.REFERRED and current and accepted), "sent again without all urls accepted"
        self.answering.update(event.answers)
        self.asked_again = state in (State.PARKED, State.REFERRED)
        self.obey(commands)
        self.asked_again = False
        if not any(isinstance(command, do.Ask) for command in commands):
            self.claims[event.round] = event.digest

    def leave(self) -> None:
        leg = self.random.choice(sorted(self.waiting | self.done, key=lambda leg: int(bytes(leg.id))))
        self.finish({leg} & self.waiting)
        self.take(on.Left(leg))

    def ask(self) -> None:
        number, what = self.random.randint(0, 6), self.random.choice(NESTED)
        # Numbers repeat: servers replay their streams. A late question is one to a call that is no more.
        id_ = bytes(raw(f"{self.calls}-{number}"))
        event = on.Nested(Raw(id_), what[0], raw(what[1]))
        if not self.running:
            self.nested[id_] = "open"
            commands = self.exchange.handle(event)
            assert len(commands) == 2
            self.obey(commands)
            return
        self.nested.setdefault(id_, "open")
        self.take(event)

    def withdraw(self) -> None:
        id_ = self.random.choice(sorted(self.nested))
        if self.nested[id_] == "open":
            self.nested[id_] = "withdrawn"
        self.take(on.Withdrawn(Raw(id_)))

    def notify(self) -> None:
        level = self.random.choice(["debug", "info", "error"])
        self.take(on.Progressed({"progressToken": raw(0), "progress": raw(1)}))
        self.take(on.Logged(level, raw({"level": level, "data": 1})))

    def finish_call(self) -> None:
        event = self.random.choice(ENDS)
        self.end_call()
        self.take(event)

    def refer(self) -> None:
        urls = self.random.randint(1, 2)
        self.end_call()
        self.referrals += self.policy.may_ask and self.declared.url
        self.take(url_required(*[url(str(number)) for number in range(urls)]))

    def end_call(self) -> None:
        self.running = False
        self.nested |= {id_: "moot" for id_, status in self.nested.items() if status == "open"}

    def fail_to_deliver(self) -> None:
        retryable = self.random.choice([True, True, False])
        questions = self.sent.pop()
        error: GatewayError = Refused("no", status=401) if retryable else CallLost("lost")
        if self.running and retryable and self.exchange.round:
            self.claims.pop(self.exchange.round, None)
            self.nested |= {bytes(q.upstream_id): "open" for q in questions if q.upstream_id is not None}
        self.take(on.Undelivered(questions, error, retryable))

    def pass_time(self) -> None:
        self.fire(Timer.QUIET if Timer.QUIET in self.armed else self.random.choice(sorted(self.armed)))

    def fire(self, timer: Timer) -> None:
        self.armed.remove(timer)
        self.leg_limit_seen |= timer is Timer.LEG
        self.take(FIRED[timer]())

    def stop(self) -> None:
        self.take(on.Stopped(Stopping("stopping")))

    # -- what must follow ---------------------------------------------------------------------------------------

    def take(self, event: on.Event) -> None:
        self.obey(self.exchange.handle(event))

    def obey(self, commands: list[do.Command]) -> None:
        for command in commands:
            match command:
                case do.SendCall():
                    assert not self.ended
                    assert not self.running
                    self.running = True
                    self.calls += 1
                    assert self.calls <= 1 + self.referrals, "the call was sent twice"
                case do.SendAnswers(answers=answers):
                    assert not self.ended
                    assert self.running
                    assert answers, "nothing to send"
                    for question, answer in answers:
                        self.settle(question.upstream_id)
                        assert bytes(inputs.check_answer(question, self.answering[question.key])) == bytes(answer)
                    self.sent.append(tuple(question for question, _ in answers))
                case do.Respond(upstream_id=id_, result=result, error=error):
                    assert (result is None) is not (error is None)
                    self.settle(id_)
                case do.CancelCall():
                    assert not self.ended
                    assert self.running, "the call was over"
                    self.running = False
                    self.cancels += 1
                    assert self.cancels == 1
                case do.ReleaseSession(clean=clean):
                    self.releases += 1
                    assert self.releases == 1
                    assert not self.running, "its session was given back while the call runs"
                    assert not (clean and self.cancels)
                    assert not (clean and not self.referrals and "moot" in self.nested.values())
                case do.Forward(leg=leg):
                    assert leg in self.waiting, "a notification after the final message"
                    assert leg is self.exchange.legs[-1]
                case do.Ask(legs=legs, questions=questions, round=round_):
                    self.check_asked(questions, round_)
                    self.finish(legs)
                case do.Fail(legs=legs, error=Refused()):
                    self.finish(legs)
                case do.Reply(legs=legs) | do.Fail(legs=legs) | do.FailWith(legs=legs):
                    assert not self.running, "a final message while the call runs"
                    self.finish(legs)
                case do.Arm(timer=timer):
                    self.armed.add(timer)
                    if timer is Timer.LEG:
                        self.leg_limit_seen = False
                case do.Disarm(timer=timer):
                    self.armed.discard(timer)
                case do.DisarmLeg():
                    self.armed -= {Timer.QUIET, Timer.LEG, Timer.GRACE}
                case do.Count():
                    pass
                case _:
                    raise AssertionError(command)
        self.ended = self.exchange.state is State.ENDED

    def settle(self, id_: Raw | None) -> None:
        assert id_ is not None, "nobody waits for this answer"
        assert self.nested[bytes(id_)] == "open", f"{bytes(id_)!r} was {self.nested[bytes(id_)]}"
        self.nested[bytes(id_)] = "answered"

    def check_asked(self, questions: dict[str, Question], round_: int) -> None:
        assert self.policy.may_ask
        assert round_ == self.exchange.round == self.round + (0 if self.asked_again else 1)
        self.sheds += round_ > self.round and not questions
        assert self.sheds <= self.policy.shed_rounds
        self.round = round_
        for key, question in questions.items():
            upstream_id = None if question.upstream_id is None else bytes(question.upstream_id)
            assert upstream_id is None or self.nested[upstream_id] == "open", "asked although it is not open"
            assert inputs.read(question.method, question.params, self.declared).allowed
            identity = (question.method, bytes(question.params), upstream_id)
            assert self.keys.setdefault(key, identity) == identity, "one key, two questions"
        self.asked.append((round_, questions))

    def finish(self, legs: Any) -> None:
        assert set(legs) <= self.waiting, "a second final message"
        self.waiting -= set(legs)
        self.done |= set(legs)

    # -- what always holds ----------------------------------------------------------------------------------------

    def the_exchange_knows_who_waits(self) -> None:
        assert set(self.exchange.legs) == self.waiting
        assert bool(self.waiting) is (self.exchange.state in WAITING)
        assert self.exchange.calling is self.running

    def nothing_waits_for_ever(self) -> None:
        state = self.exchange.state
        leg = {Timer.LEG} if self.policy.may_ask and not self.leg_limit_seen else set()
        wanted = {
            State.RUNNING: leg,
            State.ASKING: {Timer.QUIET} | leg,
            State.PARKED: {Timer.TTL},
            State.REFERRED: {Timer.TTL},
            State.DETACHED: {Timer.GRACE},
        }
        if state in wanted:
            assert self.armed == wanted[state], (state, self.armed)
        elif state is State.FINISHED:
            assert self.armed in ({Timer.TTL}, {Timer.LINGER})
        else:
            assert self.armed <= {Timer.LINGER}

    def an_end_leaves_nothing_open(self) -> None:
        if self.exchange.state in OVER:
            assert not self.running
            assert self.releases == 1
            assert "open" not in self.nested.values(), self.nested
        else:
            assert self.releases == 0
            assert self.cancels == 0
        if not self.running:
            assert not any(question.upstream_id is not None for question in self.exchange.questions.values())

    def end(self) -> None:
        """When everybody goes, every exchange ends."""
        for leg in list(self.waiting):
            self.finish({leg})
            self.take(on.Left(leg))
        for _ in range(10):
            if self.armed:
                self.fire(min(self.armed))
        assert not self.armed
        assert self.exchange.state is State.ENDED
        self.an_end_leaves_nothing_open()


@given(seed=st.integers(0, 2**32), steps=st.integers(10, 80))
@settings(max_examples=1000, deadline=None)
def test_whatever_happens_every_promise_is_kept(seed: int, steps: int) -> None:
    # Hypothesis chooses the seed and shortens a failure; drawing every step from it keeps runs shallow.
    world = World(Random(seed))
    after_the_end = 0
    for _ in range(steps):
        world.step()
        after_the_end += world.ended
        if after_the_end > 6:
            break
    world.end()
