"""Stories of calls that are not wanted any more."""

from typing import Any

from tests.simulation import ladder, oracle
from tests.simulation.history import History, Outcome
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind


def call(*, habit: str = "goes", **script: Any) -> Call:
    """A call whose client goes after 0.3 s, before it was asked anything."""
    return Call("c1", 0.0, "pay", "ann", script, think=1.0, habit=habit)


def played(the_call: Call, *faults: Fault, has_events: bool = True, ttl: float = 90.0) -> tuple[Outcome, list[str]]:
    """What became of one call at one replica, and the messages."""
    hold = {"ttl_seconds": ttl, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
    config = {"hold": hold, "sessions": {"idle_seconds": 30}}
    history = History(Plan(1, 1, Kind(has_events=has_events), config, (the_call,), faults))
    story: list[tuple[float, str]] = []
    ladder.watch(history, story)
    outcome = history.run()
    return outcome, [line for _, line in story]


def test_the_ended_stream_of_a_cancelled_call_is_opened_again_only_a_few_times() -> None:
    """The server cancels the call, and ends its stream without an answer, which need not mean that the call ended."""
    outcome, messages = played(call(questions=0, before=6.0))
    assert outcome.ledger.runs[0].cancelled is not None
    assert 2 < len([line for line in messages if "GET  from" in line]) < 12
    assert oracle.complaints(outcome) == []


def test_a_cancellation_that_does_not_reach_the_server_is_sent_again() -> None:
    """The time of the state is over while the replica is cut off."""
    outcome, _ = played(call(habit="abandons", questions=1), Fault("part", 9.0, 15.0), has_events=False, ttl=10.0)
    assert outcome.ledger.runs[0].cancelled is not None
    assert outcome.ledger.runs[0].cancelled < 1060.0
    assert oracle.complaints(outcome) == []
