"""Tests of the exchange, written as a dialogue of the protocol.

    assert Playbook() >> on.Called(leg) << do.SendCall() << do.Arm(Timer.LEG)

`>>` gives the exchange an event, `<<` names the next command that must follow. Every command must be named before the
next event, and before the playbook is true; `Count`s alone are gathered in `counts`. Values are compared by type and
fields; legs by identity; `ANY` is equal to everything.
"""

from collections.abc import Mapping
from typing import Any, Self
from unittest.mock import ANY

import msgspec
import pytest
from msgspec import Raw

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import Exchange, Policy, State
from gateway.exchange.nested_requests import NestedRequests
from gateway.exchange.replay_ledger import ReplayLedger
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallLost, GatewayError
from gateway.protocol.request_meta import Capabilities

ALL = Capabilities(form=True, url=True, sampling=True, sampling_tools=True, roots=True)
FORM = {"message": "Name?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}
SAMPLING = {"messages": [{"role": "user", "content": {"type": "text", "text": "Hi"}}], "maxTokens": 9}
ACCEPT = Raw(b'{"action":"accept","content":{"name":"Ada"}}')
DECLINE = Raw(b'{"action":"decline"}')
CANCEL = Raw(b'{"action":"cancel"}')
SAMPLED = Raw(b'{"role":"assistant","model":"m","content":{"type":"text","text":"Hello"}}')
LOST = CallLost("the stream broke")
RESULT = b'{"resultType":"complete","content":[]}'


def raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def asked(id_: Any, *, title: str | None = None, **params: Any) -> on.Nested:
    """A nested form elicitation."""
    schema = FORM["requestedSchema"] | ({} if title is None else {"title": title})  # type: ignore[operator]
    return on.Nested(raw(id_), "elicitation/create", raw(FORM | {"requestedSchema": schema} | params))


def answered(by: on.Leg, round_: int, **answers: Raw) -> on.Answered:
    """A retry; its digest is its answers."""
    digest = repr(sorted((key, bytes(value)) for key, value in answers.items())).encode()
    return on.Answered(by, round_, digest, answers)


def url_required(*elicitations: Mapping[str, Any], **data: Any) -> on.Failed:
    """The error -32042 for these urls."""
    listed = {"elicitations": list(elicitations)} if elicitations else {}
    return on.Failed(jsonrpc.Error(-32042, "URL required", raw(listed | data)))


def url(name: str = "a") -> dict[str, Any]:
    return {"mode": "url", "message": f"Visit {name}", "url": f"https://example.com/{name}", "elicitationId": name}


def same(found: Any, wanted: Any) -> bool:
    """Equal by type and fields, all the way down."""
    if wanted is ANY:
        return True
    if type(found) is not type(wanted):
        return False
    match found:
        case on.Leg():
            return found is wanted
        case msgspec.Struct():
            return all(same(getattr(found, name), getattr(wanted, name)) for name in found.__struct_fields__)
        case Raw():
            return bytes(found) == bytes(wanted)
        case GatewayError():
            return found.args == wanted.args and found.data == wanted.data
        case tuple() | list():
            return len(found) == len(wanted) and all(same(a, b) for a, b in zip(found, wanted, strict=True))
        case dict():
            return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in found)
    return bool(found == wanted)


def attributes(owner: Exchange | NestedRequests | ReplayLedger) -> dict[str, Any]:
    """A copy of everything that an exchange remembers, including its parts."""
    return {name: _copied(getattr(owner, name)) for name in owner.__slots__}


def _copied(value: Any) -> Any:
    if isinstance(value, NestedRequests | ReplayLedger):
        return attributes(value)
    return value.copy() if isinstance(value, dict | list | set) else value


