"""An exchange on its way to another process, and what of it arrives when its state has to be small."""

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange import input_requests
from gateway.exchange.input_requests import Question
from gateway.exchange.machine import State
from gateway.exchange.replay_ledger import Recorded
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from gateway.seal import handoff
from gateway.seal.request_state import Envelope, pack_record
from tests.seal.test_request_state import ENVELOPE, WHERE
from tests.support.playbook import ACCEPT, DECLINE, FORM, LOST, Playbook, answered, raw, url

FORMED = Question("elicitation-1", mcp.ELICIT, b"0", params=bytes(raw(FORM)))
URL = Question("elicitation-1", mcp.ELICIT, None, params=bytes(raw(url())))
RECORD = (Recorded("elicitation-2", b"d" * 16, 1, bytes(ACCEPT)),)
LEG = on.Leg()


def sealed(state: State, question: Question) -> Envelope:
    whole = (handoff.opened(question),)
    return replace(ENVELOPE, state=state, open=whole, upstream=WHERE, record=pack_record(RECORD), trace=b"t")


def arrived(envelope: Envelope) -> Playbook:
    play = Playbook()
    play.exchange.restore(handoff.past(envelope))
    return play


def test_a_whole_state_brings_the_exchange_as_it_was() -> None:
    past = handoff.past(sealed(State.PARKED, FORMED))
    assert (past.state, past.round, past.record, past.sheds) == (State.PARKED, 1, RECORD, 0)
    (question,) = past.questions.values()
    assert (question.key, question.method) == (FORMED.key, FORMED.method)
    assert (question.params, question.upstream_id) == (FORMED.params, FORMED.upstream_id)
    assert question.digest == input_requests.question_digest(FORMED)


def test_the_words_give_way_first_then_the_record_then_what_only_others_need() -> None:
    whole, wordless, forgetful, owners = handoff.ever_smaller(sealed(State.PARKED, FORMED), held=True)
    assert whole.open[0].params is not None
    assert whole.trace == b"t"
    assert (wordless.open[0].params, wordless.trace, bool(wordless.record)) == (None, None, True)
    assert (len(forgetful.open), forgetful.record, forgetful.upstream) == (1, None, WHERE)
    assert (owners.open, owners.record, owners.upstream) == ((), None, None)


def test_where_nothing_is_held_the_record_does_not_give_way() -> None:
    states = [*handoff.ever_smaller(sealed(State.BROKEN, FORMED), held=False)]
    assert [bool(state.record) for state in states] == [True, True]


@pytest.mark.parametrize("answer", [ACCEPT, DECLINE], ids=["accepted", "declined"])
def test_a_state_too_small_to_name_its_urls_does_not_send_the_call_again(answer: Raw) -> None:
    *_, smallest = handoff.ever_smaller(sealed(State.REFERRED, URL), held=True)
    play = arrived(smallest) >> answered(LEG, 1, **{"elicitation-1": answer})
    # The driver finds that the owner is gone.
    play = play >> on.Broke(LOST, replayable=True) << do.Fail((LEG,), LOST)
    assert play << do.ReleaseSession(clean=False)


@pytest.mark.parametrize("state", [State.PARKED, State.BROKEN])
def test_a_state_too_small_for_others_loses_the_call_and_does_not_run_it_again(state: State) -> None:
    *_, smallest = handoff.ever_smaller(sealed(state, FORMED), held=True)
    play = arrived(smallest)
    commands = play.exchange.handle(answered(LEG, 1, **{"elicitation-1": ACCEPT}))
    if state is State.PARKED:
        commands += play.exchange.handle(on.Broke(LOST, replayable=True))
    (fail,) = [command for command in commands if isinstance(command, do.Fail)]
    assert isinstance(fail.error, CallLost)
    assert not any(isinstance(command, do.SendCall | do.RunAgain) for command in commands)


@pytest.mark.parametrize("smaller", range(3))
@pytest.mark.parametrize("answer", [ACCEPT, DECLINE], ids=["accepted", "declined"])
def test_a_call_is_sent_after_its_urls_only_where_all_were_accepted(smaller: int, answer: Raw) -> None:
    state = [*handoff.ever_smaller(sealed(State.REFERRED, URL), held=True)][smaller]
    commands = arrived(state).exchange.handle(answered(LEG, 1, **{"elicitation-1": answer}))
    assert any(isinstance(command, do.SendCall) for command in commands) is (answer is ACCEPT)
