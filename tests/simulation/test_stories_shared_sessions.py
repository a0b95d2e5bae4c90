"""Stories of calls that share a session, at a time (`sessions.affinity: principal`) or one after the other."""

from dataclasses import replace
from typing import Any

from gateway.protocol import mcp
from tests.simulation import oracle
from tests.simulation import test_stories_ownership as ownership
from tests.simulation.history import History, Outcome
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind


def call(tag: str, at: float, tool: str, **script: Any) -> Call:
    """A call of the one caller."""
    return Call(tag, at, tool, "ann", script, think=0.5)


def played(*calls: Call) -> Outcome:
    """What became of calls that share a session."""
    hold = {"ttl_seconds": 90.0, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
    route = {"sessions": {"affinity": "principal"}}
    config = {"hold": hold, "sessions": {"idle_seconds": 30}, "route": route}
    return History(Plan(1, 3, Kind(has_events=False), config, calls, ())).run()


def test_what_a_run_that_was_given_up_goes_on_to_ask_is_no_question_of_the_next_call() -> None:
    """Its first answer is not taken, so the call is run again; the server heeds no cancellation."""
    deaf = {"questions": 2, "aside": True, "deaf": True, "patience": 3.0, "refuses": "503"}
    outcome = played(call("c1", 0.0, "search", **deaf), call("c2", 0.3, "pay", before=5.0))
    assert outcome.ledger.of("c1")[0].asked == ["c1/0", "c1/1"]
    _, next_call = outcome.records
    assert (next_call.asked, next_call.outcome) == ([], "result")
    assert oracle.complaints(outcome) == []


DEAF = {"questions": 3, "aside": True, "deaf": True, "patience": 1.5, "refuses": "503"}
REFERRED = {"questions": 1, "urls": True, "before": 3.0}
"""The first call is referred to a URL, and the second one joins its session meanwhile. Then both are at work in it,
until the second one is run again elsewhere."""


def test_what_it_goes_on_to_ask_is_no_question_of_the_call_whose_session_it_joined() -> None:
    """Questions of that call come on its own stream, and so they are still told apart."""
    outcome = played(call("c1", 0.0, "pay", **REFERRED), call("c2", 3.2, "search", **DEAF))
    assert outcome.ledger.of("c2")[0].asked == ["c2/0", "c2/1", "c2/2"]
    first, _ = outcome.records
    assert (first.asked, first.outcome) == (["c1/url", "c1/0"], "result")
    assert oracle.complaints(outcome) == []


def test_a_question_that_may_be_one_of_either_is_refused() -> None:
    """So the tool of the call that goes on does not wait for an answer in vain."""
    outcome = played(call("c1", 0.0, "pay", **REFERRED, aside=True), call("c2", 3.2, "search", **DEAF))
    first, _ = outcome.records
    assert (first.asked, first.outcome) == (["c1/url"], "result")
    _, run = outcome.ledger.of("c1")
    assert run.answers == [{"error": mcp.INVALID_PARAMS}]
    assert oracle.complaints(outcome) == []


def test_a_call_that_is_taken_over_is_asked_on_the_side_stream_if_no_other_one_can_have_joined_its_session() -> None:
    """Its first question came there, so nobody could join it before its replica ended."""
    the_call = ownership.call(2, 1, questions=2, aside=True, between=3.0)
    fault = Fault("kill", 2.0, 6.0, target=2)
    outcome = ownership.played(the_call, fault, route={"sessions": {"affinity": "principal"}})
    (record,) = outcome.records
    assert (record.asked, record.outcome) == (["c1/0", "c1/1"], "result")
    assert len(outcome.ledger.of("c1")) == 1


def test_only_a_slow_network_excuses_that_a_question_is_taken_for_one_of_the_next_call_in_its_session() -> None:
    """It names no call, and comes over another connection than the result of its own one, which did not wait."""
    hasty = call("c1", 0.05, "pay", questions=1, aside=True, patience=0.1)
    next_call = call("c2", 0.2, "pay", questions=1, before=0.4)
    hold = {"hold": {"ttl_seconds": 90.0}}
    outcome = History(Plan(349, 1, Kind(), hold, (hasty, next_call), (Fault("slow", 0.06, 9.0),))).run()
    first, second = outcome.records
    assert (first.asked, second.asked) == ([], ["c2/0", "c1/0"])
    assert oracle.complaints(outcome) == []
    strange = "c2: was asked c1/0, which nobody asked"
    assert strange in oracle.complaints(replace(outcome, faults=[]))
    run, other = outcome.ledger.runs
    for field, value in (
        ("session", "s0"),
        ("ended", None),
        ("asked_aside", other.began - 3.3),
        ("asked_aside", None),
    ):
        before = getattr(run, field)
        setattr(run, field, value)
        assert strange in oracle.complaints(outcome), field
        setattr(run, field, before)
    second.call = replace(second.call, caller="bob")
    assert strange in oracle.complaints(outcome)