class Playbook:
    """One exchange and what it did."""

    def __init__(
        self, declared: Capabilities = ALL, policy: Policy | None = None, given: Mapping[str, Raw] | None = None
    ) -> None:
        self.exchange = Exchange(declared, policy or Policy(), given)
        self.counts: list[str] = []
        self.pending: list[do.Command] = []
        """What was commanded and is not named yet."""

    def __rshift__(self, event: on.Event) -> Self:
        assert not self.pending, f"not expected: {self.pending}"
        for command in self.exchange.handle(event):
            if isinstance(command, do.Count):
                self.counts.append(command.outcome)
            else:
                self.pending.append(command)
        return self

    def __lshift__(self, wanted: do.Command) -> Self:
        assert self.pending, f"nothing more was commanded, wanted {wanted}"
        found = self.pending.pop(0)
        assert same(found, wanted), f"\ncommanded {found}\nwanted    {wanted}"
        return self

    def __bool__(self) -> bool:
        assert not self.pending, f"not expected: {self.pending}"
        return True

    def refuses(self, event: on.Event, error: type[Exception], match: str | None = None) -> Self:
        """Check that the event raises and changes nothing."""
        assert self
        before = attributes(self.exchange)
        with pytest.raises(error, match=match):
            self.exchange.handle(event)
        assert attributes(self.exchange) == before
        return self

    @property
    def state(self) -> State:
        return self.exchange.state

    @property
    def questions(self) -> dict[str, Question]:
        return dict(self.exchange.questions)


def ask(
    legs: on.Leg | tuple[on.Leg, ...],
    round_: int,
    *keys: str,
    state: State = State.PARKED,
    held: bool = True,
    stays: bool = True,
) -> do.Ask:
    """The command that ends legs with these questions."""
    return do.Ask(legs if isinstance(legs, tuple) else (legs,), dict.fromkeys(keys, ANY), round_, state, held, stays)


def send(*answers: tuple[str, Any, Raw]) -> do.SendAnswers:
    """The command that posts answers, each given as key, upstream id and value."""
    return do.SendAnswers(
        tuple((Question(key, ANY, bytes(raw(id_)), ANY, params=ANY), value) for key, id_, value in answers)
    )


def error(code: int, message: Any = ANY, data: Any = ANY) -> jsonrpc.Error:
    return jsonrpc.Error(code, message, data)


def waiting(by: on.Leg, **options: Any) -> Playbook:
    """A playbook whose call runs in the first round."""
    play = Playbook(**options) >> on.Called(by) << do.SendCall()
    assert play
    return play


def parked(by: on.Leg, **options: Any) -> Playbook:
    """A playbook that has asked one question, `elicitation-1` with the upstream id 0, and waits for round 1."""
    play = (
        waiting(by, **options) >> asked(0) << do.Arm(do.Timer.QUIET) >> on.QuietPassed() << ask(by, 1, "elicitation-1")
    )
    assert play.state is State.PARKED
    return play


def resumed(by: on.Leg, again: on.Leg, **options: Any) -> Playbook:
    """A playbook whose one question was answered and whose second leg waits."""
    play = (
        parked(by, **options) >> answered(again, 1, **{"elicitation-1": ACCEPT}) << send(("elicitation-1", 0, ACCEPT))
    )
    assert play.state is State.RUNNING
    return play


def detached(by: on.Leg, again: on.Leg, **options: Any) -> Playbook:
    """A playbook whose second leg left after it had answered."""
    play = resumed(by, again, **options) >> on.Left(again)
    assert play.state is State.DETACHED
    return play


def opened(by: on.Leg, *, returns: bool = True, may_ask: bool = True) -> Playbook:
    """A client that takes nested requests waits on its stream."""
    policy = Policy(may_ask=may_ask, returns=returns)
    return Playbook(policy=policy) >> on.Opened(by) << do.SendCall()


def owned(by: on.Leg, **options: Any) -> Playbook:
    """A playbook whose client holds the handle of a task."""
    return waiting(by, **options) >> on.Became("t") << do.Give((by,))


def broken(by: on.Leg, **options: Any) -> Playbook:
    """A playbook whose call was lost while its one question was with the client; it may be run again."""
    play = parked(by, **options) >> on.Broke(LOST, replayable=True) << do.ReleaseSession(clean=False)
    assert play.state is State.BROKEN
    return play


def referred(by: on.Leg, *urls: dict[str, Any], **options: Any) -> Playbook:
    """A playbook whose call ended with -32042 in the first round; the urls are with the client."""
    urls = urls or (url(),)
    play = (
        waiting(by, **options)
        >> url_required(*urls)
        << ask(by, 1, *(f"elicitation-{number + 1}" for number in range(len(urls))), state=State.REFERRED)
    )
    assert play.state is State.REFERRED
    return play
