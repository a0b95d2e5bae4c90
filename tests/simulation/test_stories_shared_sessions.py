"""Stories of calls that share a session, at a time (`sessions.affinity: principal`) or one after the other."""

from dataclasses import replace
from functools import partial

from gateway.protocol import mcp
from tests.simulation.history import Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.told import NO_EVENTS, call, played

SHARED = {"route": {"sessions": {"affinity": "principal"}}}
first, second = partial(call, think=0.5), partial(call, tag="c2", think=0.5)


def test_what_a_run_that_was_given_up_goes_on_to_ask_is_no_question_of_the_next_call() -> None:
    """Its first answer is not taken, so the call is run again; the server heeds no cancellation."""
    deaf = {"questions": 2, "aside": True, "deaf": True, "patience": 3.0, "refuses": "503"}
    outcome = played(first(tool="search", **deaf), second(at=0.3, tool="pay", before=5.0), kind=NO_EVENTS, **SHARED)
    assert outcome.ledger.of("c1")[0].asked == ["c1/0", "c1/1"]
    _, next_call = outcome.records
    assert (next_call.asked, next_call.outcome) == ([], "result")
    assert complaints(outcome) == []


DEAF = {"questions": 3, "aside": True, "deaf": True, "patience": 1.5, "refuses": "503"}
REFERRED = {"questions": 1, "urls": True, "before": 3.0}
"""The first call is referred to a URL, and the second one joins its session meanwhile. Then both are at work in it,
until the second one is run again elsewhere."""


def test_what_it_goes_on_to_ask_is_no_question_of_the_call_whose_session_it_joined() -> None:
    """Questions of that call come on its own stream, and so they are still told apart."""
    outcome = played(first(tool="pay", **REFERRED), second(at=3.2, tool="search", **DEAF), kind=NO_EVENTS, **SHARED)
    assert outcome.ledger.of("c2")[0].asked == ["c2/0", "c2/1", "c2/2"]
    record, _ = outcome.records
    assert (record.asked, record.outcome) == (["c1/url", "c1/0"], "result")
    assert complaints(outcome) == []


def questions_of_two_calls() -> Outcome:
    one, other = first(tool="pay", **REFERRED, aside=True), second(at=3.2, tool="search", **DEAF)
    return played(one, other, kind=NO_EVENTS, **SHARED)


def test_a_question_that_may_be_one_of_either_is_refused() -> None:
    """So the tool of the call that goes on does not wait for an answer in vain."""
    outcome = questions_of_two_calls()
    record, _ = outcome.records
    assert (record.asked, record.outcome) == (["c1/url"], "result")
    _, run = outcome.ledger.of("c1")
    assert run.answers == [{"error": mcp.INVALID_PARAMS}]
    assert complaints(outcome) == []


def test_a_call_that_is_taken_over_is_asked_on_the_side_stream_if_no_other_one_can_have_joined_its_session() -> None:
    """Its first question came there, so nobody could join it before its replica ended."""
    the_call = call(2, 1, questions=2, aside=True, between=3.0)
    outcome = played(the_call, Fault("kill", 2.0, 6.0, target=2), **SHARED)
    (record,) = outcome.records
    assert (record.asked, record.outcome) == (["c1/0", "c1/1"], "result")
    assert len(outcome.ledger.of("c1")) == 1


def test_only_a_slow_network_excuses_that_a_question_is_taken_for_one_of_the_next_call_in_its_session() -> None:
    """It names no call, and comes over another connection than the result of its own one, which did not wait."""
    hasty = first(at=0.05, questions=1, aside=True, patience=0.1)
    next_call = second(at=0.2, tool="pay", questions=1, before=0.4)
    outcome = played(hasty, next_call, Fault("slow", 0.06, 9.0), seed=349, replicas=1)
    one, other_one = outcome.records
    assert (one.asked, other_one.asked) == ([], ["c2/0", "c1/0"])
    assert complaints(outcome) == []
    strange = "c2: was asked c1/0, which nobody asked"
    assert strange in complaints(replace(outcome, faults=[]))
    run, other = outcome.ledger.runs
    for field, value in (
        ("session", "s0"),
        ("ended", None),
        ("asked_aside", other.began - 3.3),
        ("asked_aside", None),
    ):
        before = getattr(run, field)
        setattr(run, field, value)
        assert strange in complaints(outcome), field
        setattr(run, field, before)
    other_one.call = replace(other_one.call, caller="bob")
    assert strange in complaints(outcome)
